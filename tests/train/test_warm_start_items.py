"""The items of a warm start are none of those that evaluations hold out."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from lachesis.base_env import HermesAgentBaseEnv
from lachesis.runs.failures import UnusableSettings
from lachesis.runs.held_out import without_eval_items
from lachesis_messages.messages import Message
from lachesis_messages.records.jsonl import read_lines
from lachesis_testing.fake_server import FakeServer, RandomWords
from lachesis_train.verbs.warm_start import play
from tests.support.training_runs import environment, with_tokens


class Numbers(HermesAgentBaseEnv):
    """Items 1, 2, 3, ... in this order."""

    name = "numbers"
    enabled_toolsets = ()

    async def setup(self) -> None:
        self.drawn = 0

    async def get_next_item(self) -> int:
        self.drawn += 1
        return self.drawn

    def format_prompt(self, item: int) -> str:
        return f"Say {item}."

    async def compute_reward(self, item: int, result: Any, ctx: Any) -> float:
        return float(str(item) in result.final_response)

    def reference_policy(self) -> Any:
        return lambda messages, tools: Message("assistant", str(messages[-1]["content"])[4:-1])


class Few(Numbers):
    """Ends after two."""

    async def get_next_item(self) -> Any:
        return await super().get_next_item() if self.drawn < 2 else None


class OwnItems(Numbers):
    """Evaluates others."""

    async def get_eval_items(self) -> list[int]:
        return [100, 101, 102]


@pytest.mark.parametrize(
    ("env_cls", "steps_per_eval", "items"), [(Numbers, 100, [4, 5]), (Numbers, 0, [1, 2]), (OwnItems, 100, [1, 2])]
)
async def test_held_out_items_are_no_examples(
    env_cls: type[Numbers], steps_per_eval: int, items: list[int], tmp_path: Path
) -> None:
    async with FakeServer(RandomWords()) as model:
        server = with_tokens(model, tmp_path)
        more = {"eval_items": 3, "total_steps": 2, "group_size": 1, "steps_per_eval": steps_per_eval}
        await play(environment(env_cls, tmp_path, server, **more))
    lines = list(read_lines(tmp_path / "groups.jsonl"))
    assert sorted(line["item"] for line in lines) == items
    assert {line["model"] for line in lines} == {"reference policy"}, "not the model, which answered nothing"


async def test_an_evaluation_that_takes_all_items_is_named(tmp_path: Path) -> None:
    async with FakeServer(RandomWords()) as model:
        server = with_tokens(model, tmp_path)
        with pytest.raises(UnusableSettings, match="evaluation would take all 2 items"):
            await play(environment(Few, tmp_path, server, eval_items=3, group_size=1, steps_per_eval=100))


class Cycle(Numbers):
    """Five items, again and again."""

    async def get_next_item(self) -> Any:
        return await super().get_next_item() % 5


@pytest.mark.parametrize(("eval_items", "left", "said"), [(3, [4, 0, 4, 0], False), (5, [0, 1, 2, 3], True)])
async def test_a_stream_that_begins_again_does_not_bring_them_back(
    eval_items: int, left: list[int], said: bool, tmp_path: Path
) -> None:
    async with FakeServer(RandomWords()) as model:
        env = environment(Cycle, tmp_path, with_tokens(model, tmp_path), eval_items=eval_items)
        await env.setup()
        next_item = await without_eval_items(env)
        found = [await next_item() for _ in range(4)]
    assert found == left if not said else set(found) <= set(range(5))
    env.console.file.flush()
    assert ("trains on the items of its evaluations" in (tmp_path / "console.txt").read_text()) == said
