"""The rules of the formats of trajectory files, entry by entry."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterable, Mapping
from typing import Any

from lachesis.trajectories.chat_exports import Unsuitable
from lachesis.trajectories.errors import MessageError
from lachesis.trajectories.formats import SHAPE_ERRORS, UnknownFormat, format_of, keys_of, plain_message
from lachesis.trajectories.loading import from_sharegpt
from lachesis.trajectories.message_rules import validate_messages
from lachesis.trajectories.parquet import schema as parquet_schema
from lachesis.trajectories.samples import MalformedSample, TokenSample
from lachesis.trajectories.verification import verify

__all__ = ["VALIDATORS", "validate_entry", "validate_messages"]

_NAME = re.compile(r"[a-zA-Z0-9_-]{1,64}")
_OPENAI_KEYS = {"role", "content", "name", "tool_calls", "tool_call_id", "weight", "refusal", "audio"}
_COUNTS = {"count", "success", "failure"}


def validate_entry(entry: Any, format: str = "") -> list[str]:
    """What breaks the rules of a format in an entry, in words; empty where nothing does.

    Without `format` it is that of the entry. Raises UnknownFormat for a name that is none.
    """
    name = format or format_of(entry)
    if not name:
        return [f"it has the form of no format: {keys_of(entry)}"]
    if name not in VALIDATORS:
        raise UnknownFormat(f"no format is called {name!r}; one of {', '.join(VALIDATORS)}")
    if not isinstance(entry, Mapping):
        return [f"it is {type(entry).__name__}, not an object"]
    problems: list[str] = []
    try:
        problems.extend(VALIDATORS[name](entry))
    except SHAPE_ERRORS as error:  # a part of it is of another type
        problems.append(f"it does not have the form of {name} ({type(error).__name__}: {error})")
    return problems


def _is(entry: Mapping[str, Any], **types: type) -> Iterable[str]:
    """A problem for each key that is missing or of another type."""
    for name, kind in types.items():
        if name not in entry:
            yield f"it has no {name!r}"
        elif not isinstance(entry[name], kind) or (kind is int and isinstance(entry[name], bool)):
            yield f"{name} is {type(entry[name]).__name__}, not {kind.__name__}"


def _sharegpt(entry: Mapping[str, Any], *, think: bool) -> Iterable[str]:
    turns = entry.get("conversations")
    if not isinstance(turns, list) or not all(isinstance(turn, Mapping) for turn in turns):
        yield "conversations is not a list of turns"
        return
    for index, turn in enumerate(turns):
        if set(turn) != {"from", "value"}:
            yield f"turn {index}: its keys are {', '.join(map(repr, turn))}, not 'from' and 'value'"
            return
    try:
        messages = from_sharegpt(entry)
        validate_messages(messages, complete=False, late_system=True)
    except MessageError as error:
        yield str(error)
        return
    if not any(turn["from"] == "gpt" for turn in turns):
        yield "it has no gpt turn"
    if think:
        for index, turn in enumerate(turns):
            if turn["from"] == "gpt" and not turn["value"].startswith("<think>\n"):
                yield f"turn {index}: a gpt turn begins with a think block"


def _hermes(entry: Mapping[str, Any]) -> Iterable[str]:
    yield from _is(entry, timestamp=str, model=str, completed=bool)
    yield from _sharegpt(entry, think=True)


def _sharegpt_tools(entry: Mapping[str, Any]) -> Iterable[str]:
    yield from _is(entry, source=str)
    yield from _tools_text(entry)
    yield from _sharegpt(entry, think=False)


def _batch(entry: Mapping[str, Any]) -> Iterable[str]:
    wrong = list(
        _is(
            entry,
            prompt_index=int,
            metadata=dict,
            completed=bool,
            partial=bool,
            api_calls=int,
            toolsets_used=list,
            tool_stats=dict,
            tool_error_counts=dict,
        )
    )
    yield from wrong
    if not wrong:
        stats, errors = entry["tool_stats"], entry["tool_error_counts"]
        for name, row in stats.items():
            if not isinstance(row, Mapping) or set(row) != _COUNTS or {*map(type, row.values())} != {int}:
                yield f"tool_stats[{name!r}] is not count, success and failure"
            elif row["count"] != row["success"] + row["failure"]:
                yield f"tool_stats[{name!r}]: count is not success plus failure"
        if set(errors) != set(stats):
            yield "tool_error_counts and tool_stats name different tools"
    yield from _sharegpt(entry, think=True)


def _openai(entry: Mapping[str, Any]) -> Iterable[str]:
    if "tools" in entry:
        yield from _tools(entry["tools"])
    if problems := list(_conversation(entry.get("messages"), "messages", text=True, answer=False)):
        yield from problems
        return
    for index, message in enumerate(entry["messages"]):
        for key in sorted(set(message) - _OPENAI_KEYS):
            yield f"messages[{index}]: OpenAI knows no key {key!r}"
        if message.get("weight", 1) not in (0, 1):
            yield f"messages[{index}]: weight is {message['weight']!r}, not 0 or 1"
    answers = [message for message in entry["messages"] if message["role"] == "assistant"]
    if entry["messages"][-1]["role"] != "assistant":
        yield "messages does not end with an assistant message"
    if all(message.get("weight") == 0 for message in answers):
        yield "messages has no assistant message that is trained"


def _trl(entry: Mapping[str, Any]) -> Iterable[str]:
    if "messages" in entry:
        yield from _conversation(entry["messages"], "messages", text=False)
    else:
        yield from _parted(entry, "completion")
    yield from _tools_text(entry)


def _dpo(entry: Mapping[str, Any]) -> Iterable[str]:
    yield from _parted(entry, "chosen")
    yield from _parted(entry, "rejected")
    if entry.get("chosen") == entry.get("rejected"):
        yield "chosen and rejected are the same"
    yield from _tools_text(entry)
    yield from _is(entry, score_chosen=float, score_rejected=float, rule=str)


def _parquet(entry: Mapping[str, Any]) -> Iterable[str]:
    if missing := [name for name in parquet_schema().names if name not in entry]:
        yield f"it has no column {', '.join(missing)}"
    yield from _tools_text(entry)
    yield from _conversation(entry.get("messages"), "messages", text=None, complete=False, answer=False)


def _parted(entry: Mapping[str, Any], answer: str) -> Iterable[str]:
    parts = [entry.get("prompt"), entry.get(answer)]
    for name, part in zip(("prompt", answer), parts, strict=True):
        if not isinstance(part, list) or not part:
            yield f"{name} is not a list of messages"
            return
    yield from _conversation([*parts[0], *parts[1]], f"prompt and {answer}", text=False)  # type: ignore[misc]


def _conversation(
    messages: Any, at: str, *, text: bool | None, complete: bool = True, answer: bool = True
) -> Iterable[str]:
    """`text`: arguments have to be the text of an object; False: or an object; None: anything that a model wrote."""
    if not isinstance(messages, list) or not messages:
        yield f"{at} is not a list of messages"
        return
    try:
        plain = [plain_message(message, f"{at}[{index}]", text) for index, message in enumerate(messages)]
        validate_messages(plain, complete=complete, late_system=True)
    except (MessageError, Unsuitable) as error:
        yield f"{at}: {error}"
        return
    if answer and not any(message["role"] == "assistant" for message in plain):
        yield f"{at} has no assistant message"


def _tools_text(entry: Mapping[str, Any]) -> Iterable[str]:
    try:
        tools = json.loads(entry["tools"])
    except (KeyError, TypeError, ValueError, RecursionError):
        yield "tools is not JSON text"
        return
    yield from _tools(tools)


def _tools(tools: Any) -> Iterable[str]:
    if not isinstance(tools, list):
        yield f"tools is {type(tools).__name__}, not a list"
        return
    for index, tool in enumerate(tools):
        function = tool.get("function") if isinstance(tool, Mapping) and tool.get("type") == "function" else None
        if not isinstance(function, Mapping) or not _NAME.fullmatch(str(function.get("name"))):
            yield f"tools[{index}] is no function with a name of letters, digits, _ and -"
        elif not isinstance(function.get("parameters", {}), Mapping):
            yield f"tools[{index}]: parameters is not an object"


def _samples(entry: Mapping[str, Any]) -> Iterable[str]:
    try:
        yield from verify(TokenSample.from_record(entry))
    except MalformedSample as error:
        yield f"the sample {error}"


def _atif(entry: Mapping[str, Any]) -> Iterable[str]:
    yield from _is(entry, schema_version=str, session_id=str, agent=dict, steps=list)
    for place, step in enumerate(entry["steps"], 1):
        if step.get("source") not in ("system", "user", "agent"):
            yield f"step {place} has no source"
            continue
        if step.get("step_id") != place:
            yield f"step {place} has the step_id {step.get('step_id')!r}"
        if not isinstance(step.get("message"), str | list):
            yield f"step {place} has no message"
        calls = {call.get("tool_call_id") for call in step.get("tool_calls") or ()}
        for result in (step.get("observation") or {}).get("results", ()):
            if result.get("source_call_id") not in {None, *calls}:
                yield f"step {place} has a result for {result['source_call_id']!r}, which it did not call"


VALIDATORS: dict[str, Callable[[Mapping[str, Any]], Iterable[str]]] = {
    "hermes": _hermes,
    "sharegpt-tools": _sharegpt_tools,
    "batch": _batch,
    "openai": _openai,
    "trl": _trl,
    "dpo": _dpo,
    "parquet": _parquet,
    "samples": _samples,
    "atif": _atif,
}
"""Format -> what is wrong with an entry."""
