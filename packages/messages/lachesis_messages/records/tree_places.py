"""Where the rollouts of a group that branch are in their trees."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True, slots=True)
class TreePlace:
    """Where a rollout is in the trees of its group: the parts between forks from the root to its end."""

    path: str
    """The number of the tree in the group, then which way was taken at each fork: "0.1.0". Rollouts whose paths begin
    alike share these parts."""
    turns: tuple[int, ...]
    """For each part, the turns before it: 0 first."""
    weights: tuple[float, ...]
    """For each part, how many rollouts it stands for: those that its tree was given, divided at each fork."""
    wave: int
    """0; later for a tree that was begun because others had ended early."""
    completions: tuple[int, ...] = (0,)
    """For each part, the completions of this rollout before it: 0 for what another rollout sampled."""
    not_forked: tuple[tuple[int, str], ...] = ()
    """Turns (from 0) before which it should have forked, and why it could not."""

    def child(self, at: int, width: int, turn: int, completions: int) -> TreePlace:
        """The place of one of the branches of a fork before a turn (from 0). The first one goes on with its
        `completions` so far."""
        weights = (*self.weights, self.weights[-1] / width)
        before = (0,) * len(weights) if at else (*self.completions, completions)
        return TreePlace(f"{self.path}.{at}", (*self.turns, turn), weights, self.wave, before)

    @property
    def parts(self) -> list[str]:
        """The names of its parts, root first: beginnings of its path."""
        steps = self.path.split(".")
        return [".".join(steps[: at + 1]) for at in range(len(steps))]

    @property
    def ways(self) -> tuple[int, ...]:
        """The number of its tree, then which way it took at each fork."""
        return tuple(map(int, self.path.split(".")))

    @property
    def first_own(self) -> int:
        """The number of its first own part; another rollout has those before the fork where it branched off."""
        return max((at for at, way in enumerate(self.ways) if at and way), default=0)

    def part_of(self, completion: int) -> int:
        """Which part a completion is in, by its number among those of the rollout (from 0). It need not be a turn: it
        may be a summary, a sub-agent's, or one that could not be used."""
        return sum(before <= completion for before in self.completions) - 1

    def to_record(self) -> dict[str, Any]:
        """Plain JSON, without what is empty."""
        record = {"path": self.path, "turns": [*self.turns], "weights": [*self.weights], "wave": self.wave}
        record |= {"completions": [*self.completions]}
        return record | ({"not_forked": [*map(list, self.not_forked)]} if self.not_forked else {})

    @classmethod
    def from_record(cls, record: Mapping[str, Any]) -> TreePlace:
        """Raises what a record raises that is none: LookupError, TypeError or ValueError."""
        path, turns, weights = str(record["path"]), tuple(map(int, record["turns"])), tuple(record["weights"])
        completions = tuple(map(int, record["completions"]))
        if not len(turns) == len(weights) == len(completions) == path.count(".") + 1:
            raise ValueError(f"the place {path} in a tree has {len(turns)} turns and {len(weights)} weights")
        return cls(
            path,
            turns,
            weights,
            int(record["wave"]),
            completions,
            tuple((int(turn), str(why)) for turn, why in record.get("not_forked", ())),
        )
