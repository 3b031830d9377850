"""The reader that measures what the demonstrations of training claim: it accepts one whole call and nothing else."""

from __future__ import annotations

import asyncio
import itertools
import json
from typing import Any

import pytest

from benchmarks.shuffled_rewards import ShuffledMazeEnv, ShuffledToolCallEnv, ShuffledToolResultEnv
from benchmarks.whole_calls import is_whole_call, is_whole_result, is_whole_way
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


LOOK_UP = '<tool_call>\n{"name": "look_up", "arguments": {"part": "gear-33"}}\n</tool_call><|im_end|>'
STOCK = "How many pieces of gear-33 are in stock?"


@pytest.mark.parametrize(
    "said", ["291<|im_end|>", "There are 291.<|im_end|>", "<tool_response>\n291\n</tool_response><|im_end|>"]
)
def test_a_whole_result_is_one(said: str) -> None:
    assert is_whole_result(LOOK_UP + said, STOCK)


@pytest.mark.parametrize(
    "text",
    [
        "",
        "291<|im_end|>",
        LOOK_UP,
        f"{LOOK_UP}291",
        f"{LOOK_UP}292<|im_end|>",
        f"{LOOK_UP}291 or 292<|im_end|>",
        f"{LOOK_UP}29<|im_end|>1",
        f"{LOOK_UP.replace('33', '34')}291<|im_end|>",
        f"{LOOK_UP.replace('look_up', 'find')}291<|im_end|>",
        f"{LOOK_UP.replace('</tool_call>', '')}291<|im_end|>",
        f"So: {LOOK_UP}291<|im_end|>",
        f"{LOOK_UP}{LOOK_UP}291<|im_end|>",
    ],
)
def test_anything_else_is_no_result(text: str) -> None:
    assert not is_whole_result(text, STOCK)


ROOMS = {
    "hall": "doors: red owl, blue fox",
    "fox": "doors: red hall",
    "owl": "doors: white hall, red sea",
    "sea": "This is the end.",
}
MAZE = json.dumps({"rooms": ROOMS, "end": "sea"})


def way(*doors: str) -> str:
    return "".join(f'[go(door="{door}")]<|im_end|>' for door in doors)


@pytest.mark.parametrize(
    "text",
    [
        way("owl", "sea"),
        way("fox", "hall", "owl", "sea"),
        way("sea", "owl", "sea"),
        way("owl") + "[go( door='sea' )]<|im_end|>",
    ],
)
def test_a_whole_way_is_one(text: str) -> None:
    assert is_whole_way(text, MAZE)


@pytest.mark.parametrize(
    "text",
    [
        "",
        "This is the end.<|im_end|>",
        way("owl"),
        way("sea"),
        way("fox", "owl", "sea"),
        way("owl", "sea", "sea"),
        way("owl", "sea") + "Done.<|im_end|>",
        "So: " + way("owl", "sea"),
        way("owl", "sea").removesuffix("<|im_end|>"),
        way("owl") + way("sea").replace("]", ""),
        way("owl") + way("sea").replace(")]", "]"),
        way("owl") + way("sea").replace("[", "").replace("]", ""),
        way("owl") + way("sea").replace("go", "run"),
        way("owl") + way("sea").replace("door=", ""),
        way("owl") + way("sea").replace('"sea"', "sea"),
        way("owl") + way("sea").replace('"sea"', '"sea", colour="red"'),
        way("owl") + way("sea").replace('"sea"', '"owl", door="sea"'),
        way("owl").replace("]<|im_end|>", ", ") + way("sea").removeprefix("["),
        way("owl") + way("sea").replace("]", ", go()]"),
        way("owl").replace("<|im_end|>", "\n") + way("sea"),
    ],
)
def test_anything_else_is_no_way(text: str) -> None:
    assert not is_whole_way(text, MAZE)


@pytest.mark.parametrize("env_cls", [ShuffledToolCallEnv, ShuffledToolResultEnv, ShuffledMazeEnv])
def test_a_control_shuffles_what_its_environment_gives(env_cls: Any) -> None:
    """Each rollout has the reward of the environment before the rewards are dealt out."""

    async def play() -> list[float]:
        config = env_cls.env_config_cls(batch_size=2, group_size=2)
        env = env_cls(config, [ServerConfig(model_name="reference")])
        async with env.running():
            (group,) = await env.play_item(await env.get_next_item(), "item-1", size=2)
            return [rollout.reward for rollout in group.rollouts]

    assert asyncio.run(play()) == [1.0, 1.0]
