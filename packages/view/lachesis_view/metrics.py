"""Components of rewards and metrics of environments: under which names pages show them, and which come first."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping
from typing import Any

from lachesis.figures.intervals import mean_of

SHOWN = 12
"""Names that have a curve, or a line in a group."""
_COMPONENT = "reward/"


def metric_name(name: str) -> str:
    """A component is recorded with `reward/` before its name. A metric gets `metric/`: it may have any other name.

    Pages show it without."""
    return name if name.startswith(_COMPONENT) else f"metric/{name}"


def most_frequent(counts: Mapping[str, int]) -> list[str]:
    """The names, most frequent first; of those that are equally frequent, components first."""
    return sorted(counts, key=lambda name: (-counts[name], not name.startswith(_COMPONENT), name))


def mean(values: Iterable[float | None]) -> float | None:
    """Of those that are known; None where none is."""
    known = [value for value in values if value is not None]
    return mean_of(known) if known else None


def of_siblings(rollouts: Iterable[Mapping[str, Any]]) -> list[tuple[str, list[Any]]]:
    """The names that most rollouts have, and for each rollout the value, None where it has none."""
    found = [{metric_name(name): value for name, value in (each.get("metrics") or {}).items()} for each in rollouts]
    names = most_frequent(Counter(name for each in found for name in each))[:SHOWN]
    return [(name, [each.get(name) for each in found]) for name in names]
