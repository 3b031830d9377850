"""Anthropic's `/v1/messages` and `/v1/messages/count_tokens`."""

from __future__ import annotations

import json
import uuid
from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, Any, ClassVar, Final

from lachesis_messages.messages import FinishReason, Message
from lachesis_messages.responses import ChatResponse
from lachesis_tokens.endpoint.protocol import Protocol
from lachesis_tokens.wire.request import (
    JSON,
    ChatRequest,
    Refused,
    function_tools,
    refuse_unknown,
    stop_texts,
    take,
    wanted_sampling,
    whole,
)
from lachesis_tokens.wire.writing import event, usage_of

if TYPE_CHECKING:
    from lachesis_tokens.endpoint.recording import Recording

_KNOWN: Final = frozenset(
    {"model", "messages", "system", "tools", "tool_choice", "max_tokens", "stop_sequences", "stream", "metadata"}
    | {"temperature", "top_p", "top_k", "service_tier", "thinking", "output_config", "context_management"}
)
_ERRORS: Final = {401: "authentication_error", 403: "permission_error", 404: "not_found_error"}
_STOPS: Final = {
    FinishReason.LENGTH: "max_tokens",
    FinishReason.TOOL_CALLS: "tool_use",
    FinishReason.CONTENT_FILTER: "refusal",
}


class Messages(Protocol):
    """The messages route of Anthropic."""

    ping: ClassVar[bytes] = b'event: ping\ndata: {"type": "ping"}\n\n'

    async def complete(self, body: JSON, recording: Recording) -> JSON:
        request = read(body)
        if whole(body, "max_tokens") is None:
            raise Refused(400, "max_tokens: Field required", param="max_tokens")
        (response,) = await recording.chat(request)
        return write(response, recording.stopped_by(response, request.stop))

    def events(self, body: JSON, answer: JSON) -> Iterator[bytes]:
        return events(answer)

    def error(self, refused: Refused) -> JSON:
        kind = _ERRORS.get(refused.status, "invalid_request_error" if refused.status < 500 else "api_error")
        return {"type": "error", "error": {"type": kind, "message": str(refused)}, "request_id": None}

    def error_event(self, refused: Refused) -> bytes:
        return event(self.error(refused))


class CountTokens(Messages):
    """The length of a prompt."""

    async def complete(self, body: JSON, recording: Recording) -> JSON:
        if body.get("stream"):
            raise Refused(400, "stream: a count is no stream", param="stream")
        return {"input_tokens": await recording.prompt_length(read(body))}


def read(body: JSON) -> ChatRequest:
    """The request. Raises `Refused`."""
    refuse_unknown(body, _KNOWN)
    for edit in take(take(body, "context_management", dict, default={}), "edits", list, default=[]):
        if not isinstance(edit, Mapping) or edit.get("keep") != "all":
            raise Refused(400, f"context_management: no edits are supported, so not {edit}", param="context_management")
    given = take(body, "messages", list)
    if not given:
        raise Refused(400, "messages: a list of at least one message is required", param="messages")
    messages: list[JSON | Message] = []
    if (system := take(body, "system", str, list)) is not None:
        messages.append({"role": "system", "content": _text(system, "system", "\n")})
    for place, message in enumerate(given):
        messages += read_message(message, f"messages.{place}")
    if given[-1]["role"] == "assistant":
        raise Refused(400, "messages: the last one is the assistant's; an answer cannot be prefilled", param="messages")
    if take(body, "output_config", dict, default={}).get("format"):
        raise Refused(400, "output_config.format: only text is supported", param="output_config")
    choice = take(body, "tool_choice", dict, default={})
    return ChatRequest(
        messages=messages,
        tools=function_tools([read_tool(tool) for tool in take(body, "tools", list, default=[])]),
        tool_choice=read_choice(choice),
        max_tokens=whole(body, "max_tokens"),
        stop=stop_texts(body, "stop_sequences"),
        sampling=wanted_sampling(body),
        wishes={"parallel_tool_calls": False} if choice.get("disable_parallel_tool_use") else {},
        overruled=tuple(name for name in ("thinking", "output_config") if body.get(name)),
    )


def read_tool(tool: Any) -> Any:
    """OpenAI's definition of a tool. Tools that Anthropic's servers run stay as they are, and are refused."""
    if not isinstance(tool, Mapping) or tool.get("type") not in (None, "custom"):
        return tool
    function = {"name": tool.get("name"), "parameters": tool.get("input_schema") or {}}
    if tool.get("description"):
        function["description"] = tool["description"]
    return {"type": "function", "function": function}


def read_choice(choice: JSON) -> str | JSON | None:
    """OpenAI's `tool_choice`."""
    match choice.get("type"):
        case None | "auto" | "none" as same:
            return same
        case "any":
            return "required"
        case "tool":
            return {"type": "function", "function": {"name": choice.get("name")}}
        case other:
            raise Refused(400, f"tool_choice.type {other!r} is not supported", param="tool_choice")


def read_message(message: Any, at: str) -> list[JSON]:
    """OpenAI's messages for one of Anthropic's: tool results are messages of their own."""
    if not isinstance(message, Mapping) or message.get("role") not in ("user", "assistant", "system"):
        raise Refused(400, f"{at}: the role must be user or assistant", param=at)
    role, content = message["role"], message.get("content")
    if isinstance(content, str):
        return [{"role": role, "content": content}]
    if not isinstance(content, list):
        raise Refused(400, f"{at}.content is neither text nor a list of blocks", param=at)
    if role == "assistant":
        return [_assistant(content, at)]
    if not content:
        raise Refused(400, f"{at}.content is empty", param=at)
    found: list[JSON] = []
    texts: list[Any] = []

    def flush() -> None:
        if texts:
            found.append({"role": role, "content": _text(texts, at, "\n")})
            texts.clear()

    for block in content:
        kind = block.get("type") if isinstance(block, Mapping) else None
        if kind == "tool_result":
            flush()
            inner = block.get("content")
            text = "" if inner is None else _text(inner, f"{at}: the content of a tool_result", "\n")
            found.append({"role": "tool", "tool_call_id": block.get("tool_use_id"), "content": text})
        else:
            texts.append(block)
    flush()
    return found


def _assistant(blocks: list[Any], at: str) -> JSON:
    texts, thoughts, calls = [], [], []
    for block in blocks:
        kind = block.get("type") if isinstance(block, Mapping) else None
        if kind == "text":
            texts.append(block)
        elif kind == "thinking":
            thoughts.append(str(block.get("thinking") or ""))
        elif kind == "tool_use":
            arguments = json.dumps(block.get("input") or {}, ensure_ascii=False)
            function = {"name": block.get("name"), "arguments": arguments}
            calls.append({"id": block.get("id"), "type": "function", "function": function})
        elif kind != "redacted_thinking":  # it is of another server, and no model here can read it
            raise Refused(400, f"{at}: a block of type {kind!r} is not supported", param=at)
    message: JSON = {"role": "assistant", "content": _text(texts, at, "")}
    if calls:
        message["tool_calls"] = calls
    if reasoning := "".join(thoughts):
        message["reasoning"] = reasoning
    return message


def _text(blocks: Any, at: str, between: str) -> str:
    """The text of a text or of text blocks."""
    if isinstance(blocks, str):
        return blocks
    texts = []
    for block in blocks if isinstance(blocks, list) else [blocks]:
        text = block.get("text") if isinstance(block, Mapping) and block.get("type") == "text" else None
        if not isinstance(text, str):
            kind = block.get("type") if isinstance(block, Mapping) else type(block).__name__
            raise Refused(400, f"{at}: a block of type {kind!r} is not supported; only text is", param=at)
        texts.append(text)
    return between.join(texts)


def write(response: ChatResponse, stop: str | None = None) -> JSON:
    """Anthropic's message. `stop` is the stop sequence that ended it."""
    message = response.message
    content: list[JSON] = []
    if message.reasoning:
        content.append({"type": "thinking", "thinking": message.reasoning, "signature": ""})
    if message.text:
        content.append({"type": "text", "text": message.text, "citations": None})
    content += [
        {"type": "tool_use", "id": call.id, "name": call.name, "input": input_of(call.arguments)}
        for call in message.tool_calls
    ]
    prompt, sampled = usage_of([response])
    return {
        "id": f"msg_{uuid.uuid4().hex}",
        "type": "message",
        "role": "assistant",
        "model": response.model or "",
        "content": content,
        "stop_reason": "stop_sequence" if stop else _STOPS.get(response.finish_reason, "end_turn"),
        "stop_sequence": stop,
        "usage": {
            "input_tokens": prompt,
            "output_tokens": sampled,
            "cache_creation_input_tokens": 0,
            "cache_read_input_tokens": 0,
        },
    }


def input_of(arguments: str) -> JSON:
    """The input of a tool: an object. Arguments that are none are shown as text."""
    try:
        found = json.loads(arguments or "{}")
    except (ValueError, RecursionError):
        found = None
    return found if isinstance(found, dict) else {"arguments": arguments}


def events(answer: JSON) -> Iterator[bytes]:
    """The events of a stream."""
    usage = answer["usage"]
    opened = {
        **answer,
        "content": [],
        "stop_reason": None,
        "stop_sequence": None,
        "usage": {**usage, "output_tokens": 0},
    }
    yield event({"type": "message_start", "message": opened})
    for index, block in enumerate(answer["content"]):
        start, deltas = _parts(block)
        yield event({"type": "content_block_start", "index": index, "content_block": start})
        for delta in deltas:
            yield event({"type": "content_block_delta", "index": index, "delta": delta})
        yield event({"type": "content_block_stop", "index": index})
    ended = {"stop_reason": answer["stop_reason"], "stop_sequence": answer["stop_sequence"]}
    yield event({"type": "message_delta", "delta": ended, "usage": usage})
    yield event({"type": "message_stop"})


def _parts(block: JSON) -> tuple[JSON, list[JSON]]:
    """How a block begins, and its deltas."""
    match block["type"]:
        case "thinking":
            return {**block, "thinking": ""}, [{"type": "thinking_delta", "thinking": block["thinking"]}]
        case "text":
            return {**block, "text": ""}, [{"type": "text_delta", "text": block["text"]}]
        case _:
            written = json.dumps(block["input"], ensure_ascii=False)
            return {**block, "input": {}}, [{"type": "input_json_delta", "partial_json": written}]
