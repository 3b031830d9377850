"""Before which turns a rollout forks: what the setting `tree_at` says."""

from __future__ import annotations

import math
from typing import Any, NamedTuple


class ForkRule(NamedTuple):
    """`tree_at`, read."""

    kind: str
    """turns, tokens, surprise or tool_failures."""
    values: tuple[float, ...] = ()

    @classmethod
    def parse(cls, text: str) -> ForkRule:
        """Raises `ValueError`."""
        kind, _, given = text.partition(":")
        try:
            values = tuple(map(float, given.split(","))) if given else ()
        except ValueError:
            values = (math.nan,)
        whole = all(each % 1 == 0 for each in values)
        fitting = {
            "turns": whole and values[:1] >= (2,) and list(values) == sorted(set(values)),
            "tokens": whole and len(values) == 1 and values[0] > 0,
            "surprise": len(values) == 1 and 0 < values[0] < math.inf,
            "tool_failures": text == kind,
        }
        if not fitting.get(kind, False):
            raise ValueError(
                f"tree_at {text!r} names no turns: write turns:2,4 (from 2 on, ascending), tokens:200, surprise:1.5 or "
                "tool_failures"
            )
        return cls(kind, values)


def check(config: Any) -> None:
    """Raises `ValueError` if the settings contradict each other."""
    leaves_of(config, config.group_size)
    if config.credit == "turn":
        raise ValueError("credit turn has no effect on trees, whose turns have advantages of their own: unset it")


def leaves_of(config: Any, size: int) -> int:
    """Rollouts that a tree becomes, at most. Raises `ValueError` if nothing says so, or if groups of this `size` have
    only one tree."""
    rule = ForkRule.parse(config.tree_at) if config.tree_at is not None else None
    of_turns = config.tree_width ** len(rule.values) if rule is not None and rule.kind == "turns" else None
    leaves: int | None = config.tree_leaves or of_turns
    if leaves is None:
        by = "branch_at" if rule is None else f"tree_at {config.tree_at}"
        raise ValueError(f"{by} can fork at any turn: set tree_leaves")
    if config.tree_credit == "parts" and size < 2 * leaves:
        raise ValueError(
            f"a group of {size} rollouts holds one tree of {leaves}, whose first turns would be compared with nothing: "
            f"set group_size to {2 * leaves} or more, tree_leaves lower, or tree_credit leaves"
        )
    return leaves
