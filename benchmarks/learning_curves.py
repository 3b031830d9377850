"""What a demonstration of training measures, keeps in `curve.json`, and shows.

Each held-out answer is read twice: by the parser that the rewards come from, and by `benchmarks.whole_calls`, which
shares nothing with it. What a demonstration claims rests on the second.
"""

from __future__ import annotations

import itertools
import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from benchmarks.whole_calls import is_whole_call, is_whole_result, is_whole_way
from lachesis.figures.intervals import Mean, mean_over_items

FILE = "curve.json"
WIDTH, HEIGHT, LEFT, BOTTOM, TOP = 640, 320, 56, 40, 28
TRAINED, TREES, CONTROL, DISTILLED = "trained", "trees", "shuffled rewards", "distilled"
READERS = {"tool_call": is_whole_call, "tool_result": is_whole_result, "maze": is_whole_way}
"""Who decides whether an answer is right, by the name of the environment."""
COLOURS = {
    TRAINED: "#1f6feb",
    TREES: "#1a7f37",
    CONTROL: "#8b949e",
    DISTILLED: "#bf3989",
    "tool_call": "#1f6feb",
    "tool_result": "#bf3989",
}
"""By the name of a curve: that of its environment where one run has several."""


@dataclass(frozen=True)
class Answer:
    """One held-out item, as it was answered."""

    question: str
    """Of a maze the whole item, as JSON."""
    text: str
    """All sampled tokens, decoded; special ones are spelled out."""
    read: bool
    """The parser reads it as the right call, whatever it had to repair."""


@dataclass(frozen=True)
class Curve:
    """What one run did."""

    name: str
    settings: Mapping[str, Any]
    """What the run was started with; a run with others is another run."""
    rewards: Sequence[float]
    """Mean of each step's batch, with the ends of its 95 % interval."""
    lows: Sequence[float]
    highs: Sequence[float]
    before: Sequence[Answer]
    after: Sequence[Answer]
    seconds: float
    """Of all steps."""
    warm: Sequence[Answer] = ()
    """After the warm start, where there was one."""
    tokens: Sequence[int] = ()
    """Trained tokens of each step."""
    sampled: Sequence[int] = ()
    """Sampled tokens of each step. It includes groups with equal rewards, which are not trained."""

    @property
    def whole(self) -> tuple[Mean, Mean]:
        """The share of answers that are right, whole and closed: before and after."""
        before, after = map(self.rate, self._answers)
        return before, after

    def rate(self, answers: Sequence[Answer]) -> Mean:
        """The share of answers that are right."""
        reader = READERS[str(self.settings.get("env", "tool_call"))]
        return _rate([reader(answer.text, answer.question) for answer in answers])

    @property
    def read(self) -> tuple[Mean, Mean]:
        """The share of answers that the parser reads as the right call: before and after."""
        before, after = ([answer.read for answer in each] for each in self._answers)
        return _rate(before), _rate(after)

    @property
    def learned(self) -> bool:
        """Whether the rate of right answers rose: its interval is above the one before, and that of a warm start."""
        before, after = self.whole
        started = self.rate(self.warm).high if self.warm else 0.0
        return after.low > max(before.high, started)

    @property
    def _answers(self) -> tuple[Sequence[Answer], Sequence[Answer]]:
        return self.before, self.after

    def write(self, folder: Path) -> Curve:
        """Keep it in the folder of its run."""
        (folder / FILE).write_text(json.dumps(asdict(self), indent=1), encoding="utf-8")
        return self


def kept(folder: Path, settings: Mapping[str, Any]) -> Curve | None:
    """The curve of the run that finished in this folder, if it was started with these settings."""
    path = folder / FILE
    if not path.exists():
        return None
    plain = json.loads(path.read_text(encoding="utf-8"))
    if plain["settings"] != settings:
        return None
    answers = {name: [Answer(**answer) for answer in plain.get(name, ())] for name in ("before", "after", "warm")}
    return Curve(**{**plain, **answers})


def conclude(curves: Sequence[Curve], picture: Path) -> int:
    """Print the rates, draw the curves; 1 if a trained model has not learned, or a control has: after a warm start, if
    it is as good as a trained one."""
    warm = any(curve.warm for curve in curves)
    rates = ("whole answers before", *(("warm start",) if warm else ()), "after", "read by the parser before", "after")
    table = Table("run", "seed", "steps", "sampled tokens", "trained", *rates, "minutes", box=None)
    for curve in curves:
        (before, after), started = curve.whole, [curve.rate(curve.warm)] if warm else []
        found = (_shown(rate) for rate in (before, *started, after, *curve.read))
        minutes = f"{curve.seconds / 60:.1f}"
        steps, *tokens = (
            f"{each:,}" if each else "" for each in (len(curve.rewards), sum(curve.sampled), sum(curve.tokens))
        )
        table.add_row(curve.name, str(curve.settings["seed"]), steps, *tokens, *found, minutes)
    Console(width=170).print(table)
    picture.write_text(svg(curves), encoding="utf-8")
    print(f"plot: {picture}")
    controls = [curve for curve in curves if curve.name == CONTROL]
    trained = [curve for curve in curves if curve.name != CONTROL]
    if warm:
        best = max((curve.whole[1].high for curve in controls), default=0.0)
        return int(not all(curve.learned and curve.whole[1].low > best for curve in trained))
    return int(any(curve.learned == (curve.name == CONTROL) for curve in curves))


def _rate(found: Sequence[bool]) -> Mean:
    return mean_over_items([[float(each)] for each in found])


def _shown(rate: Mean) -> str:
    return f"{rate.mean:.2f} ({rate.low:.2f} to {rate.high:.2f})"


def svg(curves: Sequence[Curve]) -> str:
    """Reward by step, or by sampled tokens where all curves know them, and what was measured on held-out items."""
    counted = all(curve.sampled for curve in curves)

    def places(curve: Curve) -> list[int]:
        return [*itertools.accumulate(curve.sampled)] if counted else [*range(1, len(curve.rewards) + 1)]

    first, most = int(not counted), max(2, *(places(curve)[-1] for curve in curves))

    def x(place: float) -> float:
        return LEFT + (WIDTH - LEFT - 16) * (place - first) / (most - first)

    def y(value: float) -> float:
        return HEIGHT - BOTTOM - (HEIGHT - BOTTOM - TOP) * value

    def points(curve: Curve, values: Sequence[float], *, backwards: bool = False) -> str:
        at = [f"{x(place):.1f},{y(value):.1f}" for place, value in zip(places(curve), values, strict=True)]
        return " ".join(reversed(at) if backwards else at)

    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {HEIGHT}" font-family="sans-serif" '
        f'font-size="12"><rect width="{WIDTH}" height="{HEIGHT}" fill="white"/>'
    ]
    for value in (0.0, 0.25, 0.5, 0.75, 1.0):
        parts.append(f'<path d="M{LEFT} {y(value):.1f}H{WIDTH - 16}" stroke="#ddd"/>')
        parts.append(f'<text x="{LEFT - 8}" y="{y(value) + 4:.1f}" text-anchor="end">{value:g}</text>')
    every = max(1, most // 10)
    if counted:  # a round number of them
        every = max(1, round(every, 1 - len(str(every))))
    parts += [
        f'<text x="{x(place):.1f}" y="{HEIGHT - BOTTOM + 16}" text-anchor="middle">{place:,}</text>'
        for place in range(first, most + 1, every)
    ]
    axis = "sampled tokens" if counted else "step"
    parts.append(f'<text x="{WIDTH / 2}" y="{HEIGHT - 6}" text-anchor="middle">{axis}</text>')
    banded = len(curves) <= 2  # more bands hide each other
    interval = ", with its 95 % interval" if banded else ", a line a seed"
    parts.append(f'<text x="{LEFT}" y="16">mean reward of a step{interval}</text>')
    for curve in curves:
        colour = COLOURS[curve.name]
        band = f"{points(curve, curve.lows)} {points(curve, curve.highs, backwards=True)}"
        if banded:
            parts.append(f'<polygon points="{band}" fill="{colour}" opacity="0.18"/>')
        parts.append(
            f'<polyline points="{points(curve, curve.rewards)}" fill="none" stroke="{colour}" stroke-width="2"/>'
        )
    there = [name for name in reversed(COLOURS) if any(curve.name == name for curve in curves)]
    for row, name in enumerate(there):
        if named := [curve for curve in curves if curve.name == name]:
            before, after = (", ".join(f"{curve.whole[at].mean:.2f}" for curve in named) for at in (0, 1))
            text = f"{name}: whole answers {before} before; {after} after"
            parts.append(
                f'<text x="{WIDTH - 24}" y="{y(0.03) - 16 * row:.1f}" text-anchor="end" '
                f'fill="{COLOURS[name]}">{text}</text>'
            )
    return "\n".join([*parts, "</svg>\n"])
