"""The alarm about calls that the parser repairs: by simulation, and at its edges."""

from __future__ import annotations

import random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from lachesis.figures.intervals import mean_of_values
from lachesis.figures.repaired_calls import LEAST, MOST, NAME, RepairedCalls

SPREAD = 0.15
"""Correlation of the calls of a group."""


def looks(first: float, last: float, groups: int, *, seed: int, every: int = 4, size: int = 8) -> list[str]:
    """The alarm after each step of `every` groups, where the share of repaired calls moves from `first` to `last`."""
    chance = random.Random(seed)
    found, seen = [], RepairedCalls()
    for group in range(groups):
        share = first + (last - first) * group / (groups - 1)
        own = chance.betavariate(share * (1 / SPREAD - 1), (1 - share) * (1 / SPREAD - 1)) if 0 < share < 1 else share
        seen.add((int(chance.random() < own), 1) for _ in range(size))
        if group % every == every - 1:
            found.append(seen.alarm)
    return found


def test_a_model_that_unlearns_the_closing_tag_in_18_steps_raises_the_alarm() -> None:
    """The shares are those of a run that trained on a reward for which open calls were as good as closed ones."""
    assert sum(any(looks(0.24, 0.67, 72, seed=seed)) for seed in range(100)) >= 85


def test_a_share_that_rises_from_nothing_raises_the_alarm() -> None:
    assert sum(any(looks(0.0, 0.4, 72, seed=seed)) for seed in range(100)) >= 85


@pytest.mark.long
def test_a_share_that_stays_raises_few_alarms_however_often_one_looks() -> None:
    for share in (0.02, 0.2, 0.5, 0.95):
        assert sum(any(looks(share, share, 400, seed=seed)) for seed in range(100)) <= 12, share
        assert sum(bool(looks(share, share, 400, seed=seed)[-1]) for seed in range(100)) <= 3, share


def test_a_share_that_falls_raises_none() -> None:
    assert not any(any(looks(0.6, 0.1, 200, seed=seed)) for seed in range(50))


def test_a_few_groups_are_no_trend() -> None:
    seen = RepairedCalls()
    for repaired in (0, 0, 0, 0, 0, 0, 0, 8, 8, 8, 8):
        assert not seen.add([(repaired, 8)])
        assert not seen.alarm
    assert 3 * LEAST == 12


def test_the_alarm_is_raised_once_and_says_both_shares_with_their_intervals() -> None:
    seen, raised = RepairedCalls(), list[str]()
    for group in range(30):
        raised.append(seen.add([(8 * (group >= 15), 8)]))
    (alarm,) = filter(None, raised)
    assert alarm.startswith(f"{NAME}: from 0.0%"), "raised once"
    first = mean_of_values([0.0] * 10)
    assert seen.alarm.startswith(
        f"{NAME}: from 0.0% (95 % interval {first.low:.1%} to {first.high:.1%}) in the first 10 groups to 100.0% "
    )
    assert "result.ok_calls" in seen.alarm
    assert str(seen) == "120 of 240, 50.0%"


@given(st.lists(st.tuples(st.integers(0, 8), st.integers(0, 8)).map(sorted), max_size=200))
def test_every_call_is_counted_and_the_memory_is_bounded(groups: list[list[int]]) -> None:
    seen = RepairedCalls()
    for repaired, parsed in groups:
        seen.add([(repaired, parsed), (0, 0)])
    assert (seen.repaired, seen.parsed) == (sum(r for r, _ in groups), sum(p for _, p in groups))
    assert (seen.share is None) == (seen.parsed == 0)
    assert len(seen._first) <= MOST and len(seen._last) <= MOST
