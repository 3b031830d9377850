"""Settings of groups whose rollouts branch. What `tree_at` says is read in `lachesis.settings.fork_rules`."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import BaseModel, Field, model_validator

from lachesis.settings.setting_facts import Facts

_TRAINING = Facts(content="training")


class TreeSettings(BaseModel):
    """Where the rollouts of a group fork, and how the turns of a tree are credited."""

    tree_at: Annotated[str | None, _TRAINING] = Field(
        default=None,
        description="Turns before which a rollout of `process` and `serve` forks: turns:2,4, tokens:N (after each N "
        "sampled tokens), surprise:NATS (after a turn whose tokens had this mean surprise), or tool_failures; null: "
        "none.",
    )
    tree_width: Annotated[int, _TRAINING] = Field(default=2, ge=2, description="Ways in which a fork goes on.")
    tree_leaves: Annotated[int | None, _TRAINING] = Field(
        default=None,
        ge=2,
        description="Rollouts that a tree becomes, at most; default: as many as the forks of `turns:` make.",
    )
    tree_credit: Annotated[Literal["parts", "leaves"], _TRAINING] = Field(
        default="parts",
        description="Advantage of the turns between two forks: their value compared with that of the other ways from "
        "the same fork (parts), or the sum over the rollouts that share them, compared within the group (leaves).",
    )

    def without_trees(self) -> set[str]:
        """The settings of trees where there are none: runs of before are continued, which do not know them."""
        return set(TreeSettings.model_fields) if self.tree_at is None and self.tree_leaves is None else set()

    @model_validator(mode="after")
    def _check_trees(self) -> TreeSettings:
        if self.tree_at is not None:
            from lachesis.settings.fork_rules import check  # few runs have trees

            check(self)
        return self
