"""Rollouts without a score: the rate of each kind, and an alarm only where they are a biased selection."""

from __future__ import annotations

import io
import itertools
import random
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from statistics import NormalDist
from typing import Any

import numpy
import pytest
from rich.console import Console

from backends import SandboxLost
from lachesis.figures.exclusion import (
    QUANTITIES,
    Exclusion,
    Exclusions,
    SeenRollout,
    of_record,
)
from lachesis.figures.independence import _item_test, _quantity_test
from lachesis.figures.rollout_records import counted_record, rollout_record
from lachesis.figures.summary import evaluation_metrics
from lachesis.loop.outcome import Outcome
from lachesis.loop.rollout import PlayedGroup, Rollout
from lachesis.runs.group_records import group_record
from lachesis.runs.results import print_result
from lachesis_client import RequestRejected, ServerUnavailable
from lachesis_train.serve_result import ServeResult
from lachesis_train.signal_rates import SignalRates
from lachesis_view.reports.run import render_report
from lachesis_view.wandb_tracking import Tracker
from tests.support import report_pages
from tests.support.small_envs import Fussy, fussed, lines, process

Quantities = tuple[float, ...]
Ends = Callable[[random.Random, float, Quantities], tuple[str, Quantities]]
"""How a rollout ends: its kind and what it did, of the difficulty of its item and what an honest agent would do."""


def played(seed: int, end: Ends, *, items: int = 60, size: int = 8) -> Exclusion:
    """A run in which harder items take more of everything."""
    chance = random.Random(seed)
    seen = Exclusions()
    for item in range(items):
        difficulty = chance.random()
        group = []
        for _ in range(size):
            turns = 1 + int(chance.expovariate(1 / (2 + 8 * difficulty)))
            honest = (turns, turns - 1, int(turns * chance.lognormvariate(4, 1)), turns * chance.expovariate(1))
            kind, did = end(chance, difficulty, honest)
            group.append(SeenRollout(kind, "", did))
        seen.add(f"{item:x}-1", group)
    return seen.result()


def at_random(share: float) -> Ends:
    return lambda chance, _, honest: ("infra_error" if chance.random() < share else "", honest)


def sleeps(chance: random.Random, _: float, honest: Quantities) -> tuple[str, Quantities]:
    return ("timeout", (1, 1, 40, chance.uniform(100, 101))) if chance.random() < 0.1 else ("", honest)


def breaks_its_place_where_it_is_hard(
    chance: random.Random, difficulty: float, honest: Quantities
) -> tuple[str, Quantities]:
    return ("environment" if chance.random() < 0.9 * (difficulty > 0.8) else "", honest)


def fills_memory_when_it_is_losing(
    chance: random.Random, difficulty: float, honest: Quantities
) -> tuple[str, Quantities]:
    return ("infra_error" if honest[0] > 8 and chance.random() < 0.6 else "", honest)


LAYOUTS = [(60, 8, 0.05), (60, 8, 0.4), (12, 16, 0.15), (150, 2, 0.9), (300, 1, 0.1)]


@pytest.mark.sample(2)
@pytest.mark.parametrize(("items", "size", "share"), LAYOUTS)
def test_without_a_dependence_the_alarm_is_rare(items: int, size: int, share: float) -> None:
    runs = [played(seed, at_random(share), items=items, size=size) for seed in range(200)]
    assert all(run.tests for run in runs)
    assert sum(bool(run.alarm) for run in runs) <= 0.05 * len(runs)
    # The p mean what they say, above the alarm's bound too: 5 % and three standard deviations.
    assert sum(any(test.adjusted < 0.05 for test in run.tests) for run in runs) <= 0.097 * len(runs)
    for name in ("item", *QUANTITIES):
        found = [test.p for run in runs for test in run.tests if test.of == name]
        assert sum(p < 0.05 for p in found) <= 0.05 * len(found) + 3 * (0.0475 * len(found)) ** 0.5, name


@pytest.mark.parametrize("end", [sleeps, breaks_its_place_where_it_is_hard, fills_memory_when_it_is_losing])
def test_agents_that_dodge_raise_the_alarm(end: Ends) -> None:
    runs = [played(seed, end) for seed in range(50)]
    assert sum(bool(run.alarm) for run in runs) >= 49


def test_the_alarm_names_what_the_selection_depends_on() -> None:
    by_item = played(1, breaks_its_place_where_it_is_hard)
    assert [test.of for test in by_item.tests if test.alarms] == ["item"]
    assert by_item.alarm.startswith("being left out depends on the item (p = 0.0025, correlation 0.")
    by_time = played(1, sleeps)
    (seconds,) = [test for test in by_time.tests if test.of == "seconds"]
    assert seconds.alarms and seconds.effect > 0.9
    assert "seconds (p = " in by_time.alarm and "higher in 100 % of pairs" in by_time.alarm


def test_dodging_is_seen_where_every_item_is_played_once() -> None:
    assert all(played(seed, sleeps, items=300, size=1).alarm for seed in range(20))


def test_a_few_lost_rollouts_are_no_alarm_however_uneven() -> None:
    seen = Exclusions()
    for item in range(100):
        lost = 3 if item == 0 else 0
        seen.add(f"{item}-1", [SeenRollout("infra_error" if at < lost else "", "", (9, 9, 9, 9)) for at in range(8)])
    assert (seen.result().alarm, list(seen.result().tests)) == ("", [])
    for item in range(100, 200):
        lost = 8 if item == 100 else 0
        seen.add(f"{item}-1", [SeenRollout("infra_error" if at < lost else "", "", (9, 9, 9, 9)) for at in range(8)])
    result = seen.result()
    assert any(test.alarms for test in result.tests), "significant"
    assert result.alarm == "", "but too few to move a mean"


def test_an_outage_of_the_model_server_is_no_alarm() -> None:
    """It takes groups as a whole and cuts rollouts short: neither is the item's or the model's doing."""
    seen = Exclusions()
    chance = random.Random(5)
    for item in range(100):
        down = 40 <= item < 50
        group = []
        for _ in range(8):
            turns = 1 + int(chance.expovariate(0.2))
            lost = down and chance.random() < 0.8
            group.append(
                SeenRollout("model_server" if lost else "", "", (1 if lost else turns, 0, turns * 50, turns * 2.0))
            )
        seen.add(f"{item}-1", group)
    result = seen.result()
    assert result.unscored["model_server"] > 50, "it is shown"
    assert result.alarm == "" and result.tested[0] == 0


def test_the_item_test_gives_the_p_of_all_choices() -> None:
    of_item = numpy.repeat(numpy.arange(4), (2, 2, 3, 3))
    for marked in ((0, 1, 2), (0, 2, 4, 7), (4, 5, 6, 7, 8, 9, 0)):
        flags = numpy.zeros(10, dtype=numpy.int64)
        flags[list(marked)] = 1

        def uneven(chosen: tuple[int, ...]) -> float:
            counts = numpy.bincount(of_item[list(chosen)], minlength=4)
            return float(((counts - 0.1 * len(chosen) * numpy.bincount(of_item)) ** 2 / numpy.bincount(of_item)).sum())

        everything = [uneven(chosen) for chosen in itertools.combinations(range(10), len(marked))]
        exact = sum(each >= uneven(marked) - 1e-9 for each in everything) / len(everything)
        found = _item_test(of_item, flags)
        assert found is not None
        # Twenty choices as uneven as the real one are known to about 22 %.
        assert found[0] == pytest.approx(exact, rel=0.7), marked


def test_the_rank_test_gives_the_moments_of_all_choices_within_items() -> None:
    """With ties, and items of different sizes: the statistic's variance over every permutation within the items."""
    values = [[1, 1, 2, 5, 5, 5], [3, 3, 4, 4], [0, 7, 7, 7, 9, 9, 9, 9, 2, 1, 1, 1]]
    out = [[0, 3, 4], [1, 3], [1, 2, 5, 6]]
    strata = numpy.array([at for at, row in enumerate(values) for _ in row])
    flags = numpy.array([place in out[at] for at, row in enumerate(values) for place in range(len(row))])
    found = _quantity_test(strata, flags, numpy.array([float(v) for row in values for v in row]))
    assert found is not None
    distance = variance = 0.0
    for row, places in zip(values, out, strict=True):
        ranks = [sum(v < w for v in row) + (sum(v == w for v in row) + 1) / 2 for w in row]
        sums = numpy.array([sum(chosen) for chosen in itertools.combinations(ranks, len(places))])
        weight = 1 / (len(row) + 1)
        distance += weight * (sum(ranks[at] for at in places) - float(sums.mean()))
        variance += weight**2 * float(sums.var())
    assert found[0] == pytest.approx(2 * NormalDist().cdf(-abs(distance) / variance**0.5))
    pairs = [
        (row[a] > row[b]) + (row[a] == row[b]) / 2
        for row, places in zip(values, out, strict=True)
        for a in places
        for b in set(range(len(row))) - set(places)
    ]
    assert found[1] == pytest.approx(sum(pairs) / len(pairs))


def test_the_same_rollouts_give_the_same_p_in_any_order() -> None:
    chance = random.Random(3)
    groups = [
        (f"{item:x}-1", [SeenRollout("declined" if chance.random() < 0.2 else "", "", (1, 2, 3, 4))] * 2)
        for item in range(50)
    ]
    results = []
    for _ in range(3):
        chance.shuffle(groups)
        seen = Exclusions()
        for key, group in groups:
            seen.add(key, group)
        results.append(seen.result())
    assert results[0].tests and results[0] == results[1] == results[2]


def test_looking_again_and_again_raises_few_false_alarms_and_keeps_a_bounded_window() -> None:
    alarms = 0
    for seed in range(30):
        chance = random.Random(seed)
        seen = Exclusions(window=1000)
        looks: list[Exclusion] = []
        for item in range(300):
            group = [
                SeenRollout("timeout" if chance.random() < 0.08 else "", "", (chance.random(), 1, chance.random(), 2))
                for _ in range(8)
            ]
            seen.add(f"{item:x}-1", group)
            if not looks or looks[-1] is not seen.latest():
                looks.append(seen.latest())
        alarms += any(look.alarm for look in looks)
        assert 5 < len(looks) < 20
        assert seen.result().rollouts == 2400 and seen.result().tested[1] <= 1500
    assert alarms <= 2


def rollout(reward: float | None = None, **fields: Any) -> Rollout:
    return replace(Rollout("r", "key-1", 0, Outcome.COMPLETED, "why", reward, result=None), **fields)


@pytest.mark.parametrize(
    ("ended", "kind"),
    [
        (rollout(0.0), ""),
        (rollout(), "declined"),
        (rollout(left_out="refused"), "dropped"),
        (rollout(traceback="Traceback: KeyError"), "environment"),
        (rollout(agent_fault="read-only workspace", traceback="Traceback"), "agent_fault"),
        (rollout(outcome=Outcome.TIMEOUT), "timeout"),
        (rollout(outcome=Outcome.INFRA_ERROR, error=SandboxLost("gone")), "infra_error"),
        (rollout(outcome=Outcome.INFRA_ERROR, error=ServerUnavailable("s", "down", "wait")), "model_server"),
        (rollout(outcome=Outcome.INFRA_ERROR, error=RequestRejected("s", "no", "fix")), "infra_error"),
        (Rollout.broken("key-1", 0, KeyError("x")), "environment"),
    ],
)
def test_one_word_says_why_a_rollout_has_no_score_also_in_its_record(ended: Rollout, kind: str) -> None:
    assert ended.unscored_kind == kind
    record = rollout_record(ended, None)
    assert record["unscored_kind"] == kind
    (counted,) = counted_record(ended.item_key, [ended])["rollouts"]
    assert of_record(record) == of_record(counted)
    del record["unscored_kind"]  # as earlier versions wrote it
    earlier = {"model_server": "infra_error", "dropped": "declined", "agent_fault": "environment"}.get(kind, kind)
    assert of_record(record).kind == earlier


def test_scores_that_a_rule_gave_are_scores_and_are_shown_apart() -> None:
    groups = [
        [rollout(1.0), rollout(0.0, agent_fault="a full disk"), rollout(0.0, outcome=Outcome.TIMEOUT), rollout()],
        [rollout(1.0)] * 4,
    ]
    records = [
        group_record(PlayedGroup("i", f"k{at}-1", [], group), environment="e", model="m")
        for at, group in enumerate(groups)
    ]
    page, summary = render_report("t", records)
    assert summary.scored == 7 and summary.rollouts == 8
    exclusion = summary.exclusion
    assert exclusion.by_rule == {"agent_fault": 1, "timeout": 1} and exclusion.unscored == {"declined": 1}
    assert [(item.key, item.share) for item in exclusion.items] == [("k0", 0.25)]
    metrics = evaluation_metrics(summary)
    assert metrics["eval/scored_by_rule/timeout"] == metrics["eval/unscored/declined"] == 0.125
    assert "Scored by rule" in page
    shown = report_pages.rollouts(page)
    assert "agent fault: a full disk" in shown[1] and "no reward" in shown[3]


async def test_a_run_ends_with_the_alarm_in_its_table_and_its_report(tmp_path: Path) -> None:
    result = await process(Fussy, tmp_path, fussed, total_steps=10, group_size=8, enabled_toolsets=["todo"])
    alarm = result.summary.exclusion.alarm
    assert alarm.startswith("being left out depends on the item (p = 0.0005, correlation 0.")
    assert "35 of 80 rollouts" in alarm
    shown = io.StringIO()
    print_result(Console(file=shown, width=200), result)
    assert alarm in shown.getvalue()
    assert "no reward 35 (43.8 %)" in shown.getvalue() and "7 of 8 of" in shown.getvalue()
    page = result.files.report.read_text()
    assert f"<b>Alarm:</b> {alarm.replace(chr(39), '&#39;')}" in page
    assert page.count("<td>87.5 %</td>") == 10, "five items: their share, and that of the kind"
    assert render_report("t", lines(result.files.groups))[1].exclusion.alarm == alarm, "also from the file alone"


def test_the_table_of_serve_has_the_rates_and_the_alarm() -> None:
    tracker = Tracker()
    for item in range(20):
        lost = 6 if item < 5 else 0
        tracker.exclusions.add(
            f"{item}-1", [SeenRollout("environment" if at < lost else "", "", None) for at in range(8)]
        )
    numbers: dict[str, Any] = dict.fromkeys(ServeResult.__dataclass_fields__, 0)
    for group in range(20):
        tracker.repaired.add([(int(group > 10), 1)] * 4)
    numbers |= {"refused": {}, "reason": "done", "exclusion": tracker.exclusions.result(), "repaired": tracker.repaired}
    numbers |= {"signals": SignalRates(), "pools": {}}
    shown = io.StringIO()
    print_result(Console(file=shown, width=200), ServeResult(**numbers))
    assert "environment 30 (18.8 %)" in shown.getvalue()
    assert "36 of 80, 45.0%: calls repaired by the parser" in shown.getvalue()
    assert tracker.repaired.alarm in shown.getvalue()
    assert "being left out depends on the item" in shown.getvalue()
