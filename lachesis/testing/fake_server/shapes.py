"""What the APIs have in common: reading a request into a `Call`, writing completions in the server's own fields."""

from __future__ import annotations

import time
import uuid
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, Protocol

from lachesis.inference.sampling import LogprobsKind
from lachesis.testing.fake_server.completions import Call, Completion
from lachesis.testing.fake_server.model import FakeModel
from lachesis.testing.fake_server.tokenizer import Codec

JSON = dict[str, Any]


@dataclass(frozen=True, slots=True)
class Host:
    """The server, as an API sees it."""

    codec: Codec
    model: FakeModel
    model_name: str
    weight_version: str
    context_length: int
    """Tokens of prompt and completion together."""
    logprobs_mode: LogprobsKind
    """"raw" or "processed": vLLM's `--logprobs-mode`."""
    tool_call_parser: str | None
    """Reads calls out of the text on the chat route; None leaves them in it."""


@dataclass(frozen=True, slots=True)
class Shown:
    """A completion as it is reported: truthfully, or not."""

    made: Completion
    prompt_ids: Sequence[int]
    ids: Sequence[int] | None
    logprobs: Sequence[float | None] | None


class Refused(Exception):
    """An answer that is no completion. `body` is JSON, or a plain text."""

    def __init__(self, status: int, body: JSON | str, headers: Mapping[str, str] | None = None) -> None:
        self.status = status
        self.body = body
        self.headers = dict(headers or {})
        super().__init__(f"{status}: {body}")


class Api(Protocol):
    """One route for completions."""

    name: ClassVar[str]

    def logprobs(self, host: Host) -> LogprobsKind:
        """What its logprobs are of."""
        ...

    def read(self, host: Host, body: JSON) -> Call:
        """The request; raises `Refused` as the server that it stands for would refuse."""
        ...

    def write(self, host: Host, body: JSON, call: Call, shown: Sequence[Shown]) -> Any:
        """The answer, for JSON."""
        ...

    def failure(self, status: int, message: str) -> JSON | str:
        """The body of an error."""
        ...


def openai_error(status: int, message: str, param: str | None = None) -> JSON:
    """An error as vLLM writes it (`ErrorResponse`)."""
    kinds = {
        400: "BadRequestError",
        404: "NotFoundError",
        429: "Too Many Requests",
        500: "InternalServerError",
        503: "Service Unavailable",
    }
    return {"error": {"message": message, "type": kinds.get(status, "Error"), "param": param, "code": status}}


def number(body: Mapping[str, Any], name: str, default: float) -> float:
    """A number of the request; null counts as absent. Raises `ValueError` for anything else."""
    value = body.get(name)
    if value is None:
        return default
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        raise ValueError(f"{name} must be a number, got {value!r}.")
    return value


def whole(body: Mapping[str, Any], name: str, default: int) -> int:
    """A whole number of the request; null counts as absent. Raises `ValueError` for anything else."""
    value = body.get(name)
    if value is None:
        return default
    if isinstance(value, bool) or not isinstance(value, int):
        raise ValueError(f"{name} must be an integer, got {value!r}.")
    return value


def texts(value: Any) -> tuple[str, ...]:
    """`stop`: a text or a list of texts."""
    if not value:
        return ()
    found = (value,) if isinstance(value, str) else tuple(value)
    if not all(isinstance(text, str) and text for text in found):
        raise ValueError("stop must be a string, or a list of strings that are not empty.")
    return found


def is_ids(value: Any) -> bool:
    """Whether this is a list of token ids, and not of prompts."""
    return isinstance(value, list) and bool(value) and isinstance(value[0], int)


def usage(shown: Sequence[Shown], prompts: int) -> JSON:
    """Token counts, each prompt counted once."""
    asked = sum({each.made.prompt: len(each.prompt_ids) for each in shown}.values()) if prompts else 0
    answered = sum(len(each.made.ids) for each in shown)
    return {"prompt_tokens": asked, "total_tokens": asked + answered, "completion_tokens": answered}


def new_id(prefix: str) -> str:
    return prefix + uuid.uuid4().hex


def now() -> int:
    return int(time.time())
