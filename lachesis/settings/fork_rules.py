"""Before which turns a rollout forks: what the setting `tree_at` says."""

from __future__ import annotations

from typing import Any, Literal, NamedTuple


class ForkRule(NamedTuple):
    """`tree_at`, read."""

    kind: Literal["turns", "tokens", "surprise", "tool_failures"]
    values: tuple[float, ...] = ()

    @classmethod
    def parse(cls, text: str) -> ForkRule:
        """Raises `ValueError`."""
        kind, _, given = text.partition(":")
        try:
            values = tuple(float(each) for each in given.split(",")) if given else ()
            whole = all(each == int(each) for each in values)
        except (ValueError, OverflowError):
            kind = ""
        one = bool(kind) and len(values) == 1 and values[0] > 0
        if kind == "turns" and values and whole and values[0] >= 2 and list(values) == sorted(set(values)):
            return cls("turns", values)
        if kind == "tokens" and one and whole:
            return cls("tokens", values)
        if kind == "surprise" and one:
            return cls("surprise", values)
        if text == "tool_failures":
            return cls("tool_failures")
        raise ValueError(
            f"tree_at {text!r} names no turns: write turns:2,4 (from 2 on, ascending), tokens:200, surprise:1.5 or "
            "tool_failures"
        )


def leaves_of(config: Any) -> int | None:
    """Rollouts that a tree becomes, at most; None where nothing says so."""
    rule = None if config.tree_at is None else ForkRule.parse(config.tree_at)
    of_turns = config.tree_width ** len(rule.values) if rule is not None and rule.kind == "turns" else None
    return config.tree_leaves or of_turns


def check(config: Any) -> None:
    """Raises `ValueError` if the settings contradict each other."""
    leaves = leaves_of(config)
    if leaves is None:
        raise ValueError(f"tree_at {config.tree_at} can fork at any turn: set tree_leaves")
    if config.credit == "turn":
        raise ValueError("credit turn has no effect on trees, whose turns have advantages of their own: unset it")
    check_size(config, leaves, config.group_size)


def check_size(config: Any, leaves: int, size: int) -> None:
    """Raises `ValueError` if groups of this size have only one tree."""
    if config.tree_credit == "parts" and size < 2 * leaves:
        raise ValueError(
            f"a group of {size} rollouts holds one tree of {leaves}, whose first turns would be compared with nothing: "
            f"set group_size to {2 * leaves} or more, tree_leaves lower, or tree_credit leaves"
        )
