"""Conversations in the ShareGPT form that the trajectory format of Hermes Agent defines.

With the defaults, every `gpt` turn begins with exactly one think block, every tool call is one `<tool_call>` block of
JSON, and all results that follow an assistant message share one `tool` turn, in the order of the calls. Text that
contains tags of the format survives a round trip (`markup`). `warnings` name every other change.
"""

from __future__ import annotations

import json
import logging
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum
from typing import Any, Literal, NamedTuple, TypeAlias

from backends.text import without_lone_surrogates
from lachesis_messages.markup import (
    EMPTY_THINK,
    NotJson,
    convert_scratchpad_to_think,
    dump_json,
    escape_text,
    inside,
    load_arguments,
    load_json,
    split_opened_think,
    split_think,
    think_block,
)
from lachesis_messages.message_rules import validate_messages
from lachesis_messages.messages import Message, ToolCall
from lachesis_messages.responses import MessageLike, as_message

Turn: TypeAlias = dict[str, str]
Tools: TypeAlias = Iterable[Mapping[str, Any]]
SystemTurn: TypeAlias = Literal["generated", "actual", "none"]
ToolPayload: TypeAlias = Literal["json", "raw"]

SYSTEM_PREFIX = (
    "You are a function calling AI model. You are provided with function signatures within <tools> </tools> XML tags."
    " You may call one or more functions to assist with the user query. If available tools are not relevant in"
    " assisting with user query, just respond in natural conversational language. Don't make assumptions about what"
    " values to plug into functions. After calling & executing the functions, you will be provided with function"
    " results within <tool_response> </tool_response> XML tags. Here are the available tools:\n<tools>\n"
)
SYSTEM_SUFFIX = (
    "\n</tools>\nFor each function call return a JSON object, with the following pydantic model json schema for each:\n"
    "{'title': 'FunctionCall', 'type': 'object', 'properties': {'name': {'title': 'Name', 'type': 'string'},"
    " 'arguments': {'title': 'Arguments', 'type': 'object'}}, 'required': ['name', 'arguments']}\n"
    "Each function call should be enclosed within <tool_call> </tool_call> XML tags.\n"
    "Example:\n<tool_call>\n{'name': <function-name>,'arguments': <args-dict>}\n</tool_call>"
)
PARTS_OMITTED = "parts_omitted"
RESULT_KEYS = ("tool_call_id", "name", "content")

_SURROGATE = re.compile("[\ud800-\udfff]")


class WarningKind(StrEnum):
    """Kinds of changes that a conversion made to the content."""

    ARGUMENTS_REPLACED = "arguments_replaced"
    """Arguments that are not a JSON object, replaced by `{}`. Such a trajectory is never marked completed."""
    TEXT_ESCAPED = "text_escaped"
    """A tag of the format in the assistant's text or in a raw tool result, written as `&lt;...`."""
    PART_OMITTED = "part_omitted"
    """A content part that is not text (an image, audio), replaced by its type in brackets."""
    CHARACTER_REPLACED = "character_replaced"
    """Half of a surrogate pair, which UTF-8 cannot hold, replaced by U+FFFD."""


log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class ConversionWarning:
    """One change. `index` is the place of the message in the converted list."""

    kind: WarningKind
    index: int
    detail: str

    def __str__(self) -> str:
        return f"message {self.index}: {self.detail}"


class Conversion(NamedTuple):
    """ShareGPT turns (`{"from", "value"}`), and the changes to their content."""

    conversations: list[Turn]
    warnings: tuple[ConversionWarning, ...]

    @property
    def malformed(self) -> bool:
        """Whether the arguments of a tool call were replaced."""
        return any(warning.kind is WarningKind.ARGUMENTS_REPLACED for warning in self.warnings)

    @property
    def omitted(self) -> dict[str, int]:
        """The key that says in an entry how many parts are missing; empty where none is."""
        count = sum(warning.kind is WarningKind.PART_OMITTED for warning in self.warnings)
        return {PARTS_OMITTED: count} if count else {}


def to_conversations(
    messages: Iterable[MessageLike],
    tools: Tools = (),
    *,
    completed: bool = True,
    of_program: bool = False,
    system: SystemTurn = "generated",
    empty_think: bool = True,
    tool_payload: ToolPayload = "json",
) -> Conversion:
    """Converts API messages to ShareGPT turns.

    `completed=False` allows a conversation whose last tool calls have no results. `of_program` allows that too, and
    system messages anywhere: programs do both.
    `system`: the function-calling prompt with `tools`, the system message of the conversation, or no system turn.
    `empty_think`: write an empty think block into each `gpt` turn without reasoning.
    `tool_payload`: results as JSON (`tool_call_id`, `name`, `content`), or as bare text.

    Raises MessageError where `messages` are not a valid conversation.
    """
    read = [as_message(message, index) for index, message in enumerate(messages)]
    validate_messages(read, complete=completed and not of_program, late_system=of_program)
    writer = _Writer(empty_think, tool_payload)
    if system == "generated":
        writer.add(0, "system", system_prompt(tools))
    calls: dict[str, tuple[int, ToolCall]] = {}
    index = 0
    while index < len(read):
        message, first = read[index], index
        index += 1
        if message.role == "system":
            if system == "actual" or first:
                writer.add(first, "system", writer.text(first, message))
        elif message.role == "user":
            writer.add(first, "human", writer.text(first, message))
        elif message.role == "assistant":
            calls = {call.id: (place, call) for place, call in enumerate(message.tool_calls)}
            writer.add(first, "gpt", writer.gpt(first, message))
        else:
            while index < len(read) and read[index].role == "tool":
                index += 1
            # Calls have no id in this format: a reader pairs them with their results by order.
            results = sorted(enumerate(read[first:index], first), key=lambda r: calls[r[1].tool_call_id or ""][0])
            blocks = [writer.result(at, result, calls[result.tool_call_id or ""][1]) for at, result in results]
            writer.add(first, "tool", "\n".join(blocks))
    conversion = Conversion(writer.turns, tuple(writer.warnings))
    if conversion.malformed:
        replaced = [str(each) for each in conversion.warnings if each.kind is WarningKind.ARGUMENTS_REPLACED]
        log.warning("%s", "; ".join(replaced))
    return conversion


def system_prompt(tools: Tools) -> str:
    """The function-calling system prompt of the format. `tools` are OpenAI definitions, or bare functions."""
    signatures = [
        {
            "name": function["name"],
            "description": function.get("description", ""),
            "parameters": function.get("parameters", {}),
            "required": None,  # the format has the key without a value
        }
        for function in map(tool_function, tools)
    ]
    return SYSTEM_PREFIX + dump_json(signatures) + SYSTEM_SUFFIX


def tool_function(tool: Mapping[str, Any]) -> Mapping[str, Any]:
    """The function of an OpenAI tool definition, or a bare function itself."""
    function = tool.get("function", tool)
    if not isinstance(function, Mapping) or not isinstance(function.get("name"), str):
        raise ValueError(f"a tool definition without a name: {json.dumps(tool, default=repr)[:200]}")
    return function


class _Writer:
    """Collects the turns and warnings of one conversion."""

    def __init__(self, empty_think: bool, tool_payload: ToolPayload) -> None:
        self.turns: list[Turn] = []
        self.warnings: list[ConversionWarning] = []
        self._empty_think = empty_think
        self._tool_payload = tool_payload

    def add(self, index: int, role: str, value: str) -> None:
        if not value.isascii() and _SURROGATE.search(value):
            value = without_lone_surrogates(value)
            self._warn(WarningKind.CHARACTER_REPLACED, index, "half of a surrogate pair replaced by U+FFFD")
        self.turns.append({"from": role, "value": value})

    def text(self, index: int, message: Message) -> str:
        if message.content is None or isinstance(message.content, str):
            return message.content or ""
        texts = []
        for part in message.content:
            if part["type"] == "text":
                texts.append(part["text"])
            else:
                texts.append(f"[{part['type']}]")
                self._warn(WarningKind.PART_OMITTED, index, f"a part of type {part['type']!r} has no place in text")
        return "".join(texts)

    def gpt(self, index: int, message: Message) -> str:
        native = message.reasoning if message.reasoning and message.reasoning.strip() else ""
        own, content = split_think(convert_scratchpad_to_think(self.text(index, message)))
        if not native and not own:
            own, content = split_opened_think(content)
        if content.lstrip().startswith("<think>"):
            # The token limit cut it off; or the model went from it straight to a call, which the server took out.
            own, content = "\n".join(filter(None, (own, inside(content.lstrip().removeprefix("<think>"))))), ""
        # Some servers send the reasoning in its field and in the content.
        reasoning = f"{native}\n{own}" if native and own and native.strip() != own.strip() else native or own
        reasoning = reasoning if reasoning.strip() else ""  # readers take a block of white space for an empty one too
        value = think_block(reasoning) if reasoning else EMPTY_THINK if self._empty_think else ""
        if reasoning:
            self._warn_if_escaped(index, reasoning, escape_text(reasoning, think=True))
        escaped = escape_text(content)
        self._warn_if_escaped(index, content, escaped)
        if not message.tool_calls:
            return (value + escaped).rstrip()
        if content.strip():
            value += escaped + "\n"
        return value + "\n".join(self._call(index, call) for call in message.tool_calls)

    def result(self, index: int, message: Message, call: ToolCall) -> str:
        text = self.text(index, message)
        content: Any = text
        if text.startswith(("{", "[")):
            try:
                content = load_json(text, unique_keys=True)
            except NotJson:
                content = text
        # A raw result of the same shape as a structured one is wrapped, so that readers can tell them apart.
        if self._tool_payload == "json" or is_structured_result(content):
            payload = dump_json(dict(zip(RESULT_KEYS, (message.tool_call_id, call.name, content), strict=True)))
        else:
            payload = escape_text(text)
            self._warn_if_escaped(index, text, payload)
        return f"<tool_response>\n{payload}\n</tool_response>"

    def _call(self, index: int, call: ToolCall) -> str:
        try:
            arguments = load_arguments(call.arguments)
        except NotJson as error:
            arguments = self._replace(index, call, str(error))
        return f"<tool_call>\n{dump_json({'name': call.name, 'arguments': arguments})}\n</tool_call>"

    def _replace(self, index: int, call: ToolCall, reason: str) -> dict[str, Any]:
        detail = f"arguments of {call.name} ({call.id}) replaced by {{}}: {reason}"
        self._warn(WarningKind.ARGUMENTS_REPLACED, index, detail)
        return {}

    def _warn_if_escaped(self, index: int, text: str, escaped: str) -> None:
        if text != escaped:
            self._warn(WarningKind.TEXT_ESCAPED, index, "a tag of the format in the text is written as &lt;")

    def _warn(self, kind: WarningKind, index: int, detail: str) -> None:
        self.warnings.append(ConversionWarning(kind, index, detail))


def is_structured_result(value: Any) -> bool:
    """Whether a value is a tool result of the JSON form."""
    return isinstance(value, dict) and set(value) == set(RESULT_KEYS)


def conversation_tools(conversations: Sequence[Mapping[str, str]]) -> list[dict[str, Any]] | None:
    """The function signatures of a generated system turn; None where the conversation begins with none."""
    first = conversations[0] if conversations else {}
    text = first.get("value")
    if first.get("from") != "system" or not isinstance(text, str):
        return None
    if not (text.startswith(SYSTEM_PREFIX) and text.endswith(SYSTEM_SUFFIX)):
        return None
    try:
        signatures = load_json(text[len(SYSTEM_PREFIX) : -len(SYSTEM_SUFFIX)])
    except NotJson:
        return None
    return signatures if isinstance(signatures, list) else None
