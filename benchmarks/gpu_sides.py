"""What `benchmarks.gpu` compares: the embedded engine without its server, and plain transformers and peft."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import nullcontext
from pathlib import Path
from typing import Any

from benchmarks.training_step import RANK, PlainLoop


class Engine:
    """The embedded engine without its server: one adapter in training, which also samples."""

    def __init__(self, folder: Path, dtype: str, device: str) -> None:
        from lachesis_train.engine.model import LoraSpec, Model
        from lachesis_train.engine.training import create_training_model

        self.model = Model(folder, dtype=dtype, device=device)
        spec = LoraSpec(rank=RANK, train_unembed=False)
        self.trained = create_training_model(self.model, "gpu", spec, "gpu", seed=0)

    def forward_backward(self, rows: Sequence[Any], *, forward_only: bool = False) -> Any:
        """Of rows of tokens, logprobs and advantages."""
        import numpy as np

        from lachesis_train.engine.training import TrainingDatum, forward_backward

        data = [
            TrainingDatum(
                np.array(tokens[:-1]),
                {"target_tokens": np.array(tokens[1:]), "logprobs": np.array(old), "advantages": np.array(advantages)},
            )
            for tokens, old, advantages in rows
        ]
        return forward_backward(self.model, self.trained, data, "importance_sampling", {}, forward_only=forward_only)

    def step(self, rows: Sequence[Any], learning_rate: float = 1e-4) -> None:
        """Gradients and Adam."""
        from lachesis_train.engine.training import optim_step

        self.forward_backward(rows)
        optim_step(self.model, self.trained, {"learning_rate": learning_rate})

    def sample(self, prompts: Sequence[Sequence[int]], new_tokens: int, *, adapter: bool = True) -> list[Any]:
        """A sequence of exactly `new_tokens` for each prompt."""
        from lachesis_train.engine.sampling import SamplingBatch, SamplingParameters, SamplingTask

        self.model.use(self.trained.adapter if adapter else None)
        tasks = [
            SamplingTask(prompt, 1, SamplingParameters(new_tokens, seed=seed), lambda _: None)
            for seed, prompt in enumerate(prompts)
        ]
        running = SamplingBatch(self.model)
        running.add(tasks)
        while running.rows:
            running.step()
        return [task.sequences[0] for task in tasks]


class Plain(PlainLoop):
    """transformers and peft: the training loop, and `generate`."""

    def generate(self, prompts: Sequence[Sequence[int]], new_tokens: int, *, adapter: bool = True) -> Any:
        """The result of `generate`, with logits, of exactly `new_tokens` for each prompt."""
        import torch
        from transformers import GenerationConfig

        width, device = max(map(len, prompts)), self.ids.device
        ids = torch.tensor([[*[0] * (width - len(prompt)), *prompt] for prompt in prompts], device=device)
        mask = torch.tensor([[*[0] * (width - len(prompt)), *[1] * len(prompt)] for prompt in prompts], device=device)
        self.model.generation_config.eos_token_id = None
        config = GenerationConfig(
            do_sample=True, top_k=0, max_new_tokens=new_tokens, pad_token_id=0, return_dict_in_generate=True
        )
        config.output_logits = adapter
        with nullcontext() if adapter else self.model.disable_adapter(), torch.inference_mode():
            found = self.model.generate(input_ids=ids, attention_mask=mask, generation_config=config)
        assert found.sequences.shape[1] == width + new_tokens
        return found

    def difference(self, prompts: Sequence[Sequence[int]], new_tokens: int) -> Any:
        """Logprobs of a forward pass less those of `generate`, flat."""
        import torch

        found = self.generate(prompts, new_tokens)
        ids, targets = found.sequences, found.sequences[:, -new_tokens:, None]
        before = [ids.shape[1] - new_tokens - len(prompt) for prompt in prompts]
        places = torch.arange(ids.shape[1], device=ids.device) - torch.tensor(before, device=ids.device)[:, None]
        with torch.inference_mode():
            given = {"attention_mask": (places >= 0).long(), "position_ids": places.clamp(min=0)}
            again = self.model(input_ids=ids, **given).logits[:, -new_tokens - 1 : -1]
            one, other = (
                logits.float().log_softmax(-1).gather(-1, targets) for logits in (again, torch.stack(found.logits, 1))
            )
        return (one - other).flatten().cpu().numpy()

    def take(self, engine: Engine) -> None:
        """The adapter of the engine."""
        import torch

        theirs = engine.model.parameters(engine.trained.adapter)
        with torch.no_grad():
            for name, parameter in self.model.named_parameters():
                if "lora_" in name:
                    key = name.removeprefix("base_model.model.").replace(".default.", ".")
                    parameter.copy_(theirs[key])
