"""Requests of clients, in one form for all protocols, and the reasons to refuse them."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass, field
from typing import Any, TypeAlias

from lachesis_messages.messages import Message

JSON: TypeAlias = dict[str, Any]


class Refused(Exception):
    """A request that is not answered with a completion.

    Attributes:
        status: of the HTTP answer.
        code: the machine-readable reason, OpenAI's if there is one.
        param: the field of the request that is the reason.
    """

    def __init__(self, status: int, message: str, *, code: str = "invalid_request_error", param: str | None = None):
        super().__init__(message)
        self.status = status
        self.code = code
        self.param = param


@dataclass(frozen=True, slots=True)
class ChatRequest:
    """A request for `n` answers to a conversation."""

    messages: list[JSON | Message]
    """OpenAI's messages, and the messages of earlier answers that the client names."""
    tools: list[JSON] | None = None
    """OpenAI's definitions of functions."""
    tool_choice: str | JSON | None = None
    n: int = 1
    max_tokens: int | None = None
    stop: tuple[str, ...] = ()
    logprobs: bool = False
    sampling: JSON = field(default_factory=dict)
    """The other sampling parameters that the client wants, by their names in `Sampling`."""
    wishes: JSON = field(default_factory=dict)
    """Fields that a server may follow and token engines cannot, by their names in OpenAI's chat API."""
    overruled: tuple[str, ...] = ()
    """Further fields of the request that the model and its template decide."""


@dataclass(frozen=True, slots=True)
class TextRequest:
    """A request for `n` continuations of a prompt without a chat template."""

    prompt: str | list[int]
    n: int = 1
    max_tokens: int | None = None
    stop: tuple[str, ...] = ()
    logprobs: bool = False
    sampling: JSON = field(default_factory=dict)


SAMPLING = (
    *("temperature", "top_p", "top_k", "min_p", "presence_penalty", "frequency_penalty", "repetition_penalty", "seed"),
)
"""The parameters of a request that the settings of the run overrule."""
MOST_ANSWERS = 128


def take(body: Mapping[str, Any], name: str, *kinds: type, default: Any = None) -> Any:
    """A field of the request; `default` for null. Raises `Refused` for another type."""
    value = body.get(name)
    if value is None:
        return default
    if not isinstance(value, kinds) or (isinstance(value, bool) and bool not in kinds):
        wanted = " or ".join(_NAMES[kind] for kind in kinds)
        raise Refused(400, f"{name} is {_NAMES.get(type(value), type(value).__name__)}, not {wanted}", param=name)
    return value


def answers(body: Mapping[str, Any]) -> int:
    """How many answers are wanted. Raises `Refused` for more than OpenAI gives: one request would occupy the server."""
    if (wanted := whole(body, "n") or 1) > MOST_ANSWERS:
        raise Refused(400, f"n is {wanted}; the most is {MOST_ANSWERS}", param="n")
    return wanted


def whole(body: Mapping[str, Any], name: str, *, least: int = 1) -> int | None:
    """A whole number of the request. Raises `Refused` for one below `least`."""
    value: int | None = take(body, name, int)
    if value is not None and value < least:
        raise Refused(400, f"{name} is {value}; the least is {least}", param=name)
    return value


def refuse_unknown(body: Mapping[str, Any], known: Collection[str]) -> None:
    """Raise `Refused` for a field that has a value and would have no effect."""
    for name, value in body.items():
        if name not in known and value not in (None, False, [], {}, ""):
            raise Refused(
                400, f"{name} is not supported by this endpoint; leave it out", code="unsupported_parameter", param=name
            )


def wanted_sampling(body: Mapping[str, Any]) -> JSON:
    """The sampling parameters of the request."""
    return {name: value for name in SAMPLING if (value := take(body, name, int, float)) is not None}


def stop_texts(body: Mapping[str, Any], name: str = "stop") -> tuple[str, ...]:
    """A text or a list of texts."""
    value = take(body, name, str, list, default=())
    texts = (value,) if isinstance(value, str) else tuple(value)
    if not all(isinstance(text, str) for text in texts):
        raise Refused(400, f"{name} is neither text nor a list of texts", param=name)
    return tuple(text for text in texts if text)


def function_tools(tools: list[Any] | None) -> list[JSON] | None:
    """OpenAI's definitions of functions. Raises `Refused` for other tools."""
    for place, tool in enumerate(tools or ()):
        function = tool.get("function") if isinstance(tool, Mapping) else None
        if not isinstance(function, Mapping) or not isinstance(function.get("name"), str):
            kind = tool.get("type") if isinstance(tool, Mapping) else None
            raise Refused(400, f"tools[{place}] has type {kind!r}; only functions are supported", param="tools")
    return tools or None


def is_ids(value: Any) -> bool:
    """Whether this is a list of token ids, which no model has of more than 31 bits."""
    return isinstance(value, list) and bool(value) and all(type(token) is int and 0 <= token < 2**31 for token in value)


_NAMES = {str: "text", int: "a whole number", float: "a number", bool: "a boolean", list: "a list", dict: "an object"}
