"""What the pages of a rollout and of a group show, from the record of the group."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from lachesis.trajectories.exports import stored_messages


def rollout_context(group: Mapping[str, Any], n: int) -> dict[str, Any]:
    """What the template of rollout `n` takes. Raises IndexError where the group has none of this number."""
    rollout = group["rollouts"][n]
    return {"group": group, "rollout": rollout, "messages": stored_messages(group, rollout)}


def group_context(group: Mapping[str, Any]) -> dict[str, Any]:
    """What the template of a group takes."""
    return {"group": group, "rollouts": group["rollouts"]}
