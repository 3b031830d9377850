"""Groups of trees as trainers get them, from both rollout APIs."""

from __future__ import annotations

import asyncio
import json
import random
from collections import Counter
from pathlib import Path
from typing import Any

import pytest

from lachesis.runs.failures import UnusableSettings
from lachesis_testing.fake_server import FakeServer
from lachesis_testing.fake_server.completions import Ask
from lachesis_tokens.samples.group_shapes import group_problems, samples_from_atropos
from lachesis_tokens.samples.verification import verify
from lachesis_train.curves.records import GroupRecord, SampleRecord, StepRecord
from lachesis_train.curves.rollouts import group_line
from lachesis_train.trainer.datums import prepare
from lachesis_train.trainer.settings import TrainingSettings
from lachesis_train.trainers.items import environment_of
from lachesis_view.trained import as_group
from lachesis_view.trees import tree_parts
from tests.support.own_api import OwnApi, own_api
from tests.support.stock_run_api import StockRunApi, Trainer, run_api
from tests.support.training_runs import CoinToss, serving, with_tokens

__all__ = ["own_api", "run_api"]

DICE = random.Random(0)


def writes(ask: Ask) -> str:
    """Three turns with a call, or fewer, and an answer."""
    if ask.turn >= 3 or (ask.turn == 1 and DICE.random() < 0.2):
        return "Done."
    command = f"echo {DICE.randrange(1000)} >> log; cat log"
    return f"<tool_call>\n{json.dumps({'name': 'terminal', 'arguments': {'command': command}})}\n</tool_call>"


def naive_advantages(paths: dict[str, float], weights: dict[str, float], waves: dict[str, int]) -> dict[str, float]:
    """By part: from the scores of the paths to leaves, each value computed on its own."""

    def value(part: str) -> float:
        ways = {name for path in paths for name in beginnings(path) if name.rpartition(".")[0] == part}
        return paths[part] if part in paths else sum(map(value, ways)) / len(ways)

    found = {}
    for part in {name for path in paths for name in beginnings(path)}:
        others = [
            value(name)
            for name in {name for path in paths for name in beginnings(path)}
            if name != part and name.rpartition(".")[0] == part.rpartition(".")[0]
            if "." in name or waves[name] <= waves[part]
        ]
        found[part] = weights[part] * (value(part) - sum(others) / len(others))
    return found


def beginnings(path: str) -> list[str]:
    return [path[:at] for at, letter in enumerate(f"{path}.") if letter == "."]


@pytest.mark.parametrize("kind", ["own", "stock"])
async def test_a_trainer_gets_whole_groups_and_each_token_with_the_advantage_of_its_part(
    tmp_path: Path, own_api: OwnApi, run_api: StockRunApi, kind: str
) -> None:
    async with (own_api if kind == "own" else run_api).wiped() as api, FakeServer(writes) as model:
        shape = {"group_size": 8, "tree_at": "turns:2,3", "max_agent_turns": 4, "max_token_length": 120}
        env = serving(tmp_path, api, with_tokens(model, tmp_path), **shape)
        trainer = Trainer(api.url, batch_size=8, num_steps=2)
        await trainer.register()
        await trainer.poll()
        run = asyncio.create_task(env.env_manager())
        await trainer.take(2)
        await run
    trained = Counter[str]()
    for group in trainer.groups[:2]:
        assert len(group["tokens"]) == len(group["scores"]) == group["group_overrides"]["group_size"] == 8
        samples = samples_from_atropos(group)
        assert group_problems(group, samples) == [] and all(verify(sample) == [] for sample in samples)
        places = [each["tree"] for each in group["overrides"]]
        paths = {place["path"]: score for place, score in zip(places, group["scores"], strict=True)}
        weights = {
            part: weight for at in places for part, weight in zip(beginnings(at["path"]), at["weights"], strict=True)
        }
        wanted = naive_advantages(paths, weights, {at["path"].split(".")[0]: at["wave"] for at in places})
        for sample, place, tokens in zip(samples, places, group["advantages"], strict=True):
            for span in sample.spans:
                trained[span.completion_id] += 1
                at = max(number for number, before in enumerate(place["completions"]) if before <= span.turn)
                value = wanted[beginnings(place["path"])[at]]
                assert tokens[span.start : span.end] == pytest.approx([value] * len(span), abs=1e-9)
        prepared = prepare([group], TrainingSettings())
        for row, sample, tokens in zip(prepared.samples, samples, group["advantages"], strict=True):
            spans = [value for span in sample.spans for value in tokens[span.start : span.end]]
            assert row.advantages.tolist() == pytest.approx(spans, abs=1e-9)
        # The viewer draws what the trainer keeps of the group.
        record = GroupRecord(body=group, samples=[SampleRecord()] * len(samples))
        line = json.loads(json.dumps(group_line(StepRecord(step=1, version="v"), record, None)))
        parts = tree_parts(as_group(line))
        assert {name: part.advantage for name, part in parts.items()} == pytest.approx(wanted)
        assert {name: parts[name].value for name in paths} == paths
    assert set(trained.values()) == {1}


def test_a_trainer_that_credits_whole_rollouts_refuses_trees() -> None:
    settings: dict[str, Any] = {"tree_at": "turns:2", "group_size": 4}
    with pytest.raises(UnusableSettings, match="cannot branch"):
        environment_of(CoinToss, settings)
