"""Parsers whose `parse(text)` returns `(content, tool_calls)`; `tool_call_parsers` itself tells more."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

import tool_call_parsers as _parsers
from tool_call_parsers import CallStatus, Finish, ParsedCompletion, ParsedToolCall, list_parsers

__all__ = ["ToolCallParser", "get_parser", "list_parsers", "register_parser"]


class ToolCallParser:
    """A parser by its name, in the old form; and the base class of parsers of one's own."""

    def __init__(self, name: str | None = None) -> None:
        self._parser = None if name is None else _parsers.get_parser(name)

    def parse(self, text: str) -> tuple[str | None, list[Any] | None]:
        """The text outside of calls, None where there is none; and the calls as objects of the openai package, which
        work as dicts too, or None."""
        from lachesis_tokens.server.openai_types import tool_call

        if self._parser is None:
            raise NotImplementedError(f"{type(self).__name__} has no parse()")
        parsed = self._parser.parse(text)
        calls = [tool_call(call.id, call.name, call.arguments_json) for call in parsed.tool_calls]
        return (parsed.content or "").strip() or None, calls or None


class _InOldForm:
    """A registered parser, as the runs use parsers."""

    def __init__(self, own: Any) -> None:
        self.own = own

    def parse(self, text: str, tools: Any = None, **_: Any) -> ParsedCompletion:
        content, calls = self.own.parse(text)
        attempts = tuple(map(_attempt, calls or ()))
        usable = tuple(each for each in attempts if each.status is CallStatus.OK)
        finish = Finish.TOOL_CALLS if usable else Finish.STOP
        return ParsedCompletion(content or None, tool_calls=usable, attempts=attempts, finish=finish)


def _attempt(call: Any) -> ParsedToolCall:
    """A call of the openai package, as an object or as a dict."""
    function = call["function"] if isinstance(call, dict) else call.function
    name, written = (
        (function["name"], function["arguments"]) if isinstance(function, dict) else (function.name, function.arguments)
    )
    call_id = (call.get("id") if isinstance(call, dict) else call.id) or _parsers.new_call_id()
    written = written if isinstance(written, str) else json.dumps(written)
    try:
        arguments = json.loads(written or "{}")
    except (ValueError, RecursionError) as error:
        return ParsedToolCall(call_id, name, {}, written, CallStatus.INVALID_JSON, error=str(error), raw=written)
    if not isinstance(arguments, dict):
        why = f"the arguments are a {type(arguments).__name__}"
        return ParsedToolCall(call_id, name, {}, written, CallStatus.NOT_AN_OBJECT, error=why, raw=written)
    return ParsedToolCall(call_id, name, arguments, written, CallStatus.OK, raw=written)


def register_parser(name: str) -> Callable[[type], type]:
    """Register a class whose `parse(text)` returns `(content, tool_calls)`, for `env.tool_call_parser` too."""

    def register(cls: type) -> type:
        _parsers.register_parser(name)(lambda: _InOldForm(cls()))
        return cls

    return register


def get_parser(name: str) -> Any:
    """Raises `UnknownParser`, which is a `KeyError`."""
    found: Any = _parsers.get_parser(name)
    return found.own if isinstance(found, _InOldForm) else ToolCallParser(name)
