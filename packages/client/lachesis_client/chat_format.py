"""OpenAI's chat format: messages to a request, the server's answer to messages. No I/O.

Reading is lenient about form and strict about meaning: it drops nothing and invents nothing.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from inspect import signature
from typing import TYPE_CHECKING, Any, TypeAlias

from lachesis_client.chat_options import Tools
from lachesis_client.errors import BadResponse, ConversationRefused
from lachesis_client.finish_words import Ending, ending
from lachesis_client.server_words import blocked_prompt
from lachesis_messages.encoded import EncodedMessages, NodeMessages
from lachesis_messages.frozen import freeze_dict
from lachesis_messages.history import MessageHistory
from lachesis_messages.markup import NotJson, load_arguments, write_json
from lachesis_messages.messages import (
    ARGUMENTS,
    REASONING_KEYS,
    FinishReason,
    Message,
    ToolCall,
    call_function,
    is_call_part,
    is_reasoning_part,
    joined_reasoning,
    thought,
    without_reasoning_parts,
)
from lachesis_messages.responses import Usage
from tool_call_parsers.types import CALLABLE, CallStatus, ParsedCompletion, new_call_id

if TYPE_CHECKING:
    from tool_call_parsers import ToolCallParser

Payload: TypeAlias = dict[str, Any]
REASONING_FIELDS = ("reasoning_content", "reasoning")
_REASONING = frozenset((*REASONING_FIELDS, "reasoning_details"))
_OF_A_CALL = frozenset({"id", "call_id", "type", "function", "index"})
"""Fields of a call that are read. `index` belongs to streams and has no meaning in a whole answer."""
_OF_A_FLAT_CALL = _OF_A_CALL | {"name", *ARGUMENTS}
_NOT_MALFORMED = CALLABLE | {CallStatus.IN_REASONING}


def encode_messages(messages: Sequence[Message | Mapping[str, Any]], reasoning_field: str | None) -> list[Payload]:
    """Messages for a request, with reasoning under `reasoning_field`, or without it."""
    return [_encode_message(message, reasoning_field) for message in messages]


def request_messages(
    messages: Sequence[Message | Mapping[str, Any]], reasoning_field: str | None
) -> list[Payload] | EncodedMessages:
    """The same for `json_body`. Recorded messages keep their JSON, so a turn costs its new messages."""
    if isinstance(messages, (MessageHistory, NodeMessages)):
        return messages.encoded(reasoning_field)
    return [
        message
        if type(message) is dict and _REASONING.isdisjoint(message)
        else _encode_message(message, reasoning_field)
        for message in messages
    ]


def _encode_message(message: Message | Mapping[str, Any], reasoning_field: str | None) -> Payload:
    if isinstance(message, Message):
        return message.to_openai(reasoning_field)
    encoded = dict(message)
    if _REASONING.isdisjoint(encoded):
        return encoded
    reasoning = read_reasoning(message)
    for key in _REASONING:
        encoded.pop(key, None)
    if reasoning and reasoning_field and encoded.get("role") == "assistant":
        encoded[reasoning_field] = reasoning
    return encoded


def read_message(
    data: Mapping[str, Any], parser: ToolCallParser | None, tools: Tools | None
) -> tuple[Message, tuple[str, ...]]:
    """The assistant message of a choice, and the raw text of its malformed calls.

    Calls are the server's. `parser` reads the text only if the server returns none; malformed calls that it finds stay
    in the content too.
    """
    content, own = _read_content(data.get("content"))
    reasoning = joined_reasoning(read_reasoning(data), own)
    if isinstance(refusal := data.get("refusal"), str) and refusal and not content:
        content = refusal
    calls, malformed = _read_tool_calls(data)
    if not calls and not malformed and parser is not None and tools and isinstance(content, str):
        parsed = parse_text(parser, content, tools, prompt_opened_reasoning=_prompt_opened(parser, content))
        malformed = malformed_calls(parsed)
        if parsed.tool_calls or parsed.reasoning:
            content = parsed.content
            reasoning = joined_reasoning(reasoning, parsed.reasoning)
            calls = parsed_calls(parsed)
    return Message("assistant", content=content, tool_calls=calls, reasoning=reasoning), malformed


def parse_text(parser: Any, text: str, tools: Tools, **options: Any) -> ParsedCompletion:
    """`parser.parse` with those of our parsers' options that it takes: registered classes do not need to take any."""
    from tool_call_parsers import ToolCallParser

    if not isinstance(parser, ToolCallParser):
        taken = signature(parser.parse).parameters
        if all(parameter.kind is not parameter.VAR_KEYWORD for parameter in taken.values()):
            options = {name: value for name, value in options.items() if name in taken}
    parsed: ParsedCompletion = parser.parse(text, tools, **options)
    return parsed


def parsed_calls(parsed: ParsedCompletion) -> tuple[ToolCall, ...]:
    """The calls that a parser found."""
    return tuple(
        ToolCall(call.id, call.name, call.arguments_json, status=str(call.status), error=call.error)
        for call in parsed.tool_calls
    )


def malformed_calls(parsed: ParsedCompletion) -> tuple[str, ...]:
    """The raw text of calls that begin and cannot be read."""
    return tuple(attempt.raw for attempt in parsed.attempts if attempt.status not in _NOT_MALFORMED)


def _prompt_opened(parser: ToolCallParser, content: str) -> bool:
    """Whether the content closes a reasoning block that the prompt opened."""
    shape = getattr(parser, "reasoning", None)  # third-party parsers may have none
    if shape is None:
        return False
    closes = [position for marker in shape.closes if (position := content.find(marker)) >= 0]
    return bool(closes) and not any(marker in content[: min(closes)] for marker in shape.opens)


def is_refusal(data: Mapping[str, Any]) -> bool:
    """Whether the server marks the message as the model's refusal, whose text is then its content."""
    content = data.get("content")
    parts = content if isinstance(content, list) else ()
    return bool(data.get("refusal")) or any(isinstance(part, Mapping) and part.get("refusal") for part in parts)


def read_reasoning(data: Mapping[str, Any]) -> str | None:
    """From the first of `REASONING_KEYS` that has any, in whatever form: a text, parts of it, an object around it."""
    return next(filter(None, (thought(data[key]) for key in REASONING_KEYS if data.get(key))), None)


def read_finish_reason(raw: object) -> FinishReason:
    """The member of the enum that the server's word means; `UNKNOWN` where it gives none, or means none of them."""
    meant = ending(raw)
    return meant if isinstance(meant, FinishReason) else FinishReason.UNKNOWN


def raw_finish_reason(choice: Mapping[str, Any]) -> str | None:
    """As the server wrote it. A router that writes "error" may add the provider's word (OpenRouter)."""
    reason, native = choice.get("finish_reason"), choice.get("native_finish_reason")
    if isinstance(reason, Mapping):  # SGLang's own form
        reason = reason.get("type")
    if reason == "error" and isinstance(native, str) and ending(native) is not Ending.BROKEN:
        return native
    return reason if reason is None or isinstance(reason, str) else _json_text(reason)


def finish_reasons(body: Mapping[str, Any]) -> list[str]:
    """As the server wrote them."""
    choices = body.get("choices")
    if not isinstance(choices, list):
        return []
    return [
        reason for choice in choices if isinstance(choice, dict) and (reason := raw_finish_reason(choice)) is not None
    ]


def read_usage(body: Mapping[str, Any]) -> Usage:
    """The server's token counts."""
    usage = body.get("usage")
    if not isinstance(usage, dict):
        return Usage()
    prompt, completion = usage.get("prompt_tokens"), usage.get("completion_tokens")
    return Usage(
        prompt if isinstance(prompt, int) else None,
        completion if isinstance(completion, int) else None,
        cached_tokens(usage),
    )


def cached_tokens(usage: object) -> int | None:
    """Tokens of the prompt that OpenAI's `usage` counts as cached; vLLM needs --enable-prompt-tokens-details."""
    details = usage.get("prompt_tokens_details") if isinstance(usage, dict) else None
    count = details.get("cached_tokens") if isinstance(details, dict) else None
    return count if isinstance(count, int) else None


def read_choices(body: Mapping[str, Any], server: str) -> list[Mapping[str, Any]]:
    """The choices of a chat completion, in order. Raises `BadResponse` unless each has a message, and
    `ConversationRefused` where the server blocked the prompt."""
    choices = body.get("choices")
    if not isinstance(choices, list) or not choices:
        if why := blocked_prompt(body):
            raise ConversationRefused(server, 200, f"the prompt is blocked: {why}")
        raise BadResponse(server, f"the answer has no choices (its keys: {', '.join(map(str, body)) or 'none'})")
    return in_order([_with_message(choice, server) for choice in choices])


def in_order(choices: Sequence[Mapping[str, Any]]) -> list[Mapping[str, Any]]:
    """By `index`: gateways that ask several servers list choices as they come."""
    return sorted(choices, key=lambda choice: index if isinstance(index := choice.get("index"), int) else 0)


def _with_message(choice: object, server: str) -> Mapping[str, Any]:
    if isinstance(choice, dict) and isinstance(choice.get("message"), dict):
        return choice
    if isinstance(choice, dict) and ending(raw_finish_reason(choice)) in (
        FinishReason.CONTENT_FILTER,
        FinishReason.LENGTH,
    ):  # nothing was left of it
        return {**choice, "message": {"role": "assistant", "content": None}}
    raise BadResponse(server, "a choice of the answer has no message")


def restate_choices(
    body: Mapping[str, Any], server: str, parser: ToolCallParser | None, tools: Tools | None
) -> dict[str, Any]:
    """The body with every message as `read_message` reads it, in OpenAI's form."""
    choices = []
    for choice in read_choices(body, server):
        message, _ = read_message(choice["message"], parser, tools)
        restated = {**choice["message"], **_encode_message(message, "reasoning_content")}
        choices.append({**choice, "message": restated})
    return {**body, "choices": choices}


def _read_content(content: object) -> tuple[str | tuple[Mapping[str, Any], ...] | None, str | None]:
    """The content, and the reasoning in parts of it. Calls in parts are read apart."""
    if content is None or isinstance(content, str):
        return content, None
    if isinstance(content, Mapping) and ("type" in content or isinstance(content.get("text"), str)):
        content = [content]
    if not isinstance(content, list):
        return _json_text(content), None
    read = [_read_part(part) for part in content if part is not None and not is_call_part(part)]
    parts, reasoning = without_reasoning_parts(read)
    if isinstance(parts, list) and all(part["type"] == "text" for part in parts):
        return "".join(part["text"] for part in parts), reasoning
    return tuple(parts) if isinstance(parts, list) else parts, reasoning


def _read_part(part: object) -> Mapping[str, Any]:
    """A content part with a type, and with a text if it is a text part."""
    if not isinstance(part, Mapping):
        return {"type": "text", "text": part if isinstance(part, str) else _json_text(part)}
    if is_reasoning_part(part):
        return part
    if (part.get("type") or "text") in ("text", "output_text", "refusal"):
        return {"type": "text", "text": str(part.get("text") or part.get("refusal") or "")}
    return {**part, "type": str(part["type"])}


def _read_tool_calls(data: Mapping[str, Any]) -> tuple[tuple[ToolCall, ...], tuple[str, ...]]:
    """The calls, and the JSON of those that name no function. A call keeps its unknown fields."""
    calls: list[ToolCall] = []
    nameless: list[str] = []
    taken: set[str] = set()
    for item in _listed_calls(data):
        function, fields = call_function(item), _OF_A_CALL
        if function is item:
            fields = _OF_A_FLAT_CALL
        name = function.get("name") if function is not None else None
        if function is None or not isinstance(name, str) or not name:
            nameless.append(_json_text(item))
            continue
        call_id = item.get("id") or item.get("call_id")
        if not isinstance(call_id, str) or not call_id or call_id in taken:
            call_id = new_call_id()  # tool results refer to calls by id
        taken.add(call_id)
        extra = {key: value for key, value in item.items() if key not in fields and value is not None}
        text = _arguments_text(next((function[key] for key in ARGUMENTS if function.get(key) is not None), None))
        inner = _encoded_twice(text)
        repaired = {"status": str(CallStatus.REPAIRED), "error": "the arguments are a JSON string"}
        calls.append(ToolCall(call_id, name, inner or text, freeze_dict(extra), **(repaired if inner else {})))
    return tuple(calls), tuple(nameless)


def _listed_calls(data: Mapping[str, Any]) -> list[Any]:
    """The calls of an answer: in `tool_calls`, in content parts (Anthropic, Responses), or in the retired
    `function_call`."""
    listed = data.get("tool_calls")
    if isinstance(listed, str):
        try:
            listed = json.loads(listed)
        except (ValueError, RecursionError):
            listed = [listed] if listed.strip() else None
    if isinstance(listed, dict):
        listed = [listed] if call_function(listed) is not None else list(listed.values())
    content = data.get("content")
    found = list(listed) if isinstance(listed, list) else []
    found = found or [part for part in (content if isinstance(content, list) else ()) if is_call_part(part)]
    retired = data.get("function_call")
    return found or ([{"function": retired}] if isinstance(retired, dict) and retired.get("name") else [])


def _arguments_text(arguments: object) -> str:
    """The text; "" for null; compact JSON for servers that send an object. Some write an empty one as `[]` (PHP)."""
    if isinstance(arguments, str):
        return arguments
    if arguments == []:
        return "{}"
    return "" if arguments is None else _json_text(arguments)


def _encoded_twice(text: str) -> str:
    """The arguments in the JSON text of a text, as some servers write them; else empty."""
    if not text.lstrip().startswith('"'):
        return ""
    try:
        return write_json(load_arguments(text))
    except NotJson:
        return ""


def _json_text(value: object) -> str:
    # Not orjson: it rejects lone surrogates, which models write.
    return json.dumps(value, ensure_ascii=False, separators=(",", ":"))
