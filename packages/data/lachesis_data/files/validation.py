"""The rules of the formats of trajectory files, entry by entry."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Mapping
from typing import Any

from lachesis_data.exports.chat_exports import OPENAI_NAME
from lachesis_data.exports.parquet import schema as parquet_schema
from lachesis_data.files.foreign import with_own_ids
from lachesis_data.files.formats import SHAPE_ERRORS, UnknownFormat, format_of, keys_of, plain_message
from lachesis_messages.errors import MessageError
from lachesis_messages.markup import split_think
from lachesis_messages.message_rules import validate_messages
from lachesis_messages.records.export_lines import Unsuitable
from lachesis_messages.records.loading import from_sharegpt
from lachesis_tokens.samples.sample_records import MalformedSample, read_sample
from lachesis_tokens.samples.verification import verify

__all__ = ["VALIDATORS", "validate_entry", "validate_messages"]

_OPENAI_KEYS = {"role", "content", "name", "tool_calls", "tool_call_id", "weight", "refusal", "audio"}
_COUNTS = {"count", "success", "failure"}
_BATCH = {
    **dict.fromkeys(("prompt_index", "api_calls"), int),
    **dict.fromkeys(("completed", "partial"), bool),
    **dict.fromkeys(("metadata", "tool_stats", "tool_error_counts"), dict),
    "toolsets_used": list,
}


def validate_entry(entry: Any, format: str = "") -> list[str]:
    """The ways in which an entry breaks the rules of a format, in words; empty if it breaks none.

    Without `format`, the entry's own format is used. Raises UnknownFormat for an unknown name.
    """
    name = format or format_of(entry)
    if not name:
        return [f"it matches no known format: {keys_of(entry)}"]
    if name not in VALIDATORS:
        raise UnknownFormat(f"there is no format {name!r}; choose from {', '.join(VALIDATORS)}")
    if not isinstance(entry, Mapping):
        return [f"it is {type(entry).__name__}, not an object"]
    problems: list[str] = []
    try:
        problems.extend(VALIDATORS[name](entry))  # those before an error are kept
    except (Unsuitable, MessageError) as error:
        problems.append(str(error))
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
    turns = entry["conversations"]
    for index, turn in enumerate(turns):
        if set(turn) != {"from", "value"}:
            yield f"turn {index}: its keys are {', '.join(map(repr, turn))}, not 'from' and 'value'"
            return
    validate_messages(with_own_ids(from_sharegpt(entry)), complete=False, late_system=True)
    answers = [(index, turn["value"]) for index, turn in enumerate(turns) if turn["from"] == "gpt"]
    if not answers:
        yield "it has no gpt turn"
    for index, value in answers if think else ():
        if not value.startswith("<think>\n"):
            yield f"turn {index}: a gpt turn begins with a think block"
        elif split_think(value)[1].lstrip().startswith("<think>"):
            yield f"turn {index}: a think block is not closed"


def _hermes(entry: Mapping[str, Any]) -> Iterable[str]:
    yield from _is(entry, timestamp=str, model=str, completed=bool)
    yield from _sharegpt(entry, think=True)


def _sharegpt_tools(entry: Mapping[str, Any]) -> Iterable[str]:
    yield from _is(entry, source=str)
    yield from _tools_text(entry)
    yield from _sharegpt(entry, think=False)


def _batch(entry: Mapping[str, Any]) -> Iterable[str]:
    wrong = list(_is(entry, **_BATCH))
    yield from wrong
    for name, row in entry["tool_stats"].items() if not wrong else ():
        if not isinstance(row, Mapping) or set(row) != _COUNTS or {*map(type, row.values())} != {int}:
            yield f"tool_stats[{name!r}] is not count, success and failure"
        elif row["count"] != row["success"] + row["failure"]:
            yield f"tool_stats[{name!r}]: count is not success plus failure"
    if not wrong and set(entry["tool_error_counts"]) != set(entry["tool_stats"]):
        yield "tool_error_counts and tool_stats name different tools"
    yield from _sharegpt(entry, think=True)


def _openai(entry: Mapping[str, Any]) -> Iterable[str]:
    tools = entry.get("tools") or []
    yield from _tools(tools)
    yield from _conversation(entry["messages"], "messages", text=True, answer=False)
    for index, message in enumerate(entry["messages"]):
        for key in sorted(set(message) - _OPENAI_KEYS):
            yield f"messages[{index}]: OpenAI knows no key {key!r}"
        if message.get("weight", 1) not in (0, 1):
            yield f"messages[{index}]: weight is {message['weight']!r}, not 0 or 1"
    called = [call for message in entry["messages"] for call in message.get("tool_calls") or ()]
    for name in {each["function"]["name"] for each in (*tools, *called)}:
        if not OPENAI_NAME.fullmatch(name):
            yield f"OpenAI takes no tool called {name!r}: 1 to 64 letters, digits, _ and - only"
    if entry["messages"][-1]["role"] != "assistant":
        yield "messages does not end with an assistant message"
    if all(message.get("weight") == 0 for message in entry["messages"] if message["role"] == "assistant"):
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
    if entry["chosen"] == entry["rejected"]:
        yield "chosen and rejected are the same"
    yield from _tools_text(entry)
    yield from _is(entry, score_chosen=float, score_rejected=float, rule=str)


def _parquet(entry: Mapping[str, Any]) -> Iterable[str]:
    if missing := [name for name in parquet_schema().names if name not in entry]:
        yield f"it has no column {', '.join(missing)}"
    yield from _tools_text(entry)
    yield from _conversation(entry["messages"], "messages", text=None, complete=False, answer=False)


def _parted(entry: Mapping[str, Any], answer: str) -> Iterable[str]:
    for name in ("prompt", answer):
        if not isinstance(entry[name], list) or not entry[name]:
            raise Unsuitable(f"{name} is not a list of messages")
    yield from _conversation([*entry["prompt"], *entry[answer]], f"prompt and {answer}", text=False)


def _conversation(
    messages: Any, at: str, *, text: bool | None, complete: bool = True, answer: bool = True
) -> Iterable[str]:
    """`text`: arguments have to be the text of an object; False: or an object; None: anything that a model wrote."""
    if not isinstance(messages, list) or not messages:
        raise Unsuitable(f"{at} is not a list of messages")
    plain = [plain_message(message, f"{at}[{index}]", text) for index, message in enumerate(messages)]
    validate_messages(with_own_ids(plain, by_place=False), complete=complete, late_system=True)
    if answer and not any(message["role"] == "assistant" for message in plain):
        yield f"{at} has no assistant message"


def _tools_text(entry: Mapping[str, Any]) -> Iterable[str]:
    try:
        tools = json.loads(entry["tools"])
    except SHAPE_ERRORS:
        yield "tools is not JSON text"
    else:
        yield from _tools(tools)


def _tools(tools: Any) -> Iterable[str]:
    if not isinstance(tools, list):
        raise Unsuitable(f"tools is {type(tools).__name__}, not a list")
    for index, tool in enumerate(tools):
        function = tool.get("function") if isinstance(tool, Mapping) and tool.get("type") == "function" else None
        if not isinstance(function, Mapping) or not isinstance(name := function.get("name"), str) or not name:
            yield f"tools[{index}] is not a function with a name"
        elif not isinstance(function.get("parameters", {}), Mapping):
            yield f"tools[{index}]: parameters is not an object"


def _samples(entry: Mapping[str, Any]) -> Iterable[str]:
    try:
        yield from verify(read_sample(entry))
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
