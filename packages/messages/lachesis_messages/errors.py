"""Errors of messages and of lists of messages."""

from __future__ import annotations

from collections.abc import Iterable

from backends.errors import LachesisError

MISSHAPEN = (ArithmeticError, AttributeError, LookupError, RecursionError, TypeError, ValueError)
"""What reading a record of another shape raises."""


class MessageError(LachesisError, ValueError):
    """A message, or a list of messages, that is not OpenAI-shaped. `index` is the place in the list, if any."""

    def __init__(self, reason: str, *, index: int | None = None) -> None:
        self.reason = reason
        self.index = index
        super().__init__(reason if index is None else f"message {index}: {reason}")

    def __reduce__(self) -> tuple[object, ...]:
        # Process pools pickle exceptions, and pickle rebuilds them from `args` alone, without the keywords.
        return (type(self).__new__, (type(self), *self.args), self.__dict__)


class MalformedMessage(MessageError):
    """A field is missing, of the wrong type, or not allowed in this role."""


class UnknownRole(MessageError):
    """The role is none of `system`, `user`, `assistant`, `tool`."""


class RoleOrder(MessageError):
    """A system message is not the first message."""


class DuplicateCallId(MessageError):
    """Two tool calls of one conversation have the same id."""


class UnansweredToolCall(MessageError):
    """Tool calls of the assistant message `index` have no results. `ids` are the calls."""

    def __init__(self, reason: str, *, ids: Iterable[str] = (), index: int | None = None) -> None:
        super().__init__(reason, index=index)
        self.ids = tuple(ids)


class UnexpectedToolResult(MessageError):
    """A tool message answers a call that does not exist, is no longer open, or has a result already."""
