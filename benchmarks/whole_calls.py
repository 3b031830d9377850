"""Reads the raw text of an answer to an item of `tool_call`, `tool_result` or `maze`, strictly, and with none of the
project's own code.

The rewards and the parser that are measured must not also be what measures them.
"""

from __future__ import annotations

import ast
import json
import re
from typing import Any
from zlib import crc32

_ANSWER = re.compile(r"<tool_call>\n?(.*?)\n?</tool_call><\|im_end\|>(.*)<\|im_end\|>", re.DOTALL)
_NUMBER = re.compile(r"\d+")
_CALL = re.compile(r"<tool_call>(.*?)</tool_call>", re.DOTALL)


def is_whole_call(text: str, question: str) -> bool:
    """Whether `text` has exactly one call, opened and closed, which is the one that `add 12 and 34` asks for."""
    found = _CALL.findall(text)
    if len(found) != 1 or text.count("<tool_call>") != 1 or text.count("</tool_call>") != 1:
        return False
    name, a, _, b = question.split()
    wanted = {"name": name, "arguments": {"a": int(a), "b": int(b)}}
    try:
        call = json.loads(found[0], object_pairs_hook=_without_repeats)
    except ValueError:
        return False
    # As text: Python holds 1, 1.0 and True for equal.
    return json.dumps(call, sort_keys=True) == json.dumps(wanted, sort_keys=True)


def is_whole_result(text: str, question: str) -> bool:
    """Whether `text`, the two turns of an answer, is the call that `How many pieces of bolt-12 are in stock?` needs,
    opened and closed, and then an answer whose only number is the one that the tool says."""
    if (turns := _ANSWER.fullmatch(text)) is None or text.count("<tool_call>") != 1:
        return False
    part = question.split()[4]
    try:
        call = json.loads(turns[1], object_pairs_hook=_without_repeats)
    except ValueError:
        return False
    said = _NUMBER.findall(turns[2])
    return call == {"name": "look_up", "arguments": {"part": part}} and said == [str(100 + crc32(part.encode()) % 900)]


def is_whole_way(text: str, item: str) -> bool:
    """Whether `text`, all turns of an answer, is nothing but calls such as `[go(door="stone")]`, and the last of them
    comes to the end of the maze in `item`, as JSON. A call of no door of its room changes nothing."""
    drawn, here = json.loads(item), "hall"
    *turns, rest = text.split("<|im_end|>")
    for turn in turns:
        if here == drawn["end"]:
            return False
        doors = [door.split()[1] for door in drawn["rooms"][here].removeprefix("doors: ").split(", ")]
        try:
            call = ast.dump(ast.parse(turn, mode="eval"))
        except (SyntaxError, ValueError, RecursionError, MemoryError):
            return False
        if not call.startswith("Expression(body=List(elts=[Call("):
            return False
        same = (door for door in doors if call == ast.dump(ast.parse(f"[go(door='{door}')]", mode="eval")))
        here = next(same, here)
    return not rest and here == drawn["end"]


def _without_repeats(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    if len(dict(pairs)) != len(pairs):
        raise ValueError("a key twice")
    return dict(pairs)
