"""How often the intervals of `mean_over_items` hold the mean of all possible items, by simulation.

    python -m benchmarks.interval_coverage [--seeds 2000] [--items 5 10 20 50 200]

Each row is a distribution from which the items of evaluations are drawn. Each figure is the share of their intervals,
in per cent, that hold its mean; after the stroke is half of their mean width. Fails where fewer than 93 % do. Above
97 % they are wider than need be: with few items, that is the price of the rows in which many evaluations see one score.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import numpy

from lachesis.figures.intervals import mean_over_items

Draw = Callable[[Any, int], Any]
"""Scores of so many items, as an array [item, sample]."""


def shares(draw: Draw, samples: int) -> Draw:
    """Passes and failures at the chances that are drawn."""
    return lambda random, items: (random.random((items, samples)) < draw(random, items)[:, None]) * 1.0


def graded(draw: Draw) -> Draw:
    return lambda random, items: draw(random, items)[:, None]


def mixed(share: float, usual: float, rare: Draw) -> Draw:
    """A value, and at a share of the items others."""
    return lambda random, items: numpy.where(random.random(items) < share, rare(random, items), usual)


def always(value: float) -> Draw:
    return lambda random, items: numpy.full(items, value)


def beta(a: float, b: float) -> Draw:
    return lambda random, items: random.beta(a, b, items)


def distributions() -> Iterator[tuple[str, Draw, float]]:
    """The name, the draw and the mean of each."""
    for samples in (1, 4, 16):
        for chance in (0.03, 0.1, 0.3, 0.5, 0.95):
            yield f"chance {chance}, samples: {samples}", shares(always(chance), samples), chance
        for a, b in ((0.5, 0.5), (3.0, 3.0), (9.0, 1.0), (1.96, 0.04)):
            yield f"chances beta({a:g}, {b:g}), samples: {samples}", shares(beta(a, b), samples), a / (a + b)
        yield f"1 in 5 items never, others 0.95, samples: {samples}", shares(mixed(0.2, 0.95, always(0)), samples), 0.76
    for a, b in ((1.0, 1.0), (0.5, 0.5), (2.0, 2.0), (20.0, 20.0), (1.0, 8.0), (5.0, 1.0)):
        yield f"graded, beta({a:g}, {b:g})", graded(beta(a, b)), a / (a + b)
    for share in (0.02, 0.05, 0.1, 0.2):
        mean = 0.001 * (1 - share)
        yield f"graded, 0.001, 1 at {share:.0%}", graded(mixed(share, 0.001, always(1))), mean + share
        yield f"graded, 0.001, 0 to 1 at {share:.0%}", graded(mixed(share, 0.001, beta(1, 1))), mean + share / 2
    yield "graded, 0.9, 0 at 10%", graded(mixed(0.1, 0.9, always(0))), 0.81
    levels = numpy.array([0.0, 0.5, 1.0])
    yield "graded, 0, 0.5 or 1", graded(lambda random, items: random.choice(levels, items, p=[0.3, 0.4, 0.3])), 0.5
    yield "all 0", graded(always(0)), 0.0
    yield "all 0.4", graded(always(0.4)), 0.4
    yield "all 1", graded(always(1)), 1.0
    yield "-1 or 1, 30 % are 1", graded(mixed(0.3, -1, always(1))), -0.4
    yield "-1 to 1", graded(lambda random, items: random.uniform(-1, 1, items)), 0.0
    yield "normal, 0.3 and 0.4", graded(lambda random, items: random.normal(0.3, 0.4, items)), 0.3
    yield "whole numbers 0 to 10", graded(lambda random, items: random.integers(0, 11, items) * 1.0), 5.0
    yield "exponential, 5", graded(lambda random, items: random.exponential(5, items)), 5.0


def coverage(draw: Draw, truth: float, items: int, seeds: int) -> tuple[float, float]:
    """The share of intervals that hold the truth, and half of their mean width."""
    random = numpy.random.default_rng(items)
    found = [mean_over_items(draw(random, items).tolist()) for _ in range(seeds)]
    inside = sum(mean.low - 1e-9 <= truth <= mean.high + 1e-9 for mean in found) / seeds
    return inside, sum(mean.high - mean.low for mean in found) / seeds / 2


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--seeds", type=int, default=2000)
    parser.add_argument("--items", type=int, nargs="+", default=[5, 10, 20, 50, 200])
    options = parser.parse_args(argv)
    heads = "".join(f"{f'{items} items':>15}" for items in options.items)
    print(f"{'% that hold the mean | half width':50}{heads}")
    short = []
    for name, draw, truth in distributions():
        cells = [coverage(draw, truth, items, options.seeds) for items in options.items]
        print(f"{name:50}" + "".join(f"{100 * inside:8.1f} |{width:5.2f}" for inside, width in cells), flush=True)
        # With 5 items of an unbounded distribution nothing holds: the next one may be anything.
        short += [name for inside, _ in cells if inside < 0.93 and "exponential" not in name]
    print(f"below 93 %: {', '.join(short) or 'none'}")
    return 1 if short else 0


if __name__ == "__main__":
    sys.exit(main())
