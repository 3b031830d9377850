"""Advantages: one a rollout, however many samples it splits into."""

from __future__ import annotations

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from lachesis_messages.tokens import TokenPrefix
from lachesis_tokens.samples.advantages import (
    LossAverage,
    rollout_advantages,
    sample_advantage,
    token_advantages,
)
from lachesis_tokens.samples.samples import samples
from tests.support.token_trees import END, UNTIMED, Tree, trees

rewards = st.lists(st.none() | st.floats(-1e6, 1e6), max_size=8)


def split_rollout() -> Tree:
    """Three samples, as a compaction and a retry make them."""
    tree = Tree()
    first = tree.sample(TokenPrefix([1, 2]), [3, 3, 3, END])
    tree.sample(first.extend([4]), [5, END])
    tree.sample(TokenPrefix([1, 6]), [7])
    tree.sample(TokenPrefix([1, 6]), [7])
    return tree


def test_the_baseline_is_that_of_the_rollouts_however_the_first_one_splits() -> None:
    assert len(samples(split_rollout())) == 3
    assert rollout_advantages([1, 1, 1, 0]) == [0.25, 0.25, 0.25, -0.75]
    assert rollout_advantages([1, 1, 1, 0], normalise=True) == pytest.approx([3**-0.5, 3**-0.5, 3**-0.5, -(3**0.5)])


def test_a_rollout_without_a_reward_is_in_no_baseline() -> None:
    assert rollout_advantages([1, None, 0]) == [0.5, None, -0.5]
    assert rollout_advantages([None, None]) == [None, None]
    assert rollout_advantages([]) == []


@UNTIMED
@given(rewards, st.booleans())
def test_advantages_keep_the_order_of_the_rewards_and_add_up_to_nothing(
    rewards: list[float | None], normalise: bool
) -> None:
    found = rollout_advantages(rewards, normalise=normalise)
    assert [value is None for value in found] == [reward is None for reward in rewards]
    scored = [(reward, value) for reward, value in zip(rewards, found, strict=True) if reward is not None]
    values = [value for _, value in scored if value is not None]
    assert all(map(math.isfinite, values))
    assert math.fsum(values) == pytest.approx(0, abs=1e-6)
    assert [value for _, value in sorted(scored)] == sorted(values)
    if len({reward for reward, _ in scored}) == 1:
        assert set(values) == {0.0}


@UNTIMED
@given(st.floats(-1e6, 1e6), st.integers(1, 8))
def test_equal_rewards_give_exactly_nothing(reward: float, count: int) -> None:
    assert rollout_advantages([reward] * count, normalise=True) == [0.0] * count


@pytest.mark.parametrize("reward", [math.nan, math.inf, -math.inf, 1e300])
def test_a_reward_that_is_no_number_is_named(reward: float) -> None:
    with pytest.raises(ValueError, match="reward 1 is"):
        rollout_advantages([0.0, reward])


@UNTIMED
@given(trees(), st.floats(-2, 2))
def test_a_rollout_counts_once_however_the_trainer_averages(tree: Tree, advantage: float) -> None:
    found = samples(tree)
    for average in LossAverage:
        total = 0.0
        for sample in found:
            tokens = token_advantages(sample, sample_advantage(sample, advantage, average))
            assert len(tokens) == len(sample.tokens)
            assert all(value == 0 for value, mask in zip(tokens, sample.masks, strict=True) if mask == -100)
            summed = math.fsum(tokens)
            total += summed / sample.trained if average is LossAverage.SAMPLE else summed / sample.sampled
        assert not found or total == pytest.approx(advantage, abs=1e-9)
