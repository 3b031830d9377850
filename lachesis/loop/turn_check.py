"""Classifies completions: is this a turn that the agent loop can act on? The loop decides what to do about a flaw."""

from __future__ import annotations

import difflib
import json
import re
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from enum import Enum
from typing import Any

import orjson

from lachesis_client.finish_words import Ending, ending
from lachesis_messages.markup import NotJson, load_json, split_opened_think
from lachesis_messages.messages import FinishReason, ToolCall
from lachesis_messages.responses import ChatResponse


class Flaw(Enum):
    """The possible flaws of a turn."""

    EMPTY = "empty answer"
    """Neither text nor tool calls."""
    ONLY_REASONING = "nothing after the reasoning"
    """Reasoning, and no answer after it."""
    TRUNCATED_CALL = "tool call cut off by the token limit"
    MALFORMED_CALL = "text that starts a tool call and is none"
    INVALID_JSON = "arguments are not JSON"
    NOT_AN_OBJECT = "arguments are not a JSON object"
    UNKNOWN_TOOL = "unknown tool"
    MISSING_ARGUMENTS = "required arguments are missing"


RESAMPLED = frozenset(
    {
        Flaw.EMPTY,
        Flaw.ONLY_REASONING,
        Flaw.TRUNCATED_CALL,
        Flaw.MALFORMED_CALL,
        Flaw.INVALID_JSON,
        Flaw.NOT_AN_OBJECT,
    }
)
"""Turns that cannot stay in the conversation: there is nothing to answer, or a chat template could not render them.

All others stay: the model reads in the tool's answer what was wrong, and the valid calls of the turn are run."""

_SHALLOW = 100
"""No JSON with at most this many brackets is nested too deeply for a parser."""
_THINK_BLOCK = re.compile(r"<think>.*?(?:</think>|\Z)", re.DOTALL)


@dataclass(frozen=True, slots=True)
class TurnCheck:
    """The check of a turn. `flaw` is the worst flaw, or None."""

    flaw: Flaw | None = None
    detail: str = ""
    faulty: Mapping[str, str] = field(default_factory=dict)
    """Call id -> the message that the model reads instead of a result."""
    duplicates: Mapping[str, str] = field(default_factory=dict)
    """Id of a repeated call -> id of the same call earlier in the turn."""


def check_turn(response: ChatResponse, required_arguments: Mapping[str, Collection[str]]) -> TurnCheck:
    """Check one completion against the tools on offer (`required_arguments`: tool name -> names of arguments)."""
    message = response.message
    cut = response.finish_reason is FinishReason.LENGTH
    if ending(response.raw_finish_reason) is Ending.MALFORMED:
        return TurnCheck(Flaw.MALFORMED_CALL, f"{response.raw_finish_reason}: {_shorten(message.text)}")
    if response.malformed_calls:
        flaw = Flaw.TRUNCATED_CALL if cut else Flaw.MALFORMED_CALL
        return TurnCheck(flaw, _shorten(response.malformed_calls[0]))
    if not message.tool_calls:
        said = _check_text(message.text, message.reasoning)
        # The loop ends where the token limit cut off an answer, or the reasoning before it.
        return TurnCheck() if cut and said.flaw is Flaw.ONLY_REASONING else said

    faulty: dict[str, str] = {}
    worst: tuple[Flaw, str] | None = None
    for call in message.tool_calls:
        found = _check_call(call, required_arguments)
        if found is None:
            continue
        flaw, message_text = found
        if flaw in RESAMPLED:
            # The last call of a turn that hit the limit is cut JSON, whatever else it looks like.
            is_last = call is message.tool_calls[-1]
            return TurnCheck(
                Flaw.TRUNCATED_CALL if cut and is_last else flaw, f"{call.name}: {_shorten(call.arguments)}"
            )
        faulty[call.id] = message_text
        worst = worst or (flaw, message_text)
    duplicates = _duplicates(message.tool_calls)
    if worst is None:
        return TurnCheck(duplicates=duplicates)
    return TurnCheck(worst[0], worst[1], faulty, duplicates)


def _check_text(text: str, reasoning: str | None) -> TurnCheck:
    _, said = split_opened_think(text)
    if _THINK_BLOCK.sub("", said).strip():
        return TurnCheck()
    if text.strip() or (reasoning and reasoning.strip()):
        return TurnCheck(Flaw.ONLY_REASONING, _shorten(reasoning or text))
    return TurnCheck(Flaw.EMPTY)


def _check_call(call: ToolCall, required_arguments: Mapping[str, Collection[str]]) -> tuple[Flaw, str] | None:
    # An empty string is how several servers spell "no arguments".
    text = call.arguments.strip() or "{}"
    try:
        arguments: Any = _usual_json(text)
        if arguments is None:
            arguments = load_json(text)
    except NotJson as error:
        return Flaw.INVALID_JSON, str(error)
    if not isinstance(arguments, dict):
        return Flaw.NOT_AN_OBJECT, f"got {type(arguments).__name__}"
    if call.name not in required_arguments:
        return Flaw.UNKNOWN_TOOL, unknown_tool_text(call.name, required_arguments)
    missing = [name for name in required_arguments[call.name] if name not in arguments]
    if missing:
        names = ", ".join(repr(name) for name in missing)
        problem = f"{call.name} needs {names}, which the call does not give. Call it again with all of its arguments."
        return Flaw.MISSING_ARGUMENTS, json.dumps({"error": problem}, ensure_ascii=False)
    return None


def _usual_json(text: str) -> dict[str, Any] | None:
    """The object, if `load_json` would accept it too. `load_json` also writes the value again, which costs far more."""
    if text.count("[") + text.count("{") > _SHALLOW:
        return None
    try:
        value = orjson.loads(text)  # rejects NaN and infinite numbers
    except orjson.JSONDecodeError:
        return None
    return value if isinstance(value, dict) else None


def unknown_tool_text(name: str, known: Collection[str]) -> str:
    """The answer to a call of a tool that does not exist."""
    near = difflib.get_close_matches(name, known, n=3, cutoff=0.5)
    hint = f" Did you mean {' or '.join(near)}?" if near else ""
    listing = ", ".join(sorted(known)) or "none"
    return json.dumps({"error": f"There is no tool {name!r}.{hint} Available tools: {listing}."}, ensure_ascii=False)


def _duplicates(calls: Sequence[ToolCall]) -> dict[str, str]:
    first: dict[tuple[str, str], str] = {}
    repeated: dict[str, str] = {}
    for call in calls:
        key = (call.name, call.arguments)
        if key in first:
            repeated[call.id] = first[key]
        else:
            first[key] = call.id
    return repeated


def _shorten(text: str, limit: int = 200) -> str:
    text = " ".join(text.split())
    return text if len(text) <= limit else text[: limit - 1] + "…"
