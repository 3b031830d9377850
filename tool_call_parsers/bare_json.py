"""An answer that is nothing but a call as JSON: `{"name": "f", "arguments": {...}}`, a list of them, or either fenced.

Data looks just like that, so the name has to be that of an offered tool; without tools nothing is a call.
"""

from __future__ import annotations

import re

from tool_call_parsers.json_calls import NotJSON, calls_of, read_value
from tool_call_parsers.registry import register_parser
from tool_call_parsers.types import CallStatus, ParsedCompletion, ParsedToolCall, Tools, tool_names

_REASONING = re.compile(r"\s*<think>(.*?)</think>", re.DOTALL)
_FENCED = re.compile(r"```(?:json)?\s*(.*?)\s*```", re.DOTALL)


@register_parser("bare_json")
class BareJSONParser:
    """Reads whole answers only: JSON that is part of a longer text is data."""

    def parse(self, text: str, tools: Tools | None = None) -> ParsedCompletion:
        reasoning, answer = None, text
        if thought := _REASONING.match(text):
            reasoning, answer = thought[1].strip() or None, text[thought.end() :]
        calls = read_whole_answer(answer, tool_names(tools))
        if calls:
            return ParsedCompletion(None, reasoning, calls, calls)
        return ParsedCompletion((answer if thought is None else answer.strip()) or None, reasoning)


def read_whole_answer(answer: str, known: frozenset[str]) -> tuple[ParsedToolCall, ...]:
    """The calls, if the answer is calls to `known` tools and nothing else; none otherwise."""
    body = answer.strip()
    if fenced := _FENCED.fullmatch(body):
        body = fenced[1]
    if not known or not body.startswith(("{", "[")):
        return ()
    try:
        value = read_value(body, 0)
    except NotJSON:
        return ()
    items = value.value if isinstance(value.value, list) else [value.value]
    if value.end != len(body) or not items or not all(_is_call(item, known) for item in items):
        return ()
    calls = calls_of(value, known, answer.strip())
    return tuple(calls) if all(call.status in (CallStatus.OK, CallStatus.REPAIRED) for call in calls) else ()


def _is_call(item: object, known: frozenset[str]) -> bool:
    return (
        isinstance(item, dict)
        and item.get("name") in known
        and isinstance(item.get("arguments", item.get("parameters")), dict)
    )
