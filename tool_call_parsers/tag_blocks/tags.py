"""A single tag: its role, and the contents of its head, such as the name."""

from __future__ import annotations

import re
from enum import Enum
from typing import NamedTuple

HEAD_LIMIT = 1024
"""The maximum length of a tag's head, blanks included. Bounds the text that is read twice."""
WORD = re.compile(r"[\w.\-:/$]+")
EQUALS = re.compile(r"\s*+([^<>\n]*+)(?:([<>])|\n\s*+(\S))")
"""The head of `<function=f>`: the name and the character that ends it, which is not `>` if that is missing."""
_QUOTED = r"\"[^\"]*+\"|'[^']*+'|[^\s<>\"'/]*+"
ATTRIBUTES = re.compile(
    rf"(?>(?:\s++string[ \t]*+=[ \t]*+(?:{_QUOTED}))?)"
    rf"(\s*+)(?>(name)?)\s*+=\s*+({_QUOTED})((?>(?:[ \t]++[\w:-]++[ \t]*+=[ \t]*+(?:{_QUOTED}))*))"
    r"(?:\s*+(/>|[<>])|[ \t]*+\n\s*+(\S))"
)
"""The head of `<invoke name="f">`: the name, other attributes, and the same."""
_STRING_FLAG = re.compile(r"string[ \t]*+=[ \t]*+[\"']?+(true|false)")
_STRING_ATTRIBUTE = re.compile(r' string="(true|false)"')
TYPES = {"true": "string", "false": "json"}
"""The meaning of the attribute `string`."""


class TagRole(Enum):
    """The role of a tag, or of other text in the place of one."""

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
    """Not a tag."""


AFTER_CALL = (TagRole.UNWRAP, TagRole.CALL, TagRole.WRAP, TagRole.DONE, TagRole.CUT)


class Mark(NamedTuple):
    """A tag or other text at a position, after blanks."""

    start: int
    role: TagRole
    end: int


class Head(NamedTuple):
    """An opening tag read to its end, with the name of the call or the parameter."""

    name: str
    end: int
    typed: str | None = None
    """The type that the tag states: "string", "json", a JSON schema's type, or None."""
    note: str | None = None
    """The defect of the tag."""
    closed: bool = False
    """The tag closes itself."""
    dangling: bool = False
    """A key without a value."""
    open_end: bool = False
    """Its `>` is missing."""
    attributes: bool = False
    """It has other attributes."""


CUT_HEAD = Head("", -1)
"""The text ends in the tag."""


class Beginning(NamedTuple):
    """A call's name, and the mark after its opening tag."""

    name: str
    mark: Mark


def equals_head(match: re.Match[str]) -> Head | None:
    """The head in a match of `EQUALS`; None if it is not a head."""
    name, end, note = match[1].strip(), match.end(), None
    if name != match[1] or match.start(1) > match.start():
        note = "blanks around a name"
    if len(name) > 1 and name[0] in "'\"" and name[-1] == name[0]:
        name, note = name[1:-1], "a name in quotes"
    if match[2] == "<" or (match[3] or ">") != ">":
        return _unended(Head(name, match.end(1) + (match[3] is not None), note=note))
    return Head(name, end, note=note)


def attributes_head(match: re.Match[str]) -> Head | None:
    """The head in a match of `ATTRIBUTES`; None if it is not a head."""
    name, mark = match[3], match[5]
    note = None if match[1] and match[2] else "a tag run together with its attribute"
    if note is None and name[:1] != '"':
        note = "a name without double quotes"
    name = (name[1:-1] if name[:1] in ("'", '"') else name).strip()
    before = match.string[match.start() : match.start(3)]
    flag, other = None, False
    if match[4] or "string" in before:
        flag = _STRING_FLAG.search(match[4]) or _STRING_FLAG.search(before)
        other = bool(match[4] and not (flag and _STRING_ATTRIBUTE.fullmatch(match[4]))) or "string" in before
    head = Head(name, match.end(), TYPES[flag[1]] if flag else None, note, mark == "/>", attributes=other)
    if mark == "<" or mark is None:
        return _unended(head._replace(end=match.start(5) if mark else match.string.index("\n", match.end(4)) + 1))
    return head


def _unended(head: Head) -> Head | None:
    """A head without its `>`, if it is otherwise plausible."""
    if head.name and not WORD.fullmatch(head.name):
        return None
    notes = filter(None, (head.note, "a tag without its '>'"))
    return head._replace(note="; ".join(notes), open_end=True)
