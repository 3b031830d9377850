"""A single tag: what it does, and what its head says, the name above all."""

from __future__ import annotations

import re
from enum import Enum
from typing import NamedTuple

HEAD_LIMIT = 1024
"""Characters that the head of a tag spans at most, blanks included. Bounds what is looked at twice."""
WORD = re.compile(r"[\w.\-:/$]+")
EQUALS = re.compile(r"\s*+([^<>\n]*+)(?:([<>])|\n\s*+(\S))")
"""The head of `<function=f>`: the name and what ends it, which is not `>` where that is missing."""
_QUOTED = r"\"[^\"]*+\"|'[^']*+'|[^\s<>\"'/]*+"
ATTRIBUTES = re.compile(
    rf"(?>(?:\s++string[ \t]*+=[ \t]*+(?:{_QUOTED}))?)"
    rf"(\s*+)(?>(name)?)\s*+=\s*+({_QUOTED})((?>(?:[ \t]++[\w:-]++[ \t]*+=[ \t]*+(?:{_QUOTED}))*))"
    r"(?:\s*+(/>|[<>])|[ \t]*+\n\s*+(\S))"
)
"""The head of `<invoke name="f">`: the name, other attributes, and the same."""
_STRING_FLAG = re.compile(r"string[ \t]*+=[ \t]*+[\"']?+(true|false)")
TYPES = {"true": "string", "false": "json"}
"""What the attribute `string` says."""


class TagRole(Enum):
    """What a tag does, and what else may stand where a tag is due."""

    WRAP = 1
    UNWRAP = 2
    CALL = 3
    END_CALL = 4
    PARAMETER = 5
    END_VALUE = 6
    DONE = 7
    """The text is over, or its last tag is a cut end tag."""
    CUT = 8
    """The text ends in an opening tag."""
    TEXT = 9
    """No tag."""


AFTER_CALL = (TagRole.UNWRAP, TagRole.CALL, TagRole.WRAP, TagRole.DONE, TagRole.CUT)


class Mark(NamedTuple):
    """What stands at a position, blanks before it left out."""

    start: int
    role: TagRole
    end: int


class Head(NamedTuple):
    """An opening tag read to its end, the name of the call or the parameter in it."""

    name: str
    end: int
    typed: str | None = None
    """How the markup types the value: "string", "json", a JSON schema's type, or not at all."""
    note: str | None = None
    """What is wrong with the tag."""
    closed: bool = False
    """It is its own end tag."""
    dangling: bool = False
    """A key without a value."""
    open_end: bool = False
    """Its `>` is missing."""


CUT_HEAD = Head("", -1)
"""The text ends in the tag."""


class Beginning(NamedTuple):
    """A call's name, and what stands behind its opening tag."""

    name: str
    mark: Mark


def equals_head(match: re.Match[str]) -> Head | None:
    """The head that `EQUALS` has found; None where it is none."""
    name, end, note = match[1].strip(), match.end(), None
    if len(name) > 1 and name[0] in "'\"" and name[-1] == name[0]:
        name, note = name[1:-1], "a name in quotes"
    if match[2] == "<" or (match[3] or ">") != ">":
        return _unended(Head(name, match.end(1) + (match[3] is not None), note=note))
    return Head(name, end, note=note)


def attributes_head(match: re.Match[str]) -> Head | None:
    """The head that `ATTRIBUTES` has found; None where it is none."""
    name, mark = match[3], match[5]
    name = (name[1:-1] if name[:1] in ("'", '"') else name).strip()
    note = None if match[1] and match[2] else "a tag run together with its attribute"
    flag = _STRING_FLAG.search(match[4]) or _STRING_FLAG.search(match.string, match.start(), match.start(3))
    head = Head(name, match.end(), TYPES[flag[1]] if flag else None, note, closed=mark == "/>")
    if mark == "<" or mark is None:
        return _unended(head._replace(end=match.start(5) if mark else match.string.index("\n", match.end(4)) + 1))
    return head


def _unended(head: Head) -> Head | None:
    """A head without its `>`, if it looks like one all the same."""
    if head.name and not WORD.fullmatch(head.name):
        return None
    notes = filter(None, (head.note, "a tag without its '>'"))
    return head._replace(note="; ".join(notes), open_end=True)
