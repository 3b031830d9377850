"""The interface between the HTTP server and the protocols, and the writing of JSON and of server-sent events."""

from __future__ import annotations

import json
from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any, ClassVar

import orjson

from lachesis.endpoint.request import JSON, Refused
from lachesis.trajectories import ChatResponse

if TYPE_CHECKING:
    from lachesis.endpoint.recording import Recording


class Protocol(ABC):
    """One route: what its requests ask, and how answers and errors are written. It has no state."""

    ping: ClassVar[bytes] = b": waiting for the model\n\n"
    """Sent while a stream waits."""

    @abstractmethod
    async def complete(self, body: JSON, recording: Recording) -> JSON:
        """The whole answer. Raises `Refused`, `MessageError`, or what the recording raises."""

    def body(self, answer: JSON) -> Any:
        """The answer as JSON."""
        return answer

    @abstractmethod
    def events(self, body: JSON, answer: JSON) -> Iterator[bytes]:
        """The answer as server-sent events."""

    @abstractmethod
    def error(self, refused: Refused) -> JSON:
        """The body of an error."""

    def error_event(self, refused: Refused) -> bytes:
        """An error in a stream that has begun."""
        return data(self.error(refused))


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
        body = orjson.loads(raw)
    except orjson.JSONDecodeError:
        try:
            body = json.loads(raw)  # lone surrogates, huge numbers
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
