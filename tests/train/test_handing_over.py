"""Data of some rollouts of a group of trees: the turns before a fork are in it, whichever rollout recorded them."""

from __future__ import annotations

import asyncio
import json
import random
from collections import Counter
from typing import Any

import pytest

from lachesis_data.exports.builtin_exports import token_samples
from lachesis_data.exports.exports import export_group
from lachesis_messages.records.export_lines import ExportTotals
from lachesis_messages.records.jsonl import read_lines
from lachesis_tokens.samples.handing_over import without_rollouts
from lachesis_tokens.samples.sample_records import read_sample
from lachesis_tokens.samples.verification import verify, verify_records
from lachesis_train.sft.readers import Example, _of_group
from lachesis_train.sft.settings import SftSettings
from tests.core.agent.test_tree_rollouts import Letters, Writer, trees


class Weighed(Letters):
    """Letters with a reward that hardly any two rollouts have both."""

    async def compute_reward(self, item: Any, result: Any, ctx: Any) -> float:
        said = [json.loads(call.arguments)["command"][5] for call in result.ok_calls]
        return float(sum(ord(letter) * 26.0**at for at, letter in enumerate(said)) / 1e9)


@pytest.fixture(scope="module")
def group(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    folder = tmp_path_factory.mktemp("trees")
    shape = {"group_size": 12, "tree_at": "turns:2,4", "tree_width": 3, "tree_leaves": 6}
    asyncio.run(trees(folder, Writer(4), Weighed, **shape))
    (group,) = read_lines(folder / "groups.jsonl")
    return dict(group)


def turns_of(group: dict[str, Any]) -> dict[str, list[tuple[int, ...]]]:
    """By rollout, the tokens up to the end of each turn of its conversation, inherited ones included."""
    ends = {tuple(sample["tokens"][: span["end"]]) for sample in group["samples"] for span in sample["spans"]}
    return {
        sample["rollout_id"]: [end for end in ends if tuple(sample["tokens"][: len(end)]) == end]
        for sample in group["samples"]
    }


@pytest.mark.parametrize("count", [*range(12), "first"])
def test_what_remains_trains_each_turn_of_its_conversations_once(group: dict[str, Any], count: int | str) -> None:
    ids = [rollout["rollout_id"] for rollout in group["rollouts"]]
    first = {each["rollout_id"] for each in group["rollouts"] if "inherited_tokens" not in each}
    left_out = set(random.Random(count).sample(ids, count)) if isinstance(count, int) else first
    records = [each for each in without_rollouts(group, left_out) if each["rollout_id"] not in left_out]
    assert [verify(read_sample(each)) for each in records] == [[]] * len(records)
    assert (totals := verify_records(records)).ok or not records, totals.problems
    assert totals.delivered == totals.sampled
    trained = Counter(tuple(each["tokens"][: span["end"]]) for each in records for span in each["spans"])
    wanted = {end for rollout_id, ends in turns_of(group).items() if rollout_id not in left_out for end in ends}
    assert trained == Counter(dict.fromkeys(wanted, 1))
    own = {tuple(s["tokens"][: span["end"]]) for s in group["samples"] if s["rollout_id"] not in left_out
           for span in s["spans"]}  # fmt: skip
    assert own < wanted if count == "first" else own <= wanted, "the first ways have the turns before the forks"
    completions = Counter(span["completion_id"] for each in records for span in each["spans"])
    assert set(completions.values()) <= {1}
    of_record = {span["completion_id"]: span for each in group["samples"] for span in each["spans"]}
    for each in records:
        for span in each["spans"]:
            before = of_record[span["completion_id"]]
            assert {**span, "turn": 0} == {**before, "turn": 0}
    if not left_out:
        assert records == group["samples"]


def test_fine_tuning_and_exports_of_the_best_rollouts_have_the_turns_before_a_fork(group: dict[str, Any]) -> None:
    least = sorted(rollout["reward"] for rollout in group["rollouts"])[-3]
    good = {each["rollout_id"] for each in group["rollouts"] if each["reward"] >= least}
    turns = turns_of(group)
    wanted = {end for rollout_id in good for end in turns[rollout_id]}
    lines = [
        json.loads(json.dumps(line.content))
        for line in export_group(token_samples, group, ExportTotals(), min_reward=least)
    ]
    assert {each["rollout_id"] for each in lines} == good
    assert {tuple(each["tokens"][: span["end"]]) for each in lines for span in each["spans"]} == wanted
    assert verify_records(lines).ok

    found = list(_of_group(group, "here", SftSettings(min_reward=least)))
    examples = [each for each in found if isinstance(each, Example)]
    assert len(examples) == len(good) and len(found) == len(group["samples"])
    trained = {(tuple(each.tokens[:place]), each.tokens[place]) for each in examples for place in each.trained}
    of_ends = {(end[:at], end[at]) for end in wanted for at in spans_of(group, end)}
    assert trained == of_ends


def spans_of(group: dict[str, Any], end: tuple[int, ...]) -> range:
    """The places of the turn that ends there."""
    return next(
        range(span["start"], span["end"])
        for sample in group["samples"]
        for span in sample["spans"]
        if tuple(sample["tokens"][: span["end"]]) == end
    )
