"""Everything that the model said while an environment collected the groups of one item.

A context variable leads each request to the recording of its item, also in tasks and in threads of
`asyncio.to_thread`. A request without one, from a thread that was started in another way, belongs to the only open
recording, or is refused if there are several: it is never guessed.
"""

from __future__ import annotations

from array import array
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from backends.errors import LachesisError
from lachesis_messages.responses import ChatResponse
from lachesis_messages.tokens import SampledTokens

if TYPE_CHECKING:
    from lachesis.loop.rollout import Rollout


class RecordingError(LachesisError, RuntimeError):
    """A request that belongs to no item, or to one whose groups were collected already."""


@dataclass(frozen=True, slots=True, eq=False)
class RecordedCompletion:
    """One completion, with the request that it answers."""

    response: ChatResponse
    said: str
    """The text as the environment got it."""
    messages: tuple[Mapping[str, Any], ...] | None
    """The conversation of the request; None for a text completion."""
    prompt: str
    """The prompt as text, special tokens included; empty in Phase 1."""

    @property
    def tokens(self) -> SampledTokens | None:
        return self.response.tokens


@dataclass(frozen=True, slots=True)
class NotedChat:
    """A conversation that the environment had encoded."""

    messages: tuple[Mapping[str, Any], ...]
    trained: tuple[int, ...] | None = None
    """The messages that `tokenize_for_trainer` trains; None where only the chat template was applied."""


@dataclass(eq=False)
class ItemRecording:
    """One item's."""

    completions: list[RecordedCompletion] = field(default_factory=list)
    rollouts: dict[str, Rollout] = field(default_factory=dict)
    """Rollouts that our own loop ran meanwhile, by id."""
    error: Exception | None = None
    """The first failure of a model server that a request met, whatever the environment made of it."""
    closed: bool = False
    trains: bool = True
    """Whether it is of an item to train on; not of an evaluation, or of what comes before items."""
    sessions: dict[int, Any] = field(default_factory=dict)
    """The session of requests that open none, for each server."""
    _chats: dict[tuple[bytes, bytes | None], NotedChat] = field(default_factory=dict)

    def note(self, ids: Any, messages: Any, trained: Sequence[int] | None = None, masks: Any = None) -> None:
        """Remember which conversation these ids were encoded from, and which of its messages these masks train."""
        found = as_ids(ids)
        if found is None or not isinstance(messages, list | tuple):
            return
        if not all(isinstance(message, Mapping) for message in messages):
            return
        masked = None if trained is None else as_ids(masks)
        kept = tuple(dict(message) for message in messages)
        self._chats.setdefault((_key(found), None), NotedChat(kept))
        if masked is not None and trained is not None:
            self._chats[_key(found), _key(masked)] = NotedChat(kept, tuple(trained))

    def chat_of(self, ids: Sequence[int], masks: Sequence[int] | None) -> NotedChat | None:
        """The conversation that exactly these ids were encoded from; what it trains only where the masks are noted."""
        trained = self._chats.get((_key(ids), _key(masks))) if masks is not None else None
        return trained or self._chats.get((_key(ids), None))


_current: ContextVar[ItemRecording | None] = ContextVar("recording", default=None)
_open: set[ItemRecording] = set()


@contextmanager
def recorded(*, trains: bool = True) -> Iterator[ItemRecording]:
    """A recording of everything that is asked inside, also by tasks that are started here."""
    recording = ItemRecording(trains=trains)
    token = _current.set(recording)
    _open.add(recording)
    try:
        yield recording
    finally:
        recording.closed = True
        _open.discard(recording)
        _current.reset(token)


def current_recording() -> ItemRecording | None:
    """The recording of the caller's item; None outside of one."""
    return _current.get()


def recording_of_request() -> ItemRecording:
    """The recording that a request of the caller belongs to.

    Raises:
        RecordingError: there is none, or it is over, or it is unknown which of several.
    """
    recording = _current.get()
    if recording is None:
        if len(_open) == 1:
            return next(iter(_open))
        raise RecordingError(
            f"a request for the model from code that belongs to none of {len(_open)} items in progress; start "
            "threads with asyncio.to_thread, or with contextvars.copy_context().run"
        )
    if recording.closed:
        raise RecordingError("a request for the model after the groups of its item were returned")
    return recording


def as_ids(value: Any) -> list[int] | None:
    """Token ids as a list of ints; None for anything else (transformers' `BatchEncoding`, nested lists, text)."""
    if callable(convert := getattr(value, "tolist", None)):
        value = convert()
    if not isinstance(value, list | tuple) or not value:
        return None
    try:
        found = list(map(int, value))
    except (TypeError, ValueError):
        return None
    return found if all(-(1 << 31) <= number < 1 << 32 for number in found) else None


def _key(ids: Sequence[int]) -> bytes:
    return array("q", ids).tobytes()
