"""CPU time of a training step through the Tinker SDK and the embedded engine, beside a plain torch loop.

    .venv-train/bin/python -m benchmarks.training_step [--model smollm2] [--groups 2] [--size 4]

A step is forward_backward and optim_step; for the engine the CPU time of both processes counts. The plain loop is what
one writes first: transformers and peft, one padded batch with a mask, logits at all positions, Adam. The two alternate,
on the same batch, with the same form of adapters and the same loss. Needs the packages of `make test-train`.
"""

from __future__ import annotations

import argparse
import asyncio
import os
import statistics
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from benchmarks.machine import cpu_seconds

LIMIT = 1.3
ROUNDS = 3
RANK = 16


def batch(groups: int, size: int) -> list[tuple[list[int], list[float], list[float]]]:
    """Tokens, logprobs and advantages: `size` samples of 16 to 64 tokens for each prompt, of 40 to 160 tokens."""
    import numpy as np

    random = np.random.default_rng(0)
    rows = []
    for group in range(groups):
        prompt = random.integers(0, 256, 40 + 40 * (group % 4))
        for _ in range(size):
            sampled = random.integers(0, 256, int(random.integers(16, 65)))
            masked = np.zeros(len(prompt) - 1)
            advantages = [*masked, *[float(random.choice([-1.0, 1.0]))] * len(sampled)]
            rows.append(([*map(int, prompt), *map(int, sampled)], [*masked, *[-5.0] * len(sampled)], advantages))
    return rows


class PlainLoop:
    """transformers, peft and torch, as one writes them first."""

    def __init__(
        self, folder: str, rows: list[Any], layers: int | None, *, dtype: str = "float32", device: str = "cpu"
    ) -> None:
        import torch
        from peft import LoraConfig, get_peft_model
        from transformers import AutoModelForCausalLM

        base = AutoModelForCausalLM.from_pretrained(folder, dtype=getattr(torch, dtype)).to(device)
        count = base.config.num_hidden_layers
        config = LoraConfig(
            r=RANK,
            lora_alpha=32,
            target_modules=["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"],
            layers_to_transform=list(range(count - (layers or count), count)),
        )
        self.model = get_peft_model(base, config)
        trained = [parameter for parameter in self.model.parameters() if parameter.requires_grad]
        self.optimizer = torch.optim.AdamW(trained, lr=1e-4, betas=(0.9, 0.95), weight_decay=0.0)
        width = max(len(tokens) for tokens, _, _ in rows) - 1

        def padded(values: list[list[Any]], kind: Any) -> Any:
            return torch.tensor([[*row, *[0] * (width - len(row))] for row in values], dtype=kind, device=device)

        self.ids = padded([tokens[:-1] for tokens, _, _ in rows], torch.long)
        self.mask = padded([[1] * (len(tokens) - 1) for tokens, _, _ in rows], torch.long)
        self.targets = padded([tokens[1:] for tokens, _, _ in rows], torch.long)
        self.sampled = padded([logprobs for _, logprobs, _ in rows], torch.float32)
        self.advantages = padded([advantages for _, _, advantages in rows], torch.float32)

    def step(self) -> float:
        """The loss before the step."""
        logits = self.model(input_ids=self.ids, attention_mask=self.mask).logits.float()
        logprobs = logits.log_softmax(-1).gather(-1, self.targets[..., None])[..., 0]
        loss = -((logprobs - self.sampled).exp() * self.advantages).sum()
        loss.backward()
        self.optimizer.step()
        self.optimizer.zero_grad()
        return float(loss.detach())


class Client:
    """The same step through the SDK."""

    def __init__(self, url: str, model: str, rows: list[Any]) -> None:
        import tinker
        from tinker import types

        service = tinker.ServiceClient(base_url=url, api_key="tml-local")
        client = service.create_lora_training_client(model, rank=RANK, train_unembed=False)
        self.trainer = client.result() if hasattr(client, "result") else client
        self.adam = types.AdamParams(learning_rate=1e-4)
        self.data = [
            types.Datum(
                model_input=types.ModelInput.from_ints(tokens[:-1]),
                loss_fn_inputs={"target_tokens": tokens[1:], "logprobs": logprobs, "advantages": advantages},
            )
            for tokens, logprobs, advantages in rows
        ]

    def step(self) -> float:
        """The loss before the step."""
        result = self.trainer.forward_backward(self.data, "importance_sampling")
        self.trainer.optim_step(self.adam).result()
        return float(result.result().metrics["loss:sum"])


def cpu_of_children() -> float:
    """CPU seconds of this process's running children."""
    children = Path(f"/proc/{os.getpid()}/task/{os.getpid()}/children").read_text().split()
    return cpu_seconds(*map(int, children))


async def measure(arguments: argparse.Namespace) -> int:
    """Print the figures; 1 over the limit."""
    import torch

    from lachesis_tokens.prompts.model_folders import model_folder
    from lachesis_train.engine import start_engine

    torch.set_num_threads(1)
    os.environ["TINKER_TELEMETRY"] = "0"
    rows = batch(arguments.groups, arguments.size)
    folder = str(model_folder(arguments.model))
    plain = PlainLoop(folder, rows, arguments.layers)
    with tempfile.TemporaryDirectory() as states:
        async with start_engine(arguments.model, state_dir=states, lora_layers=arguments.layers) as url:
            client = await asyncio.to_thread(Client, url, arguments.model, rows)
            figures: dict[str, list[float]] = {"plain": [], "engine": []}
            for number in range(ROUNDS):
                for name, step in (("plain", plain.step), ("engine", client.step)):
                    before = time.process_time() + cpu_of_children()
                    loss = await asyncio.to_thread(step)
                    if number:  # the first one warms up
                        figures[name].append(time.process_time() + cpu_of_children() - before)
                    else:
                        print(f"{name}: loss before the first step {loss:.4f}")
    tokens = sum(len(tokens) - 1 for tokens, _, _ in rows)
    for name, seconds in figures.items():
        print(f"{name:7} {statistics.median(seconds):7.2f} CPU s a step of {len(rows)} sequences, {tokens} tokens")
    ratio = statistics.median(figures["engine"]) / statistics.median(figures["plain"])
    print(f"ratio   {ratio:7.2f} (limit {LIMIT})")
    return int(ratio > LIMIT)


def main() -> int:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", default="smollm2")
    parser.add_argument("--groups", type=int, default=2)
    parser.add_argument("--size", type=int, default=4)
    parser.add_argument("--layers", type=int, default=10, help="adapters in the last N layers")
    return asyncio.run(measure(parser.parse_args()))


if __name__ == "__main__":
    sys.exit(main())
