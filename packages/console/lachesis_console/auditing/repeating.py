"""Plays that repeat a step of the reference policy: what pays once shall not pay without end."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, Final

MANY: Final = 60
"""Repetitions."""
_POSITIONS, _OTHERS = 6, 6

Turn = Mapping[str, Any]


def cycles(turns: Sequence[Turn], tools: Sequence[Mapping[str, Any]]) -> Iterator[tuple[str, int, list[Turn]]]:
    """Name, number of the reference's turns that come first, and the turns that are repeated after them."""
    seen: set[str] = set()
    for at, turn in enumerate(turns[:_POSITIONS]):
        if (key := json.dumps(turn, sort_keys=True)) in seen or not (turn["calls"] or at + 1 < len(turns)):
            continue
        seen.add(key)
        said = turn["calls"][0]["name"] if turn["calls"] else turn["text"][:40]
        yield f"{said} again and again after turn {at}", at + 1, [turn]
        if at:
            yield f"turns {at} and {at + 1} again and again", at + 1, [turns[at - 1], turn]
        for call in turn["calls"][:1]:
            for name in _fitting(call, tools):
                other = {"text": "", "calls": [{"name": name, "arguments": _for(name, call, tools)}]}
                yield f"{call['name']} and {name} again and again after turn {at}", at + 1, [other, turn]


def _schema(name: str, tools: Sequence[Mapping[str, Any]]) -> Mapping[str, Any]:
    schemas = (tool["function"].get("parameters") or {} for tool in tools if tool["function"]["name"] == name)
    return next(schemas, {})


def _for(name: str, call: Mapping[str, str], tools: Sequence[Mapping[str, Any]]) -> str:
    known = _schema(name, tools).get("properties") or {}
    return json.dumps({key: value for key, value in json.loads(call["arguments"] or "{}").items() if key in known})


def _fitting(call: Mapping[str, str], tools: Sequence[Mapping[str, Any]]) -> list[str]:
    """Other tools that can be called with the arguments of this call."""
    try:
        given = set(json.loads(call["arguments"] or "{}"))
    except (ValueError, TypeError):
        return []
    names = [tool["function"]["name"] for tool in tools]
    return [n for n in names if n != call["name"] and given >= set(_schema(n, tools).get("required") or ())][:_OTHERS]


def repeated(turns: Sequence[Turn], first: int, cycle: Sequence[Turn], count: int) -> list[Turn]:
    """The turns of a play. The calls of a cycle are put into one turn, as turns are few."""
    calls = [call for turn in cycle for call in turn["calls"]]
    once: Sequence[Turn] = [{"text": "", "calls": calls}] if calls else cycle
    return [*turns[:first], *(turn for _ in range(count) for turn in once)]
