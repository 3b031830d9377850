"""OpenAI's `/v1/chat/completions`: the reading of requests, and the writing of answers and of streams."""

from __future__ import annotations

import time
import uuid
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, Final

from lachesis_messages.messages import FinishReason, Message
from lachesis_messages.responses import ChatResponse
from lachesis_tokens.wire.request import (
    JSON,
    SAMPLING,
    ChatRequest,
    Refused,
    answers,
    function_tools,
    refuse_unknown,
    stop_texts,
    take,
    wanted_sampling,
    whole,
)
from lachesis_tokens.wire.writing import NamesOf, data, listed_tokens, usage_of

_NO_EFFECT: Final = frozenset(
    {"model", "stream", "stream_options", "store", "metadata", "user", "service_tier", "safety_identifier"}
    | {"prompt_cache_key", "prompt_cache_retention", "timeout", "verbosity"}
)
"""Fields that do not affect sampling."""
WISHES: Final = ("response_format", "parallel_tool_calls", "reasoning_effort", "logit_bias")
_READ: Final = frozenset(
    {"messages", "tools", "tool_choice", "n", "max_tokens", "max_completion_tokens", "stop", "logprobs", "top_logprobs"}
)
_KNOWN: Final = _NO_EFFECT | _READ | {*SAMPLING, *WISHES}
_METADATA: Final = frozenset({"cache_control", "annotations", "refusal", "audio"})
"""Fields of messages and of content parts that clients add, and that no model sees."""

_TEXT: Final = (str, type(None))


def read(body: JSON) -> ChatRequest:
    """The request. Raises `Refused`."""
    refuse_unknown(body, _KNOWN)
    if body.get("top_logprobs"):
        raise Refused(400, "top_logprobs: only the logprobs of sampled tokens are known", param="top_logprobs")
    wants_usage(body)
    messages = take(body, "messages", list)
    if not messages:
        raise Refused(400, "messages: a list of at least one message is required", param="messages")
    limits = [limit for name in ("max_tokens", "max_completion_tokens") if (limit := whole(body, name)) is not None]
    return ChatRequest(
        messages=[read_message(message) for message in messages],
        tools=function_tools(take(body, "tools", list)),
        tool_choice=take(body, "tool_choice", str, dict),
        n=answers(body),
        max_tokens=min(limits, default=None),
        stop=stop_texts(body),
        logprobs=take(body, "logprobs", bool, default=False),
        sampling=wanted_sampling(body),
        wishes={name: body[name] for name in WISHES if body.get(name) is not None},
    )


def wants_usage(body: JSON) -> bool:
    """Whether a stream ends with the usage. Raises `Refused`."""
    return bool(take(body, "stream_options", dict, default={}).get("include_usage"))


def read_message(given: Any) -> Any:
    """A message in the form that all protocols share: the role is one of four, and a text is not a list of parts."""
    if not isinstance(given, Mapping):
        return given
    if type(given.get("content")) in _TEXT and given.get("role") != "developer" and _METADATA.isdisjoint(given):
        return given
    message = {name: value for name, value in given.items() if name not in _METADATA}
    if message.get("role") == "developer":
        message["role"] = "system"
    content = message.get("content")
    if isinstance(content, list):
        message["content"] = joined(content, "" if message.get("role") == "assistant" else "\n")
    return message


def joined(parts: list[Any], between: str) -> Any:
    """Text parts as one text; with other parts among them, the list without the clients' metadata."""
    if all(isinstance(part, Mapping) and part.get("type") == "text" for part in parts):
        texts = [part.get("text") for part in parts]
        if all(isinstance(text, str) for text in texts):
            return between.join(texts)
    return [
        {name: value for name, value in part.items() if name not in _METADATA} if isinstance(part, Mapping) else part
        for part in parts
    ]


def answer(responses: Sequence[ChatResponse], names_of: NamesOf | None = None) -> JSON:
    """One choice for each response. With `names_of`, choices have the logprobs of the sampled tokens."""
    prompt, sampled = usage_of(responses)
    return {
        "id": f"chatcmpl-{uuid.uuid4().hex}",
        "object": "chat.completion",
        "created": int(time.time()),
        "model": responses[0].model or "",
        "choices": [
            {
                "index": index,
                "message": write_message(response.message),
                "logprobs": None if names_of is None else _logprobs(response, names_of(response)),
                "finish_reason": finish_reason(response),
            }
            for index, response in enumerate(responses)
        ],
        "usage": {"prompt_tokens": prompt, "completion_tokens": sampled, "total_tokens": prompt + sampled},
    }


def _logprobs(response: ChatResponse, names: list[str]) -> JSON:
    return {"content": listed_tokens(response, names), "refusal": None}


def write_message(message: Message) -> JSON:
    """An assistant message, reasoning under vLLM's and SGLang's name for it."""
    written: JSON = {"role": "assistant", "content": message.text if message.content is not None else None}
    if message.reasoning:
        written["reasoning_content"] = message.reasoning
    if message.tool_calls:
        written["tool_calls"] = [call.to_openai() for call in message.tool_calls]
    return written


def finish_reason(response: ChatResponse) -> str:
    """OpenAI's name. It has none for an unknown reason."""
    return "stop" if response.finish_reason is FinishReason.UNKNOWN else response.finish_reason.value


def chunks(answer: JSON, *, include_usage: bool) -> Iterator[bytes]:
    """The chunks of a stream."""
    shared = {name: answer[name] for name in ("id", "created", "model")} | {"object": "chat.completion.chunk"}
    if include_usage:
        shared["usage"] = None

    def chunk(index: int, delta: JSON, finish: str | None = None, logprobs: Any = None) -> bytes:
        choice = {"index": index, "delta": delta, "logprobs": logprobs, "finish_reason": finish}
        return data({**shared, "choices": [choice]})

    for choice in answer["choices"]:
        index, message = choice["index"], choice["message"]
        yield chunk(index, {"role": "assistant", "content": ""})
        if message.get("reasoning_content"):
            yield chunk(index, {"reasoning_content": message["reasoning_content"]})
        if message["content"] or choice["logprobs"]:
            yield chunk(index, {"content": message["content"] or ""}, logprobs=choice["logprobs"])
        for place, call in enumerate(message.get("tool_calls") or ()):
            opened = {**call, "index": place, "function": {**call["function"], "arguments": ""}}
            yield chunk(index, {"tool_calls": [opened]})
            arguments = {"index": place, "function": {"arguments": call["function"]["arguments"]}}
            yield chunk(index, {"tool_calls": [arguments]})
        yield chunk(index, {}, choice["finish_reason"])
    if include_usage:
        yield data({**shared, "choices": [], "usage": answer["usage"]})
    yield b"data: [DONE]\n\n"


def error(refused: Refused) -> JSON:
    """OpenAI's error object."""
    kind = "invalid_request_error" if refused.status < 500 else "server_error"
    return {"error": {"message": str(refused), "type": kind, "param": refused.param, "code": refused.code}}
