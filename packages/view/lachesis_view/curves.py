"""The curves of runs, as their page draws them: figures of groups over time, and of steps of a trainer."""

from __future__ import annotations

import math
import sqlite3
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import orjson

from lachesis.figures.intervals import mean_over_items
from lachesis.loop.outcome import in_words
from lachesis.loop.rollout import DECLINED
from lachesis_messages.records.split_rollouts import LARGEST_REWARD
from lachesis_view.html import ended, visible
from lachesis_view.index import Index
from lachesis_view.metrics import SHOWN, mean
from lachesis_view.reports.training import environments

POINTS, GROUPS = 60, 10
"""Points of a curve, at most; and groups of a point, if there are enough for ten points: a mean of few says little."""
STEP_CHARTS = {
    "reward": ("train/reward", "train/reward_low", "train/reward_high"),
    "staleness, policy versions": ("train/staleness/mean",),
    "tokens of a sequence": ("train/completions/mean_length",),
    "loss": ("train/loss",),
    "entropy": ("train/entropy",),
    "KL, sampler to trainer": ("train/sampling/kl_k3",),
    "groups without a signal": ("train/frac_reward_zero_std",),
    "seconds of a step": ("train/step_time",),
    "loss on validation data": ("eval/loss",),
}
"""By title: the name of the figure, and of the ends of its interval."""
OUTCOMES, CALLS = "outcomes, share", "tool calls that succeed, share"
UNSCORED, SCORED, NOT_TRAINED = (
    f"{of}, share" for of in ("why unscored", "causes of scored rollouts", "why not trained")
)
SHARES = (OUTCOMES, CALLS, UNSCORED, SCORED, NOT_TRAINED)
OUTCOMES_OF_STEPS = "outcomes"
NAMED = (*SHARES, OUTCOMES_OF_STEPS)
"""Whose lines are outcomes and causes."""


def curves(index: Index, runs: Sequence[str], over: str) -> list[dict[str, Any]]:
    """Charts over `groups`, `time` (seconds since 1970) or `step`: a title, and lines with the run they are of, a
    label, x, y, and where there is an interval its ends; of an outcome, the `kind` that its colour is of. The y of a
    `share` is 0 to 1."""
    charts: dict[str, list[dict[str, Any]]] = {}
    names = [] if over == "step" else index.metric_names(runs)[:SHOWN]
    for run in runs:
        lines = _of_steps(index.steps(run)) if over == "step" else _of_groups(index.history(run), over, names)
        for title, line in lines:
            if title in (OUTCOMES, OUTCOMES_OF_STEPS):
                line["kind"] = ended(line["label"])
            line["label"] = visible(in_words(line["label"]) if title in NAMED else line["label"])
            charts.setdefault(visible(title), []).append({"run": run, **line})
    return [{"title": title, "over": over, "share": title in SHARES, "lines": lines} for title, lines in charts.items()]


def _of_steps(steps: Sequence[Mapping[str, Any]]) -> Iterator[tuple[str, dict[str, Any]]]:
    for title, (name, *ends) in STEP_CHARTS.items():
        if known := [step for step in steps if name in step]:
            line = {"label": "", "x": [step["step"] for step in known], "y": [_finite(step[name]) for step in known]}
            for end, key in zip(ends, ("low", "high"), strict=False):
                line[key] = [_finite(step.get(end)) for step in known]
            yield title, line
    for own in found if len(found := environments(steps)) > 1 else ():
        known = [step for step in steps if f"train/{own}/reward" in step]
        of = {key: f"train/{own}/reward{end}" for key, end in (("y", ""), ("low", "_low"), ("high", "_high"))}
        values = {key: [_finite(step.get(name)) for step in known] for key, name in of.items()}
        yield "reward by environment", {"label": own, "x": [step["step"] for step in known], **values}
    outcomes = {name for step in steps for name in step if name.startswith("train/outcome/")}
    for name in sorted(outcomes):
        known = [step for step in steps if "train/completions/mean_length" in step]
        x, y = [step["step"] for step in known], [_finite(step.get(name, 0)) for step in known]
        yield OUTCOMES_OF_STEPS, {"label": name.removeprefix("train/outcome/"), "x": x, "y": y}


def _of_groups(rows: Sequence[sqlite3.Row], over: str, metrics: Sequence[str]) -> Iterator[tuple[str, dict[str, Any]]]:
    """Means over ranges of groups that ended one after the other."""
    numbers = list(dict.fromkeys(row["number"] for row in rows))
    if not numbers:
        return
    width = max(math.ceil(len(numbers) / POINTS), min(GROUPS, len(numbers) // 10))
    bins: list[list[sqlite3.Row]] = [[] for _ in range(math.ceil(len(numbers) / width))]
    places = {number: place // width for place, number in enumerate(numbers)}
    for row in rows:
        bins[places[row["number"]]].append(row)
    if over == "time":
        x: list[float] = [each[-1]["time"] for each in bins]
    else:
        x = [min(len(numbers), (place + 1) * width) for place in range(len(bins))]
    means = [_reward(each) for each in bins]
    yield (
        "reward",
        {
            "label": "",
            "x": x,
            "y": means and [m[0] for m in means],
            "low": [m[1] for m in means],
            "high": [m[2] for m in means],
        },
    )
    for outcome, share in _shares(bins, lambda row: row["outcome"]):
        yield OUTCOMES, {"label": outcome, "x": x, "y": share}
    for (title, cause), share in _shares(bins, _cause):
        yield title, {"label": cause, "x": x, "y": share}
    yield "turns", {"label": "", "x": x, "y": [mean(row["turns"] for row in each) for each in bins]}
    if any(row["tokens"] for row in rows):
        yield "tokens sampled", {"label": "", "x": x, "y": [mean(row["tokens"] for row in each) for each in bins]}
    if any(row["calls"] and row["errors"] is not None for row in rows):
        yield CALLS, {"label": "", "x": x, "y": [_success(each) for each in bins]}
    if any(row["seconds"] is not None for row in rows):
        yield "seconds", {"label": "", "x": x, "y": [mean(row["seconds"] for row in each) for each in bins]}
    known = [[orjson.loads(row["metrics"]) for row in each if row["metrics"] is not None] for each in bins]
    for name in metrics:
        y = [mean(of_rollout.get(name) for of_rollout in each) for each in known]
        if any(value is not None for value in y):
            yield name, {"label": "", "x": x, "y": y}


def _reward(rows: Sequence[sqlite3.Row]) -> tuple[float | None, float | None, float | None]:
    items: dict[str, list[float | None]] = {}
    for row in rows:
        items.setdefault(row["item"], []).append(row["reward"])
    mean = mean_over_items(list(items.values()))
    return _finite(mean.mean), _finite(mean.low), _finite(mean.high)


def _finite(value: Any) -> float | None:
    """What a curve can show of a value: not of one that overflowed, and not of a text."""
    return value if isinstance(value, int | float) and abs(value) <= LARGEST_REWARD else None


def _shares(bins: Sequence[Sequence[sqlite3.Row]], of: Callable[[sqlite3.Row], Any]) -> list[tuple[Any, list[float]]]:
    """Of the most frequent values of the rows, None left out: their shares in each bin."""
    counts = [Counter(map(of, rows)) for rows in bins]
    known = [value for value, _ in sum(counts, Counter()).most_common(SHOWN + 1) if value is not None]
    shares = ((value, [count[value] / count.total() for count in counts]) for value in known[:SHOWN])
    return sorted(shares)


def _cause(row: sqlite3.Row) -> tuple[str, str] | None:
    """The cause of a row, after the title of what it is about."""
    about = NOT_TRAINED if row["kind"] == "trained" else UNSCORED if row["reward"] is None else SCORED
    return (about, row["cause"]) if row["cause"] not in ("", DECLINED) else None


def _success(rows: Sequence[sqlite3.Row]) -> float | None:
    known = [row for row in rows if row["errors"] is not None]
    calls = sum(row["calls"] for row in known)
    return 1 - sum(row["errors"] for row in known) / calls if calls else None
