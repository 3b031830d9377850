"""SkyRL's own training loop, `RayPPOTrainer.train`, with our tokens: `make test-trainers` installs SkyRL.

Its workers need GPUs: they put tensors on `torch.cuda.current_device()` and join a group of NCCL. So here the model is
on the CPU, behind the calls that the loop makes of its workers. The loss is SkyRL's own, as are the data loader, the
validation of what a generator returns, the advantages, and the batches.
"""

from __future__ import annotations

import asyncio
import os
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

if "LACHESIS_NEED_TRAINERS" not in os.environ:
    pytest.skip("make test-trainers installs SkyRL", allow_module_level=True)

import torch
from skyrl.backends.skyrl_train.distributed.dispatch import WorkerOutput
from skyrl.backends.skyrl_train.utils.ppo_utils import PolicyLossRegistry
from skyrl.train.config import SkyRLTrainConfig
from skyrl.train.dataset import PromptDataset
from skyrl.train.trainer import RayPPOTrainer
from transformers import AutoModelForCausalLM, AutoTokenizer

from lachesis_tokens.prompts.model_folders import model_folder
from lachesis_train import write_items
from lachesis_train.trainers.skyrl import LachesisGenerator
from tests.train.torch.trl.envs import AsksAgain, SayAscii

STEPS = 20


class OnCpu:
    """The policy for SkyRL's loop (`WorkerDispatch`), and its inference engine (`InferenceEngineInterface`)."""

    def __init__(self, config: Any, folder: Path) -> None:
        self.config = config.trainer.algorithm
        self.model = AutoModelForCausalLM.from_pretrained(folder)
        self.sampler = AutoModelForCausalLM.from_pretrained(folder)
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=1e-2)
        self.loss = PolicyLossRegistry.get(self.config.policy_loss_type)
        self.end = AutoTokenizer.from_pretrained(folder).eos_token_id
        self.steps = self.updates = 0

    def logprobs(self, data: Any) -> torch.Tensor:
        """Of the response, as its worker returns them."""
        positions = (data["attention_mask"].long().cumsum(-1) - 1).clamp(min=0)
        logits = self.model(data["sequences"], data["attention_mask"], position_ids=positions).logits[:, :-1]
        chosen = (logits / self.config.temperature).log_softmax(-1).gather(-1, data["sequences"][:, 1:, None])[..., 0]
        return chosen[:, -data.metadata["response_length"] :]

    # What the loop calls.

    def get_lcm_dp_size(self) -> int:
        return 1

    def forward(self, model: str, data: Any) -> WorkerOutput:
        with torch.no_grad():
            return WorkerOutput(loss_fn_outputs=[{"logprobs": row.tolist()} for row in self.logprobs(data)], metrics={})

    forward_from_staged = forward

    def stage_data(self, model: str, data: Any, boundaries: Any) -> list[Any]:
        return [data[start:end] for start, end in boundaries]

    def forward_backward_from_staged(self, model: str, data: Any) -> WorkerOutput:
        loss, figures = self.loss(
            self.logprobs(data),
            data["action_log_probs"],
            data["advantages"],
            config=self.config,
            loss_mask=data["loss_mask"],
            rollout_logprobs=data["rollout_logprobs"],
        )
        loss.backward()
        return WorkerOutput(loss_fn_outputs=[], metrics={"policy_loss": loss.item(), **figures})

    def optim_step(self, model: str) -> float:
        norm = torch.nn.utils.clip_grad_norm_(self.model.parameters(), 1.0).item()
        self.optimizer.step()
        self.optimizer.zero_grad()
        self.steps += 1
        return norm

    async def save_weights_for_sampler(self) -> None:
        self.sampler.load_state_dict(self.model.state_dict())
        self.updates += 1

    def __getattr__(self, name: str) -> Any:
        if name in ("init_weight_sync_state", "finalize_pending_saves", "empty_cache"):
            return lambda *_: None
        if name == "get_timing_metrics":
            return dict
        raise AttributeError(name)

    # The inference engine.

    @torch.no_grad()
    async def generate(self, input_batch: Any, model: str | None = None) -> dict[str, Any]:
        (prompt,), parameters = input_batch["prompt_token_ids"], input_batch["sampling_params"]
        given, cache, ids, logprobs = torch.tensor([prompt]), None, [], []
        while len(ids) < parameters["max_tokens"] and ids[-1:] != [self.end]:
            out = self.sampler(given, past_key_values=cache, use_cache=True)
            cache, shown = out.past_key_values, (out.logits[0, -1] / parameters["temperature"]).log_softmax(-1)
            given = torch.multinomial(shown.exp(), 1)[None]
            ids.append(given.item())
            logprobs.append(shown[ids[-1]].item())
        reason = "stop" if ids[-1] == self.end else "length"
        return {"response_ids": [ids], "response_logprobs": [logprobs], "stop_reasons": [reason], "responses": [""]}


def settings(folder: Path, data: Path, *, steps: int) -> SkyRLTrainConfig:
    config = SkyRLTrainConfig()
    trainer = config.trainer
    trainer.policy.model.path = str(folder)
    trainer.placement.colocate_all = False
    trainer.train_batch_size = trainer.policy_mini_batch_size = 4
    trainer.max_training_steps, trainer.epochs = steps, 100
    trainer.eval_interval, trainer.ckpt_interval, trainer.hf_save_interval = -1, -1, -1
    trainer.resume_mode, trainer.enable_ray_gpu_monitor = "none", False
    trainer.algorithm.use_kl_loss = False
    trainer.algorithm.max_seq_len = 400
    trainer.ckpt_path = trainer.export_path = str(data.parent)
    config.generator.inference_engine.enable_ray_prometheus_stats = False
    config.generator.n_samples_per_prompt = 4
    config.generator.step_wise_trajectories = True
    config.generator.sampling_params.max_generate_length = 12
    config.generator.max_input_length = 400
    config.data.dataloader.num_workers = 0
    return config


@pytest.mark.parametrize(("env", "steps"), [(SayAscii, STEPS), (AsksAgain, 2)])
async def test_skyrls_loop_learns_from_our_tokens(env: Any, steps: int, tmp_path: Path) -> None:
    """Its trainer computes the same logprobs of them as the sampler that made them."""
    torch.manual_seed(0)
    torch.set_num_threads(1)
    folder, data = model_folder("tiny"), tmp_path / "items.jsonl"
    assert await asyncio.to_thread(write_items, env, data, 8) == 8
    config = settings(folder, data, steps=steps)
    tokenizer = AutoTokenizer.from_pretrained(folder)
    policy = OnCpu(config, folder)
    logged: list[dict[str, float]] = []
    tracker = SimpleNamespace(log=lambda figures, step, commit: logged.append(dict(figures)), finish=lambda: None)
    with LachesisGenerator(env, config.generator, client=policy, tokenizer=tokenizer) as generator:
        trainer = RayPPOTrainer(
            cfg=config,
            tracker=tracker,
            tokenizer=tokenizer,
            train_dataset=PromptDataset(str(data), tokenizer, 400, num_workers=1),
            inference_engine_client=policy,
            generator=generator,
        )
        trainer.dispatch = policy
        await trainer.train()
    assert (policy.steps, policy.updates, len(logged)) == (steps, steps + 1, steps)
    gaps = [figures["policy/rollout_train_logprobs_abs_diff_max"] for figures in logged]
    assert max(gaps) < 1e-4, "every token after its exact prompt, from the weights of the step"
    rows = {figures["generate/batch_num_seq"] for figures in logged}
    assert rows == {16 if env is SayAscii else 32}, "an edited rollout has two rows"
    rewards = [figures["reward/avg_raw_reward"] for figures in logged]
    print([round(reward, 3) for reward in rewards], f"largest gap of logprobs {max(gaps):.1e}")
    if steps == STEPS:
        assert sum(rewards[-5:]) / 5 > sum(rewards[:5]) / 5 + 0.1
