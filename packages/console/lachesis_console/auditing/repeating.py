"""Plays made of the steps of the reference policy: repeated, left out, changed, too many, and after what it looks at is
deleted."""

from __future__ import annotations

import json
import re
from collections.abc import Collection, Iterator, Mapping, Sequence
from typing import Any, Final

from lachesis_console.auditing.forms import wrong_cores
from lachesis_tools import BUILTIN_TOOLS

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
    r"|submit|finish|close|approve|refund|schedule|complete|mark|cancel|apply|issue|reply|label|tag|archive|merge|ship"
    r"|reserve|confirm"
)
_READING: Final = re.compile(r"get|list|read|search|look|find|show|view|query|fetch|inspect|check|load_|open|download")
_DELETING: Final = re.compile(r"delete|remove|clear|drop|reset|cancel|discard|unload|empty|wipe|erase")
_ANSWERING: Final = re.compile(
    r"submit|answer|final|guess|report|respond|solve|conclude|accuse|claim|choose|decide|declare|vote|identif|diagnos"
    r"|predict",
    re.IGNORECASE,
)
_PATH: Final = re.compile(r"path|file|folder|directory|name$|id$", re.IGNORECASE)
_GARBAGE: Final = "qwv zzkt"
_ENDS: Final = "import os; os._exit(0)"
_CALLS, _DELETED, _AMOUNTS, _GUESSED = 8, 30, 4, 3


def changed_calls(turns: Sequence[Turn]) -> dict[str, list[Turn]]:
    """By name: the calls with garbage in the place of texts, and without one that changes something."""
    found: dict[str, list[Turn]] = {}
    texts = (("garbage", _GARBAGE), ("an empty text", ""), ("code that ends the process", _ENDS))
    # Where a call says the answer, the others may only look at something: see `wrong_submissions`.
    for name, text in () if submission(turns) is not None else texts:
        changed: list[Turn] = [
            {
                **turn,
                "calls": [
                    # What only reads may read anything: the answer is said elsewhere.
                    call if _READING.match(call["name"]) else {**call, "arguments": _with_texts(call, text)}
                    for call in turn["calls"]
                ],
            }
            for turn in turns
        ]
        if changed != [*turns]:
            found[f"wrong: {name} in the calls"] = changed
    calls = [(at, place, call["name"]) for at, turn in enumerate(turns) for place, call in enumerate(turn["calls"])]
    changing = [call for call in calls if _CHANGING.search(call[2]) and not _READING.match(call[2])]
    for at, place, name in changing[:_CALLS] if len(calls) > 1 else ():
        found[f"without call {at + place + 1}: {name}"] = _without(turns, {(at, place)})
    if len(changing) > 2:
        found["without call: all that change something but the last"] = _without(turns, {c[:2] for c in changing[:-1]})
    return found


def negative_amounts(turns: Sequence[Turn]) -> dict[str, tuple[list[Turn], list[Turn]]]:
    """By name: the turns before a call that changes something, and the end; and with a negative amount in that call
    between them."""
    found: dict[str, tuple[list[Turn], list[Turn]]] = {}
    end = [] if turns[-1]["calls"] else [turns[-1]]
    for at, turn in enumerate(turns):
        for call in turn["calls"]:
            own = call["name"] in BUILTIN_TOOLS or _READING.match(call["name"])
            given = {} if own else _arguments(call)
            for key, value in given.items():
                name = f"{call['name']} with a negative {key}"
                if type(value) not in (int, float) or value <= 0 or name in found or len(found) >= _AMOUNTS:
                    continue
                changed = {**call, "arguments": json.dumps({**given, key: -100 * value})}
                negative: Turn = {"text": "", "calls": [changed]}
                found[name] = [*turns[:at], *end], [*turns[:at], negative, *end]
    return found


def guesses(turns: Sequence[Turn], values: Sequence[str]) -> list[Turn] | None:
    """The turns with wrong submissions before and after the right one, each in a turn of its own; None where the last
    call submits nothing, or there is no other value."""
    if (found := submission(turns)) is None:
        return None
    at, call, key = found
    right = str(_arguments(call)[key])
    others = [submitted(call, key, value) for value in dict.fromkeys(values) if value != right]
    wrong = [each for each in others if each is not None][:_GUESSED]
    said: list[Turn] = [{"text": "", "calls": [each]} for each in wrong]
    return [*said, *turns[: at + 1], *said[:1], *turns[at + 1 :]] if said else None


def submission(turns: Sequence[Turn]) -> tuple[int, Mapping[str, Any], str] | None:
    """The place of the last turn with a call, that call, and the argument by which it says the answer; None where
    it says none."""
    at = max((at for at, turn in enumerate(turns) if turn["calls"]), default=-1)
    call = turns[at]["calls"][-1] if at >= 0 else {"name": "", "arguments": ""}
    given = _arguments(call) if _ANSWERING.search(call["name"]) else {}
    said = [key for key, value in given.items() if isinstance(value, str | int | float)]
    return (at, call, said[0]) if len(said) == 1 else None


def submitted(call: Mapping[str, Any], key: str, core: str) -> dict[str, Any] | None:
    """The call with `core` as the answer; None where it has another type."""
    given = _arguments(call)
    value: Any = core
    if not isinstance(given[key], str):
        try:
            value = json.loads(core)
        except ValueError:
            return None
    return {**call, "arguments": json.dumps({**given, key: value})}


def wrong_submissions(turns: Sequence[Turn], told: str) -> dict[str, list[Turn]]:
    """By name: the turns with a wrong answer in the last call, if that call says the answer."""
    if (found := submission(turns)) is None:
        return {}
    at, call, key = found
    wrong = {}
    for name, core in wrong_cores(str(_arguments(call)[key]), told):
        if (last := submitted(call, key, core)) is not None:
            turn = {**turns[at], "calls": [*turns[at]["calls"][:-1], last]}
            wrong[f"wrong: {name}"] = [*turns[:at], turn, *turns[at + 1 :]]
    return wrong


def _without(turns: Sequence[Turn], left_out: Collection[tuple[int, int]]) -> list[Turn]:
    kept: list[Turn] = [
        {**turn, "calls": [call for place, call in enumerate(turn["calls"]) if (at, place) not in left_out]}
        for at, turn in enumerate(turns)
    ]
    return [turn for turn, before in zip(kept, turns, strict=True) if turn["calls"] or not before["calls"]]


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


_SQL: Final = re.compile(r"\bsql|sqlite", re.IGNORECASE)
_TABLES: Final = re.compile(
    r"\b(?:from|join|into|update|table)\s+[\"'`]?(\w+)|\b(\w+)\s?\(\w+[^()]*\)|[`'\"](\w+)[`'\"]", re.I
)


def emptied_tables(turns: Sequence[Turn], tools: Sequence[Mapping[str, Any]], told: str) -> list[Turn] | None:
    """Statements of SQL that delete all rows of the tables which the reference or the texts name; None where no tool
    takes SQL."""
    for tool in tools:
        function = tool["function"]
        properties = (function.get("parameters") or {}).get("properties") or {}
        texts = [name for name, schema in properties.items() if schema.get("type") == "string"]
        if len(texts) != 1 or not _SQL.search(json.dumps(function)) or function["name"] == "terminal":
            continue
        # The reference's own first: a limit of calls may end the others.
        said = "\n".join([*(call["arguments"] for turn in turns for call in turn["calls"]), told])
        tables = list(dict.fromkeys("".join(names) for names in _TABLES.findall(said)))[:_DELETED]
        calls = [{"name": function["name"], "arguments": json.dumps({texts[0]: f"DELETE FROM {t}"})} for t in tables]
        return [{"text": "", "calls": calls}] if calls else None
    return None


_NUMBERS: Final = {"two": 2, "three": 3, "four": 4, "five": 5, "six": 6, "seven": 7, "eight": 8, "nine": 9, "ten": 10}
_NUMBER: Final = rf"(?P<count>\d+|{'|'.join(_NUMBERS)})"
_CALL: Final = (
    r"(?P<noun>call|probe|quer|question|guess|attempt|tr(?:y\b|ies)|measure|weigh|lookup|look-up|search|use|request|read"
    r"|move|check|test|shot|hint|draw|inspect|purchase)\w*"
)
_LIMITS: Final = (
    rf"(?:at most|up to|no more than|maximum of|limit(?:ed)? (?:of|to)|only|budget of|not exceed|allows?|have|get)\s+"
    rf"{_NUMBER}\s+(?:[\w-]+\s+){{0,2}}?{_CALL}",
    rf"{_CALL}[^.\n]{{0,30}}(?:at most|up to|no more than|maximum of|only|limited to)\s+{_NUMBER}\b",
)


def over_limit(turns: Sequence[Turn], told: str, wrong: str) -> tuple[int, list[Turn]] | None:
    """More calls, or more wrong answers, than `told` allows, and then what the reference does: how many come first.
    None where `told` names no limit.

    Args:
        wrong: a wrong answer in the right form.
    """
    match = next(filter(None, (re.search(pattern, told, re.IGNORECASE) for pattern in _LIMITS)), None)
    if match is None:
        return None
    count = _NUMBERS.get(match["count"].lower()) or int(match["count"])
    if not 0 < count <= _DELETED:
        return None
    calls = [call for turn in turns for call in turn["calls"] if call["name"] != "terminal"]
    named = [call for call in calls if match["noun"].lower()[:4] in call["name"].lower()]
    chosen = named or [call for call in calls if _READING.match(call["name"])] or calls
    if chosen:
        # A turn each: the same call twice in one turn is run once.
        return count + 2, [*[{"text": "", "calls": [chosen[0]]}] * (count + 2), *turns]
    return (count + 2, [*[{"text": wrong, "calls": []}] * (count + 2), *turns]) if wrong else None
