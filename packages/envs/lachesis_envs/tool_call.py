"""Two tasks for a first success in training: a call with the right arguments, and a call whose result is needed.

    python environments/tool_call_env.py evaluate --env.eval_items 64
    lachesis train --env tool_call --config configs/train_tool_call.yaml

`ToolCallEnv` asks for one call: `add 12 and 34` wants `add(a=12, b=34)`. A model of 135 million parameters learns it
within minutes on a CPU. `ToolResultEnv` asks for what only a tool knows, so the model has to read its result.

Items are drawn by a seed. Which items are held out for evaluation depends on the item alone, so that no seed and no
number of items puts one of them into training.
"""

from __future__ import annotations

import itertools
import json
import random
from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any, Literal
from zlib import crc32

from pydantic import Field

from lachesis import HermesAgentBaseEnv, HermesAgentEnvConfig, Reward
from lachesis_envs.gsm8k.math_answer import last_number
from lachesis_messages.messages import Message, ToolCall
from lachesis_tools import ToolFailure, ToolRegistry, tool

if TYPE_CHECKING:
    from lachesis import AgentResult, Policy

HELD_OUT = 8
"""One item of so many is held out for evaluation."""

KINDS = ("bolt", "cable", "filter", "gear", "lamp", "pump", "spring", "valve")

Split = Literal["train", "test"]


def is_held_out(item: Mapping[str, Any]) -> bool:
    """Whether an item belongs to evaluation."""
    return crc32(item["question"].encode()) % HELD_OUT == 0


def in_stock(part: str) -> int | None:
    """Pieces of a part: 100 to 999, by its name; None where there is no such part."""
    kind, _, number = part.rpartition("-")
    return 100 + crc32(part.encode()) % 900 if kind in KINDS and number.isdecimal() else None


@tool(toolset="arithmetic", concurrency_safe=True)
async def add(a: int, b: int) -> int:
    """Add two numbers."""
    return a + b


@tool(toolset="arithmetic", concurrency_safe=True)
async def subtract(a: int, b: int) -> int:
    """Subtract b from a."""
    return a - b


@tool(toolset="arithmetic", concurrency_safe=True)
async def multiply(a: int, b: int) -> int:
    """Multiply two numbers."""
    return a * b


@tool(toolset="stock", concurrency_safe=True)
async def look_up(part: str) -> int:
    """Look up how many pieces of a part are in stock.

    Args:
        part: The name of the part, as in the question.
    """
    if (pieces := in_stock(part)) is None:
        raise ToolFailure(f"there is no part {part!r}; a name is a kind and a number, for example bolt-12")
    return pieces


class DrawnItemsConfig(HermesAgentEnvConfig):
    """Settings of environments whose items are drawn by a seed."""

    dataset_seed: int = Field(default=0, description="Seed of the order in which items are drawn.")
    dataset_split: Split = Field(
        default="train", description="Items of `process` and `serve`: `train`, or `test`, which evaluations use."
    )
    highest: int = Field(default=99, ge=10, le=10**9, description="The largest number in an item.")


class DrawnItems(HermesAgentBaseEnv):
    """Items by seed, those of evaluation held out by their content."""

    env_config_cls = DrawnItemsConfig
    needs_sandboxes = False  # the tools compute here
    max_token_length = 64
    max_resamples = 0
    """A call that cannot be read is an answer like any other: it earns nothing, and training has to see it."""

    def draw(self, rng: random.Random, highest: int) -> Mapping[str, Any]:
        """A random item: its `question`, and what answers it."""
        raise NotImplementedError

    async def setup(self) -> None:
        config: Any = self.config
        self.drawn = self.items(config.dataset_split)

    def items(self, split: Split) -> Iterator[Mapping[str, Any]]:
        """The endless stream of one side: the same for the same settings, and without items of the other side."""
        config: Any = self.config
        rng = random.Random(f"{config.dataset_seed} {config.highest} {split}")
        while True:
            item = self.draw(rng, config.highest)
            if is_held_out(item) == (split == "test"):
                yield item

    async def get_next_item(self) -> Mapping[str, Any]:
        return next(self.drawn)

    async def get_eval_items(self) -> list[Mapping[str, Any]]:
        different = {
            item["question"]: item for item in itertools.islice(self.items("test"), 20 * self.config.eval_items)
        }
        return list(different.values())[: self.config.eval_items]

    def format_prompt(self, item: Mapping[str, Any]) -> str:
        question: str = item["question"]
        return question

    def rollout_metrics(self, item: Any, result: AgentResult, reward: float | None) -> Mapping[str, float]:
        """`exact`: the share of rollouts that earn 1.0 by their own reward, whatever a group reward makes of it."""
        return {} if result.reward is None else {"exact": float(result.reward.value == 1.0)}


def arguments(call: ToolCall) -> dict[str, Any]:
    """The arguments of a call; none where they are not a JSON object."""
    try:
        given = json.loads(call.arguments or "{}")
    except (ValueError, RecursionError):  # the deeper the stack is here, the less deep may the JSON be
        return {}
    return given if isinstance(given, dict) else {}


class ToolCallEnv(DrawnItems):
    """One well-formed call with the right arguments: 1.0 for exactly that, partial credit on the way.

    0.1 for a call that the parser had to repair, for example one that is not closed, or of a tool that was not offered,
    whatever it says. A well-formed one earns 0.2, 0.1 if it is the whole answer, 0.2 for the tool, and 0.25 for each
    argument.
    """

    name = "tool-call"
    toolsets = ("arithmetic",)
    tools = ToolRegistry([add, subtract, multiply])
    max_turns = 1

    def draw(self, rng: random.Random, highest: int) -> Mapping[str, Any]:
        name, a, b = rng.choice(("add", "subtract")), rng.randint(1, highest), rng.randint(1, highest)
        return {"question": f"{name} {a} and {b}", "tool": name, "arguments": {"a": a, "b": b}}

    async def compute_reward(self, item: Mapping[str, Any], result: AgentResult, ctx: Any) -> Reward:
        answers = [answer.message for answer in result.history.responses()]
        return graded(answers[0], item) if answers else NOTHING

    def rollout_metrics(self, item: Any, result: AgentResult, reward: float | None) -> Mapping[str, float]:
        """With `right_as_read`: the share of answers that are the right call as the parser reads them, repaired or
        not."""
        answer = next((answer.message for answer in result.history.responses()), None)
        calls = answer.tool_calls if answer is not None else ()
        right = len(calls) == 1 and calls[0].name == item["tool"] and right_arguments(calls[0], item) == 1.0
        return {**super().rollout_metrics(item, result, reward), "right_as_read": float(right)}

    def reference_policy(self) -> Policy:
        """Makes the call."""

        def policy(messages: Sequence[Mapping[str, Any]], tools: Sequence[Mapping[str, Any]] | None) -> Message:
            name, a, _, b = str(messages[-1]["content"]).split()
            arguments = json.dumps({"a": int(a), "b": int(b)})
            return Message("assistant", tool_calls=(ToolCall("call_1", name, arguments),))

        return policy


def weighted(weights: Mapping[str, float], parts: Mapping[str, float]) -> Reward:
    """The weighted sum of parts, which are recorded without their weights."""
    return Reward(round(sum(weights[name] * part for name, part in parts.items()), 6), parts, weights=weights)


WEIGHTS = {"call": 0.3, "tool": 0.2, "arguments": 0.5}
NOTHING = weighted(WEIGHTS, dict.fromkeys(WEIGHTS, 0.0))


def graded(answer: Message, item: Mapping[str, Any]) -> Reward:
    """The reward of one answer of the model."""
    if len(answer.tool_calls) != 1:
        return NOTHING
    (call,) = answer.tool_calls
    if not call.ok:
        return weighted(WEIGHTS, {"call": 1 / 3, "tool": 0.0, "arguments": 0.0})
    parts = {
        "call": 2 / 3 if answer.text.strip() else 1.0,
        "tool": float(call.name == item["tool"]),
        "arguments": right_arguments(call, item),
    }
    return weighted(WEIGHTS, parts)


def right_arguments(call: ToolCall, item: Mapping[str, Any]) -> float:
    """The share of the arguments that are right; 0 where there is one too many."""
    given, wanted = arguments(call), item["arguments"]
    right = sum(type(given.get(name)) is int and given[name] == value for name, value in wanted.items())
    return right / len(wanted) if len(given) == len(wanted) else 0.0


class ToolResultEnv(DrawnItems):
    """A question that only a tool can answer: 1.0 for the number that it says, 0.25 for the right call alone.

    A call that the parser had to repair is run, so that the model may go on, and earns nothing.
    """

    name = "tool-result"
    toolsets = ("stock",)
    tools = ToolRegistry([look_up])
    max_turns = 3

    def draw(self, rng: random.Random, highest: int) -> Mapping[str, Any]:
        part = f"{rng.choice(KINDS)}-{rng.randint(1, highest)}"
        return {"question": f"How many pieces of {part} are in stock?", "part": part, "answer": in_stock(part)}

    async def compute_reward(self, item: Mapping[str, Any], result: AgentResult, ctx: Any) -> Reward:
        calls = result.ok_calls
        asked = any(call.name == "look_up" and arguments(call) == {"part": item["part"]} for call in calls)
        answer = last_number(result.final_response.replace(item["part"], ""))  # whose name ends in a number
        said = bool(calls) and result.finished_naturally and answer == str(item["answer"])
        return weighted({"call": 0.25, "answer": 0.75}, {"call": float(asked), "answer": float(asked and said)})

    def reference_policy(self) -> Policy:
        """Looks the part up and says what it read."""

        def policy(messages: Sequence[Mapping[str, Any]], tools: Sequence[Mapping[str, Any]] | None) -> Message:
            if messages[-1]["role"] == "tool":
                return Message("assistant", str(messages[-1]["content"]))
            part = str(messages[-1]["content"]).split()[4]
            return Message("assistant", tool_calls=(ToolCall("call_1", "look_up", json.dumps({"part": part})),))

        return policy
