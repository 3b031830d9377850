"""Dicts and lists that write through: `history[i]` returns them, so that messages can be edited in place.

They are dicts and lists of plain values, so json, orjson, jinja2 and `==` treat them as such. Each change is validated
on the whole message; a change that makes the message malformed has no effect.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeAlias

from backends.errors import LachesisError
from lachesis_messages.errors import MalformedMessage
from lachesis_messages.frozen import PlainCopies, thaw
from lachesis_messages.nodes import Node, Origin

Rewrite: TypeAlias = Callable[[Node, int, dict[str, Any]], Node]
"""Replaces the node at an index by one for a message and returns it; raises StaleMessage, MessageError."""


class StaleMessage(LachesisError, RuntimeError):
    """A write to a message that is no longer part of its conversation."""


def _writing(operation: Callable[..., Any]) -> Callable[..., Any]:
    def write(self: _EditableDict | _EditableList, *args: Any, **kwargs: Any) -> Any:
        view = self if isinstance(self, MessageView) else self._view
        return view._write(self, operation, args, kwargs)

    write.__name__ = write.__qualname__ = operation.__name__
    write.__doc__ = operation.__doc__
    return write


class _EditableDict(PlainCopies, dict[str, Any]):
    __slots__ = ("_view",)
    _view: MessageView

    __setitem__ = _writing(dict.__setitem__)
    __delitem__ = _writing(dict.__delitem__)
    __ior__ = _writing(dict.__ior__)
    clear = _writing(dict.clear)
    pop = _writing(dict.pop)
    popitem = _writing(dict.popitem)
    setdefault = _writing(dict.setdefault)
    update = _writing(dict.update)

    def __reduce__(self) -> tuple[object, ...]:
        return (dict, (thaw(self),))


class _EditableList(PlainCopies, list[Any]):
    __slots__ = ("_view",)
    _view: MessageView

    __setitem__ = _writing(list.__setitem__)
    __delitem__ = _writing(list.__delitem__)
    __iadd__ = _writing(list.__iadd__)
    __imul__ = _writing(list.__imul__)
    append = _writing(list.append)
    clear = _writing(list.clear)
    extend = _writing(list.extend)
    insert = _writing(list.insert)
    pop = _writing(list.pop)
    remove = _writing(list.remove)
    reverse = _writing(list.reverse)
    sort = _writing(list.sort)

    def __reduce__(self) -> tuple[object, ...]:
        return (list, (thaw(self),))


class MessageView(_EditableDict):
    """One message of a history, as a dict that writes through.

    It follows its message through edits elsewhere. Copies (`copy.deepcopy`, pickles) are plain dicts.
    """

    __slots__ = ("__weakref__", "_node", "_place", "_rewrite")

    def __init__(self, node: Node, place: int, rewrite: Rewrite) -> None:
        super().__init__()
        self._node = node
        self._place = place
        self._rewrite = rewrite
        _fill(self, node.item, self, set())

    @property
    def origin(self) -> Origin:
        """The completion or tool result of the message in its present form."""
        return self._node.origin

    def _moved(self, node: Node, place: int) -> None:
        self._node, self._place = node, place

    def _write(self, part: _EditableDict | _EditableList, operation: Callable[..., Any], args: Any, kwargs: Any) -> Any:
        if not _holds(self, part):
            raise StaleMessage("this part was removed from its message; read it from the history again")
        before = part.copy()
        try:
            result = operation(part, *args, **kwargs)
            self._node = self._rewrite(self._node, self._place, thaw(self))
        except BaseException as error:
            _replace(part, before)
            if isinstance(error, RecursionError):
                raise MalformedMessage("contains itself, or is nested too deeply", index=self._place) from None
            raise
        _fill(self, self._node.item, self, set())  # in canonical form, with containers that write through
        if operation is dict.setdefault:
            return part.get(args[0])  # type: ignore[union-attr]
        return result if result is part else thaw(result)


def _holds(view: MessageView, part: object) -> bool:
    left: list[object] = [view]
    while left:
        found = left.pop()
        if found is part:
            return True
        if isinstance(found, dict):
            left += found.values()
        elif isinstance(found, list):
            left += found
    return False


def _replace(part: _EditableDict | _EditableList, content: Any) -> None:
    if isinstance(part, dict):
        dict.clear(part)
        dict.update(part, content)
    else:
        list.clear(part)
        list.extend(part, content)


def _fill(part: _EditableDict | _EditableList, content: Any, view: MessageView, used: set[int]) -> None:
    """Set `part` to `content`; containers in it that callers may hold stay the same objects."""
    if isinstance(part, dict):
        present = dict(part)
        _replace(part, {key: _adopted(present.get(key), value, view, used) for key, value in content.items()})
    else:
        at = list(part) + [None] * (len(content) - len(part))
        _replace(part, [_adopted(old, value, view, used) for old, value in zip(at, content, strict=False)])


def _adopted(present: Any, value: Any, view: MessageView, used: set[int]) -> Any:
    if not isinstance(value, (dict, list)):
        return value
    kind = _EditableDict if isinstance(value, dict) else _EditableList
    if type(present) is not kind or present._view is not view or id(present) in used:
        present = kind()
        present._view = view
    used.add(id(present))
    _fill(present, value, view, used)
    return present
