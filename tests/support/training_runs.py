"""`serve` with a trainer beside it: an environment whose rewards differ, and checks of the trainer's samples."""

from __future__ import annotations

import asyncio
import random
from pathlib import Path
from typing import Any

from rich.console import Console

from lachesis.base_env import HermesAgentBaseEnv
from lachesis.settings.server_settings import ServerConfig
from lachesis_testing.fake_server import FakeServer
from lachesis_tokens.samples.group_shapes import samples_from_atropos
from lachesis_tokens.samples.samples import TokenSample
from lachesis_tokens.samples.verification import verify
from tests.support.small_envs import ManyWords, rollouts
from tests.support.stock_run_api import StockRunApi, Trainer


class CoinToss(ManyWords):
    """Rewards that differ within a group, whatever a small model answers."""

    name = "coin-toss"

    async def compute_reward(self, item: Any, result: Any, ctx: Any) -> float:
        return random.random()


def serving(
    folder: Path, api: StockRunApi, server: ServerConfig, env_cls: type[CoinToss] = CoinToss, **settings: Any
) -> CoinToss:
    chosen = {
        "group_size": 2,
        "max_num_workers": 2,
        "max_token_length": 24,
        "max_agent_turns": 2,
        "max_resamples": 1,
        "enabled_toolsets": ["terminal"],
        "rollout_server_url": api.url,
        "spool_path": str(folder / "spool"),
        "data_dir_to_save_evals": str(folder / "eval"),
        "steps_per_eval": 0,
        **settings,
    }
    env = env_cls(env_cls.env_config_cls(**chosen), [server])
    env.console = Console(file=(folder / "console.txt").open("a"), width=200)
    return env


def with_tokens(model: FakeServer, folder: Path, *, name: str = "fake") -> ServerConfig:
    """The settings that get its tokens from a fake server (Phase 2), whose tokenizer is written into the folder."""
    tokenizer = str(folder / "tokenizer")
    model.tokenizer.save_pretrained(tokenizer)
    return ServerConfig(base_url=model.base_url, model_name=name, server_type="vllm", tokenizer_name=tokenizer)


async def trained(env: CoinToss, api: StockRunApi, *, groups: int, steps: int) -> Trainer:
    """Play the trainer beside `serve` until it has its groups. Each step takes two of them."""
    trainer = Trainer(api.url, batch_size=4, num_steps=steps)
    await trainer.register()
    await trainer.poll()
    run = asyncio.create_task(env.env_manager())
    taking = asyncio.create_task(take(trainer, groups))
    done, _ = await asyncio.wait({run, taking}, return_when=asyncio.FIRST_COMPLETED)
    for task in done:
        task.result()
    await taking
    result = await run
    assert result.step >= steps
    return trainer


async def take(trainer: Trainer, groups: int) -> None:
    async with asyncio.timeout(900):  # a small model on a busy machine
        while len(trainer.groups) < groups:
            if not await trainer.poll():
                await asyncio.sleep(0.1)


def proven(trainer: Trainer) -> list[TokenSample]:
    """Check every sample of every group."""
    samples = []
    for group in trainer.groups:
        assert len(group["tokens"]) == len(group["scores"]) == 2
        assert all(message["role"] for conversation in group["messages"] or () for message in conversation)
        for sample in samples_from_atropos(group):
            assert verify(sample) == []
            samples.append(sample)
    return samples


def environment(env_cls: type[HermesAgentBaseEnv], folder: Path, server: ServerConfig, **settings: Any) -> Any:
    """An environment over a server, with small settings and its output in `folder`."""
    chosen = {
        "total_steps": 1,
        "group_size": 2,
        "max_infra_retries": 0,
        "eval_items": 3,
        "data_path_to_save_groups": str(folder / "groups.jsonl"),
        "data_dir_to_save_evals": str(folder / "eval"),
        **settings,
    }
    env = env_cls(env_cls.env_config_cls(**chosen), [server])
    env.console = Console(file=(folder / "console.txt").open("a"), width=200)
    return env


async def played(
    env_cls: type[HermesAgentBaseEnv], folder: Path, policy: Any, faults: Any = (), fake: Any = None, **settings: Any
) -> list[dict[str, Any]]:
    """The rollouts of `process` over a server with tokens, as they were written, scored or not."""
    folder.mkdir(exist_ok=True)
    async with FakeServer(policy, faults=faults, **(fake or {})) as model:
        server = with_tokens(model, folder).model_copy(update={"max_retries": 0})
        env = environment(env_cls, folder, server, **settings)
        await env.process_manager()
    found = written(folder)
    assert len(found) == env.config.total_steps * env.config.group_size
    return found


def written(folder: Path) -> list[dict[str, Any]]:
    """Every rollout that `process` wrote, those of groups without a score too."""
    return rollouts(folder / "groups.jsonl") + rollouts(folder / "groups.failed.jsonl")
