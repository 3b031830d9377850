"""OpenAI's `/v1/responses`."""

from __future__ import annotations

import time
import uuid
from collections.abc import Iterator, Mapping, Sequence
from itertools import count
from typing import TYPE_CHECKING, Any, Final

from lachesis_messages.messages import FinishReason, Message
from lachesis_messages.responses import ChatResponse
from lachesis_tokens.endpoint.protocol import Protocol
from lachesis_tokens.wire import openai_chat
from lachesis_tokens.wire.request import (
    JSON,
    ChatRequest,
    Refused,
    function_tools,
    refuse_unknown,
    take,
    wanted_sampling,
    whole,
)
from lachesis_tokens.wire.writing import event, usage_of

if TYPE_CHECKING:
    from lachesis_tokens.endpoint.recording import Recording

_NO_EFFECT: Final = frozenset(
    {"model", "stream", "stream_options", "store", "metadata", "user", "service_tier", "safety_identifier", "include"}
    | {"prompt_cache_key", "prompt_cache_retention", "client_metadata", "max_tool_calls"}
)
"""Fields that do not affect sampling. `max_tool_calls` counts the tools that OpenAI's servers run."""
_KNOWN: Final = _NO_EFFECT | {
    *("input", "instructions", "tools", "tool_choice", "previous_response_id", "max_output_tokens", "text"),
    *("temperature", "top_p", "parallel_tool_calls", "reasoning", "truncation"),
}
_TEXTS: Final = ("input_text", "output_text", "text", "reasoning_text", "summary_text", "refusal")


class Responses(Protocol):
    """The responses route of OpenAI."""

    async def complete(self, body: JSON, recording: Recording) -> JSON:
        request = read(body, recording.answered)
        (response,) = await recording.chat(request)
        written = answer(body, response)
        # The instructions of a request are not those of the next.
        kept = request.messages[1:] if body.get("instructions") else request.messages
        recording.answered[written["id"]] = [*kept, response.message]
        return written

    def events(self, body: JSON, answer: JSON) -> Iterator[bytes]:
        return events(answer)

    def error(self, refused: Refused) -> JSON:
        return openai_chat.error(refused)

    def error_event(self, refused: Refused) -> bytes:
        found = {"code": refused.code, "message": str(refused), "param": refused.param}
        return event({"type": "error", **found, "sequence_number": 0})


def read(body: JSON, answered: Mapping[str, list[JSON | Message]]) -> ChatRequest:
    """The request. `answered` has the conversations up to earlier answers, by their ids. Raises `Refused`."""
    refuse_unknown(body, _KNOWN)
    if body.get("truncation") not in (None, "disabled"):
        raise Refused(400, "truncation: conversations are never shortened here", param="truncation")
    text = take(body, "text", dict, default={})
    if take(text, "format", dict, default={}).get("type", "text") != "text":
        raise Refused(400, "text.format: only text is supported", code="unsupported_parameter", param="text")
    messages: list[JSON | Message] = []
    if instructions := take(body, "instructions", str):
        messages.append({"role": "system", "content": instructions})
    if (previous := take(body, "previous_response_id", str)) is not None:
        if previous not in answered:
            raise Refused(404, f"Previous response with id '{previous}' not found.", param="previous_response_id")
        messages += answered[previous]
    given = take(body, "input", str, list, default=[])
    messages += [{"role": "user", "content": given}] if isinstance(given, str) else read_items(given)
    if not messages:
        raise Refused(400, "input: a text or a list of items is required", param="input")
    return ChatRequest(
        messages=messages,
        tools=function_tools([read_tool(tool) for tool in take(body, "tools", list, default=[])]),
        tool_choice=read_choice(take(body, "tool_choice", str, dict)),
        max_tokens=whole(body, "max_output_tokens"),
        sampling=wanted_sampling(body),
        wishes={"parallel_tool_calls": False} if body.get("parallel_tool_calls") is False else {},
        overruled=("reasoning",) if body.get("reasoning") else (),
    )


def read_tool(tool: Any) -> Any:
    """The definition of a function in the chat API's form. Other tools stay as they are, and are refused."""
    if not isinstance(tool, Mapping) or tool.get("type") != "function" or "function" in tool:
        return tool
    named = {name: tool[name] for name in ("name", "description", "parameters", "strict") if tool.get(name) is not None}
    return {"type": "function", "function": named}


def read_choice(choice: Any) -> str | JSON | None:
    """The chat API's `tool_choice`."""
    if isinstance(choice, Mapping) and choice.get("type") == "function":
        return {"type": "function", "function": {"name": choice.get("name")}}
    if choice is None or isinstance(choice, str):
        return choice
    raise Refused(400, f"tool_choice {dict(choice)!r} is not supported", param="tool_choice")


def read_items(items: Sequence[Any]) -> list[JSON]:
    """The messages that a list of items is. Reasoning, a text and the calls after them are one answer."""
    messages: list[JSON] = []
    turn: JSON | None = None
    """The answer that the next item may belong to."""

    def begun() -> JSON:
        messages.append({"role": "assistant"})
        return messages[-1]

    for place, item in enumerate(items):
        at = f"input[{place}]"
        kind = item.get("type", "message") if isinstance(item, Mapping) else type(item).__name__
        if kind == "message" and item.get("role") == "assistant":
            if turn is None or "content" in turn or "tool_calls" in turn:
                turn = begun()
            turn["content"] = read_text(item.get("content"), at, "")
        elif kind == "reasoning":
            turn = begun()
            turn["reasoning"] = read_text(item.get("content") or item.get("summary") or "", at, "")
        elif kind == "function_call":
            turn = turn if turn is not None else begun()
            function = {"name": item.get("name"), "arguments": item.get("arguments")}
            turn.setdefault("tool_calls", []).append(
                {"id": item.get("call_id"), "type": "function", "function": function}
            )
        else:
            turn = None
            messages.append(_other_item(item, kind, at))
    return messages


def _other_item(item: Any, kind: str, at: str) -> JSON:
    if kind == "function_call_output":
        text = read_text(item.get("output"), at, "\n")
        return {"role": "tool", "tool_call_id": item.get("call_id"), "content": text}
    if kind == "message":
        role = "system" if item.get("role") == "developer" else item.get("role")
        return {"role": role, "content": read_text(item.get("content"), at, "\n")}
    raise Refused(400, f"{at}: an item of type {kind!r} is not supported", param="input")


def read_text(content: Any, at: str, between: str) -> str:
    """The text of a text or of text parts. Raises `Refused`."""
    if isinstance(content, str):
        return content
    texts = []
    for part in content if isinstance(content, list) else [content]:
        kind = part.get("type") if isinstance(part, Mapping) else type(part).__name__
        text = part.get("refusal" if kind == "refusal" else "text") if isinstance(part, Mapping) else None
        if kind not in _TEXTS or not isinstance(text, str):
            raise Refused(400, f"{at}: content of type {kind!r} is not supported; only text is", param="input")
        texts.append(text)
    return between.join(texts)


_CUT: Final = {FinishReason.LENGTH: "max_output_tokens", FinishReason.CONTENT_FILTER: "content_filter"}


def answer(body: JSON, response: ChatResponse) -> JSON:
    """The response object."""
    message, cut = response.message, _CUT.get(response.finish_reason)
    status = "incomplete" if cut else "completed"
    output: list[JSON] = []
    if message.reasoning:
        thought = {"type": "reasoning_text", "text": message.reasoning}
        output.append({"id": _id("rs"), "type": "reasoning", "summary": [], "content": [thought], "status": status})
    if message.text or not message.tool_calls:
        part = {"type": "output_text", "text": message.text, "annotations": [], "logprobs": []}
        output.append({"id": _id("msg"), "type": "message", "role": "assistant", "status": status, "content": [part]})
    for call in message.tool_calls:
        named = {"call_id": call.id, "name": call.name, "arguments": call.arguments}
        output.append({"id": _id("fc"), "type": "function_call", **named, "status": status})
    prompt, sampled = usage_of([response])
    return {
        "id": _id("resp"),
        "object": "response",
        "created_at": int(time.time()),
        "status": status,
        "error": None,
        "incomplete_details": {"reason": cut} if cut else None,
        "model": response.model or "",
        "output": output,
        "parallel_tool_calls": True,
        "tools": body.get("tools") or [],
        "tool_choice": body.get("tool_choice") or "auto",
        "text": {"format": {"type": "text"}},
        "truncation": "disabled",
        "metadata": body.get("metadata") or {},
        **{name: body.get(name) for name in ("instructions", "previous_response_id", "max_output_tokens")},
        **{name: response.sampling.get(name) for name in ("temperature", "top_p")},
        "usage": {
            "input_tokens": prompt,
            "input_tokens_details": {"cached_tokens": 0, "cache_write_tokens": 0},
            "output_tokens": sampled,
            "output_tokens_details": {"reasoning_tokens": 0},
            "total_tokens": prompt + sampled,
        },
    }


def events(answer: JSON) -> Iterator[bytes]:
    """The events of a stream."""
    numbers = count()

    def written(kind: str, **fields: Any) -> bytes:
        return event({"type": f"response.{kind}", "sequence_number": next(numbers), **fields})

    begun = {**answer, "status": "in_progress", "output": [], "usage": None, "incomplete_details": None}
    yield written("created", response=begun)
    yield written("in_progress", response=begun)
    for index, item in enumerate(answer["output"]):
        place = {"item_id": item["id"], "output_index": index}
        if item["type"] == "function_call":
            opened = {**item, "arguments": "", "status": "in_progress"}
            yield written("output_item.added", output_index=index, item=opened)
            yield written("function_call_arguments.delta", **place, delta=item["arguments"])
            done = {"name": item["name"], "arguments": item["arguments"]}
            yield written("function_call_arguments.done", **place, **done)
        else:
            yield written(
                "output_item.added", output_index=index, item={**item, "content": [], "status": "in_progress"}
            )
            (part,) = item["content"]
            place["content_index"] = 0
            kind = part["type"]
            more: JSON = {"logprobs": []} if item["type"] == "message" else {}
            yield written("content_part.added", **place, part={**part, "text": ""})
            yield written(f"{kind}.delta", **place, delta=part["text"], **more)
            yield written(f"{kind}.done", **place, text=part["text"], **more)
            yield written("content_part.done", **place, part=part)
        yield written("output_item.done", output_index=index, item=item)
    yield written(answer["status"], response=answer)


def _id(kind: str) -> str:
    return f"{kind}_{uuid.uuid4().hex}"
