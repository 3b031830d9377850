"""The reader that measures what the demonstrations of training claim: it accepts one whole call and nothing else."""

from __future__ import annotations

import asyncio
import itertools
from typing import Any

import pytest

from benchmarks.shuffled_rewards import ShuffledToolCallEnv
from benchmarks.whole_calls import is_whole_call
from lachesis import Reward, ServerConfig

QUESTION = "add 12 and 3"
CALL = '{"name": "add", "arguments": {"a": 12, "b": 3}}'


@pytest.mark.parametrize(
    "text",
    [
        f"<tool_call>\n{CALL}\n</tool_call><|im_end|>",
        f"<tool_call>{CALL}</tool_call>",
        '<tool_call>\n{"arguments": {"b": 3, "a": 12}, "name": "add"}\n</tool_call>',
        f"Here it is:\n<tool_call>\n{CALL}\n</tool_call>",
    ],
)
def test_a_whole_call_is_one(text: str) -> None:
    assert is_whole_call(text, QUESTION)


@pytest.mark.parametrize(
    "text",
    [
        "",
        CALL,
        f"<tool_call>\n{CALL}",
        f"<tool_call>\n{CALL}<|im_end|>",
        f"<tool_call>\n{CALL}\n</tool_call",
        f"<tool_call>\n{CALL}\n<tool_call>",
        f"<tool_call>\n{CALL}\n</tool_calls>",
        f"{CALL}\n</tool_call>",
        f"<tool_call>\n{CALL}}}\n</tool_call>",
        f"<tool_call>\n{CALL[:-1]}\n</tool_call>",
        f"<tool_call>\n{CALL}\n</tool_call>\n<tool_call>",
        f"<tool_call>\n{CALL}\n</tool_call>" * 2,
        f"<tool_call>\n{CALL}\n{CALL}\n</tool_call>",
        f"<tool_call>\n[{CALL}]\n</tool_call>",
        f"<tool_call>\n```json\n{CALL}\n```\n</tool_call>",
        f"<tool_call>\n{CALL.replace('12', '12.0')}\n</tool_call>",
        "<tool_call>\n" + CALL.replace("12", '"12"') + "\n</tool_call>",
        f"<tool_call>\n{CALL.replace('12', '13')}\n</tool_call>",
        "<tool_call>\n" + CALL.replace('"a": 12', '"a": 1, "a": 12') + "\n</tool_call>",
        f"<tool_call>\n{CALL.replace('add', 'subtract')}\n</tool_call>",
        f"<tool_call>\n{CALL.replace('arguments', 'parameters')}\n</tool_call>",
        "<tool_call>\n{'name': 'add', 'arguments': {'a': 12, 'b': 3}}\n</tool_call>",
    ],
)
def test_anything_else_is_none(text: str) -> None:
    assert not is_whole_call(text, QUESTION)


def test_the_control_permutes_the_rewards_of_a_batch_and_by_its_seed_alone() -> None:
    class Played:
        def __init__(self, reward: float) -> None:
            self.reward = Reward(reward)

    async def dealt(seed: int) -> list[list[float]]:
        config = ShuffledToolCallEnv.env_config_cls(dataset_seed=seed, batch_size=12, group_size=4)
        env: Any = ShuffledToolCallEnv(config, [ServerConfig(base_url="http://127.0.0.1:1/v1")])
        await env.setup()
        groups = [[Played(4 * group + at) for at in range(4)] for group in range(3)]
        return await asyncio.gather(*(env.compute_group_reward(None, group, None) for group in groups))

    first, again, other = (asyncio.run(dealt(seed)) for seed in (1, 1, 2))
    assert first == again != other
    assert sorted(itertools.chain(*first)) == list(range(12)), "a permutation"
    assert [sorted(group) for group in first] != [list(range(at, at + 4)) for at in (0, 4, 8)], "among all groups"
