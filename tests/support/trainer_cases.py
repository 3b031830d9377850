"""Rollouts of every kind for trainers that call us, and the clients of these trainers over a sampler without weights.

The clients stand for those of others, whose engines need GPUs. They answer in the form that the code of SkyRL 0.4.0
(`InferenceEngineInterface.generate`), verl 0.9.1 (`LLMServerClient.generate`) and slime of 2026-08-21 (`Sample`) shows.
"""

from __future__ import annotations

import asyncio
import json
from collections import Counter
from dataclasses import dataclass, field, fields
from enum import Enum
from types import SimpleNamespace
from typing import Any

from lachesis import HermesAgentBaseEnv
from lachesis_testing.fake_server import Ask
from lachesis_tokens.samples.samples import TokenSample
from lachesis_train.trainers.items import ITEM_COLUMN
from tests.support.sampler import FakeSampler

CASES = ("plain", "edited", "sub_agent", "discarded", "unscored", "declined")
BRANCHED = ("edited", "sub_agent")


class Cases(HermesAgentBaseEnv):
    """An item is the name of a case. Of "unscored", every second rollout has no score; of "declined" none has."""

    name = "cases"
    toolsets = ("todo", "delegation")
    max_turns = 4
    max_token_length = 120

    async def setup(self) -> None:
        self.left = list(CASES)

    async def get_next_item(self) -> Any:
        return {"case": self.left.pop(0)} if self.left else None

    def format_prompt(self, item: Any) -> str:
        return f"case {item['case']}"

    async def play_rollout(self, item: Any, *place: Any, evaluation: bool = False) -> Any:
        rollout = await super().play_rollout(item, *place, evaluation=evaluation)
        if item["case"] == "edited" and rollout.result is not None:
            history = rollout.result.history
            history[:] = [{"role": "user", "content": "case edited again"}]
            temperature = self.config.eval_temperature if evaluation else self.config.agent_temperature
            history.append(await self.server.for_rollout().chat(history, temperature=temperature, max_tokens=40))
        return rollout

    async def compute_reward(self, item: Any, result: Any, ctx: Any) -> float | None:
        index = int(ctx.task_id.rsplit("-", 3)[1])
        if item["case"] == "declined" or (item["case"] == "unscored" and index % 2):
            return None
        return 0.25 * (index + 1)


class Others(Cases):
    name = "others"


class Speaks:
    """Text for each case: a call and an answer; a sub-agent; a call that is cut off, and sampled again."""

    def __init__(self) -> None:
        self.asked: Counter[tuple[int, ...]] = Counter()

    def __call__(self, ask: Ask) -> str:
        text = ask.codec.tokenizer.decode(list(ask.prompt_ids))
        self.asked[tuple(ask.prompt_ids)] += 1
        if "help with this" in text.rpartition("<|im_start|>user")[2] and "case" not in text:
            return "Helped."
        if "case sub_agent" in text and ask.turn == 0:
            return _call("delegate_task", {"goal": "help with this"})
        if "case plain" in text and ask.turn == 0:
            return _call("todo", {})
        if "case discarded" in text and self.asked[tuple(ask.prompt_ids)] % 2:
            return '<tool_call>\n{"name": "todo", "argum'
        return "Done, and nothing else."


def _call(name: str, arguments: dict[str, Any]) -> str:
    return f"<tool_call>\n{json.dumps({'name': name, 'arguments': arguments})}\n</tool_call>"


class Weights:
    """A sampler whose weights change: with `abort_at`, every completion is cut there once, and goes on with others."""

    def __init__(self, *, abort_at: int | None = None, fails: bool = False) -> None:
        self.sampler = FakeSampler(Speaks(), kind="processed")
        self.tokenizer = self.sampler.codec.tokenizer
        self.abort_at, self.fails = abort_at, fails
        self.step = 3
        self.left: dict[tuple[int, ...], list[int]] = {}
        self.given: Counter[tuple[tuple[int, ...], tuple[int, ...]]] = Counter()
        """What was sampled, each with its prompt."""
        self.loops: set[asyncio.AbstractEventLoop] = set()

    async def sample(self, prompt_ids: list[int], parameters: dict[str, Any]) -> SimpleNamespace:
        self.loops.add(asyncio.get_running_loop())
        if self.fails:
            raise ConnectionError("the engine is gone")
        step, prompt = self.step, tuple(prompt_ids)
        if (rest := self.left.pop(prompt, None)) is not None:
            self.given[prompt, tuple(rest)] += 1
            return SimpleNamespace(ids=rest, logprobs=[-0.5] * len(rest), reason="stop", step=step)
        asked = {"n": 1, "max_tokens": parameters["max_tokens"], "temperature": parameters["temperature"] or 1.0}
        (made,) = await self.sampler.sample(prompt_ids, **asked, top_p=1.0, top_k=-1, seed=None, stop=None)
        ids, logprobs, reason = list(made.tokens), list(made.logprobs), made.stop_reason
        if self.abort_at is not None and len(ids) > self.abort_at:
            self.left[(*prompt, *ids[: self.abort_at])] = ids[self.abort_at :]
            ids, logprobs, reason = ids[: self.abort_at], logprobs[: self.abort_at], "abort"
            self.step += 1
        self.given[prompt, tuple(ids)] += 1
        return SimpleNamespace(ids=ids, logprobs=logprobs, reason=reason, step=step)

    @property
    def sampled(self) -> int:
        return sum(len(ids) * count for (_, ids), count in self.given.items())


class SkyClient:
    """`InferenceEngineInterface.generate` of SkyRL."""

    def __init__(self, weights: Weights) -> None:
        self.weights = weights

    async def generate(self, input_batch: dict[str, Any], model: str | None = None) -> dict[str, Any]:
        assert set(input_batch) == {"prompt_token_ids", "sampling_params", "session_ids"}
        (prompt_ids,) = input_batch["prompt_token_ids"]
        made = await self.weights.sample(prompt_ids, input_batch["sampling_params"])
        return {
            "responses": ["not read"],
            "response_ids": [made.ids],
            "stop_reasons": [made.reason],
            "response_logprobs": [made.logprobs],
        }


class VerlClient:
    """`LLMServerClient.generate` of verl, which says "completed" for any end."""

    def __init__(self, weights: Weights) -> None:
        self.weights = weights

    async def generate(
        self, request_id: str, *, prompt_ids: list[int], sampling_params: dict[str, Any]
    ) -> SimpleNamespace:
        made = await self.weights.sample(prompt_ids, sampling_params)
        return SimpleNamespace(
            token_ids=made.ids,
            log_probs=made.logprobs,
            stop_reason="aborted" if made.reason == "abort" else "completed",
            extra_fields=dict.fromkeys(("global_steps", "min_global_steps", "max_global_steps"), made.step),
        )


@dataclass
class SlimeSample:
    """The fields of `Sample` of slime that a rollout function fills. Others are refused."""

    class Status(Enum):
        PENDING = "pending"
        COMPLETED = "completed"
        TRUNCATED = "truncated"
        ABORTED = "aborted"
        FAILED = "failed"

    group_index: int | None = None
    index: int | None = None
    rollout_id: int | None = None
    prompt: Any = ""
    tokens: list[int] = field(default_factory=list)
    response: str = ""
    response_length: int = 0
    reward: float | None = None
    loss_mask: list[int] | None = None
    weight_versions: list[str] = field(default_factory=list)
    rollout_log_probs: list[float] | None = None
    remove_sample: bool = False
    status: Status = Status.PENDING
    metadata: dict[str, Any] = field(default_factory=dict)

    def __setattr__(self, name: str, value: Any) -> None:
        if name not in {each.name for each in fields(self)}:
            raise AttributeError(f"slime's Sample has no field {name!r}")
        super().__setattr__(name, value)


def columns(case: str) -> dict[str, Any]:
    """The columns of a row of the dataset."""
    return {ITEM_COLUMN: json.dumps({"case": case})}


def trained(tokens: list[int], mask: list[int]) -> list[int]:
    return [token for token, on in zip(tokens, mask, strict=True) if on]


def of_sample(sample: TokenSample) -> tuple[list[int], list[int], list[int]]:
    """Its prompt, its completion and its mask, read from the spans alone."""
    start = sample.spans[0].start
    on = [any(span.start <= at < span.end for span in sample.spans) for at in range(start, len(sample.tokens))]
    return sample.tokens[:start], sample.tokens[start:], list(map(int, on))
