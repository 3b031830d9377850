"""Groups as they are sent: verified, of one length, each rollout counted once, or rejected with the reason."""

from __future__ import annotations

import dataclasses
import json
import math
from collections.abc import Sequence
from typing import Any

import pytest
from atroposlib.api.server import ScoredData
from hypothesis import given
from hypothesis import strategies as st

from lachesis.settings.settings import HermesAgentEnvConfig
from lachesis_messages.records.split_rollouts import SplitRollouts
from lachesis_messages.tokens import MASKED, TokenPrefix
from lachesis_tokens.samples.group_shapes import (
    GroupSettings,
    RejectedGroup,
    RejectReason,
    RolloutSamples,
    TrainingGroup,
    build_group,
    group_problems,
    samples_from_atropos,
)
from lachesis_tokens.samples.samples import samples
from lachesis_tokens.samples.verification import verify, verify_records
from lachesis_train.api.group_body import read_group
from lachesis_train.group_encoding import GroupError, encode_group
from lachesis_train.trainer.checked import GroupRefused, checked_group
from tests.support.token_trees import END, SAMPLING, UNTIMED, Tree, trees

START = TokenPrefix([1, 2, 3])
MESSAGES: list[dict[str, Any]] = [
    {"role": "user", "content": "go"},
    {"role": "assistant", "content": None, "tool_calls": [{"id": "a"}]},
]
ALL, LONGEST = SplitRollouts.ALL, SplitRollouts.LONGEST


def rollout(name: str, reward: float | None, *, split: bool = False, attempt: int = 0, **more: Any) -> RolloutSamples:
    """5 sampled tokens in one sample; with `split`, 7 in two. `attempt`: the tokens of a discarded attempt."""
    tree = Tree()
    sampling = {**SAMPLING, **more.pop("sampling", {})}
    first = tree.sample(START, [4, 4, END], sampling=sampling)
    tree.sample(first.extend([5, 6]), [7, END], sampling={**sampling, **more.pop("later", {})})
    if split:
        tree.sample(START.extend([8]), [7, END], sampling=sampling)
    tree.path = tree.recorded[:2]
    if attempt:
        tree.sample(START, [8] * attempt, sampling=sampling)
        tree.replaced = tree.recorded[-1:]
    return RolloutSamples(name, reward, samples(tree, rollout_id=name), more.pop("messages", MESSAGES))


def four(**more: Any) -> list[RolloutSamples]:
    return [rollout("r0", 1, split=True, **more), rollout("r1", 1), rollout("r2", 1), rollout("r3", 0)]


def built(rollouts: Sequence[RolloutSamples], **settings: Any) -> TrainingGroup:
    group = build_group(rollouts, GroupSettings(len(rollouts), **settings))
    assert isinstance(group, TrainingGroup), group
    return group


def rejected(rollouts: Sequence[RolloutSamples], **settings: Any) -> RejectedGroup:
    group = build_group(rollouts, GroupSettings(**{"group_size": len(rollouts), **settings}))
    assert isinstance(group, RejectedGroup)
    return group


@pytest.mark.parametrize("split", [SplitRollouts.FINAL, LONGEST])
def test_one_sample_of_each_rollout_makes_a_group_of_the_exact_size(split: SplitRollouts) -> None:
    group = built(four(), split_rollouts=split)
    body = group.to_atropos(env_id=3)
    assert [len(body[key]) for key in ("tokens", "masks", "inference_logprobs", "scores", "overrides")] == [4] * 5
    assert body["tokens"][0] == [1, 2, 3, 4, 4, END, 5, 6, 7, END]
    assert body["masks"][0] == [*[-100] * 3, 4, 4, END, -100, -100, 7, END]
    assert body["inference_logprobs"][0] == [1.0, 1.0, 1.0, -0.25, -0.5, -0.75, 1.0, 1.0, -0.25, -0.5]
    assert body["scores"] == [1.0, 1.0, 1.0, 0.0]
    assert body["advantages"] is None
    assert set(body["group_overrides"]) == {"lachesis"}
    assert body["env_id"] == 3
    assert (group.delivered, group.undelivered) == (20, {"r0": 2})


def test_the_path_on_which_a_rollout_ended_goes_out_or_the_longest_where_that_is_set() -> None:
    tree = Tree()
    tree.sample(START, [4, 5, 4])
    tree.sample(START, [6, 7, 6])
    tree.sample(START, [END])
    tree.path = tree.recorded[2:]
    of_three = RolloutSamples("r0", 1, samples(tree, rollout_id="r0")[::-1])
    assert built([of_three, rollout("r1", 0)]).samples[0].masks[3:] == [END]
    longest = built(
        [dataclasses.replace(of_three, samples=of_three.samples[::-1]), rollout("r1", 0)], split_rollouts=LONGEST
    )
    assert longest.samples[0].masks[3:] == [4, 5, 4]  # the first of equally long ones


def test_what_a_discarded_attempt_earns_is_a_setting() -> None:
    """By default it is not sent. With a penalty it has that as its score, and the baseline stays that of rollouts."""
    pair = [rollout("a", 1, attempt=45), rollout("b", 0)]
    for split in SplitRollouts:
        left_out = built(pair, split_rollouts=split)
        assert [len(sample.spans) for sample in left_out.samples] == [2, 2]
        assert (left_out.scores, left_out.undelivered) == ((1.0, 0.0), {"a": 45})
    assert left_out.advantages == (0.5, -0.5)  # all: the rest of the rollout counts as the whole of it
    assert built(pair, split_rollouts=LONGEST, discarded_attempts="rollout").samples[0].trained == 45
    same = built(pair, split_rollouts=ALL, discarded_attempts="rollout")
    assert (same.scores, same.advantages) == ((1.0, 1.0, 0.0), pytest.approx((0.05, 0.45, -0.5)))
    body = built(pair, split_rollouts=ALL, discarded_attempts=-1).to_atropos()
    assert body["scores"] == [1.0, -1.0, 0.0]
    assert [row[-1] for row in body["advantages"]] == pytest.approx([0.05, -1.5 * 45 / 50, -0.5])
    assert [overrides["lachesis"]["discarded"] for overrides in body["overrides"]] == [False, True, False]
    assert body["group_overrides"]["group_size"] == 3
    equal = [rollout("a", 1, attempt=45), rollout("b", 1)]
    assert rejected(equal, split_rollouts=ALL, discarded_attempts="rollout").reason is RejectReason.SAME_SCORES
    assert built(equal, split_rollouts=ALL, discarded_attempts=0.0).advantages == pytest.approx((0.0, -0.9, 0.0))


def test_a_rollout_of_discarded_attempts_only_has_nothing_to_train() -> None:
    tree = Tree()
    tree.sample(START, [8, 8])
    tree.replaced = tree.recorded[:]
    tree.sample(START, [])  # the answer that ended it holds no token
    found = rejected([rollout("a", 1), RolloutSamples("b", 0, samples(tree, rollout_id="b"))])
    assert (found.reason, found.detail) == (RejectReason.INCOMPLETE, "rollout b has nothing but discarded attempts")
    assert found.undelivered == {"a": 5, "b": 2}


@pytest.mark.parametrize(
    ("split", "attempts", "problem"),
    [
        ("final", "rollout", "no effect with split_rollouts final"),
        ("final", -1.0, "no effect with split_rollouts final"),
        ("longest", -1.0, "no effect with split_rollouts longest"),
        ("all", 0.5, "a penalty is a number of at most 0"),
        ("all", math.nan, "a penalty is a number of at most 0"),
    ],
)
def test_settings_without_an_effect_are_rejected(split: str, attempts: Any, problem: str) -> None:
    with pytest.raises(ValueError, match=problem):
        GroupSettings(2, SplitRollouts(split), discarded_attempts=attempts)
    with pytest.raises(ValueError, match=r"discarded_attempts"):
        HermesAgentEnvConfig(split_rollouts=split, discarded_attempts=attempts)


def test_the_former_name_of_all_is_still_read() -> None:
    config = HermesAgentEnvConfig(split_rollouts="advantages", discarded_attempts="-0.5")
    assert (config.split_rollouts, config.discarded_attempts) == ("all", -0.5)
    assert (HermesAgentEnvConfig().split_rollouts, HermesAgentEnvConfig().discarded_attempts) == ("final", "none")


def test_all_samples_go_out_with_advantages_of_their_rollouts_and_the_true_size() -> None:
    group = built(four(), split_rollouts=ALL)
    body = group.to_atropos()
    assert body["group_overrides"]["group_size"] == 5
    assert body["scores"] == [1, 1, 1, 1, 0]
    # The baseline is 0.75, not 0.8; the first rollout's share of it is cut 5 to 2.
    constants = [max(row, key=abs) for row in body["advantages"]]
    assert constants == pytest.approx([0.25 * 5 / 7, 0.25 * 2 / 7, 0.25, 0.25, -0.75])
    for row, mask, constant in zip(body["advantages"], body["masks"], constants, strict=True):
        assert row == [0.0 if token == MASKED else constant for token in mask]
    assert (group.delivered, group.undelivered) == (22, {})


@UNTIMED
@given(st.lists(trees(max_completions=5), min_size=2, max_size=4), st.sampled_from(list(SplitRollouts)))
def test_what_goes_out_and_what_is_left_out_is_all_that_was_sampled(
    of_rollouts: list[Tree], split: SplitRollouts
) -> None:
    rollouts = [
        RolloutSamples(f"r{at}", float(at), samples(tree, rollout_id=f"r{at}")) for at, tree in enumerate(of_rollouts)
    ]
    group = build_group(rollouts, GroupSettings(len(rollouts), split))
    if not all(rollout.samples for rollout in rollouts):
        assert isinstance(group, RejectedGroup)
        return
    assert isinstance(group, TrainingGroup)
    record = {"samples": [sample.to_record() for sample in group.samples], "undelivered": group.undelivered}
    totals = verify_records([json.loads(json.dumps(record))])
    assert totals.ok
    assert totals.sampled == sum(rollout.sampled for rollout in rollouts)
    assert (totals.delivered, totals.undelivered) == (group.delivered, sum(group.undelivered.values()))
    assert split is not ALL or not totals.undelivered
    assert split is ALL or len(group.samples) == totals.rollouts


@pytest.mark.parametrize("split", list(SplitRollouts))
def test_a_trainer_can_verify_every_sample_of_the_group_that_it_gets(split: SplitRollouts) -> None:
    group = built(four(), split_rollouts=split)
    body = json.loads(json.dumps(group.to_atropos(1), allow_nan=False))
    received = json.loads(ScoredData(**body).model_dump_json())  # Atropos' own model of the request
    assert received == body | {"distill_token_ids": None, "distill_logprobs": None}
    found = samples_from_atropos(received)
    assert found == list(group.samples)
    assert [verify(sample) for sample in found] == [[]] * len(found)
    assert group_problems(received, found) == []
    received["group_overrides"] |= {"group_id": "g", "begin_step": 3}  # as it is sent
    assert group_problems(received, found) == []


@pytest.mark.parametrize("split", list(SplitRollouts))
def test_a_group_that_is_built_is_taken_by_the_api_and_by_the_trainer(split: SplitRollouts) -> None:
    """Nothing checks it in between: each of them has a check of its own for what comes from others."""
    group = built(four(), split_rollouts=split)
    sent = b"".join(encode_group(group.to_atropos(1)))
    taken = read_group(sent)
    assert (taken.sequences, taken.tokens) == (len(group.samples), sum(len(sample.tokens) for sample in group.samples))
    checked = checked_group(json.loads(b"".join(taken.pieces)))
    assert sum(len(sample.trained) for sample in checked) == group.delivered


@pytest.mark.parametrize("name", ["masks", "inference_logprobs"])
def test_a_list_that_is_too_short_is_refused_at_the_door_of_the_api_and_of_the_trainer(name: str) -> None:
    body = built(four()).to_atropos(1)
    body[name] = [body[name][0][1:], *body[name][1:]]
    with pytest.raises(GroupError, match=rf"{name}\[0\] has "):
        read_group(b"".join(encode_group(body)))
    with pytest.raises(GroupRefused):
        checked_group(json.loads(json.dumps(body)))


def test_half_of_a_surrogate_pair_that_is_sent_as_another_character_is_no_damage() -> None:
    rollouts = [rollout(f"r{at}", at, messages=[{"role": "user", "content": "\ud83d"}]) for at in range(2)]
    sent = json.loads(b"".join(encode_group(built(rollouts).to_atropos())))
    assert sent["messages"][0][0]["content"] == "\ufffd"
    assert group_problems(sent, samples_from_atropos(sent)) == []


def test_versions_of_the_weights_travel_at_the_top_of_the_overrides() -> None:
    rollouts = four()
    tree = Tree()
    first = tree.sample(START, [4, 4, END], versions=(("7", 0, 1), ("8", 1, 3)))
    tree.sample(first.extend([5, 6]), [7, END], versions=(("7", 0, 1), ("8", 1, 2)))
    rollouts[1] = RolloutSamples("r1", 1, samples(tree, rollout_id="r1"))
    received = json.loads(ScoredData(**built(rollouts).to_atropos(1)).model_dump_json())
    ranges = [["7", 3, 4], ["8", 4, 6], ["7", 8, 9], ["8", 9, 10]]
    assert [overrides.get("policy_versions") for overrides in received["overrides"]] == [None, ranges, None, None]
    assert samples_from_atropos(received)[1].policy_versions == list(map(tuple, ranges))


def test_rewards_of_turns_travel_with_every_sample_of_their_rollout() -> None:
    rollouts = four()
    rollouts[0] = dataclasses.replace(rollouts[0], turn_rewards=[0.5, 0.25])
    group = built(rollouts, split_rollouts=ALL)
    received = json.loads(ScoredData(**group.to_atropos(1)).model_dump_json())
    assert [overrides.get("turn_rewards") for overrides in received["overrides"]] == [[0.5, 0.25]] * 2 + [None] * 3
    assert all("turn_rewards" not in overrides for overrides in built(four()).to_atropos()["overrides"])


def test_a_group_that_says_nothing_of_its_samples_is_an_error() -> None:
    body = built(four()).to_atropos()
    broken: list[Any] = [None, [{}] * 4, [{"lachesis": {"schema": "?"}}] * 4]
    for overrides in broken:
        with pytest.raises(ValueError, match=r"certificate|schema"):
            samples_from_atropos({**body, "overrides": overrides})


def test_messages_have_a_role_and_content_and_are_sent_by_all_rollouts_or_none() -> None:
    body = built(four()).to_atropos()
    assert [message["content"] for message in body["messages"][0]] == ["go", ""]
    assert MESSAGES[1]["content"] is None
    split = built(four(), split_rollouts=ALL).to_atropos()
    assert len(split["messages"]) == len(split["tokens"]) == 5 and split["messages"][0] == split["messages"][1]
    assert built([rollout("a", 1), rollout("b", 0, messages=None)]).to_atropos()["messages"] is None
    found = rejected([rollout("a", 1), rollout("b", 0, messages=[{"content": "hello"}])])
    assert found.reason is RejectReason.MALFORMED_MESSAGES
    assert found.detail == "rollout b: message 0 has no role"


def test_the_temperature_travels_where_atropos_looks_for_it() -> None:
    cool = {"temperature": 0.7, "logprobs": "processed", "max_tokens": 9}
    body = built([rollout("a", 1, sampling=cool), rollout("b", 0)]).to_atropos()
    assert [overrides["temperature"] for overrides in body["overrides"]] == [0.7, 1.0]
    assert body["generation_params"] == {"top_p": 1.0, "top_k": 0, "min_p": 0.0}
    body = built([rollout("a", 1, sampling=cool), rollout("b", 0, sampling=cool)]).to_atropos()
    assert body["generation_params"] == {**SAMPLING, **cool}


def test_one_sequence_with_two_temperatures_is_rejected() -> None:
    cool = {"temperature": 0.7, "logprobs": "processed"}
    found = rejected([rollout("a", 1, sampling={"logprobs": "processed"}, later=cool), rollout("b", 0)])
    assert found.reason is RejectReason.MIXED_TEMPERATURES
    assert "rollout a: one sequence with temperatures 0.7, 1" in found.detail


@pytest.mark.parametrize(
    ("rollouts", "detail"),
    [
        ([rollout("a", 1)], "1 rollouts, but the group size is 2"),
        ([rollout("a", 1), rollout("b", None)], "rollout b has no reward"),
        ([rollout("a", 1), RolloutSamples("b", 0, [])], "rollout b has no sampled tokens"),
    ],
)
def test_an_incomplete_group_is_rejected(rollouts: list[RolloutSamples], detail: str) -> None:
    found = rejected(rollouts, group_size=2)
    assert (found.reason, found.detail) == (RejectReason.INCOMPLETE, detail)
    assert found.undelivered["a"] == 5


@pytest.mark.parametrize("reward", [math.nan, math.inf, 1e200])
def test_a_reward_that_is_no_number_is_rejected(reward: float) -> None:
    found = rejected([rollout("a", 1), rollout("b", reward)])
    assert found.reason is RejectReason.BAD_SCORE
    assert found.detail.startswith("rollout b has reward")


def test_equal_rewards_are_rejected_unless_they_are_allowed() -> None:
    same = [rollout("a", 0.5), rollout("b", 0.5)]
    found = rejected(same)
    assert found.reason is RejectReason.SAME_SCORES
    assert found.detail.startswith("all 2 rewards are 0.5")
    assert built(same, ensure_scores_are_not_same=False).scores == (0.5, 0.5)


def test_a_sequence_has_to_be_shorter_than_what_the_trainer_takes() -> None:
    pair = [rollout("a", 1), rollout("b", 0)]
    found = rejected(pair, max_token_len=10)
    assert found.reason is RejectReason.TOO_LONG
    assert "a sequence of 10 tokens" in found.detail
    for allowed in (11, 0, -1):
        assert built(pair, max_token_len=allowed)


def _changed(of: RolloutSamples, **changes: Any) -> RolloutSamples:
    return dataclasses.replace(of, samples=[dataclasses.replace(of.samples[0], **changes), *of.samples[1:]])


def test_samples_that_do_not_verify_are_rejected_with_the_reason() -> None:
    good = rollout("b", 0)
    bad = rollout("a", 1)
    swapped = _changed(bad, tokens=[3, 2, 1, *bad.samples[0].tokens[3:]])
    halved = dataclasses.replace(rollout("a", 1, split=True), samples=rollout("a", 1, split=True).samples[:1])
    for broken, reason in (
        (swapped, "rollout a: turns 0, 1 after another prefix"),
        (_changed(bad, logprobs=bad.samples[0].logprobs[:-1]), "rollout a: lengths differ"),
        (rollout("a", 1, sampling={"top_p": 0.9}), "rollout a: turns 0, 1: top_p = 0.9"),
        (rollout("a", 1, sampling={"temperature": 0.5}), "rollout a: turns 0, 1: sampled at temperature 0.5"),
        (halved, "rollout a: 5 of 7 sampled tokens delivered"),
        (
            dataclasses.replace(bad, samples=[*bad.samples, *bad.samples]),
            "rollout a: turns 0, 1 (5 tokens) trained again",
        ),
        (_changed(bad, rollout_id="x"), "rollout a has a sample of x"),
        (rollout("b", 1), "rollout b: "),
    ):
        found = rejected([broken, good])
        assert found.reason is RejectReason.UNPROVEN
        assert found.detail.startswith(reason)


def test_one_rollout_does_not_count_as_two() -> None:
    whole = rollout("a", 1, split=True)
    halves = [dataclasses.replace(whole, samples=[sample], reward=at) for at, sample in enumerate(whole.samples)]
    found = rejected(halves)
    assert (found.reason, found.detail) == (RejectReason.UNPROVEN, "two of the 2 rollouts have the same id")
