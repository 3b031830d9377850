"""The OpenAI chat wire format and what servers make of it: our messages to a request, their answer to ours.

Pure functions, no I/O. Reading is lenient about form and strict about meaning: nothing is dropped, nothing is invented.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple, TypeAlias

from lachesis.inference.errors import BadResponse
from lachesis.trajectories.frozen import freeze_dict
from lachesis.trajectories.messages import FinishReason, Message, ToolCall, Usage
from tool_call_parsers import CALLABLE, CallStatus, ToolCallParser, new_call_id

Payload: TypeAlias = dict[str, Any]
Tools: TypeAlias = Sequence[Mapping[str, Any]]
REASONING_FIELDS = ("reasoning_content", "reasoning")
_OF_A_CALL = frozenset({"id", "type", "function", "index"})
"""What we read of a call; its `index` is a stream's, and says nothing in a whole answer."""
_NOT_MALFORMED = CALLABLE | {CallStatus.IN_REASONING}
_FINISH_REASONS = {reason.value: reason for reason in FinishReason} | {"function_call": FinishReason.TOOL_CALLS}


def encode_messages(messages: Sequence[Message | Mapping[str, Any]], reasoning_field: str | None) -> list[Payload]:
    """Messages as the server takes them: reasoning under the field that it reads, or left out."""
    return [_encode_message(message, reasoning_field) for message in messages]


def _encode_message(message: Message | Mapping[str, Any], reasoning_field: str | None) -> Payload:
    if isinstance(message, Message):
        return message.to_openai(reasoning_field)
    encoded = dict(message)
    reasoning = read_reasoning(message)
    for key in (*REASONING_FIELDS, "reasoning_details"):
        encoded.pop(key, None)
    if reasoning and reasoning_field and encoded.get("role") == "assistant":
        encoded[reasoning_field] = reasoning
    return encoded


class Reading(NamedTuple):
    """An assistant message as read from a choice."""

    message: Message
    malformed_calls: tuple[str, ...] = ()
    """Raw text of calls that were begun and are none. What `parser` found so stays in the content, too."""


def read_message(data: Mapping[str, Any], parser: ToolCallParser | None, tools: Tools | None) -> Reading:
    """The assistant message of a choice. Calls are the server's; `parser` reads the text only where it gave none."""
    content, reasoning = _read_content(data.get("content")), read_reasoning(data)
    calls, malformed = _read_tool_calls(data)
    if not calls and not malformed and parser is not None and tools and isinstance(content, str):
        parsed = parser.parse(content, tools, prompt_opened_reasoning=_prompt_opened(parser, content))
        malformed = tuple(attempt.raw for attempt in parsed.attempts if attempt.status not in _NOT_MALFORMED)
        if parsed.tool_calls or parsed.reasoning:
            content = parsed.content
            reasoning = _join_reasoning(reasoning, parsed.reasoning)
            calls = tuple(ToolCall(call.id, call.name, call.arguments_json) for call in parsed.tool_calls)
    return Reading(Message("assistant", content=content, tool_calls=calls, reasoning=reasoning), malformed)


def _prompt_opened(parser: ToolCallParser, content: str) -> bool:
    """Whether reasoning ends in the content that never begins there: the server's template began it in the prompt."""
    shape = getattr(parser, "reasoning", None)  # parsers from outside have none
    if shape is None:
        return False
    closes = [position for marker in shape.closes if (position := content.find(marker)) >= 0]
    return bool(closes) and not any(marker in content[: min(closes)] for marker in shape.opens)


def read_reasoning(data: Mapping[str, Any]) -> str | None:
    """`reasoning_content`, else `reasoning`, else the texts of `reasoning_details` (OpenRouter's spelling)."""
    for key in REASONING_FIELDS:
        if isinstance(text := data.get(key), str) and text:
            return text
    details = data.get("reasoning_details")
    if not isinstance(details, list):
        return None
    texts = (part.get("text") for part in details if isinstance(part, Mapping))
    return "".join(text for text in texts if isinstance(text, str)) or None


def _join_reasoning(native: str | None, own: str | None) -> str | None:
    """The server's and the content's. Some servers send the same thought apart and leave it in the content, too."""
    if native and own and native.strip() == own.strip():
        return native
    return "\n".join(filter(None, (native, own))) or None


def read_finish_reason(raw: object) -> FinishReason:
    """The enum's member, `UNKNOWN` for anything else."""
    return _FINISH_REASONS.get(raw, FinishReason.UNKNOWN) if isinstance(raw, str) else FinishReason.UNKNOWN


def broken_off(body: Mapping[str, Any]) -> str | None:
    """The finish reason of a completion that the server itself gave up, half-written: no word of the model's end."""
    choices = body.get("choices")
    for choice in choices if isinstance(choices, list) else ():
        if isinstance(choice, Mapping) and (reason := choice.get("finish_reason")) in ("abort", "error"):
            return str(reason)
    return None


def read_usage(body: Mapping[str, Any]) -> Usage:
    """Token counts as the server gives them."""
    usage = body.get("usage")
    if not isinstance(usage, Mapping):
        return Usage()
    prompt, completion = usage.get("prompt_tokens"), usage.get("completion_tokens")
    return Usage(prompt if isinstance(prompt, int) else None, completion if isinstance(completion, int) else None)


def read_choices(body: Mapping[str, Any], server: str) -> list[Mapping[str, Any]]:
    """The choices of a chat completion, each with a message; `BadResponse` otherwise."""
    choices = body.get("choices")
    if not isinstance(choices, list) or not choices:
        raise BadResponse(server, f"the answer has no choices (its keys: {', '.join(map(str, body)) or 'none'})")
    for choice in choices:
        if not isinstance(choice, Mapping) or not isinstance(choice.get("message"), Mapping):
            raise BadResponse(server, "a choice of the answer has no message")
    return choices


def restate_choices(
    body: Mapping[str, Any], server: str, parser: ToolCallParser | None, tools: Tools | None
) -> dict[str, Any]:
    """The body with the message of every choice read as `read_message` does and written out in OpenAI's form."""
    choices = []
    for choice in read_choices(body, server):
        message = read_message(choice["message"], parser, tools).message
        restated = {**choice["message"], **_encode_message(message, "reasoning_content")}
        choices.append({**choice, "message": restated})
    return {**body, "choices": choices}


def _read_content(content: object) -> str | tuple[Mapping[str, Any], ...] | None:
    if content is None or isinstance(content, str):
        return content
    if not isinstance(content, list):
        return str(content)
    parts = tuple(_read_part(part) for part in content)
    if all(part["type"] == "text" for part in parts):
        return "".join(part["text"] for part in parts)
    return parts


def _read_part(part: object) -> Mapping[str, Any]:
    """A part that has a type, and text where it is a text part."""
    if not isinstance(part, Mapping):
        return {"type": "text", "text": str(part)}
    if part.get("type", "text") in ("text", "output_text"):
        return {"type": "text", "text": str(part.get("text") or "")}
    return {**part, "type": str(part["type"])}


def _read_tool_calls(data: Mapping[str, Any]) -> tuple[tuple[ToolCall, ...], tuple[str, ...]]:
    """The calls, and the text of those that name no function. What else is said of a call goes back with it."""
    listed = data.get("tool_calls")
    calls: list[ToolCall] = []
    nameless: list[str] = []
    taken: set[str] = set()
    for item in listed if isinstance(listed, list) else ():
        function = item.get("function") if isinstance(item, Mapping) else None
        name = function.get("name") if isinstance(function, Mapping) else None
        if not isinstance(function, Mapping) or not isinstance(name, str) or not name:
            nameless.append(_json_text(item))
            continue
        call_id = item.get("id")
        if not isinstance(call_id, str) or not call_id or call_id in taken:
            call_id = new_call_id()  # results find their calls by id
        taken.add(call_id)
        extra = {key: value for key, value in item.items() if key not in _OF_A_CALL and value is not None}
        calls.append(ToolCall(call_id, name, _arguments_text(function.get("arguments")), freeze_dict(extra)))
    return tuple(calls), tuple(nameless)


def _arguments_text(arguments: object) -> str:
    """The text as sent; "" for null; a sloppy server's decoded object as compact JSON."""
    if isinstance(arguments, str):
        return arguments
    return "" if arguments is None else _json_text(arguments)


def _json_text(value: object) -> str:
    # Not orjson: it refuses half surrogate pairs, and models write them.
    return json.dumps(value, ensure_ascii=False, separators=(",", ":"))
