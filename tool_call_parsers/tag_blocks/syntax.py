"""The tags of a format, and their order."""

from __future__ import annotations

import itertools
import re
from dataclasses import dataclass
from functools import cached_property
from typing import Literal

from tool_call_parsers.engine import BlockGrammar, Marker, Needles, Run, Step
from tool_call_parsers.json_blocks import JsonBlocks
from tool_call_parsers.row_checks import Syntax, check_template
from tool_call_parsers.tag_blocks.tags import (
    ATTRIBUTES,
    CUT_HEAD,
    EQUALS,
    HEAD_LIMIT,
    Beginning,
    Head,
    Mark,
    TagRole,
    attributes_head,
    equals_head,
)

CDATA, CDATA_END = "<![CDATA[", "]]>"


@dataclass(frozen=True)
class TagSyntax(BlockGrammar):
    """The tags of a format. Of several spellings the first is written."""

    heads: Literal["equals", "attributes", "pairs"]
    """The place of names. equals: `<function=f>`; attributes: `<invoke name="f">`; pairs: the name of a call after its
    tag, and each key in its own tags."""
    calls: tuple[str, ...]
    """Opening tags of a call, up to the name."""
    ends: tuple[str, ...]
    """End tags of a call."""
    parameters: tuple[str, ...]
    """Opening tags of a parameter, up to the name."""
    value_ends: tuple[str, ...]
    """End tags of a parameter."""
    wraps: tuple[str, ...] = ()
    """Opening tags of the wrapper around all calls."""
    unwraps: tuple[str, ...] = ()
    """End tags of the wrapper."""
    fillers: tuple[str, ...] = ()
    """Texts without meaning that may occur between a wrapper and a call."""
    pair: tuple[str, str] = ("", "")
    """Pairs: the end tag of a key, the opening tag of a value."""
    key_type: tuple[str, str] = ("", "")
    """Pairs: tags around a type between a key and its value."""
    name_end: str = ""
    """Pairs: the text after the name."""
    framed: bool = False
    """A newline on each side of a value is framing."""
    cdata: bool = False
    """A value may be a CDATA section."""
    open_end: bool = False
    """At the end of the text the end tag of a call may be missing, if all required parameters are there."""
    unwrapped: str = ""
    """A parameter that, undeclared and alone, holds all arguments as an object."""
    json: JsonBlocks | None = None
    """Calls as JSON after the same tags, if the format has them."""
    writes_json: bool = False
    """Calls are written as `json` writes them."""
    separators: tuple[str, ...] = ("\n\n", "\n")
    separates: bool = False
    trail: str = ""
    around: tuple[str, str] = ("", "")
    """The text before and after all calls of a turn."""
    between: str = "\n"
    """The text between two calls."""
    call: str = ""
    """The text of a call: `{name}`, `{parameters}`."""
    parameter: str = ""
    """The text of a parameter and its framing: `{key}`, `{value}`, `{string}` ("true" or "false")."""
    empty: str = ""
    """The text in place of parameters if there are none."""

    def __post_init__(self) -> None:
        super().__post_init__()
        check_template(self, "call", Syntax.BRACES, ("name", "parameters"))
        check_template(self, "parameter", Syntax.BRACES, ("key", "value"), ("string",))

    # -- derived ------------------------------------------------------------------------------------------------------

    openers = cached_property(lambda self: (*self.wraps, *self.calls))
    closers = cached_property(lambda self: (*self.unwraps, *self.ends))

    @cached_property
    def _roles(self) -> dict[str, TagRole]:
        return {
            **dict.fromkeys(self.wraps, TagRole.WRAP),
            **dict.fromkeys(self.unwraps, TagRole.UNWRAP),
            **dict.fromkeys(self.calls, TagRole.CALL),
            **dict.fromkeys(self.ends, TagRole.END_CALL),
            **dict.fromkeys(self.parameters, TagRole.PARAMETER),
            **dict.fromkeys(self.value_ends, TagRole.END_VALUE),
            # Valid only after a name, and must differ from the other tags.
            **dict.fromkeys(filter(None, (self.name_end,)), TagRole.TEXT),
        }

    _tags = cached_property(lambda self: Needles(*self._roles))

    @cached_property
    def _tag(self) -> re.Pattern[str]:
        return re.compile(rf"\s*+({self._tags.pattern.pattern})")

    _fillers = cached_property(lambda self: Needles(*self.fillers))

    @cached_property
    def _variants(self) -> frozenset[str]:
        """Spellings that are read and never written."""
        written = "".join((*self.around, self.call, self.parameter))
        spellings = (self.wraps, self.unwraps, self.calls, self.ends, self.parameters, self.value_ends)
        found = set(Needles(*itertools.chain(*spellings)).pattern.findall(written))
        return frozenset(tag for tags in spellings for tag in tags[1:] if written and tag not in found)

    _written_calls = cached_property(lambda self: frozenset(self.calls) - self._variants)
    _call_tags = cached_property(lambda self: Needles(*self.calls))
    _shares_wrapper = cached_property(lambda self: any(tag in self.around[0] for tag in self.wraps))
    """One wrapper is around all calls, and not one around each."""
    _states_types = cached_property(lambda self: "{string}" in self.parameter)

    @cached_property
    def _other_tags(self) -> tuple[str, ...]:
        """Tags that models write in place of the end tag of a value."""
        opening = [tag.rstrip("=> <") + ">" for tag in (*self.parameters, *self.calls) if tag.strip("<") != tag]
        return tuple(filter(None, (*self.ends, *self.unwraps, *self.value_ends, *self.pair, *self.key_type, *opening)))

    @cached_property
    def _wrapping(self) -> re.Pattern[str]:
        return re.compile("|".join((r"\s", *map(re.escape, (*self.wraps, *self.fillers)))).join(("(?>(?:", ")*)")))

    _closing = cached_property(lambda self: Needles(*self.ends, *self.unwraps, *self.calls, *self.wraps))

    @cached_property
    def _call_head(self) -> re.Pattern[str]:
        if self.heads == "pairs":
            return re.compile(rf"\s*+([^\s<>{{]*+)\s*+(?>({re.escape(self.name_end)})?)\s*+(?=(\S))")
        return self._parameter_head

    @cached_property
    def _parameter_head(self) -> re.Pattern[str]:
        if self.heads != "pairs":
            return EQUALS if self.heads == "equals" else ATTRIBUTES
        (key_end, value), (type_start, type_end) = map(re.escape, self.pair), map(re.escape, self.key_type)
        kind = rf"(?>(?:{type_start}([^<]*+)(?>(?:{type_end})?)\s*+)?)" if type_start else "()"
        return re.compile(rf"\s*+([^<]*+)(?>({key_end})?)\s*+{kind}(?:({value})|(?=(\S)))")

    @cached_property
    def _usual(self) -> re.Pattern[str] | None:
        """A whole parameter of the usual shape: its value ends at the first tag, and valid text follows.
        Its groups are name, type and value. None if a pattern cannot decide."""
        if self._tags.extendable or len({tag[0] for tag in self._roles}) > 1:
            return None

        def one(tags: tuple[str, ...]) -> str:
            return f"(?:{'|'.join(map(re.escape, tags))})"

        def parameter(group: str) -> str:
            kind = rf" string=\"{group}true|false)\"" if self._states_types else f"{group})"
            head = {
                "equals": rf"{group}[\w.\-]++){group})>",
                "attributes": rf" name=\"{group}[\w.\-]++)\"{kind}>",
                "pairs": rf"{group}[\w.\-]++){re.escape(self.pair[0])}\s?+{group}){re.escape(self.pair[1])}",
            }
            return one(self.parameters) + head[self.heads]

        begin = re.escape(next(iter(self._roles))[0])
        value = rf"[^{begin}]*+(?>(?:(?!{one(tuple(self._roles))}){begin}[^{begin}]*+)*)"
        if self.framed:
            value = rf"\n(?!{one(self.value_ends)})({value})(?<=\n)"  # not one newline for two
        elif self.cdata:
            opened, closed = re.escape(CDATA), re.escape(CDATA_END)
            section = rf"{opened}[^\]]*+(?>(?:(?!{closed})\][^\]]*+)*){closed}"
            value = rf"({section}|(?!\s*+{opened}){value})"
        elif self.pair[1]:
            value = rf"(?!\s*+{re.escape(self.pair[1])})({value})"
        else:
            value = f"({value})"
        after = rf"\s*+(?:{one((*self.unwraps, *self.calls, *self.wraps))}|\Z)" if self.wraps else ""
        follows = rf"(?=\s*+(?:{parameter('(?:')}|{one(self.ends)}{after}))"
        return re.compile(rf"\s*+{parameter('(')}{value}{one(self.value_ends)}{follows}")

    # -- reading tags --------------------------------------------------------------------------------------------------

    def _tag_at(self, run: Run, position: int) -> Mark | None:
        """The tag at `position`, if more text cannot change it. Costs less than to start `_next`."""
        match = self._tag.match(run.text, position)
        if match is None or match[1] in self._tags.extendable:
            return None
        return Mark(match.start(1), self._roles[match[1]], match.end())

    def _next(self, run: Run, position: int) -> Step[Mark]:
        """The mark at `position`."""
        if (mark := self._tag_at(run, position)) is not None:
            return mark
        position = yield from run.skip_space(position)
        if (yield from run.starts(position, self._tags)) is None:
            return (yield from self._no_tag(run, position))
        match = self._tag.match(run.text, position)
        assert match is not None
        return Mark(match.start(1), self._roles[match[1]], match.end())

    def _no_tag(self, run: Run, start: int) -> Step[Mark]:
        """The mark for text at `start` that is not a tag."""
        position = start
        while position < len(run.text):
            marker = yield from run.starts(position, run.markers.all)
            if marker is None or run.markers.kinds[marker] is not Marker.END:
                break
            position = yield from run.skip_space(position + len(marker))
        else:
            return Mark(start, TagRole.DONE, start)
        if not self._tags.begins(run.text, start):
            return Mark(start, TagRole.TEXT, start)
        meant = {role for tag, role in self._roles.items() if tag.startswith(run.text[start:])}
        role = TagRole.DONE if meant <= {TagRole.END_CALL, TagRole.UNWRAP, TagRole.END_VALUE} else TagRole.CUT
        return Mark(start, role, len(run.text))

    def _match(self, run: Run, pattern: re.Pattern[str], start: int, ahead: int = 0) -> Step[re.Match[str] | None]:
        """The head at `start`, final once `ahead` characters after it have arrived."""
        while True:
            match = pattern.match(run.text, start, start + HEAD_LIMIT)
            if run.final or len(run.text) >= start + HEAD_LIMIT or (match and match.end() + ahead <= len(run.text)):
                return match
            yield

    def _head(self, run: Run, start: int, pattern: re.Pattern[str]) -> Step[Head | None]:
        """The rest of an opening tag after its first word; None if it is not a tag."""
        names_call = pattern is self._call_head
        ahead = self._tags.longest + len(self.name_end + self.pair[0]) if self.heads == "pairs" else 0
        if run.final:
            match = pattern.match(run.text, start, start + HEAD_LIMIT)
        else:
            match = yield from self._match(run, pattern, start, ahead)
        if match is None:
            return self._unread(run, start, names_call)
        if self.heads == "equals":
            return equals_head(match)
        if self.heads == "attributes":
            return attributes_head(match)
        if names_call:
            missing = match[2] is None and self.name_end in self.call
            note = f"{self.name_end} is missing" if missing else None
            return Head(match[1], match.end(), note=note) if match[3] in "<{" else None
        note = None if match[2] else "the end tag of a key is missing"
        kind = match[3].strip().lower() or None if match[3] else None
        return Head(match[1].strip(), match.end(), kind, note, dangling=match[4] is None)

    def _unread(self, run: Run, start: int, named: bool = False) -> Head | None:
        """A head that no pattern matches: cut if the text ends in a possible head."""
        tail = run.text[start : start + HEAD_LIMIT].strip()
        if not run.final or len(run.text) - start >= HEAD_LIMIT:
            return None
        if self.heads == "attributes":
            begins = "name".startswith(tail[:4]) or "string".startswith(tail[:6]) or tail.startswith("=")
            named = "<" in tail or ">" in tail or not begins
        else:
            named = (named and " " in tail) or (bool(tail) and not any(map(str.isalnum, tail)))
        return None if named else CUT_HEAD

    def _begins_call(self, run: Run, start: int) -> Step[Beginning | None]:
        """The beginning of the call whose opening tag ends at `start`; None if no call begins there."""
        head = yield from self._head(run, start, self._call_head)
        if head is None or head is CUT_HEAD:
            return None
        mark = yield from self._next(run, head.end)
        if head.closed or mark.role in (TagRole.PARAMETER, TagRole.END_CALL) or run.text.startswith("{", mark.start):
            return Beginning(head.name, mark)
        return None

    def first_name(self, run: Run, start: int) -> Step[str | None]:
        """The name of the call that follows an opening wrapper that ends at `start`; None without a call."""
        mark = yield from self._next(run, start)
        if mark.role is not TagRole.CALL:
            return None
        head = yield from self._head(run, mark.end, self._call_head)
        return None if head is None else head.name
