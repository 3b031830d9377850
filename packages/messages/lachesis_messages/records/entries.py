"""The lines of trajectory files in Hermes Agent's format; `dataset_entries` has its other variants.

A conversation with a tool call whose arguments had to be replaced is never marked completed.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from datetime import datetime
from pathlib import Path
from typing import Any, NamedTuple

from lachesis_messages.records.sharegpt import PARTS_OMITTED, ConversionWarning, SystemTurn, Tools, to_conversations
from lachesis_messages.responses import MessageLike

COMPLETED_FILE = "trajectory_samples.jsonl"
FAILED_FILE = "failed_trajectories.jsonl"


class ConvertedEntry(NamedTuple):
    """An entry for a JSONL file, and warnings about changes to its content."""

    entry: dict[str, Any]
    warnings: tuple[ConversionWarning, ...]


def to_trajectory_entry(
    messages: Iterable[MessageLike],
    tools: Tools = (),
    *,
    model: str,
    completed: bool,
    of_program: bool = False,
    timestamp: datetime | str | None = None,
    system: SystemTurn = "generated",
    **metadata: Any,
) -> ConvertedEntry:
    """`{conversations, timestamp, model, completed}`, `parts_omitted` where there are any, and the keys of `metadata`.

    `timestamp` defaults to now, in local time without a zone, as in the format.
    """
    conversion = to_conversations(messages, tools, completed=completed, of_program=of_program, system=system)
    entry = trajectory_entry(conversion.conversations, model, completed and not conversion.malformed, timestamp)
    return ConvertedEntry(merged({**entry, **conversion.omitted}, metadata), conversion.warnings)


def trajectory_entry(
    conversations: Sequence[Mapping[str, str]], model: str, completed: bool, timestamp: datetime | str | None = None
) -> dict[str, Any]:
    """The four keys of every trajectory line, for existing turns."""
    if timestamp is None:
        timestamp = datetime.now()
    if isinstance(timestamp, datetime):
        timestamp = timestamp.isoformat(timespec="microseconds")
    return {
        "conversations": [dict(turn) for turn in conversations],
        "timestamp": timestamp,
        "model": model,
        "completed": completed,
    }


def omitting(path: Path) -> int:
    """The lines of a file whose conversations have omitted parts; 0 where there is no file."""
    try:
        with path.open("rb") as lines:
            key = f'"{PARTS_OMITTED}":'.encode()  # in a text its quotes would be escaped
            return sum(key in line for line in lines)
    except FileNotFoundError:
        return 0


def merged(entry: dict[str, Any], extra: Mapping[str, Any]) -> dict[str, Any]:
    """`entry` with further keys; ValueError where one would replace a key of the entry."""
    taken = sorted(set(entry) & set(extra))
    if taken:
        raise ValueError(f"metadata cannot replace keys of the entry: {', '.join(taken)}")
    return {**entry, **extra}
