"""What reaches the engine: shifted targets, true logprobs, and advantages that count each rollout once."""

from __future__ import annotations

import json
import math
import random
from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from lachesis_messages.records.split_rollouts import DiscardedAttempts, SplitRollouts
from lachesis_messages.tokens import TokenPrefix
from lachesis_tokens.samples.advantages import LossAverage, rollout_advantages
from lachesis_tokens.samples.group_shapes import (
    GroupSettings,
    RolloutSamples,
    TrainingGroup,
    build_group,
    group_digest,
)
from lachesis_tokens.samples.samples import samples
from lachesis_train.curves.estimators import LARGEST_LOG_RATIO
from lachesis_train.curves.metrics import step_metrics
from lachesis_train.curves.records import StepRecord
from lachesis_train.trainer.checked import Refusal
from lachesis_train.trainer.datums import NO_SIGNAL, TOO_LONG, TOO_OLD, penalise_divergence, prepare
from lachesis_train.trainer.settings import Settings, TrainingSettings
from tests.run import some
from tests.support.token_trees import END, UNTIMED, Tree, completion, trees
from tests.support.trained_groups import group_body

START = TokenPrefix([1, 2, 3])


def rollout(
    name: str, reward: float, *, split: bool = False, attempt: int = 0, outcome: str = "", **more: Any
) -> RolloutSamples:
    """5 sampled tokens in one sample; with `split` 7 in two. `attempt`: the tokens of a discarded attempt."""
    tree = Tree()
    first = tree.sample(START, [4, 4, END], **more)
    tree.sample(first.extend([5, 6]), [7, END], **more)
    if split:
        tree.sample(START.extend([8]), [7, END], **more)
    tree.path = tree.recorded[:2]
    if attempt:
        tree.sample(START, [8] * attempt, **more)
        tree.replaced = tree.recorded[-1:]
    return RolloutSamples(name, reward, samples(tree, rollout_id=name, outcome=outcome))


def body(
    rollouts: Sequence[RolloutSamples],
    split: SplitRollouts = SplitRollouts.FINAL,
    attempts: DiscardedAttempts = "none",
    **overrides: Any,
) -> dict[str, Any]:
    """As it comes from `GET /batch`."""
    settings = GroupSettings(
        len(rollouts), split_rollouts=split, discarded_attempts=attempts, ensure_scores_are_not_same=False
    )
    group = build_group(rollouts, settings)
    assert isinstance(group, TrainingGroup), group
    found: dict[str, Any] = json.loads(json.dumps(group.to_atropos()))
    return found | overrides


def test_targets_are_the_next_tokens_and_what_is_masked_has_no_advantage() -> None:
    batch = prepare([body([rollout("a", 1), rollout("b", 0)])], TrainingSettings())
    datum = batch.samples[0].datum()
    assert list(datum.tokens) == [1, 2, 3, 4, 4, END, 5, 6, 7]
    assert list(datum.targets) == [2, 3, 4, 4, END, 5, 6, 7, END]
    assert np.asarray(datum.inputs["logprobs"]).tolist() == [0, 0, -0.25, -0.5, -0.75, 0, 0, -0.25, -0.5]
    each = 0.5 / 5 / 2  # 5 tokens of each of 2 rollouts
    wanted = pytest.approx([0, 0, each, each, each, 0, 0, each, each])
    assert np.asarray(datum.inputs["advantages"]).tolist() == wanted
    assert (-np.asarray(batch.samples[1].datum().inputs["advantages"])).tolist() == wanted
    assert set(datum.inputs) == {"logprobs", "advantages"}


def test_gspo_also_gets_which_tokens_its_mean_is_over() -> None:
    """Also those whose advantage is 0."""
    batch = prepare([body([rollout("a", 1), rollout("b", 0)])], TrainingSettings())
    batch.samples[0].advantages[1] = 0.0
    inputs = batch.samples[0].datum("gspo").inputs
    assert np.asarray(inputs["weights"]).tolist() == [0, 0, 1, 1, 1, 0, 0, 1, 1]
    assert np.count_nonzero(inputs["advantages"]) == 4


def test_the_mean_over_tokens_gives_each_token_the_advantage_of_its_rollout() -> None:
    batch = prepare([body([rollout("a", 1), rollout("b", 0)])], TrainingSettings(loss_average=LossAverage.TOKEN))
    assert np.asarray(batch.samples[0].datum().inputs["advantages"]).max() == pytest.approx(0.5 / 10)


def totals(batch: Any, advantage_of: Any) -> dict[str, float]:
    """The sum of the scaled advantages of each rollout of a batch of one group, times its rollouts."""
    found: dict[str, float] = {}
    for each in batch.samples:
        name = each.sample.rollout
        found[name] = found.get(name, 0.0) + float(np.sum(each.advantages * each.scale)) * advantage_of
    return found


@st.composite
def groups(draw: st.DrawFn, *, signal: bool = False) -> list[RolloutSamples]:
    """`signal`: the rewards differ."""
    rewards = draw(st.lists(st.sampled_from([0.0, 0.5, 1.0]), min_size=2, max_size=4))
    if signal:
        rewards = [2.0, *rewards]
    found = []
    for at, reward in enumerate(rewards):
        tree = draw(trees(max_completions=5))
        # A completion of an empty prompt has a first token that nothing predicts: such groups are refused.
        tree.recorded = [each for each in tree.recorded if each.tokens is not None and each.tokens.prompt.length]
        tree.sample(START, [4, END])
        found.append(RolloutSamples(f"r{at}", reward, samples(tree, rollout_id=f"r{at}")))
    return found


@settings(UNTIMED, max_examples=some(40))
@given(groups(), st.booleans(), st.sampled_from([SplitRollouts.ALL, SplitRollouts.FINAL, SplitRollouts.LONGEST]))
def test_a_rollout_counts_once_however_many_sequences_it_has(
    rollouts: list[RolloutSamples], normalise: bool, split: SplitRollouts
) -> None:
    wanted = rollout_advantages([each.reward for each in rollouts], normalise=normalise)
    batch = prepare([body(rollouts, split)], TrainingSettings(advantage="normalised" if normalise else "centred"))
    assert not batch.left_out
    if not any(wanted):
        assert batch.skipped[0][0] == NO_SIGNAL
        return
    assert not batch.skipped
    found = totals(batch, len(rollouts))
    assert found == {f"r{at}": pytest.approx(value, abs=1e-9) for at, value in enumerate(wanted)}
    # The same advantage for all of its tokens.
    for each in batch.samples:
        value = wanted[int(each.sample.rollout[1:])]
        assert each.advantages.tolist() == [pytest.approx(value, abs=1e-9)] * each.sample.trained.size


@settings(UNTIMED, max_examples=some(40))
@given(groups(signal=True), st.sampled_from(list(LossAverage)))
def test_every_sampled_token_is_a_target_once_with_its_own_logprob(
    rollouts: list[RolloutSamples], average: LossAverage
) -> None:
    batch = prepare([body(rollouts, SplitRollouts.ALL)], TrainingSettings(loss_average=average))
    found = []
    for each in batch.samples:
        datum = each.datum()
        assert len(datum.tokens) == len(datum.targets) == len(datum.inputs["logprobs"])
        places = each.sample.trained - 1
        found += [(datum.targets[place], np.float32(datum.inputs["logprobs"][place])) for place in places]
    wanted = [
        (token, np.float32(sample.logprobs[span.start + at]))
        for each in rollouts
        for sample in each.samples
        for span in sample.spans
        for at, token in enumerate(sample.tokens[span.start : span.end])
    ]
    assert sorted(found) == sorted(wanted)


def test_the_score_of_a_discarded_attempt_is_its_own_and_in_no_baseline() -> None:
    group = [rollout("a", 1, attempt=5), rollout("b", 0)]
    batch = prepare([body(group, SplitRollouts.ALL, -0.5)], TrainingSettings())
    values = {(each.sample.rollout, len(each.sample.tokens)): float(each.advantages[0]) for each in batch.samples}
    assert values == pytest.approx({("a", 8): -1.0, ("a", 10): 0.5, ("b", 10): -0.5})  # -0.5 minus the baseline 0.5
    # With the reward of its rollout: half of the tokens are the attempt's.
    batch = prepare([body(group, SplitRollouts.ALL, "rollout")], TrainingSettings())
    assert totals(batch, 2) == {"a": pytest.approx(0.5), "b": pytest.approx(-0.5)}


def test_an_attempt_that_is_sent_as_the_longest_sample_has_the_advantage_of_its_rollout() -> None:
    batch = prepare(
        [body([rollout("a", 1, attempt=9), rollout("b", 0)], SplitRollouts.LONGEST, "rollout")], TrainingSettings()
    )
    assert totals(batch, 2) == {"a": pytest.approx(0.5), "b": pytest.approx(-0.5)}


def test_a_batch_without_a_signal_trains_nothing_and_refuses_nothing() -> None:
    batch = prepare([body([rollout("a", 1), rollout("b", 1)])], TrainingSettings())
    assert not batch.samples
    assert not batch.refused
    (record,) = batch.records([])
    assert record.skipped == NO_SIGNAL


def test_groups_of_a_batch_have_baselines_of_their_own() -> None:
    first, second = body([rollout("a", 1), rollout("b", 0)]), body([rollout("c", 9), rollout("d", 5)])
    batch = prepare([first, second], TrainingSettings())
    assert [each.advantages[0] for each in batch.samples] == [0.5, -0.5, 2, -2]
    assert {each.scale for each in batch.samples} == {1 / 5 / 4}
    equal = body([rollout("e", 1), rollout("f", 1)])
    assert {each.scale for each in prepare([first, equal], TrainingSettings()).samples} == {1 / 5 / 4}


def test_sequences_that_are_too_long_are_left_out_and_counted_and_the_baseline_stays() -> None:
    group = [rollout("a", 1, split=True), rollout("b", 0)]
    batch = prepare([body(group, SplitRollouts.ALL)], TrainingSettings(max_token_trainer_length=10))
    assert [len(each.sample.tokens) for each in batch.samples] == [6]
    assert [name for name, _ in batch.left_out.values()] == [TOO_LONG, TOO_LONG]
    assert batch.samples[0].advantages[0] == 0.5
    assert batch.samples[0].scale == 1 / 7 / 2  # as if the rest of the rollout were trained


def test_a_group_whose_sequences_are_all_left_out_is_not_refused_and_each_has_its_own_reason() -> None:
    group = group_body("g", "why", ["a", "b", "c" * 60], [0.0, 1.0, 0.5])
    group["group_overrides"]["environment"] = "maze"
    group["group_overrides"]["lachesis"] = group_digest(group)
    rules = TrainingSettings(max_policy_lag=1, max_token_trainer_length=40)
    batch = prepare([group], rules, run="run", step=5)
    assert not batch.samples
    assert not batch.refused
    records = batch.records([])
    line = step_metrics(StepRecord(step=6, version="run:6", groups=records))
    assert (line["train/skipped/too_old"], line["train/skipped/too_long"]) == (2, 1)
    assert (line["train/maze/refused"], line["train/maze/tokens"]) == (0, 0)


def of_version(name: str, reward: float, version: str) -> RolloutSamples:
    tree = Tree()
    first = tree.sample(START, [4, 4, END], versions=((version, 0, 3),))
    tree.sample(first.extend([5, 6]), [7, END])
    return RolloutSamples(name, reward, samples(tree, rollout_id=name))


def test_sequences_of_old_weights_are_left_out_by_their_own_versions() -> None:
    group = body([of_version("a", 1, "run:3"), of_version("b", 0, "run:7")])
    batch = prepare([group], TrainingSettings(max_policy_lag=2), run="run", step=8)
    assert [each.at for each in batch.samples] == [1]
    assert batch.left_out[0, 0][0] == TOO_OLD
    assert prepare([group], TrainingSettings(), run="run", step=8).lags == {0: [5, 1]}
    assert prepare([group], TrainingSettings(), run="other", step=8).lags == {0: [None, None]}
    # Sampled after the checkpoint that the run went back to.
    assert prepare([group], TrainingSettings(), run="run", step=4).lags == {0: [1, 3]}


def test_the_age_of_what_is_not_trained_is_recorded_too() -> None:
    equal = body([of_version("a", 1, "run:3"), of_version("b", 1, "run:7")])
    old = body([of_version("c", 1, "run:2"), of_version("d", 0, "run:3")])
    batch = prepare([equal, old], TrainingSettings(max_policy_lag=2), run="run", step=8)
    assert not batch.samples
    records = batch.records([])
    assert [[each.staleness for each in record.samples] for record in records] == [[5, 1], [6, 5]]
    line = step_metrics(StepRecord(step=9, version="run:9", groups=records))
    assert (line["train/staleness/mean"], line["train/staleness/max"]) == (4.25, 6)
    assert (line["train/skipped/same_scores"], line["train/skipped/too_old"]) == (2, 2)


def test_a_group_is_trained_once() -> None:
    group = body([rollout("a", 1), rollout("b", 0)])
    group["group_overrides"]["group_id"] = "g1"  # as it is sent
    batch = prepare([group, group], TrainingSettings())
    assert batch.new_ids == ("g1",)
    assert batch.skipped[1][0] == Refusal.DUPLICATE
    assert prepare([group], TrainingSettings(), seen={"g1"}).skipped[0][0] == Refusal.DUPLICATE


def test_the_penalty_lowers_what_the_base_model_finds_unlikely_and_keeps_the_mean() -> None:
    batch = prepare([body([rollout("a", 1), rollout("b", 0)])], TrainingSettings())
    base = [[math.nan, *[-0.5] * 9], [math.nan, *[-1.5] * 9]]
    before = [each.advantages for each in batch.samples]
    mean, _ = penalise_divergence(batch, base, 0.1)
    sampled = np.array([-0.25, -0.5, -0.75, -0.25, -0.5])
    assert mean == pytest.approx(np.mean(np.concatenate([sampled + 0.5, sampled + 1.5])))
    changes = [each.advantages - old for each, old in zip(batch.samples, before, strict=True)]
    assert changes[0] == pytest.approx(-0.1 * (sampled + 0.5 - mean))
    assert float(np.sum(np.concatenate(changes))) == pytest.approx(0.0, abs=1e-12)


def test_one_impossible_token_moves_no_other_one_and_is_counted() -> None:
    batch = prepare([body([rollout("a", 1), rollout("b", 0)])], TrainingSettings())
    before, first = [each.advantages for each in batch.samples], int(batch.samples[0].sample.trained[0])
    other = [[-0.5] * 10, [math.nan, *[-0.5] * 9]]
    other[0][first - 1], other[0][first] = -9999.0, -9999.0  # the former is not trained
    mean, impossible = penalise_divergence(batch, other, 1.0)
    assert impossible == 1
    assert mean == pytest.approx(2.0, abs=0.1)
    changes = [each.advantages - old for each, old in zip(batch.samples, before, strict=True)]
    assert changes[0][0] == pytest.approx(mean - LARGEST_LOG_RATIO)
    assert max(map(max, changes)) < 2.5


@settings(UNTIMED, max_examples=some(40))
@given(
    st.lists(st.tuples(groups(), st.booleans()), min_size=1, max_size=3),
    st.sampled_from(list(LossAverage)),
    st.sampled_from([0.0, 0.3]),
    st.integers(0, 1000),
)
def test_groups_without_a_signal_are_trained_for_the_penalty_alone(
    batch_of: list[tuple[list[RolloutSamples], bool]], average: LossAverage, coefficient: float, seed: int
) -> None:
    """Compared with every token of the batch on its own, in float64."""
    played = []
    for group, equal in batch_of:
        played.append([RolloutSamples(each.rollout_id, 1.0, each.samples) for each in group] if equal else group)
    config = Settings.model_construct(training=TrainingSettings(kl_penalty=coefficient, loss_average=average))
    batch = prepare([body(group, SplitRollouts.ALL) for group in played], config.training)
    chance = np.random.default_rng(seed)
    base = [chance.uniform(-9, 0, len(each.sample.tokens)) for each in batch.samples]
    if coefficient:
        penalise_divergence(batch, [each.tolist() for each in base], coefficient)
        assert not batch.skipped and len(batch.samples) == sum(len(each.samples) for group in played for each in group)
    differences = {
        (number, at): min(20.0, max(-20.0, each.sample.logprobs[at] - of_base[place]))
        for number, (each, of_base) in enumerate(zip(batch.samples, base, strict=True))
        for at, place in enumerate(each.sample.trained)
    }
    tokens = {
        (number, each.rollout_id): sum(sample.trained for sample in each.samples)
        for number, group in enumerate(played)
        for each in group
    }
    for number, each in enumerate(batch.samples):
        rewards = [rollout.reward or 0.0 for rollout in played[each.group]]
        (reward,) = (mine.reward for mine in played[each.group] if mine.rollout_id == each.sample.rollout)
        divisor = float(sum(tokens.values()))
        if average is LossAverage.SAMPLE:
            divisor = float(len(tokens) * tokens[each.group, each.sample.rollout])
        given_advantages = np.asarray(each.datum().inputs["advantages"], np.float64)
        wanted = np.zeros(len(each.sample.tokens) - 1)
        for at, place in enumerate(each.sample.trained):
            penalty = coefficient * (differences[number, at] - np.mean([*differences.values()]))
            wanted[place - 1] = ((reward or 0.0) - np.mean(rewards) - penalty) / divisor
        assert given_advantages == pytest.approx(wanted, rel=1e-5, abs=1e-7)


def test_the_clip_share_has_the_advantage_of_each_token() -> None:
    """A penalty gives the tokens of one sequence advantages of both signs."""
    batch = prepare([body([rollout("a", 1), rollout("b", 0)])], TrainingSettings())
    penalise_divergence(batch, [[math.nan, *[-0.5] * 9], [math.nan, *[-1.5] * 9]], 3.0)
    engine = [[0.0] * 9] * 2  # every ratio is above 1.1
    line = step_metrics(StepRecord(step=1, version="r:1", groups=batch.records(engine), ratio_bounds=(0.9, 1.1)))
    advantages = np.concatenate([each.advantages for each in batch.samples])
    assert 0 < np.mean(advantages > 0) < 1
    assert line["train/clip_ratio/high_mean"] == pytest.approx(np.mean(advantages > 0))
    assert line["train/clip_ratio/low_mean"] == 0


def test_records_have_the_logprobs_of_both_sides_for_the_trained_tokens() -> None:
    group = body([of_version("a", 1, "run:3"), of_version("b", 0, "run:3")])
    batch = prepare([group], TrainingSettings(), run="run", step=4)
    engine = [[-float(at) for at in range(9)]] * 2
    (record,) = batch.records(engine)
    assert record.samples[0].sampler_logprobs == [-0.25, -0.5, -0.75, -0.25, -0.5]
    assert record.samples[0].trainer_logprobs == [-2, -3, -4, -7, -8]
    assert record.samples[0].staleness == 1
    assert [each.advantage for each in record.samples] == [0.5, -0.5]


def test_a_temperature_is_refused_by_name_and_the_rest_of_the_batch_is_trained() -> None:
    sampling = {**completion(START, [4]).sampling, "temperature": 0.7, "logprobs": "processed"}
    warm = body([rollout("a", 1, sampling=sampling), rollout("b", 0, sampling=sampling)])
    batch = prepare([warm, body([rollout("c", 1), rollout("d", 0)])], TrainingSettings())
    assert len(batch.samples) == 2
    assert batch.skipped[0][0] == Refusal.TEMPERATURE
    assert "agent_temperature 1.0" in batch.skipped[0][1]


@given(
    st.lists(st.floats(0, 1), min_size=2, max_size=4),
    st.floats(0.01, 3),
    st.floats(0, 3),
    st.randoms(use_true_random=False),
)
def test_the_divergence_is_added_to_the_advantage_of_each_token(
    scores: list[float], weight: float, reward_weight: float, rng: random.Random
) -> None:
    group = body([rollout(f"r{at}", score, split=at % 2 == 1) for at, score in enumerate(scores)])
    batch = prepare([group], TrainingSettings(kl_penalty=0.1))
    before = [each.advantages.copy() for each in batch.samples]
    teacher = [[math.nan, *(-5 * rng.random() for _ in each.sample.tokens[1:])] for each in batch.samples]
    mean, _ = penalise_divergence(batch, teacher, weight, reward_weight)
    divergences = []
    for each, earlier, of_teacher in zip(batch.samples, before, teacher, strict=True):
        for at, place in enumerate(each.sample.trained):
            divergence = float(each.sample.logprobs[at]) - of_teacher[place]
            divergences.append(divergence)
            wanted = reward_weight * earlier[at] - weight * (divergence - mean)
            assert each.advantages[at] == pytest.approx(wanted, abs=1e-9)
    assert mean == pytest.approx(np.mean(divergences))


def test_equal_scores_are_trained_where_a_teacher_says_what_is_better() -> None:
    group = body([rollout("a", 1), rollout("b", 1)])
    assert prepare([group], TrainingSettings()).skipped[0][0] == NO_SIGNAL
    assert len(prepare([group], TrainingSettings(kl_penalty=0.1)).samples) == 2


PLAIN = {
    "tokens": [[1, 2, 3], [1, 2, 4]],
    "masks": [[-100, 2, 3], [-100, 2, 4]],
    "inference_logprobs": [[1.0, -0.5, -0.5]] * 2,
    "scores": [1.0, 0.0],
}


@pytest.mark.parametrize(
    "odd",
    [
        {"overrides": [{}]},
        {"overrides": [None, {}]},
        {"overrides": [{"policy_versions": [7]}, {}]},
        {"overrides": [{"policy_versions": [[]]}, {}]},
        {"advantages": 5},
        {"generation_params": {"temperature": "1.0"}},
        {"generation_params": [1]},
        {"group_overrides": {"group_id": ["x"]}},
        {"masks": [[-100, 2, [3]], [-100, 2, 4]]},
        {"tokens": [[1, 2, [3, 4]], [1, 2, 4]]},
    ],
    ids=str,
)
def test_a_group_of_any_shape_is_refused_and_the_others_are_trained(odd: dict[str, Any]) -> None:
    """A trainer that ended with an exception would get the same batch after each restart."""
    batch = prepare([{**PLAIN, **odd}, PLAIN], TrainingSettings(uncertified="allow"))
    assert batch.skipped[0][0] == Refusal.UNPROVEN
    assert {each.group for each in batch.samples} == {1}


@pytest.mark.parametrize("reward", [1.0, 1e-200, 1e-308])
def test_tiny_rewards_are_normalised_as_others_where_a_group_carries_advantages(reward: float) -> None:
    carried = [[0, -reward / 2, -reward / 2], [0, reward / 2, reward / 2]]
    group = {**PLAIN, "scores": [0.0, reward], "advantages": carried}
    batch = prepare([group], TrainingSettings(uncertified="allow", advantage="normalised"))
    found = [value for each in batch.samples for value in each.advantages]
    assert found == pytest.approx([-1.0, -1.0, 1.0, 1.0])


@pytest.mark.parametrize("discount", [None, 1.0])
def test_the_spread_counts_a_rollout_of_which_only_a_discarded_attempt_is_sent(discount: float | None) -> None:
    rollouts = []
    for name, reward in zip("abcd", (10.0, 0.0, 0.0, 0.0), strict=True):
        tree = Tree()
        tree.sample(START, [8] * 6)  # the longest sample of its rollout
        tree.replaced = tree.recorded[:]
        tree.sample(START, [4, END])
        tree.path = tree.recorded[1:]
        ids = [each.tokens.completion_id for each in tree.path if each.tokens is not None]
        found = samples(tree, rollout_id=name)
        rollouts.append(RolloutSamples(name, reward, found, turn_rewards=[reward], turn_ids=ids))
    shape = GroupSettings(4, SplitRollouts.LONGEST, discarded_attempts="rollout", turn_discount=discount)
    group = build_group(rollouts, shape)
    assert isinstance(group, TrainingGroup) and all(each.discarded for each in group.samples)
    batch = prepare([json.loads(json.dumps(group.to_atropos()))], TrainingSettings(advantage="normalised"))
    assert [round(float(each.advantages[0]), 3) for each in batch.samples] == [1.732, -0.577, -0.577, -0.577]
