"""Settings of groups whose rollouts branch."""

from __future__ import annotations

from typing import Annotated, Literal, NamedTuple

from pydantic import BaseModel, Field, model_validator

from lachesis.settings.setting_facts import Facts

TRAINING = Facts(content="training")


class ForkRule(NamedTuple):
    """Before which turns a rollout forks: what `tree_at` says."""

    kind: Literal["turns", "tokens", "surprise", "tool_failures"]
    values: tuple[float, ...] = ()


class TreeSettings(BaseModel):
    """Where the rollouts of a group fork, and how the turns of a tree are credited."""

    tree_at: Annotated[str | None, TRAINING] = Field(
        default=None,
        description="Turns before which a rollout of `process` and `serve` forks: turns:2,4, tokens:N (after each N "
        "sampled tokens), surprise:NATS (after a turn whose tokens had this mean surprise), or tool_failures; null: "
        "none.",
    )
    tree_width: Annotated[int, TRAINING] = Field(default=2, ge=2, description="Ways in which a fork goes on.")
    tree_leaves: Annotated[int | None, TRAINING] = Field(
        default=None,
        ge=2,
        description="Rollouts that a tree becomes, at most; default: as many as the forks of `turns:` make.",
    )
    tree_credit: Annotated[Literal["parts", "leaves"], TRAINING] = Field(
        default="parts",
        description="Advantage of the turns between two forks: their value compared with that of the other ways from "
        "the same fork (parts), or the sum over the rollouts that share them, compared within the group (leaves).",
    )

    def fork_rule(self) -> ForkRule | None:
        """`tree_at`, read. Raises `ValueError`."""
        if self.tree_at is None:
            return None
        kind, _, given = self.tree_at.partition(":")
        try:
            values = tuple(float(each) for each in given.split(",")) if given else ()
            rule = ForkRule(kind, values)  # type: ignore[arg-type]
            whole = all(each == int(each) for each in values)
            if kind == "turns" and values and whole and min(values) >= 2 and list(values) == sorted(set(values)):
                return rule
            one = len(values) == 1 and values[0] > 0
            if (kind == "tokens" and one and whole) or (kind == "surprise" and one) or rule == ("tool_failures", ()):
                return rule
        except (ValueError, OverflowError):
            pass
        raise ValueError(
            f"tree_at {self.tree_at!r} names no turns: write turns:2,4 (from 2 on, ascending), tokens:200, "
            "surprise:1.5 or tool_failures"
        )

    @property
    def leaves_of_tree(self) -> int | None:
        """Rollouts that a tree becomes, at most; None where nothing says so."""
        rule = self.fork_rule()
        of_turns = self.tree_width ** len(rule.values) if rule is not None and rule.kind == "turns" else None
        return self.tree_leaves or of_turns

    @model_validator(mode="after")
    def _check_trees(self) -> TreeSettings:
        rule, leaves, size = self.fork_rule(), self.leaves_of_tree, getattr(self, "group_size", None)
        if rule is not None and leaves is None:
            raise ValueError(f"tree_at {self.tree_at} can fork at any turn: set tree_leaves")
        if rule is not None and leaves is not None and size is not None and self.tree_credit == "parts":
            check_size(leaves, size)
        if getattr(self, "credit", "rollout") == "turn" and rule is not None:
            raise ValueError("credit turn has no effect on trees, whose turns have advantages of their own: unset it")
        return self


def check_size(leaves: int, size: int) -> None:
    """Raises `ValueError` if groups of this size have only one tree."""
    if size < 2 * leaves:
        raise ValueError(
            f"a group of {size} rollouts holds one tree of {leaves}, whose first turns would be compared with nothing: "
            f"set group_size to {2 * leaves} or more, tree_leaves lower, or tree_credit leaves"
        )
