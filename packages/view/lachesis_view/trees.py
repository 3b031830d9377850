"""The trees of a group whose rollouts branch: what each part is worth, where that falls, and the drawing."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from statistics import fmean
from typing import Any

from backends.text import counted
from lachesis_messages.records.tree_places import TreePlace
from lachesis_tokens.samples.tree_credit import part_advantages, part_values

_LANE, _FORK, _END = 22, 64, 14
"""Pixels between leaves, before a turn with a fork, and before one at which a rollout ended."""


@dataclass(slots=True)
class TreePart:
    """The turns between two forks."""

    before: str
    """The name of the part that it follows; empty for the first one of a tree."""
    rollout: int
    """The first one that has it. It sampled these turns, and trains them."""
    begin: int
    """Turns before it; the next: before what follows."""
    end: int
    weight: float
    completions: list[int]
    """Their numbers in the record of the rollout."""
    tokens: int | None
    anchor: str
    """Of its first message on the page of the rollout; empty if it has none."""
    leaves: list[int] = field(default_factory=list)
    value: float | None = None
    """None where no rollout that has it has a score; so are the next ones."""
    baseline: float | None = None
    advantage: float | None = None

    @property
    def turns(self) -> str:
        """As pages number them, from 0."""
        first, last = self.begin, self.end - 1
        return f"turn {first}" if last <= first else f"turns {first} to {last}"

    @property
    def sign(self) -> str:
        """The class of its colour."""
        return "off" if self.advantage is None else "good" if self.advantage > 0 else "bad" if self.advantage else ""

    def __str__(self) -> str:
        tokens = "" if self.tokens is None else f", {counted(self.tokens, 'token')}"
        value = "no score"
        if self.value is not None:
            value = f"value {self.value:.2f}, baseline {self.baseline:.2f}, advantage {self.advantage:+.2f}"
        return f"{self.turns} of rollout {self.rollout}{tokens}: {value}, weight {self.weight:g}"


def tree_parts(group: Mapping[str, Any]) -> dict[str, TreePart]:
    """The parts of all trees by name, each before those that follow it; empty if the rollouts do not branch."""
    rollouts = group["rollouts"]
    if not all(rollout.get("tree") for rollout in rollouts):
        return {}
    places = [TreePlace.from_record(rollout["tree"]) for rollout in rollouts]
    parts: dict[str, TreePart] = {}
    for n in sorted(range(len(places)), key=lambda n: [int(step) for step in places[n].path.split(".")]):
        place, rollout = places[n], rollouts[n]
        completions = rollout.get("completions") or {}
        tokens = completions.get("tokens")
        for at, (name, begin) in enumerate(zip(place.parts, place.turns, strict=True)):
            if name not in parts:
                end = rollout["turns"] if name == place.path else place.turns[at + 1]
                own = [
                    each for each in range(len(completions.get("finish_reasons") or ())) if place.part_of(each) == at
                ]
                sampled = None if tokens is None else sum(tokens[completion] for completion in own)
                anchor = next((f"turn-{each}" for each in own if each in rollout["message_turns"]), "")
                before = name.rpartition(".")[0]
                parts[name] = TreePart(before, n, begin, end, place.weights[at], own, sampled, anchor)
            parts[name].leaves.append(n)
    known = [n for n, rollout in enumerate(rollouts) if rollout["reward"] is not None]
    if known:
        scored, scores = [places[n] for n in known], [rollouts[n]["reward"] for n in known]
        of_leaves = group.get("tree_credit") == "leaves"
        values = part_values(scored, scores)
        found = part_advantages(scored, scores, "leaves" if of_leaves else "parts")
        for place, advantages in zip(scored, found, strict=True):
            for name, advantage in zip(place.parts, advantages, strict=True):
                part, value = parts[name], values[name]
                part.value, part.advantage = value, advantage
                part.baseline = fmean(scores) if of_leaves else value - advantage / part.weight
    return parts


def tree_drawing(group: Mapping[str, Any]) -> dict[str, Any] | None:
    """The values for the drawing, from left to right; None without a tree."""
    if not (parts := tree_parts(group)):
        return None
    following: dict[str, list[str]] = {}
    for name, part in parts.items():
        following.setdefault(part.before, []).append(name)
    leaves = [part.rollout for name, part in parts.items() if name not in following]
    lanes = {n: _LANE * (lane + 1) for lane, n in enumerate(leaves)}
    y = {name: (lanes[part.leaves[0]] + lanes[part.leaves[-1]]) / 2 for name, part in parts.items()}
    forks = sorted({part.begin for part in parts.values()})
    x, right = {0: 20}, 20
    ends = sorted({part.end for part in parts.values()} - {0})
    for turn in ends:
        right += _FORK if turn in forks or turn == ends[-1] else _END
        x[turn] = right
    known = {name: part.value for name, part in parts.items() if part.value is not None}
    drops = {name: known[parts[name].before] - value for name, value in known.items() if parts[name].before}
    most = max(drops.values(), default=0.0)
    falls = [name for name, drop in drops.items() if drop > 0 and drop >= most - 1e-9]
    lines = [
        {
            "part": part,
            "x1": x[part.begin],
            "x2": max(x[part.end], x[part.begin] + 6),
            "y": y[name],
            "stem": [y[each] for each in following.get(name, ())],
            "falls": name in falls,
        }
        for name, part in parts.items()
    ]
    left_out = [
        (n, f"turn {turn}: {why}")
        for n, rollout in enumerate(group["rollouts"])
        for turn, why in TreePlace.from_record(rollout["tree"]).not_forked
    ]
    return {
        "count": len(following[""]),
        "forked": len(following) > 1,
        "lines": lines,
        "ticks": [(x[turn], turn) for turn in forks],
        "falls": [(known[parts[name].before], parts[name]) for name in falls],
        "left_out": left_out,
        "width": right + 90,
        "height": _LANE * len(leaves) + 34,
    }
