"""Immutable messages, and their conversion from and to plain OpenAI dicts.

One invariant: `Message.from_openai(m).to_openai()` has the content of `m`. The arguments of a tool call stay the text
that the model wrote; nothing here parses and re-serialises them. Fields that the classes do not name are in `extra`.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any, Literal, TypeAlias

from lachesis_messages.errors import MalformedMessage, UnknownRole
from lachesis_messages.frozen import FrozenDict, freeze, freeze_dict, thaw

Role: TypeAlias = Literal["system", "user", "assistant", "tool"]
ROLES: tuple[Role, ...] = ("system", "user", "assistant", "tool")
OpenAIMessage: TypeAlias = dict[str, Any]
Purpose: TypeAlias = Literal["turn", "summary", "given"]
"""Of a completion: a turn of the conversation, a summary that replaces messages of it, or a turn that no model of the
run sampled: a history keeps its message, as context without a completion."""

REASONING_FIELDS = ("reasoning_content", "reasoning", "reasoning_details")
"""The fields in which servers send reasoning, in order of preference; the last is a list of `{"text": ...}`."""
REASONING_KEYS = (*REASONING_FIELDS, "thinking", "thinking_blocks", "reasoning_text")
"""All keys of messages under which servers and writers of files keep it, in order of preference."""
REASONING_PARTS = frozenset(
    {"thinking", "redacted_thinking", "reasoning", "reasoning_text", "reasoning_content", "thought", "thoughts"}
)
"""Types of content parts that are reasoning: Mistral's, Anthropic's, Cohere's, and OpenAI's Responses API."""
CALL_PARTS = frozenset({"tool_use", "tool_call", "function_call", "toolCall", "functionCall"})
"""Types of content parts that are tool calls: Anthropic's, OpenAI's Responses API, and those of gateways."""
ARGUMENTS = ("arguments", "input", "args", "parameters")
"""The keys of a call under which its arguments may be."""


_NOTHING = FrozenDict()
"""Shared by all messages and calls without further fields, which are most of them."""


class FinishReason(StrEnum):
    """Why the server stopped. Never inferred: without a reason from the server it is `UNKNOWN`."""

    STOP = "stop"
    """The model ended its turn."""
    TOOL_CALLS = "tool_calls"
    """The model ended its turn with tool calls."""
    LENGTH = "length"
    """The token limit cut the turn off."""
    CONTENT_FILTER = "content_filter"
    """The server withheld the rest."""
    ABORT = "abort"
    """The server aborted it, for example for a weight update. No completion of a rollout ends this way."""
    UNKNOWN = "unknown"
    """The server gave no reason, or another one, which is in `ChatResponse.raw_finish_reason`."""


@dataclass(frozen=True, slots=True)
class ToolCall:
    """One tool call of a message. `arguments` is the JSON text as the model wrote it, valid or not."""

    id: str
    name: str
    arguments: str
    extra: Mapping[str, Any] = field(default_factory=lambda: _NOTHING, hash=False)
    """Further fields of the call, for example a signature that the provider expects back."""
    status: str | None = field(default=None, compare=False)
    """The parser's verdict on its form: "ok", "repaired" or "unknown_tool"; None if none of our parsers read it. It is
    not part of the message: requests and `to_openai` do not contain it."""
    error: str | None = field(default=None, compare=False)
    """What the parser repaired."""

    @property
    def ok(self) -> bool:
        """Whether the model wrote it as its format requires. A call from a server's own parser counts as such, since
        it is unknown what that parser tolerated."""
        return self.status in (None, "ok")

    @classmethod
    def from_openai(cls, call: Any, *, at: str = "tool_calls[0]", index: int | None = None) -> ToolCall:
        """Reads `{"id", "type": "function", "function": {"name", "arguments"}}`. `at` is its name in errors.

        In this format arguments are text. An object, which some servers send, becomes compact JSON; null, which some
        send for a call without arguments, becomes `{}`.
        """
        if not isinstance(call, Mapping):
            raise MalformedMessage(f"{at} is {_kind(call)}, not an object", index=index)
        if call.get("type") not in (None, "function"):
            raise MalformedMessage(f"{at} has type {call['type']!r}; only 'function' is supported", index=index)
        call_id = call.get("id")
        if not isinstance(call_id, str) or not call_id:
            raise MalformedMessage(f"{at} has no id (a text that its result names)", index=index)
        function = call.get("function")
        if not isinstance(function, Mapping):
            raise MalformedMessage(f"{at}.function is {_kind(function)}, not an object", index=index)
        name = function.get("name")
        if not isinstance(name, str) or not name:
            raise MalformedMessage(f"{at}.function has no name", index=index)
        arguments = function.get("arguments")
        if arguments is None:
            arguments = "{}"
        elif isinstance(arguments, Mapping):
            try:
                arguments = json.dumps(thaw(arguments), ensure_ascii=False, separators=(",", ":"))
            except (TypeError, ValueError) as error:
                raise MalformedMessage(f"{at}.function.arguments cannot become JSON: {error}", index=index) from None
        elif not isinstance(arguments, str):
            raise MalformedMessage(f"{at}.function.arguments is {_kind(arguments)}, not text", index=index)
        extra = _extra(call, ("id", "type", "function"), at, index)
        return cls(call_id, name, arguments, extra)

    def to_openai(self) -> dict[str, Any]:
        """A new plain dict."""
        plain = {"id": self.id, "type": "function", "function": {"name": self.name, "arguments": self.arguments}}
        return {**plain, **thaw(self.extra)} if self.extra else plain


@dataclass(frozen=True, slots=True)
class Message:
    """One message of a conversation. `content` is text, a tuple of OpenAI content parts, or None."""

    role: Role
    content: str | tuple[Mapping[str, Any], ...] | None = None
    tool_calls: tuple[ToolCall, ...] = ()
    tool_call_id: str | None = None
    name: str | None = None
    reasoning: str | None = None
    """The model's reasoning before the answer; a request only contains it in the field that the server accepts."""
    extra: Mapping[str, Any] = field(default_factory=lambda: _NOTHING, hash=False)
    """Further fields of the API message, unchanged, without nulls."""

    @classmethod
    def from_openai(cls, message: Any, index: int | None = None) -> Message:
        """Reads one API message; `index` is its position in the list, for errors.

        Reasoning is read from the first field of `REASONING_FIELDS` that is not empty, and from the content parts of
        `REASONING_PARTS`.

        Raises UnknownRole or MalformedMessage.
        """
        if not isinstance(message, Mapping):
            raise MalformedMessage(f"is {_kind(message)}, not an object", index=index)
        role = message.get("role")
        if role not in ROLES:
            hint = "; use 'system'" if role == "developer" else ""
            raise UnknownRole(f"unknown role {role!r}, expected one of {', '.join(ROLES)}{hint}", index=index)
        assistant = role == "assistant"
        for key in ("tool_calls", *REASONING_FIELDS):
            if not assistant and message.get(key):
                raise MalformedMessage(f"{key} in a {role} message; only assistant messages have them", index=index)
        if message.get("function_call"):
            raise MalformedMessage("function_call is the retired form of tool_calls; use tool_calls", index=index)
        tool_call_id = message.get("tool_call_id")
        if role == "tool":
            if not isinstance(tool_call_id, str) or not tool_call_id:
                raise MalformedMessage("a tool message needs the tool_call_id that it answers", index=index)
        elif tool_call_id is not None:
            raise MalformedMessage(f"tool_call_id in a {role} message", index=index)
        name = message.get("name")
        if name is not None and not isinstance(name, str):
            raise MalformedMessage(f"name is {_kind(name)}, not text", index=index)
        content = _content(message.get("content"), role, index)
        reasoning = _reasoning(message, index) if assistant else None
        if assistant and isinstance(content, tuple):
            content, own = without_reasoning_parts(content)
            reasoning = joined_reasoning(reasoning, own)
        return cls(
            role=role,
            content=content,
            tool_calls=_tool_calls(message.get("tool_calls"), index) if assistant else (),
            tool_call_id=tool_call_id,
            name=name,
            reasoning=reasoning,
            extra=_extra(message, _NAMED, "the message", index),
        )

    def to_openai(self, reasoning_field: str | None = None) -> OpenAIMessage:
        """A new plain dict, free to edit.

        Reasoning is left out unless `reasoning_field` names its key: "reasoning" for the internal full form, or the
        field in which a server accepts it ("reasoning_content" or "reasoning").
        """
        plain: OpenAIMessage = {"role": self.role}
        if self.tool_call_id is not None:
            plain["tool_call_id"] = self.tool_call_id
        if self.name is not None:
            plain["name"] = self.name
        plain["content"] = self.content if isinstance(self.content, str) else thaw(self.content)
        if self.tool_calls:
            plain["tool_calls"] = [call.to_openai() for call in self.tool_calls]
        if reasoning_field is not None and self.reasoning:
            plain[reasoning_field] = self.reasoning
        if self.extra:
            plain.update(thaw(self.extra))
        return plain

    @property
    def text(self) -> str:
        """The content as text: parts joined, None as the empty string."""
        if self.content is None:
            return ""
        if isinstance(self.content, str):
            return self.content
        return "".join(str(part.get("text", "")) for part in self.content)


_NAMED = ("role", "content", "tool_calls", "tool_call_id", "name", "function_call", *REASONING_FIELDS)


Messages: TypeAlias = Sequence[Mapping[str, Any]]


def _content(content: Any, role: str, index: int | None) -> str | tuple[Mapping[str, Any], ...] | None:
    if isinstance(content, str):
        return content
    if content is None:
        if role == "assistant":
            return None
        raise MalformedMessage(f"a {role} message needs content", index=index)
    if not isinstance(content, (list, tuple)):
        raise MalformedMessage(f"content is {_kind(content)}, not text, a list of parts or null", index=index)
    parts = []
    for at, part in enumerate(content):
        if not isinstance(part, Mapping) or not isinstance(part.get("type"), str):
            raise MalformedMessage(f"content[{at}] is not an object with a type", index=index)
        if part["type"] == "text" and not isinstance(part.get("text"), str):
            raise MalformedMessage(f"content[{at}] is a text part without text", index=index)
        try:
            parts.append(freeze_dict(part))
        except TypeError as error:
            raise MalformedMessage(f"content[{at}]: {error}", index=index) from None
    return tuple(parts)


def _tool_calls(calls: Any, index: int | None) -> tuple[ToolCall, ...]:
    if calls is None:
        return ()
    if not isinstance(calls, (list, tuple)):
        raise MalformedMessage(f"tool_calls is {_kind(calls)}, not a list", index=index)
    return tuple(ToolCall.from_openai(call, at=f"tool_calls[{at}]", index=index) for at, call in enumerate(calls))


def _reasoning(message: Mapping[str, Any], index: int | None) -> str | None:
    for key in REASONING_FIELDS[:2]:
        reasoning = message.get(key)
        if reasoning is not None and not isinstance(reasoning, str):
            raise MalformedMessage(f"{key} is {_kind(reasoning)}, not text", index=index)
        if reasoning:
            return reasoning
    details = message.get("reasoning_details")
    if details is None:
        return None
    if not isinstance(details, (list, tuple)):
        raise MalformedMessage(f"reasoning_details is {_kind(details)}, not a list", index=index)
    return thought(details) or None


_THOUGHT = ("thinking", "reasoning", "text", "content", "summary")
_THOUGHT_OF_GATEWAYS = ("reasoning_content", "reasoning_text", "reasoningContent", "reasoningText", "thought")


def thought(part: Any) -> str:
    """The text of a content part that is reasoning, or of a list of such parts or of their texts."""
    if isinstance(part, (list, tuple)):
        return "".join(map(thought, part))
    if isinstance(part, Mapping):
        return next(filter(None, (thought(part.get(key)) for key in (*_THOUGHT, *_THOUGHT_OF_GATEWAYS))), "")
    return part if isinstance(part, str) else ""


def is_reasoning_part(part: Any) -> bool:
    """Whether a content part is reasoning: by its type, by Gemini's mark, or by Bedrock's key."""
    if not isinstance(part, Mapping):
        return False
    return part.get("type") in REASONING_PARTS or part.get("thought") is True or "reasoningContent" in part


def is_call_part(part: Any) -> bool:
    """Whether a content part is a tool call."""
    return isinstance(part, Mapping) and part.get("type") in CALL_PARTS and call_function(part) is not None


def call_function(call: Any) -> Mapping[str, Any] | None:
    """Where a call has its name and its arguments: in OpenAI's `function`, or in itself; None where it has neither."""
    if not isinstance(call, Mapping):
        return None
    function = call.get("function")
    if isinstance(function, Mapping):
        return function
    named = isinstance(call.get("name"), str) and any(key in call for key in ARGUMENTS)
    return call if named else None


def without_reasoning_parts(content: Sequence[Any]) -> tuple[Any, str | None]:
    """The content parts of an answer without those that are reasoning, as text where the others are text, and the
    reasoning. Without any, the content is returned as it is."""
    if not any(map(is_reasoning_part, content)):
        return content, None
    reasoning = _lines(thought(part) for part in content if is_reasoning_part(part))
    rest = tuple(part for part in content if not is_reasoning_part(part))
    if all(isinstance(part, Mapping) and part.get("type") == "text" for part in rest):
        return "".join(str(part.get("text", "")) for part in rest) or None, reasoning
    return rest, reasoning


def joined_reasoning(native: str | None, own: str | None) -> str | None:
    """The server's reasoning and the content's. Some servers send the same text in both places."""
    if native and own and native.strip() == own.strip():
        return native
    return _lines((native, own))


def _lines(texts: Iterable[str | None]) -> str | None:
    return "\n".join(filter(None, texts)) or None


def _extra(mapping: Mapping[str, Any], named: tuple[str, ...], at: str, index: int | None) -> Mapping[str, Any]:
    extra = {key: value for key, value in mapping.items() if key not in named and value is not None}
    if not extra:
        return _NOTHING
    try:
        return FrozenDict({key: freeze(value) for key, value in extra.items()})
    except TypeError as error:
        raise MalformedMessage(f"a field of {at} ({', '.join(map(repr, extra))}): {error}", index=index) from None


def _kind(value: Any) -> str:
    return "missing" if value is None else type(value).__name__
