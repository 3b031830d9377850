"""Samples as prime-rl's `TrainingSample`: the wire, the weights, and every sampled token once."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import msgspec
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from lachesis_messages.tokens import TokenPrefix
from lachesis_tokens.samples.advantages import LossAverage
from lachesis_tokens.samples.samples import TokenSample, samples
from lachesis_train.trainers.prime import encoded, training_samples
from tests.support.token_trees import SAMPLING, UNTIMED, Tree, trees


class TrainingSample(msgspec.Struct, array_like=True, gc=False, omit_defaults=True):
    """The order of prime-rl's fields."""

    token_ids: list[int]
    mask: list[bool]
    logprobs: list[float]
    temperatures: list[float]
    env_name: str
    ref_logprobs: list[float] | None = None
    mm_kwargs: Any = None
    routed_experts: Any = None
    mm_token_type_ids: list[int] | None = None
    rl_weights: list[float] | None = None
    ce_weights: list[float] | None = None
    ref_kl_weights: list[float] | None = None
    advantages: list[float] | None = None


GOLDEN = (
    "919d940102040994c2c2c3c394cb0000000000000000cb0000000000000000cbbfd0000000000000cbbfe000000000000094cb3f"
    "f0000000000000cb3ff0000000000000cb3ff0000000000000cb3ff0000000000000a7736f7274696e67c0c0c0c094cb00000000"
    "00000000cb0000000000000000cb3ff0000000000000cb3ff0000000000000c0c094cb0000000000000000cb0000000000000000"
    "cbbfe0000000000000cbbfe0000000000000"
)


def two_turns(rollout: str = "a") -> list[TokenSample]:
    tree = Tree()
    after = tree.sample(TokenPrefix([1, 2]), [4, 9])
    tree.sample(after.extend([5]), [6, 7, 9], sampling={**SAMPLING, "temperature": 0.5, "logprobs": "processed"})
    return samples(tree, rollout_id=rollout, outcome="completed")


def test_the_bytes_are_those_of_msgspec_in_the_order_of_the_fields() -> None:
    tree = Tree()
    tree.sample(TokenPrefix([1, 2]), [4, 9])
    (sample,) = samples(tree, rollout_id="a", outcome="completed")
    (row,) = training_samples([(sample, -0.5)], "sorting")
    assert encoded([row]) == msgspec.msgpack.encode([TrainingSample(**row)])
    assert encoded([row]).hex() == GOLDEN
    (read,) = msgspec.msgpack.decode(encoded([row]), type=list[TrainingSample])
    assert read == TrainingSample(**row)
    plain = training_samples([(sample, -0.5)], "sorting", LossAverage.TOKEN)
    assert msgspec.msgpack.decode(encoded(plain), type=list[TrainingSample])[0].rl_weights is None


def test_tokens_between_turns_are_context_and_turns_have_their_temperature() -> None:
    (row,) = training_samples([(two_turns()[0], 2.0)], "x")
    assert row["token_ids"] == [1, 2, 4, 9, 5, 6, 7, 9]
    assert row["mask"] == [False, False, True, True, False, True, True, True]
    assert row["logprobs"] == [0, 0, -0.25, -0.5, 0, -0.25, -0.5, -0.75]
    assert row["temperatures"] == [1, 1, 1, 1, 1, 0.5, 0.5, 0.5]
    assert row["advantages"] == [0, 0, 2, 2, 0, 2, 2, 2]


@UNTIMED
@given(drawn=st.lists(trees(), min_size=1, max_size=4))
def test_a_rollout_counts_once_and_every_sampled_token_is_delivered_once(drawn: list[Tree]) -> None:
    """The mean over all trained tokens, with the weights, is the mean over rollouts of the mean over their tokens."""
    rollouts = [samples(tree, rollout_id=str(at), outcome="completed") for at, tree in enumerate(drawn)]
    step = [(sample, float(at)) for at, found in enumerate(rollouts) for sample in found]
    rows = training_samples(step, "x")
    kept = [sample for sample, _ in step if not sample.discarded]
    assert [row["token_ids"] for row in rows] == [sample.tokens for sample in kept]
    delivered = sum(sum(row["mask"]) for row in rows)
    sampled = sum(found[0].sampled for found in rollouts if found)
    assert delivered == sampled - sum(sample.trained for sample, _ in step if sample.discarded)
    losses = [np.linspace(-1.0, 2.0, len(sample.tokens)) ** 3 for sample in kept]
    if not delivered:
        return
    mine = sum(float(np.dot(row["rl_weights"], loss)) for row, loss in zip(rows, losses, strict=True)) / delivered
    by_rollout: dict[str, list[float]] = {}
    for sample, loss, row in zip(kept, losses, rows, strict=True):
        by_rollout.setdefault(sample.rollout_id, []).extend(loss[np.array(row["mask"], dtype=bool)])
    means = [np.mean(np.array(each, dtype=np.float64)) for each in by_rollout.values()]
    assert mine == pytest.approx(float(np.mean(means)), abs=1e-9)


def test_a_discarded_attempt_is_not_delivered_and_has_no_share() -> None:
    attempt, plain = Tree(), Tree()
    attempt.sample(TokenPrefix([1, 2]), [4, 4, 4, 9])
    attempt.replaced = list(attempt.recorded)
    attempt.sample(TokenPrefix([1, 2]), [7, 9])
    plain.sample(TokenPrefix([1, 2]), [5, 5, 5, 9])
    step = [(sample, 1.0) for at, tree in enumerate((attempt, plain)) for sample in samples(tree, rollout_id=str(at))]
    assert [sample.discarded for sample, _ in step] == [False, True, False]
    kept, other = training_samples(step, "x")
    assert (kept["token_ids"], kept["rl_weights"]) == ([1, 2, 7, 9], [0, 0, 1.5, 1.5])
    assert other["rl_weights"] == [0, 0, 0.75, 0.75, 0.75, 0.75]


def test_a_sample_that_may_not_be_trained_is_refused_by_name() -> None:
    (sample,) = two_turns("r1")
    changed = replace(sample, tokens=[*sample.tokens[:-1], 8])
    with pytest.raises(ValueError, match="sample 0 of rollout r1"):
        training_samples([(changed, 1.0)], "x")
    replayed: Any = replace(sample, sampling_mask=object())  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="it has sampling_mask, which are not written"):
        training_samples([(replayed, 1.0)], "x")
