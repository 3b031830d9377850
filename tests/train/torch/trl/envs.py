"""Environments for tests of TRL: tasks that a tiny random model can learn, and one with a tool and a sandbox."""

from __future__ import annotations

import itertools
from pathlib import Path
from typing import Any

from lachesis import HermesAgentBaseEnv


class SayAscii(HermesAgentBaseEnv):
    """The share of ASCII in what the model says: about one half of the bytes of a random model."""

    name = "say-ascii"
    toolsets = ()
    max_turns = 1
    max_token_length = 12
    eval_items = 2

    async def setup(self) -> None:
        self.items = (f"say {number}" for number in itertools.count())

    async def get_next_item(self) -> str:
        return next(self.items)

    def format_prompt(self, item: str) -> str:
        return item

    async def compute_reward(self, item: str, result: Any, ctx: Any) -> float | None:
        said = result.final_response
        return sum(character.isascii() for character in said) / max(1, len(said))


class LeavesOut(SayAscii):
    """It scores every second rollout of a group with 1, and no other."""

    name = "leaves-out"

    async def compute_reward(self, item: str, result: Any, ctx: Any) -> float | None:
        return None if int(ctx.task_id.rsplit("-", 3)[1]) % 2 else 1.0


class Raises(SayAscii):
    name = "raises"

    async def compute_reward(self, item: str, result: Any, ctx: Any) -> float | None:
        raise RuntimeError("no judge here")


class AsksAgain(SayAscii):
    """The question is replaced after the answer, so a rollout has two samples; the second answer is the shorter one."""

    name = "asks-again"

    async def play_rollout(self, item: str, *place: Any, evaluation: bool = False) -> Any:
        rollout = await super().play_rollout(item, *place, evaluation=evaluation)
        history = rollout.result.history
        history[:] = [{"role": "user", "content": f"{item} again"}]
        model = self.server.for_rollout()
        history.append(await model.chat(history, temperature=self.config.agent_temperature, max_tokens=4))
        return rollout


COMMAND = "echo 7 >f"
RESULT = '{"output": "", "exit_code": 0, "error": null}'


class WritesFile(SayAscii):
    """The agent runs one command in its sandbox and says a word; the reward looks into the sandbox."""

    name = "writes-file"
    toolsets = ("terminal",)
    max_turns = 3
    max_token_length = 160

    def format_prompt(self, item: str) -> str:
        return "go"

    async def compute_reward(self, item: str, result: Any, ctx: Any) -> float | None:
        return float("7" in await ctx.read_file("f"))


def conversation(env: HermesAgentBaseEnv) -> list[dict[str, Any]]:
    """What an agent does that solves `WritesFile`."""
    call = {"id": "c", "type": "function", "function": {"name": "terminal", "arguments": {"command": COMMAND}}}
    return [
        *env.initial_messages("say 0"),
        {"role": "assistant", "content": "", "tool_calls": [call]},
        {
            "role": "tool",
            "tool_call_id": "c",
            "name": "terminal",
            "content": '{"output": "", "exit_code": 0, "error": null}',
        },
        {"role": "assistant", "content": "ok"},
    ]


def arguments(folder: Path, **changes: Any) -> Any:
    """`GRPOConfig` for a few steps without any files."""
    from trl import GRPOConfig

    settings = {
        "output_dir": str(folder),
        "per_device_train_batch_size": 8,
        "per_device_eval_batch_size": 4,
        "num_generations": 4,
        "max_completion_length": 12,
        "max_steps": 1,
        "learning_rate": 1e-2,
        "lr_scheduler_type": "constant",
        "logging_steps": 1,
        "save_strategy": "no",
        "report_to": [],
        "use_cpu": True,
        "bf16": False,
        "disable_tqdm": True,
        "gradient_checkpointing": False,
    }
    return GRPOConfig(**{**settings, **changes})
