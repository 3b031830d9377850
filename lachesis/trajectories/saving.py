"""Trajectory files, with the file names and lines of the trajectory format of Hermes Agent."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from datetime import datetime
from pathlib import Path
from typing import Any

from lachesis.trajectories.entries import merge, trajectory_entry
from lachesis.trajectories.jsonl import StrPath, append_line, read_lines
from lachesis.trajectories.sharegpt import Conversion

COMPLETED_FILE = "trajectory_samples.jsonl"
FAILED_FILE = "failed_trajectories.jsonl"


def save_trajectory(
    trajectory: Conversion | Sequence[Mapping[str, str]],
    model: str,
    completed: bool,
    filename: StrPath | None = None,
    *,
    directory: StrPath = ".",
    timestamp: datetime | str | None = None,
    fsync: bool = False,
    **metadata: Any,
) -> Path:
    """Appends one line and returns the path of its file.

    `trajectory` is the result of `to_conversations`, or its ShareGPT turns. Completed trajectories go to
    `trajectory_samples.jsonl` in `directory`, others to `failed_trajectories.jsonl`, all to `filename` if it is given.
    A malformed `Conversion` counts as failed. `metadata` are further keys.
    """
    if isinstance(trajectory, Conversion):
        completed = completed and not trajectory.malformed
        trajectory = trajectory.conversations
    entry = merge(trajectory_entry(trajectory, model, completed, timestamp), metadata)
    path = Path(directory) / (filename if filename is not None else COMPLETED_FILE if completed else FAILED_FILE)
    append_line(path, entry, fsync=fsync)
    return path


def load_trajectories(path: StrPath, *, completed: bool | None = None, torn_tail: bool = False) -> list[dict[str, Any]]:
    """The entries of a file; with `completed`, only the completed ones, or only the others."""
    entries = read_lines(path, torn_tail=torn_tail)
    return [entry for entry in entries if completed is None or bool(entry.get("completed")) is completed]
