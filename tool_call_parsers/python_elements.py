"""An element of a block of calls in Python, as read."""

from __future__ import annotations

from enum import Enum
from typing import Any, NamedTuple

from tool_call_parsers.arguments import plain_name
from tool_call_parsers.engine import Run
from tool_call_parsers.literals.literal import LiteralError
from tool_call_parsers.literals.python_call import read_python_call
from tool_call_parsers.types import CallStatus


class Kind(Enum):
    """The kind of text after an element of a block."""

    NEXT = 1
    """Another element, or the end of the text in place of one."""
    OVER = 2
    """The end of the block."""
    ODD = 3
    """Text that cannot follow a call."""


class Gap(NamedTuple):
    """The text after an element, and its end."""

    kind: Kind
    end: int
    missing: str | None = None
    """The missing character."""


class CallHead(NamedTuple):
    """The beginning of a call."""

    name: str
    bracket: int
    """The position of its parenthesis."""


class Element(NamedTuple):
    """An element of a block, as read."""

    start: int
    end: int
    gap: Gap
    status: CallStatus
    name: str = ""
    arguments: dict[str, Any] | None = None
    raw: str = ""
    error: str | None = None


def read_element(run: Run, start: int, end: int, gap: Gap, head: CallHead) -> Element:
    """The call that spans `start:end`."""
    raw = run.text[head.bracket + 1 : end].removesuffix(")")
    plain = plain_name(head.name, run.tools)
    try:
        call = read_python_call(run.text, start, end)
    except LiteralError as reason:
        return Element(start, end, gap, CallStatus.INVALID_JSON, head.name, raw=raw, error=reason.reason)
    if call.end != end:
        error = "something else follows the call"
        return Element(start, end, gap, CallStatus.INVALID_JSON, head.name, raw=raw, error=error)
    notes, arguments = call.notes, call.arguments
    if plain is not None:
        notes, head = (*notes, f"the name is written {head.name!r}"), head._replace(name=plain)
    if call.positional:
        notes = (*notes, "positional arguments")
        order = run.tools.order(head.name)
        only = call.positional[0]
        if len(call.positional) == 1 and not arguments and order and isinstance(only, dict) and only.keys() <= {*order}:
            as_first = not run.tools.is_string(head.name, order[0])  # an object can be the first argument itself
            arguments = {order[0]: only} if as_first else only
        else:
            places = dict(zip(order, call.positional, strict=False))
            if len(places) < len(call.positional) or places.keys() & arguments.keys():
                error = "positional arguments without a parameter of their own"
                return Element(start, end, gap, CallStatus.INVALID_JSON, head.name, raw=raw, error=error)
            arguments = places | arguments
    status = CallStatus.REPAIRED if notes else CallStatus.OK
    return Element(start, end, gap, status, head.name, arguments, raw, "; ".join(notes) or None)
