"""Ratios of whole sequences: weights, rejections and their figures, against plain loops in float64."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest

from lachesis_tokens.samples.advantages import LossAverage
from lachesis_tokens.samples.group_shapes import group_digest
from lachesis_train.curves.metrics import step_metrics
from lachesis_train.curves.records import StepRecord
from lachesis_train.trainer.checked import Refusal
from lachesis_train.trainer.datums import NO_SIGNAL, TRUNCATED, PreparedBatch, _truncated, prepare, with_signal
from lachesis_train.trainer.off_policy import OFF_POLICY, correct, scored
from lachesis_train.trainer.settings import TrainingSettings
from tests.support.trained_groups import group_body
from tests.train.test_trainer_datums import body, rollout

ANSWERS = ["yes", "no", "it depends", "maybe"]
SCORES = [1.0, 0.0, 0.5, 0.0]


def drawn(seed: int) -> tuple[PreparedBatch, list[np.ndarray]]:
    """A batch, and logprobs of the engine for all of its targets."""
    random = np.random.default_rng(seed)
    batch = prepare([group_body("g", "why", ANSWERS, SCORES)], TrainingSettings())
    return batch, [random.normal(-0.5, 0.4, len(each.sample.tokens) - 1) for each in batch.samples]


def log_ratios(batch: PreparedBatch, logprobs: list[np.ndarray]) -> list[list[float]]:
    found = []
    for each, values in zip(batch.samples, logprobs, strict=True):
        masked = zip(each.sample.trained, each.sample.logprobs, strict=True)
        found.append([float(values[place - 1]) - float(q) for place, q in masked])
    return found


@pytest.mark.parametrize("seed", range(5))
def test_a_sequence_has_one_weight_the_product_of_its_ratios_cut_to_the_bound(seed: int) -> None:
    """The gradient of the loss by the logprob of a token, when the engine computes the same logprobs again."""
    largest = 1.3
    batch, logprobs = drawn(seed)
    corrected, figures = correct(
        batch, [each.tolist() for each in logprobs], TrainingSettings(max_sequence_ratio=largest)
    )
    weights = []
    for of_ratios, before, after, new in zip(
        log_ratios(batch, logprobs), batch.samples, corrected.samples, logprobs, strict=True
    ):
        weight = 1.0
        for ratio in of_ratios:
            weight *= math.exp(ratio)
        weight = min(weight, largest)
        weights.append(weight)
        inputs = {name: np.asarray(values, np.float64) for name, values in after.datum().inputs.items()}
        gradient = -np.exp(new - inputs["logprobs"]) * inputs["advantages"]
        plain = np.asarray(before.datum().inputs["advantages"], np.float64)
        np.testing.assert_allclose(gradient, -weight * plain, atol=1e-6, rtol=1e-5)
        assert after.advantages is before.advantages, "records show it as it is"
    assert not corrected.left_out
    assert figures == {
        "sequence_ratio/mean": pytest.approx(sum(weights) / 4, rel=1e-9),
        "sequence_ratio/max": pytest.approx(max(weights), rel=1e-9),
        "sequence_ratio/truncated": sum(weight == largest for weight in weights) / 4,
    }
    assert len({round(weight, 9) for weight in weights}) > 1


def test_weights_that_are_next_to_0_are_no_signal() -> None:
    """The product of ratios falls with the length. Engines get float32, and make no step without gradients."""
    batch, logprobs = drawn(0)
    kept, _ = correct(batch, [each - 200.0 for each in logprobs], TrainingSettings(max_sequence_ratio=2.0))
    assert len(kept.samples) == 4 and not any(np.any(each.datum().inputs["advantages"]) for each in kept.samples)
    none = with_signal(kept)
    assert not none.samples and {reason for reason, _ in none.left_out.values()} == {NO_SIGNAL}
    assert [each.skipped for record in none.records([]) for each in record.samples] == [NO_SIGNAL] * 4
    assert with_signal(batch) is batch


@pytest.mark.parametrize("seed", range(5))
@pytest.mark.parametrize("kind", ["product", "geometric"])
@pytest.mark.parametrize("average", LossAverage)
def test_sequences_beyond_the_bounds_are_left_out_and_the_rest_weighs_the_same(
    seed: int, kind: Any, average: LossAverage
) -> None:
    _, logprobs = drawn(seed)
    batch = prepare([group_body("g", "why", ANSWERS, SCORES)], TrainingSettings(loss_average=average))
    ratios = []
    for of_ratios in log_ratios(batch, logprobs):
        product = float(np.prod(np.exp(of_ratios)))
        ratios.append(product if kind == "product" else product ** (1 / len(of_ratios)))
    low, high = sorted(ratios)[0] * 1.0001, sorted(ratios)[3] * 0.9999
    rules = TrainingSettings(reject_ratio=kind, reject_ratio_below=low, reject_ratio_above=high)
    corrected, figures = correct(batch, [each.tolist() for each in logprobs], rules)
    kept = [at for at, ratio in enumerate(ratios) if low <= ratio <= high]
    assert (len(kept), figures) == (2, {})
    assert [each.at for each in corrected.samples] == kept
    for each in corrected.samples:
        assert (
            each.datum().inputs["advantages"].tolist() == batch.samples[each.at].datum().inputs["advantages"].tolist()
        )
    assert {place for _, place in corrected.left_out} == {0, 1, 2, 3} - set(kept)
    name, detail = next(iter(corrected.left_out.values()))
    assert name == OFF_POLICY
    assert f"the {kind} ratio is " in detail
    records = corrected.records([logprobs[at].tolist() for at in kept])
    metrics = step_metrics(StepRecord(step=1, version="r:1", groups=records, loss=figures))
    assert metrics["train/skipped/off_policy"] == 2
    assert metrics["train/samples"] == 2
    assert metrics["train/reward"] == pytest.approx(0.375), "their rewards count"


def test_one_bound_alone_rejects_on_its_side_only() -> None:
    batch, _ = drawn(0)
    shifted = zip(batch.samples, (-1.0, 0.0, 0.0, 1.0), strict=True)
    logprobs = [[-0.5 + shift] * (len(each.sample.tokens) - 1) for each, shift in shifted]
    for rules, gone in ((TrainingSettings(reject_ratio_below=0.9), 0), (TrainingSettings(reject_ratio_above=1.1), 3)):
        assert rules.needs_ratios
        assert [place for _, place in correct(batch, logprobs, rules)[0].left_out] == [gone]
    assert not TrainingSettings().needs_ratios


def test_what_is_scored_first_needs_no_loss_of_the_service() -> None:
    batch, _ = drawn(0)
    for each, datum in zip(batch.samples, scored(batch), strict=True):
        assert list(datum.targets) == list(each.sample.tokens[1:])
        assert set(datum.inputs) == {"weights"}


def test_a_rollout_that_a_limit_cut_off_stays_in_the_baseline_only() -> None:
    cut = rollout("a", 1.0, split=True, outcome="context_exhausted")
    given = body([cut, rollout("b", 0.0, outcome="completed"), rollout("c", 0.5, outcome="max_turns")])
    batch, plain = (prepare([given], TrainingSettings(mask_truncated_completions=masked)) for masked in (True, False))
    assert {each.sample.rollout for each in batch.samples} == {"b", "c"}
    assert {name for name, _ in batch.left_out.values()} == {TRUNCATED}
    wanted = {(each.sample.rollout, each.at): each.datum().inputs["advantages"].tolist() for each in plain.samples}
    for each in batch.samples:
        assert each.datum().inputs["advantages"].tolist() == wanted[each.sample.rollout, each.at]


def test_a_group_of_trees_is_refused_where_cut_off_rollouts_are_left_out() -> None:
    """A rollout would take the turns that it shares with others along."""
    given = body([rollout("a", 1.0), rollout("b", 0.0)])
    for override in given["overrides"]:
        override["tree"] = {"path": "0", "turns": [0], "weights": [1.0], "completions": [0], "wave": 0}
    given["group_overrides"]["lachesis"] = group_digest(given)
    assert len(prepare([given], TrainingSettings()).samples) == 2
    name, detail = prepare([given], TrainingSettings(mask_truncated_completions=True)).skipped[0]
    assert name == Refusal.UNSUPPORTED and "its rollouts branch" in detail


def test_without_an_outcome_the_last_completion_says_whether_it_was_cut() -> None:
    given = body([rollout("a", 1.0), rollout("b", 0.0)])
    for override, reason in zip(given["overrides"], ("length", "stop"), strict=True):
        certificate = override["lachesis"]
        certificate["outcome"] = ""
        certificate["spans"][-1]["finish_reason"] = reason
    assert _truncated(given) == {"a"}
    assert _truncated({**given, "overrides": None}) == frozenset()


def test_a_group_whose_rollouts_were_all_cut_off_is_left_out_and_not_refused() -> None:
    rollouts = [rollout(name, reward, outcome="context_exhausted") for name, reward in (("a", 1.0), ("b", 0.0))]
    batch = prepare([body(rollouts)], TrainingSettings(mask_truncated_completions=True))
    assert not batch.samples and not batch.refused
    assert [each.skipped for record in batch.records([]) for each in record.samples] == [TRUNCATED] * 2
