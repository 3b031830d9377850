"""Plays that repeat a step of the reference policy: what pays once shall not pay without end."""

from __future__ import annotations

import json
import re
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


_CHANGING: Final = re.compile(
    r"write|set|add|create|delete|remove|send|book|move|load|update|put|post|pay|transfer|place|assign|edit|insert|rename"
)
_READING: Final = re.compile(r"get|list|read|search|look|find|show|view|query|fetch|inspect|check|load_|open|download")
_DELETING: Final = re.compile(r"delete|remove|clear|drop|reset|cancel|discard|unload|empty|wipe|erase")
_PATH: Final = re.compile(r"path|file|folder|directory|name$|id$", re.IGNORECASE)
_GARBAGE: Final = "qwv zzkt"
_ENDS: Final = "import os; os._exit(0)"
_CALLS, _DELETED = 8, 30


def changed_calls(turns: Sequence[Turn]) -> dict[str, list[Turn]]:
    """By name: the calls with garbage in the place of texts, and without one that changes something."""
    found: dict[str, list[Turn]] = {}
    for name, text in (("garbage", _GARBAGE), ("an empty text", ""), ("code that ends the process", _ENDS)):
        changed: list[Turn] = [
            {**turn, "calls": [{**call, "arguments": _with_texts(call, text)} for call in turn["calls"]]}
            for turn in turns
        ]
        if changed != [*turns]:
            found[f"wrong: {name} in the calls"] = changed
    calls = [(at, place, call["name"]) for at, turn in enumerate(turns) for place, call in enumerate(turn["calls"])]
    for at, place, name in calls[:_CALLS] if len(calls) > 1 else ():
        if _CHANGING.search(name) and not _READING.match(name):
            left = {**turns[at], "calls": [c for n, c in enumerate(turns[at]["calls"]) if n != place]}
            kept = [left] if left["calls"] else []
            found[f"without call {at + place + 1}: {name}"] = [*turns[:at], *kept, *turns[at + 1 :]]
    return found


def further_calls(turns: Sequence[Turn], others: Sequence[Turn]) -> list[Turn] | None:
    """The turns, and before the last calls those that solve other items with the same tools; None if there are none."""
    own = [(call["name"], call["arguments"]) for turn in turns for call in turn["calls"]]
    names = {name for name, _ in own if name != "terminal" and not _READING.match(name)}
    given = ((call["name"], call["arguments"]) for turn in others for call in turn["calls"] if call["name"] in names)
    more = [{"name": name, "arguments": text} for name, text in dict.fromkeys(given) if (name, text) not in own]
    if not more:
        return None
    last = max(at for at, turn in enumerate(turns) if turn["calls"])
    # Before, as the last call may end the rollout.
    return [*turns[:last], {"text": "", "calls": more[:_DELETED]}, *turns[last:]]


def _with_texts(call: Mapping[str, str], text: str) -> str:
    """Arguments with `text` in the place of what is written; commands and paths stay."""
    given = _arguments(call)
    if call["name"] == "terminal":
        return call["arguments"]
    return json.dumps({k: text if isinstance(v, str) and not _PATH.search(k) else v for k, v in given.items()})


def _arguments(call: Mapping[str, str]) -> dict[str, Any]:
    try:
        given = json.loads(call["arguments"] or "{}")
    except ValueError:
        return {}
    return given if isinstance(given, dict) else {}


def deletions(turns: Sequence[Turn], tools: Sequence[Mapping[str, Any]], prompt: str) -> list[Turn] | None:
    """Calls of the tools that delete, with all that the reference or the prompt names; None where there are none."""
    used = [call["name"] for turn in turns for call in turn["calls"]]
    deleting = [tool["function"] for tool in tools if _DELETING.search(tool["function"]["name"])]
    if not deleting or any(map(_DELETING.search, used)):
        return None
    values = [
        v for turn in turns for call in turn["calls"] for v in _arguments(call).values() if isinstance(v, str | int)
    ]
    values += re.findall(r"['\"`]([\w ./-]{1,40})['\"`]", prompt) + re.findall(r"\w+", prompt)
    calls = []
    for function in deleting:
        schema = function.get("parameters") or {}
        names = list(schema.get("required") or schema.get("properties") or ())[:1]
        kind = (schema.get("properties") or {}).get(names[0], {}).get("type") if names else None
        fitting = [v for v in dict.fromkeys(values) if isinstance(v, int) == (kind in ("integer", "number"))]
        for value in fitting[:_DELETED] if names else [None]:
            arguments = json.dumps({names[0]: value} if names else {})
            calls.append({"name": function["name"], "arguments": arguments})
    return [{"text": "", "calls": calls[at : at + 10]} for at in range(0, len(calls), 10)]
