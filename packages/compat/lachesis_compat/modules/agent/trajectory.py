"""Trajectory files under the names of the removed stack."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from lachesis_messages.markup import convert_scratchpad_to_think
from lachesis_messages.records.dataset_entries import load_trajectories as _entries
from lachesis_messages.records.dataset_entries import save_trajectory
from lachesis_messages.records.sharegpt import to_conversations

__all__ = [
    "_convert_to_trajectory_format",
    "convert_scratchpad_to_think",
    "has_incomplete_scratchpad",
    "load_trajectories",
    "save_trajectory",
]


def load_trajectories(path: str | Path, completed: bool | None = None) -> list[dict[str, Any]]:
    """The entries of a file; with `completed`, only the completed ones, or only the others."""
    return list(_entries(path, completed=completed))


def has_incomplete_scratchpad(content: str | None) -> bool:
    """Whether a reasoning scratchpad is opened and not closed."""
    return bool(content) and "<REASONING_SCRATCHPAD>" in str(content) and "</REASONING_SCRATCHPAD>" not in str(content)


def _convert_to_trajectory_format(
    messages: Iterable[Mapping[str, Any]],
    user_query: str = "",
    completed: bool = True,
    tools: Iterable[Mapping[str, Any]] = (),
) -> list[dict[str, str]]:
    """The ShareGPT turns of a conversation. `user_query` is put before messages that begin with no user's message."""
    given = list(messages)
    if user_query and not any(message.get("role") == "user" for message in given):
        given.insert(0, {"role": "user", "content": user_query})
    return [dict(turn) for turn in to_conversations(given, list(tools), completed=completed).conversations]
