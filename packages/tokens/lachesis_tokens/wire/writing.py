"""The writing of JSON, of server-sent events and of sampled tokens."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypeAlias

import orjson

from lachesis_messages.records.jsonl import read_line
from lachesis_messages.responses import ChatResponse
from lachesis_tokens.wire.request import JSON, Refused

NamesOf: TypeAlias = Callable[[ChatResponse], list[str]]
"""A text for each sampled token of a completion."""


def token_names(response: ChatResponse, decode: Callable[[Sequence[int]], str]) -> list[str]:
    """The text of each sampled token alone; the end of the turn included."""
    assert response.tokens is not None
    return [decode([token]) for token in response.tokens.ids]


def listed_tokens(response: ChatResponse, names: Sequence[str]) -> list[JSON]:
    """The sampled tokens with their logprobs, as OpenAI's chats list them."""
    assert response.tokens is not None
    # One list for all tokens of a name: completions are long, and the garbage collector visits each list.
    raw: dict[str, list[int]] = {name: list(name.encode("utf-8", "replace")) for name in set(names)}
    none: list[JSON] = []
    return [
        {"token": name, "logprob": logprob, "bytes": raw[name], "top_logprobs": none}
        for name, logprob in zip(names, response.tokens.logprobs, strict=True)
    ]


def listed_versions(response: ChatResponse) -> list[JSON]:
    """The version of the weights of each range of sampled tokens, as vLLM and SGLang list them."""
    assert response.tokens is not None
    return [{"version": version, "start": start, "end": end} for version, start, end in response.tokens.versions]


def usage_of(responses: Sequence[ChatResponse]) -> tuple[int, int]:
    """Tokens of the prompt, which counts once, and of all completions."""
    prompt = responses[0].usage.prompt_tokens or 0
    return prompt, sum(response.usage.completion_tokens or 0 for response in responses)


def dump(value: Any) -> bytes:
    """JSON. Lone surrogates, which models write, are escaped."""
    try:
        return orjson.dumps(value)
    except (TypeError, orjson.JSONEncodeError):
        return json.dumps(value, separators=(",", ":")).encode()


def load(raw: bytes) -> JSON:
    """The object of a request. Raises `Refused`."""
    try:
        body = read_line(raw)
    except (ValueError, RecursionError) as error:
        raise Refused(400, f"the body is not JSON: {error}") from None
    if not isinstance(body, dict):
        raise Refused(400, "the body is not a JSON object")
    return body


def data(value: Any) -> bytes:
    """An event without a name."""
    return b"data: %b\n\n" % dump(value)


def event(value: Mapping[str, Any]) -> bytes:
    """An event with the name of its `type`."""
    return b"event: %b\ndata: %b\n\n" % (str(value["type"]).encode(), dump(value))
