"""Read-only dicts and lists: equal to plain ones, serialised like plain ones, and never changed in place.

`copy.copy` and `copy.deepcopy` give plain, editable copies; pickling keeps them read-only.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NoReturn, TypeVar

T = TypeVar("T")

_HINT = (
    "messages from an iteration or a slice of a history are read-only; edit history[index], which writes through, or a "
    "copy.deepcopy()"
)


def _reject(self: object, *args: Any, **kwargs: Any) -> NoReturn:
    raise TypeError(_HINT)


class PlainCopies:
    """A dict or list whose copies are plain and editable."""

    __slots__ = ()

    def __copy__(self) -> Any:
        return self.copy()  # type: ignore[attr-defined]

    def __deepcopy__(self, memo: dict[int, Any]) -> Any:
        return thaw(self)


class FrozenDict(PlainCopies, dict[str, Any]):
    """A dict whose mutations raise TypeError. `freeze` builds one and copies the values."""

    __slots__ = ()

    __setitem__ = __delitem__ = __ior__ = _reject
    clear = pop = popitem = setdefault = update = _reject

    def __reduce__(self) -> tuple[object, ...]:
        return (FrozenDict, (dict(self),))


class FrozenList(PlainCopies, list[Any]):
    """A list whose mutations raise TypeError. `freeze` builds one and copies the items."""

    __slots__ = ()

    __setitem__ = __delitem__ = __iadd__ = __imul__ = _reject
    append = clear = extend = insert = pop = remove = reverse = sort = _reject

    def __reduce__(self) -> tuple[object, ...]:
        return (FrozenList, (list(self),))


def freeze(value: Any) -> Any:
    """A read-only deep copy of a JSON value. TypeError for any other value."""
    if value is None or isinstance(value, (str, bool, int, float)):
        return value
    if isinstance(value, (dict, Mapping)):  # isinstance is slow with an abstract base class
        return freeze_dict(value)
    if isinstance(value, (list, tuple)):
        return FrozenList([freeze(item) for item in value])
    raise TypeError(f"{type(value).__name__} is not a JSON value")


def freeze_dict(mapping: Mapping[Any, Any]) -> FrozenDict:
    """`freeze` for a mapping; its keys must be text."""
    frozen = {key: value if type(value) is str else freeze(value) for key, value in mapping.items()}
    if set(map(type, frozen)) - {str}:
        for key in frozen:
            if not isinstance(key, str):
                raise TypeError(f"key {key!r} is not text")
    return FrozenDict(frozen)


def thaw(value: Any) -> Any:
    """A plain, editable deep copy of a frozen value."""
    if isinstance(value, str):
        return value  # most values are text
    if isinstance(value, (dict, Mapping)):
        return {key: thaw(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [thaw(item) for item in value]
    return value
