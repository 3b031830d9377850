"""Two other variants of lines of Hermes Agent's trajectory format, and its files of trajectories."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from datetime import datetime
from pathlib import Path
from typing import Any

from lachesis_messages.markup import dump_json
from lachesis_messages.records.entries import COMPLETED_FILE, FAILED_FILE, ConvertedEntry, merged, trajectory_entry
from lachesis_messages.records.jsonl import StrPath, append_line, read_lines
from lachesis_messages.records.sharegpt import Conversion, SystemTurn, Tools, to_conversations, tool_function
from lachesis_messages.responses import MessageLike


def to_dataset_entry(
    messages: Iterable[MessageLike],
    tools: Tools = (),
    *,
    completed: bool = True,
    of_program: bool = False,
    system: SystemTurn = "actual",
    source: str = "hermes-agent",
) -> ConvertedEntry:
    """`{conversations, tools, source}`, with the tool definitions as JSON text.

    The system turn is that of the conversation, turns without reasoning have no think block, and tool results are bare
    text.
    """
    tools = list(tools)
    conversion = to_conversations(
        messages,
        tools,
        completed=completed,
        of_program=of_program,
        system=system,
        empty_think=False,
        tool_payload="raw",
    )
    definitions = dump_json([{"type": "function", "function": dict(tool_function(tool))} for tool in tools])
    entry = {"conversations": conversion.conversations, "tools": definitions, "source": source}
    return ConvertedEntry({**entry, **conversion.omitted}, conversion.warnings)


def to_batch_entry(
    messages: Iterable[MessageLike],
    tools: Tools = (),
    *,
    prompt_index: int,
    metadata: Mapping[str, Any],
    completed: bool,
    of_program: bool = False,
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
    conversion = to_conversations(messages, tools, completed=completed, of_program=of_program, system=system)
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
    return ConvertedEntry(merged({**entry, **conversion.omitted}, extra), conversion.warnings)


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
    omitted: dict[str, int] = {}
    if isinstance(trajectory, Conversion):
        completed, omitted = completed and not trajectory.malformed, trajectory.omitted
        trajectory = trajectory.conversations
    entry = merged({**trajectory_entry(trajectory, model, completed, timestamp), **omitted}, metadata)
    path = Path(directory) / (filename if filename is not None else COMPLETED_FILE if completed else FAILED_FILE)
    append_line(path, entry, fsync=fsync)
    return path


def load_trajectories(
    path: StrPath, *, completed: bool | None = None, torn_tail: bool = False
) -> Iterator[dict[str, Any]]:
    """The entries of a file, one at a time; with `completed`, only the completed ones, or only the others."""
    for entry in read_lines(path, torn_tail=torn_tail):
        if completed is None or bool(entry.get("completed")) is completed:
            yield entry
