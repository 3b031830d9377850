"""Lines of trajectory files: the three variants of Hermes Agent.

A conversation with a tool call whose arguments had to be replaced is never marked completed.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from datetime import datetime
from typing import Any, NamedTuple

from lachesis.trajectories.markup import dump_json
from lachesis.trajectories.messages import MessageLike
from lachesis.trajectories.sharegpt import ConversionWarning, SystemTurn, Tools, to_conversations, tool_function


class ConvertedEntry(NamedTuple):
    """An entry for a JSONL file, and warnings about changes to its content."""

    entry: dict[str, Any]
    warnings: tuple[ConversionWarning, ...]


def to_dataset_entry(
    messages: Iterable[MessageLike],
    tools: Tools = (),
    *,
    completed: bool = True,
    system: SystemTurn = "actual",
    source: str = "hermes-agent",
) -> ConvertedEntry:
    """`{conversations, tools, source}`, with the tool definitions as JSON text.

    The system turn is that of the conversation, turns without reasoning have no think block, and tool results are bare
    text.
    """
    tools = list(tools)
    conversations, warnings = to_conversations(
        messages, tools, completed=completed, system=system, empty_think=False, tool_payload="raw"
    )
    definitions = dump_json([{"type": "function", "function": dict(tool_function(tool))} for tool in tools])
    return ConvertedEntry({"conversations": conversations, "tools": definitions, "source": source}, warnings)


def to_trajectory_entry(
    messages: Iterable[MessageLike],
    tools: Tools = (),
    *,
    model: str,
    completed: bool,
    timestamp: datetime | str | None = None,
    system: SystemTurn = "generated",
    **metadata: Any,
) -> ConvertedEntry:
    """`{conversations, timestamp, model, completed}` and the keys of `metadata`.

    `timestamp` defaults to now, in local time without a zone, as in the format.
    """
    conversion = to_conversations(messages, tools, completed=completed, system=system)
    entry = trajectory_entry(conversion.conversations, model, completed and not conversion.malformed, timestamp)
    return ConvertedEntry(merge(entry, metadata), conversion.warnings)


def to_batch_entry(
    messages: Iterable[MessageLike],
    tools: Tools = (),
    *,
    prompt_index: int,
    metadata: Mapping[str, Any],
    completed: bool,
    partial: bool,
    api_calls: int,
    toolsets_used: Sequence[str],
    tool_stats: Mapping[str, Mapping[str, int]],
    all_tools: Iterable[str],
    system: SystemTurn = "generated",
    **extra: Any,
) -> ConvertedEntry:
    """The line of a batch run.

    `tool_stats` maps a tool to `{"count", "success", "failure"}`. Every name of `all_tools` gets a row, with zeros for
    an unused tool, so that all lines of a file have the same columns.
    """
    conversion = to_conversations(messages, tools, completed=completed, system=system)
    names = dict.fromkeys([*all_tools, *tool_stats])
    stats = {
        name: {key: tool_stats.get(name, {}).get(key, 0) for key in ("count", "success", "failure")} for name in names
    }
    entry = {
        "prompt_index": prompt_index,
        "conversations": conversion.conversations,
        "metadata": dict(metadata),
        "completed": completed and not conversion.malformed,
        "partial": partial,
        "api_calls": api_calls,
        "toolsets_used": list(toolsets_used),
        "tool_stats": stats,
        "tool_error_counts": {name: row["failure"] for name, row in stats.items()},
    }
    return ConvertedEntry(merge(entry, extra), conversion.warnings)


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


def merge(entry: dict[str, Any], extra: Mapping[str, Any]) -> dict[str, Any]:
    """`entry` with further keys; ValueError where one would replace a key of the entry."""
    taken = sorted(set(entry) & set(extra))
    if taken:
        raise ValueError(f"metadata cannot replace keys of the entry: {', '.join(taken)}")
    return {**entry, **extra}
