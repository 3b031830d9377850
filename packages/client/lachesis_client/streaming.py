"""A chat completion as a stream: its pieces as they come, and at the end the body that the server gives without one."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator, Callable, Mapping
from dataclasses import dataclass
from typing import Any, Final, Literal, TypeAlias

import aiohttp

from lachesis_client.http_attempts import Failed, decode
from lachesis_messages.messages import REASONING_KEYS, thought

STREAMED: Final = {"stream": True, "stream_options": {"include_usage": True}}
"""The fields of a request for a stream."""
_DONE: Final = b"[DONE]"
_WHOLE: Final = frozenset({"id", "type", "role", "name", "index"})
"""Texts that come at once. Some servers repeat them in every piece."""


@dataclass(frozen=True, slots=True)
class Delta:
    """A piece of an answer."""

    kind: Literal["text", "reasoning", "call", "restart"]
    """`restart`: the attempt failed, and what it said so far is void."""
    text: str = ""
    """Of a `call`: the name of the tool, once its first piece is there."""


OnDelta: TypeAlias = Callable[[Delta], None]


class AnswerStream:
    """Asks for streams, and passes on the pieces of one answer, over all attempts to get it."""

    def __init__(self, on_delta: OnDelta) -> None:
        """`on_delta` is called on the event loop, and raises nothing."""
        self._on_delta = on_delta
        self._said = False

    async def read(self, response: aiohttp.ClientResponse) -> bytes:
        """The body of the answer as it would be without a stream. Raises `Failed` for a stream that breaks off."""
        if self._said:
            self._say(Delta("restart"))
            self._said = False
        if response.content_type != "text/event-stream":  # an error, or a server that streams nothing
            raw = await response.read()
            answer = decode(raw) if response.status == 200 else None
            choices = (answer or {}).get("choices")
            if isinstance(choices, list) and choices and isinstance(choices[0], dict):
                self._tell(choices[0].get("message"))
            return raw
        body: dict[str, Any] = {}
        ended = False
        async for event in _events(response):
            if event == _DONE:
                ended = True
                break
            chunk = decode(event)
            if chunk is None:
                raise Failed(f"a piece of the stream is no JSON object: {event[:200]!r}")
            self._take(body, chunk)
        choices = [body["choices"][index] for index in sorted(body.get("choices", ()))]
        for choice in choices:
            if choice["message"].get("tool_calls") and not choice["message"]["content"]:
                choice["message"]["content"] = None  # streams begin with an empty text
        if not (ended or "error" in body or (choices and all(choice.get("finish_reason") for choice in choices))):
            raise Failed("the stream broke off")
        # Not orjson: it rejects lone surrogates, which models write.
        return json.dumps({**body, "choices": choices} if choices else body).encode()

    def _take(self, body: dict[str, Any], chunk: Mapping[str, Any]) -> None:
        for name, value in chunk.items():
            if name != "choices" and value is not None:
                body[name] = "chat.completion" if name == "object" else value
        for piece in chunk.get("choices") or ():
            choice = body.setdefault("choices", {}).setdefault(piece.get("index") or 0, {"message": {"content": None}})
            choice.update({k: v for k, v in piece.items() if k not in ("delta", "message") and v is not None})
            delta = piece.get("delta") or piece.get("message")
            if isinstance(delta, dict):
                new_calls = _merge(choice["message"], delta)
                if not choice.get("index"):
                    self._tell(delta, new_calls)

    def _tell(self, message: Any, calls: list[Any] | None = None) -> None:
        if not isinstance(message, dict):
            return
        if reasoning := next(filter(None, (thought(message[key]) for key in REASONING_KEYS if message.get(key))), None):
            self._say(Delta("reasoning", reasoning))
        for key in ("content", "refusal"):
            if isinstance(text := message.get(key), str) and text:
                self._say(Delta("text", text))
        for call in (message.get("tool_calls") or ()) if calls is None else calls:
            function = call.get("function") if isinstance(call, dict) else None
            if isinstance(function, dict) and function.get("name"):
                self._say(Delta("call", str(function["name"])))

    def _say(self, delta: Delta) -> None:
        self._said = True
        self._on_delta(delta)


async def _events(response: aiohttp.ClientResponse) -> AsyncIterator[bytes]:
    """The data of the events. A line may be longer than aiohttp's buffer."""
    waiting: list[bytes] = []
    async for piece in response.content.iter_any():
        first, *others = piece.split(b"\n")
        waiting.append(first)
        for line in others:
            whole, waiting = b"".join(waiting), [line]
            if whole.startswith(b"data:"):
                yield whole[5:].strip()
    if (last := b"".join(waiting)).startswith(b"data:"):
        yield last[5:].strip()


def _merge(message: dict[str, Any], delta: Mapping[str, Any]) -> list[Any]:
    """Add a piece to a message. Returns the tool calls that begin with it."""
    for name, value in delta.items():
        if name != "tool_calls":
            _add(message, name, value)
    new: list[Any] = []
    pieces = delta.get("tool_calls")
    for piece in pieces if isinstance(pieces, list) else ():
        if not isinstance(piece, dict):
            continue
        calls: list[dict[str, Any]] = message.setdefault("tool_calls", [])
        call = _continued(calls, piece)
        if call is None:
            calls.append(call := {})
            new.append(piece)
        for name, value in piece.items():
            if name == "function" and isinstance(value, dict):
                for inner, text in value.items():
                    _add(call.setdefault("function", {}), inner, text)
            else:
                _add(call, name, value)
    return new


def _continued(calls: list[dict[str, Any]], piece: Mapping[str, Any]) -> dict[str, Any] | None:
    """The call that a piece goes on with; None for a new one.

    Some servers give every call the index 0, or none, no id, the id in every piece, or another one in each, and some
    repeat the name. Only a call that begins has a name, so a repeated one counts only after arguments that are whole.
    """
    place, call_id = piece.get("index"), piece.get("id")
    same_place = [call for call in calls if place is None or call.get("index") in (None, place)]
    same = [call for call in same_place if call_id and call.get("id") == call_id] or [
        call for call in same_place if place is None or call.get("index") == place
    ]
    function = piece.get("function")
    function = function if isinstance(function, dict) else {}
    name, more = function.get("name"), function.get("arguments")
    if not same:
        return same_place[-1] if same_place and not (name or call_id) else None
    known = same[-1].get("function") or {}
    other = bool(call_id and same[-1].get("id") and same[-1]["id"] != call_id)
    if name and known.get("name") and (other or name != known["name"]):
        return None
    # Where calls have ids, the name may come once more with the end of the call, which has no text.
    begins = other or (name and (not same[-1].get("id") or (more.strip() if isinstance(more, str) else more)))
    return None if begins and _is_whole(known.get("arguments")) else same[-1]


def _is_whole(arguments: Any) -> bool:
    if isinstance(arguments, str):
        return arguments.rstrip().endswith("}") and decode(arguments.encode(errors="surrogatepass")) is not None
    return bool(arguments)


def _add(to: dict[str, Any], name: str, value: Any) -> None:
    known = to.get(name)
    if value is None and name in to:
        return
    if known and isinstance(known, str) and isinstance(value, str):
        if name not in _WHOLE:
            to[name] = known + value
    elif isinstance(known, list) and isinstance(value, list):
        to[name] = known + value
    elif value != "" or known is None:
        to[name] = value
