"""What can be wrong with a message, or with a list of them."""

from __future__ import annotations

from collections.abc import Iterable

from lachesis.errors import LachesisError


class MessageError(LachesisError, ValueError):
    """A message, or a list of them, that is not OpenAI-shaped. `index` is its place in the list, where it has one."""

    def __init__(self, reason: str, *, index: int | None = None) -> None:
        self.reason = reason
        self.index = index
        super().__init__(reason if index is None else f"message {index}: {reason}")

    def __reduce__(self) -> tuple[object, ...]:
        # Exceptions are rebuilt from `args` alone, which would lose what is keyword-only: they cross process pools.
        return (type(self).__new__, (type(self), *self.args), self.__dict__)


class MalformedMessage(MessageError):
    """A field is missing, of the wrong type, or not allowed in this role."""


class UnknownRole(MessageError):
    """The role is none of `system`, `user`, `assistant`, `tool`."""


class RoleOrder(MessageError):
    """A system message stands anywhere but first."""


class DuplicateCallId(MessageError):
    """Two tool calls of one conversation have the same id."""


class UnansweredToolCall(MessageError):
    """Tool calls of the assistant message `index` have no result where one is due. `ids` are the calls."""

    def __init__(self, reason: str, *, ids: Iterable[str] = (), index: int | None = None) -> None:
        super().__init__(reason, index=index)
        self.ids = tuple(ids)


class UnexpectedToolResult(MessageError):
    """A tool message answers a call that was not made, is no longer open, or has been answered already."""
