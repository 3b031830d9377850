"""Charts as inline SVG: lines with bands, and stacked bars, over the steps of a run."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from lachesis.loop.outcome import in_words

WIDTH, HEIGHT = 520, 210
LEFT, RIGHT, TOP, BOTTOM = 52, 18, 12, 24
MAX_POINTS = 250
"""Points of a line; of more steps, each point is the mean of some."""
MAX_BARS = 80
KINDS = ("done", "cut", "broke")
"""How rollouts ended, from below: the classes of `lachesis_view.html.ended`."""

Value = float | None


@dataclass(frozen=True, slots=True)
class Line:
    """One line. `low` and `high` are a band around it. One that may lie on another is `dashed`."""

    name: str
    values: Sequence[Value]
    low: Sequence[Value] = ()
    high: Sequence[Value] = ()
    dashed: bool = field(default=False, kw_only=True)


@dataclass(frozen=True, slots=True)
class Series:
    """A line as it is drawn."""

    name: str
    colour: int
    path: str
    band: str
    points: Sequence[tuple[float, float, str]]
    """x, y, text."""
    dashed: bool = False


@dataclass(frozen=True, slots=True)
class Chart:
    """A chart as the template draws it, in a box of `width` x HEIGHT; its steps begin at `left`."""

    title: str
    note: str
    width: int
    left: float
    steps: int
    """That have a value."""
    flat: bool
    """That nothing in it changes: its figures say as much as a drawing."""
    x_ticks: Sequence[tuple[float, str]]
    y_ticks: Sequence[tuple[float, str]]
    series: Sequence[Series] = ()
    bars: Sequence[tuple[float, float, float, float, str, str]] = ()
    """x, y, width, height, class of the colour, text."""
    legend: Sequence[tuple[str, str, str]] = field(default_factory=tuple)
    """Name, class of the colour, value of the last step with its interval."""
    steps_per_point: int = 1
    narrow: Chart | None = None  # as a wide one is drawn on a phone, where its texts would be too small


def line_chart(
    title: str,
    steps: Sequence[int],
    lines: Sequence[Line],
    *,
    note: str = "",
    floor: float | None = None,
    wide: bool = False,
) -> Chart | None:
    """None where no line has a value. `floor`: the axis begins there, or below."""
    lines = [line for line in lines if any(value is not None for value in line.values)]
    if not lines:
        return None
    width = 2 * WIDTH if wide else WIDTH
    size = math.ceil(len(steps) / MAX_POINTS)
    places = [sum(steps[at : at + size]) / len(steps[at : at + size]) for at in range(0, len(steps), size)]
    drawn = [
        Line(line.name, *(_means(values, size) for values in (line.values, line.low, line.high))) for line in lines
    ]
    everything = [v for line in drawn for values in (line.values, line.low, line.high) for v in values if v is not None]
    low, high = min(everything), max(everything)
    low = low if floor is None else min(low, floor)
    ticks, low, high = _ticks(low, high)
    texts, left = _labels(ticks)
    x = _scale(places[0], places[-1], left, width - RIGHT)
    y = _scale(low, high, HEIGHT - BOTTOM, TOP)
    series, legend = [], []
    for colour, (line, original) in enumerate(zip(drawn, lines, strict=True)):
        known = [(place, value) for place, value in zip(places, line.values, strict=True) if value is not None]
        band = [
            (place, below, above)
            for place, below, above in zip(places, line.low, line.high, strict=False)
            if below is not None and above is not None
        ]
        outline = [(x(p), y(above)) for p, _, above in band] + [(x(p), y(below)) for p, below, _ in reversed(band)]
        ranges = {place: f" [{number(below)}, {number(above)}]" for place, below, above in band}
        points = [
            (round(x(p), 1), round(y(v), 1), f"step {p:g}: {line.name} {number(v)}{ranges.get(p, '')}")
            for p, v in known
        ]
        newest = next(value for value in reversed(original.values) if value is not None)
        legend.append(
            (line.name, f"f{colour % 8}", number(newest) + (ranges.get(known[-1][0], "") if size == 1 else ""))
        )
        series.append(Series(line.name, colour, _path(points), _path(outline, close=True), points, original.dashed))
    return Chart(
        title,
        note,
        width,
        left,
        len({point[0] for each in series for point in each.points}),
        all(len({*line.values} - {None}) < 2 for line in lines),
        _step_ticks(places, x),
        [(round(y(tick), 1), text) for tick, text in zip(ticks, texts, strict=True)],
        series=series,
        legend=legend,
        steps_per_point=size,
        narrow=line_chart(title, steps, lines, note=note, floor=floor) if wide else None,
    )


def bar_chart(
    title: str,
    steps: Sequence[int],
    counts: Sequence[Mapping[str, float]],
    *,
    note: str = "",
    unit: str = "",
    kind: Callable[[str], str] | None = None,
) -> Chart | None:
    """Stacked bars, `counts[i]` those of `steps[i]`; None where there are none. Of many steps, a bar is a mean. `kind`
    gives the class of the colour of a name; else each has its own."""
    names = sorted({name for each in counts for name in each}, key=lambda name: -sum(c.get(name, 0) for c in counts))
    names = sorted(names, key=lambda name: KINDS.index(kind(name))) if kind else names
    colours = [kind(name) if kind else f"f{at % 8}" for at, name in enumerate(names)]
    if not any(value for each in counts for value in each.values()):
        return None
    size = math.ceil(len(steps) / MAX_BARS)
    grouped = [(steps[at : at + size], counts[at : at + size]) for at in range(0, len(steps), size)]
    means = [{name: sum(c.get(name, 0) for c in part) / len(part) for name in names} for _, part in grouped]
    ticks, _, high = _ticks(0.0, max(sum(each.values()) for each in means))
    texts, left = _labels(ticks)
    y = _scale(0.0, high, HEIGHT - BOTTOM, TOP)
    slot = (WIDTH - left - RIGHT) / len(grouped)
    gap = min(4.0, slot * 0.2)
    bars = []
    for number_of, ((covered, _), values) in enumerate(zip(grouped, means, strict=True)):
        base = 0.0
        where = f"step {covered[0]}" if len(covered) == 1 else f"steps {covered[0]} to {covered[-1]}"
        for colour, name in zip(colours, names, strict=True):
            if value := values[name]:
                top = y(base + value)
                text = f"{where}: {in_words(name)} {number(value)}{unit}"
                at = left + number_of * slot + gap / 2
                bars.append((round(at, 1), round(top, 1), round(slot - gap, 1), round(y(base) - top, 1), colour, text))
                base += value
    middles = [sum(covered) / len(covered) for covered, _ in grouped]
    x = _scale(middles[0], middles[-1], left + slot / 2, WIDTH - RIGHT - slot / 2)
    last = counts[-1]
    return Chart(
        title,
        note,
        WIDTH,
        left,
        len(grouped),
        all(each.get(name, 0) == last.get(name, 0) for each in counts for name in names),
        _step_ticks(middles, x),
        [(round(y(tick), 1), text) for tick, text in zip(ticks, texts, strict=True)],
        bars=bars,
        legend=[
            (in_words(name), colour, f"{number(last[name])}{unit}" if name in last else "0")
            for colour, name in zip(colours, names, strict=True)
        ],
        steps_per_point=size,
    )


def number(value: float, digits: int = 3) -> str:
    """A number with about so many digits."""
    if value == 0:
        return "0"
    size = abs(value)
    if size >= 10_000_000:
        return f"{value:.{digits}g}"
    if size >= 1000:
        return f"{value:,.{digits - 3}f}"
    return f"{value:.{digits}g}" if size >= 0.001 else f"{value:.{digits - 2}e}".replace("e-0", "e-")


def _means(values: Sequence[Value], size: int) -> list[Value]:
    parts = [[v for v in values[at : at + size] if v is not None] for at in range(0, len(values), size)]
    return [sum(part) / len(part) if part else None for part in parts]


def _ticks(low: float, high: float) -> tuple[list[float], float, float]:
    """Round numbers over the range, and the range that they span."""
    if high - low <= max(abs(low), abs(high)) * 1e-9:
        margin = abs(high) * 0.1 or 1.0
        low, high = low - margin if low else 0.0, high + margin
    raw = (high - low) / 4
    magnitude = 10.0 ** math.floor(math.log10(raw))
    step = next(each * magnitude for each in (1, 2, 2.5, 5, 10) if each * magnitude >= raw * 0.999)
    first, last = math.floor(low / step + 1e-9), math.ceil(high / step - 1e-9)
    ticks = [at * step for at in range(first, last + 1)]
    return ticks, ticks[0], ticks[-1]


def _labels(ticks: Sequence[float]) -> tuple[list[str], float]:
    """Of ticks, with as many digits as their distance needs; and where the axis begins, to the right of them."""
    texts: list[str] = []
    for digits in range(3, 18):
        texts = [number(tick, digits) for tick in ticks]
        off = (abs(float(text.replace(",", "")) - tick) for text, tick in zip(texts, ticks, strict=True))
        if max(off) < (ticks[1] - ticks[0]) / 20:
            break
    return texts, max(LEFT, 10 + 8.5 * max(map(len, texts)))  # letters as a phone has them


def _step_ticks(places: Sequence[float], x: Any) -> list[tuple[float, str]]:
    low, high = places[0], places[-1]
    if high <= low:
        return [(round(x(low), 1), f"{low:g}")]
    size = max(1.0, 10.0 ** math.floor(math.log10((high - low) / 5 or 1)))
    step = next(each * size for each in (1, 2, 5, 10) if each * size >= (high - low) / 8)
    first = math.ceil(low / step)
    return [(round(x(at * step), 1), f"{at * step:g}") for at in range(first, math.floor(high / step) + 1)]


def _scale(low: float, high: float, start: float, end: float) -> Any:
    return lambda value: start + (end - start) * ((value - low) / (high - low) if high > low else 0.5)


def _path(points: Sequence[tuple[Any, ...]], *, close: bool = False) -> str:
    if not points:
        return ""
    return "M" + "L".join(f"{each[0]:.1f} {each[1]:.1f}" for each in points) + ("Z" if close else "")
