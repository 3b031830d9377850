"""Advantages in groups of trees: the turns between two forks are credited with the value of what follows them.

The value of a part of a tree is the mean of the values of the ways in which it goes on; that of a leaf is its score.
The baseline of a part is the mean value of its siblings, the other ways from the same fork: without its own value
(leave-one-out, arXiv 2402.14740; values of turns from their continuations: arXiv 2410.01679), it does not depend on
what the part did, so the gradient is unbiased. Each part carries its weight, the number of rollouts that it stands for,
because its tokens are trained once.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Literal

from lachesis_messages.records.tree_places import TreePlace
from lachesis_tokens.samples.advantages import rollout_advantages


def part_advantages(
    places: Sequence[TreePlace], scores: Sequence[float], credit: Literal["parts", "leaves"] = "parts"
) -> list[list[float]]:
    """For each rollout the advantage of each of its parts, root to leaf; shared parts have one advantage.

    Args:
        places: of the rollouts with a score.
        scores: theirs.
        credit: "leaves" adds up the advantages of the rollouts that share a part, compared within the whole group.
    """
    paths = [place.parts for place in places]
    leaves: dict[str, list[int]] = {}
    for at, path in enumerate(paths):
        for part in path:
            leaves.setdefault(part, []).append(at)
    if credit == "leaves":
        own = [advantage or 0.0 for advantage in rollout_advantages(scores)]
        return [[math.fsum(own[at] for at in leaves[part]) for part in path] for path in paths]
    values = part_values(places, scores)
    waves = {path[0]: place.wave for path, place in zip(paths, places, strict=True)}
    ways: dict[str, list[str]] = {}
    for part in values:
        ways.setdefault(_fork(part), []).append(part)
    found = []
    for path, place in zip(paths, places, strict=True):
        advantages, baseline = [], values[path[0]]
        for part, weight in zip(path, place.weights, strict=True):
            # How many trees a wave has follows from how the waves before it went, and not from its own trees.
            others = [each for each in ways[_fork(part)] if waves.get(each, 0) <= waves.get(part, 0)]
            siblings = [values[each] for each in others if each != part]
            # Alone, as where its siblings have no score: what the part before was compared with.
            baseline = math.fsum(siblings) / len(siblings) if siblings else baseline
            equal = siblings and min(siblings) == max(siblings) == values[part]
            advantages.append(0.0 if equal else (values[part] - baseline) * weight)
        found.append(advantages)
    return found


def _fork(part: str) -> str:
    return part.rpartition(".")[0]


def part_values(places: Sequence[TreePlace], scores: Sequence[float]) -> dict[str, float]:
    """The value of each part, by its name; `places` are of the rollouts with a score."""
    own = dict(zip((place.path for place in places), scores, strict=True))
    values: dict[str, float] = {}
    following: dict[str, list[float]] = {}
    # Leaves first, so that the ways in which a part goes on are known before it.
    for part in sorted({part for place in places for part in place.parts}, key=lambda name: -name.count(".")):
        after = following.get(part)
        values[part] = own[part] if after is None else math.fsum(after) / len(after)
        following.setdefault(_fork(part), []).append(values[part])
    return values
