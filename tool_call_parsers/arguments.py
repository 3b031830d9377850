"""A call's arguments: their status, and their JSON text as a stream sends it."""

from __future__ import annotations

import json
import re
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from tool_call_parsers.engine import Run
from tool_call_parsers.json_scan import JsonScan
from tool_call_parsers.literals.literal import Literal
from tool_call_parsers.literals.strict import read_whole_json
from tool_call_parsers.schema import ToolIndex
from tool_call_parsers.types import CallStatus


class FoundArguments(NamedTuple):
    """Arguments as found in the text, with a status."""

    status: CallStatus
    value: dict[str, Any]
    raw: str
    error: str | None = None


def no_arguments(instead: str) -> FoundArguments:
    """The arguments of a call that has `instead` in place of an object."""
    return FoundArguments(CallStatus.REPAIRED, {}, "", f"{instead} in place of the arguments")


def read_arguments(value: object, raw: str) -> FoundArguments:
    """Classify a decoded value as arguments: an object, nothing, or a string with the JSON text of an object."""
    if isinstance(value, dict):
        return FoundArguments(CallStatus.OK, value, raw)
    if value is None:
        return no_arguments("null")
    if isinstance(value, str):
        inner = value.strip()
        if not inner or inner == "null":
            return no_arguments("a string")
        literal = read_whole_json(inner)
        if literal is None or not isinstance(literal.value, dict):
            from tool_call_parsers.literals.tolerant import repair_json  # see `json_scan.read_damaged`

            literal = repair_json(inner)
        if literal is not None and isinstance(literal.value, dict):
            notes = ("the arguments are a JSON string", *literal.notes)
            return FoundArguments(CallStatus.REPAIRED, literal.value, inner, ", ".join(notes))
    elif value == []:
        return FoundArguments(CallStatus.REPAIRED, {}, raw, "an empty list instead of an object")
    return FoundArguments(
        CallStatus.NOT_AN_OBJECT, {}, raw, f"the arguments are not an object but a {type(value).__name__}"
    )


def plain_name(name: str, tools: ToolIndex, separators: str = "") -> str | None:
    """The offered tool that a name with a namespace means: `functions.f`, or a path before one of the `separators`;
    None if the name is offered itself, or means none."""
    if name in tools.names():
        return None
    plain = name.removeprefix("functions.")
    if plain not in tools.names():
        plain = re.split(f"[{re.escape(separators)}]", name)[-1] if separators else name
    return plain if plain != name and plain in tools.names() else None


def read_literal(literal: Literal, raw: str) -> FoundArguments:
    """Classify JSON as arguments."""
    found = read_arguments(literal.value, raw)
    if found.status is CallStatus.OK and literal.notes:
        return found._replace(status=CallStatus.REPAIRED, error=", ".join(literal.notes))
    return found


class ArgumentsWatch:
    """Sends the JSON text of arguments while the model writes it."""

    def __init__(self, run: Run, start: int) -> None:
        self.run, self.sent = run, start

    def __call__(self, scan: JsonScan) -> None:
        if self.run.started and scan.position > self.sent:
            self.run.send_arguments(self.run.text[self.sent : scan.position])
            self.sent = scan.position


@dataclass(slots=True)
class ArgumentsText:
    """Builds and sends the JSON text of arguments that the model writes in another form."""

    run: Run
    active: bool = True
    """False if the run does not stream, so that nobody needs the text."""
    _parts: list[str] = field(default_factory=list)

    def add(self, text: str) -> None:
        """Add text."""
        if self.active:
            self._parts.append(text)
            self.run.send_arguments(text)

    def member(self, key: str, value: str = "") -> None:
        """Add a member with its value, or with the beginning of its value."""
        if self.active:
            self.add(f"{', ' if self._parts else '{'}{json.dumps(key, ensure_ascii=False)}: {value}")

    def value(self, value: Any) -> None:
        """Add the value of a member."""
        if self.active:
            self.add(json.dumps(value, ensure_ascii=False))

    def characters(self, text: str) -> None:
        """Add characters of a string."""
        if self.active and text:
            self.add(json.dumps(text, ensure_ascii=False)[1:-1])

    def whole(self) -> str | None:
        """All of the text, with the closing brace that is not sent yet; None if it was not built."""
        if not self.active:
            return None
        return "".join(self._parts) + "}" if self._parts else "{}"
