"""Requests of an environment's own code that a model server failed to answer, for a caller that learns of them nowhere
else: environments catch the error, and their scores would count it as the model's."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar

FailedRequests = dict[str, Exception]
"""What was asked -> the error."""

_noted: ContextVar[FailedRequests | None] = ContextVar("failed_requests", default=None)


@contextmanager
def failed_requests() -> Iterator[FailedRequests]:
    """The failures of the code inside, and of tasks and threads that it starts. A request that succeeded when repeated
    does not count. An inner `failed_requests` takes those of its own code."""
    noted: FailedRequests = {}
    token = _noted.set(noted)
    try:
        yield noted
    finally:
        _noted.reset(token)


def note_failed(asked: str, error: Exception) -> None:
    """Keep the first failure of a request."""
    if (noted := _noted.get()) is not None:
        noted.setdefault(asked, error)


def note_answered(asked: Callable[[], str]) -> None:
    """Forget the failure of a request. `asked` is called only where there are failures."""
    if noted := _noted.get():
        noted.pop(asked(), None)
