"""The remaining time of a run, by a clock of the test."""

from __future__ import annotations

import io
import re

import pytest
from rich.console import Console

from lachesis.runs.progress import Progress, Standing
from lachesis.runs.time_left import LEAST, RECENT, TimeLeft


class Clock:
    def __init__(self) -> None:
        self.now = 1000.0

    def __call__(self) -> float:
        return self.now


def looks(durations: list[float], *, total: float, first: float = 0.0, looks_between: int = 0) -> list[float | None]:
    """The estimates after each unit of a run, the first one before any."""
    clock, at = Clock(), first
    left = TimeLeft(clock)
    found = [left.seconds(at, total)]
    for each in durations:
        for _ in range(looks_between):
            clock.now += each / (looks_between + 1)
            left.seconds(at, total)
        clock.now += each / (looks_between + 1)
        at += 1
        found.append(left.seconds(at, total))
    return found


def test_there_is_no_estimate_before_there_are_enough_units() -> None:
    found = looks([10.0] * 5, total=12)
    assert found == [None, None, None, 90.0, 80.0, 70.0]
    assert found.index(90.0) == LEAST


def test_looking_often_changes_nothing() -> None:
    assert looks([10.0] * 5, total=12, looks_between=7) == looks([10.0] * 5, total=12)


def test_a_run_that_continues_after_a_checkpoint_is_as_fast_as_its_new_steps() -> None:
    assert looks([60.0] * 3, total=100, first=50)[-1] == pytest.approx(47 * 60)


def test_one_long_wait_is_no_pace() -> None:
    """With the mean of all, an hour in which the API was down would have made it 16 times as long."""
    found = looks([10.0] * 12 + [3600.0] + [10.0] * 12, total=125)[-1]
    assert found is not None
    assert 1000 <= found < 1300


def test_units_that_are_done_at_the_same_time_do_not_make_it_fast() -> None:
    """Eight at once each minute: 7.5 s each."""
    found = looks([60.0, *[0.01] * 7] * 5, total=140)[-1]
    assert found == pytest.approx(100 * 7.5, rel=0.25)


def test_a_run_that_became_slower_is_estimated_by_its_recent_units() -> None:
    assert looks([1.0] * 100 + [30.0] * RECENT, total=220)[-1] == pytest.approx(100 * 30)


def test_while_a_unit_takes_its_time_the_estimate_falls_by_one_unit_at_most() -> None:
    clock = Clock()
    left = TimeLeft(clock)
    for done in range(6):
        left.seconds(done, 10)
        clock.now += 10
    assert left.seconds(5, 10) == 40
    clock.now += 1000
    assert left.seconds(5, 10) == 40


def test_parts_of_few_large_units_give_an_estimate_early_and_end_with_the_run() -> None:
    clock = Clock()
    left = TimeLeft(clock)
    found = []
    for rollouts in range(101):
        found.append(left.seconds(rollouts / 25, 4))
        clock.now += 1.0
    assert found[10] == pytest.approx(90, abs=1)
    assert found[2] is None
    assert found[100] is None, "there is nothing left"


@pytest.mark.parametrize("total", [-1, 0])
def test_a_run_without_an_end_has_no_estimate(total: int) -> None:
    assert set(looks([1.0] * 9, total=total)) == {None}


def test_the_line_says_it_in_words() -> None:
    clock, out = Clock(), io.StringIO()
    with Progress(Console(file=out, width=200), "run", clock) as progress:
        for step in range(5):
            progress.show(Standing(step, 20, "step", "2 waiting"), last=True)
            clock.now += 400.0
    first, *_, last = out.getvalue().splitlines()
    assert first == "run: step 0/20; 2 waiting"
    assert re.fullmatch(r"run: step 4/20; about 1 h 46 min left, 2 waiting", last)
