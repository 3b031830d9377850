"""Private copies of the messages of clients, which show whether a message is still the one that came before.

Clients may change a message in place, so identity shows nothing. `given == copy` compares contents, mostly without
Python code: texts that are the same object are equal at once.
"""

from __future__ import annotations

from typing import Any

from lachesis_messages.messages import Message
from lachesis_messages.responses import ChatResponse, ToolResponse


class Uncopied(Exception):
    """The value may change in ways that a copy does not show."""


def copy_of(given: Any) -> Any:
    """A value that equals `given`, on the right side of `==`, as long as `given` has the same JSON.

    `==` alone treats 1, 1.0 and True as equal. Raises `Uncopied` for values that no message holds.
    """
    if given is None or type(given) is str:
        return given
    if isinstance(given, dict):
        if set(map(type, given)) - {str}:
            raise Uncopied
        return {key: value if type(value) is str else copy_of(value) for key, value in given.items()}
    if type(given) in (list, tuple):
        return type(given)(map(copy_of, given))
    if isinstance(given, (bool, int, float)):
        return _Number(given)
    if isinstance(given, (Message, ChatResponse, ToolResponse)):
        return _Frozen(given)
    if hasattr(given, "model_dump"):
        return _Model(copy_of(given.model_dump(exclude_none=True)))
    raise Uncopied


class _Held:
    """Defines `==`: the classes of what it is compared with do not know it."""

    __slots__ = ("held",)
    __hash__ = None  # type: ignore[assignment]

    def __init__(self, held: Any) -> None:
        self.held = held


class _Number(_Held):
    __slots__ = ()

    def __eq__(self, other: object) -> bool:
        return type(other) is type(self.held) and repr(other) == repr(self.held)


class _Frozen(_Held):
    """An immutable object."""

    __slots__ = ()

    def __eq__(self, other: object) -> bool:
        return other is self.held


class _Model(_Held):
    """An object of the openai package."""

    __slots__ = ()

    def __eq__(self, other: Any) -> bool:
        return hasattr(other, "model_dump") and bool(other.model_dump(exclude_none=True) == self.held)
