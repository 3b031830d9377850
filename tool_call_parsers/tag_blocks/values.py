"""Where the value of a parameter ends.

Nothing in these formats is escaped, so the end of a value depends on the text around the tags:

* The end tag of a value ends it if a tag follows that may follow a value: the next parameter, the end of the call or
    of the wrapper, the end tag again, or the end of the text. Before other text it is data. A misspelt one right before
    it is dropped, if its `<` or its `>` is left. After the end of a call inside a wrapper, a tag must follow as well;
    otherwise a better end may come, and this one is the fallback.
* A value without its end tag ends at the opening tag of a parameter that the tool has and the call still lacks, unless
    an end tag without a tag after it shows that both are data; or else at the end of the call. If an end tag and text
    precede either, the model wrote the text after a parameter, and it is dropped. A damaged end tag there is dropped,
    too; if the value has another inside, nobody can say where it ends, and there is no call.
* A whole call inside a value is data if the value ends properly after it. If it does not, and the text ends with the
  end of a call, there are two cases. The inner call is on its own line and fits a tool that was offered: the outer
  call was never closed, and is not a call. Or the value only quotes an opening tag, and ends at its first plausible
  end. The number of both decisions is bounded, which keeps the time linear. Text that ends in another way is cut in
  the value, and is not a call.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, NamedTuple

from tool_call_parsers.arguments import ArgumentsText
from tool_call_parsers.engine import Needles, Run, Step
from tool_call_parsers.tag_blocks.damage import damaged_end, holds_damaged_end, near_end
from tool_call_parsers.tag_blocks.syntax import CDATA, CDATA_END, TagSyntax
from tool_call_parsers.tag_blocks.tags import AFTER_CALL, HEAD_LIMIT, WORD, Beginning, Mark, TagRole

_SECTION, _SECTION_END = Needles(CDATA), Needles(CDATA_END)
_DAMAGED = 256
"""How many values without an end tag a completion may have. Bounds the number of comparisons."""
_SIBLINGS = 8
"""How many calls may turn out unclosed only at the end of the text. Bounds the number of searches."""


@dataclass(slots=True)
class OpenCall:
    """A call while it is read."""

    name: str
    start: int
    body: int
    wrapped: bool
    arguments: dict[str, Any] = field(default_factory=dict)
    notes: list[str] = field(default_factory=list)
    dangling: bool = False
    """It has a key without a value."""
    defect: str | None = None
    """Why nobody can say what its arguments are."""
    streamed: ArgumentsText | None = None
    """The arguments' JSON text as far as it was sent; None if the run does not stream."""

    def note(self, *defects: str | None) -> None:
        """Keep what is wrong with the form of the call; None is nothing."""
        self.notes += filter(None, defects)

    def set(self, key: str, value: Any) -> None:
        """Set an argument. Of repeated parameters the last counts, in the last place."""
        if key in self.arguments:
            del self.arguments[key]
            self.note(f"the parameter {key!r} is repeated")
        self.arguments[key] = value


@dataclass(slots=True)
class StringStream:
    """Sends a string value piece by piece."""

    run: Run
    streamed: ArgumentsText
    position: int

    def upto(self, end: int) -> None:
        """Send the text before `end`, except for a newline at its end, which may be framing."""
        text = self.run.text
        if end > self.position and text[end - 1] == "\n":
            end -= 1
        self.rest(end)

    def rest(self, end: int) -> None:
        if end > self.position:
            self.streamed.characters(self.run.text[self.position : end])
            self.position = end


class _Value(NamedTuple):
    """The end of a value, and the start of the tag after it."""

    end: int
    resume: int
    broken: bool = False
    """It has no end at all, and ends the call."""
    note: str | None = None
    """The assumption that was made."""


class TagValues(TagSyntax):
    """Finds the ends of values."""

    def _value(
        self, run: Run, call: OpenCall, key: str, start: int, stream: StringStream | None
    ) -> Step[_Value | None]:
        """The end of the value that begins at `start`; None if the text ends in it."""
        position = start
        if self.cdata:
            position = yield from self._section(run, start)
        depth = 0  # calls open in the value
        inner = 0  # elements of the parameter's own name open in the value
        closed = start  # after the last end tag of a call or a wrapper
        unwrapped = False  # the last end tag was a wrapper's
        quoted: _Value | None = None  # the first end, if the calls in the value are data
        sibling: int | None = None  # the first call in the value, if it follows the outer call
        fallback: _Value | None = None  # an end that counts if no better one comes
        opener: int | None = None  # the next parameter, which ends the value unless its end tag is data
        opened = ""  # the name of that parameter
        loose: int | None = None  # the last end tag with text after it
        behind = start  # its end
        while True:
            certain = opener is None and fallback is None and quoted is None and loose is None and not depth
            passed = stream.upto if stream is not None and certain else None
            match = yield from run.find(self._tags, position, passed)
            if match is None:
                break
            at, position = match.span()
            role = self._roles[match.group()]
            if role is TagRole.END_VALUE:
                after = yield from self._closes(run, opened or key, position)
                if inner and after is not None:
                    inner -= 1
                    continue
                mark = Mark(position, TagRole.TEXT, position)
                if after is not None:
                    mark = yield from self._after_value(run, opened or key, after)
                position = mark.start
                if mark.role is TagRole.TEXT:
                    opener, opened = None, ""
                    if after is not None and not depth:
                        loose, behind = at, after
                    continue
                if opener is not None:
                    return self._without_end(run, key, start, opener, loose)
                found = self._with_end(run, key, start, at, after or at, mark.start)
                if depth:
                    quoted = quoted or found
                elif mark.role in (TagRole.PARAMETER, TagRole.DONE, TagRole.CUT) or (
                    mark.role is TagRole.END_CALL
                    and (not call.wrapped or (yield from self._next(run, mark.end)).role in AFTER_CALL)
                ):
                    return found
                else:
                    fallback = fallback or found
            elif opener is not None and role is not TagRole.TEXT:
                return self._without_end(run, key, start, opener, loose)
            elif role is TagRole.END_CALL:
                closed, unwrapped = position, False
                if depth:
                    depth -= 1
                elif fallback is None and (yield from self._next(run, position)).role in AFTER_CALL:
                    fallback = self._without_end(run, key, start, at, loose)
            elif role is TagRole.UNWRAP:
                after_call = closed > start and not run.text[closed:at].strip()
                closed, unwrapped = position, True
                if not depth and not after_call and fallback is None:
                    mark = yield from self._next(run, position)
                    if mark.role in AFTER_CALL:
                        fallback = _Value(at, position, broken=True)
            elif role is TagRole.PARAMETER:
                if (yield from self._nests(run, call, key, position)):
                    inner += 1
                elif not depth and fallback is None and (loose is None or self._ends_line(run, behind, at)):
                    opened = yield from self._begins_parameter(run, call, key, start, at, position)
                    opener = at if opened else None
            elif role is TagRole.CALL and (following := (yield from self._begins_call(run, position))):
                if fallback is not None:
                    return fallback
                if "quotes" not in run.hints:
                    if closed == start and not depth and (yield from self._is_sibling(run, start, at, following)):
                        sibling = at
                    depth += 1
        if opener is not None or (quoted is None and (fallback is not None or sibling is None)):
            return fallback if opener is None else None
        mark = yield from self._next(run, closed)
        if closed == start or mark.role is not TagRole.DONE:
            return None
        if sibling is not None and (mark.end > mark.start or (call.wrapped and not unwrapped)):
            return None  # more likely a text that shows calls, cut in one of them
        return self._undecided(run, sibling, quoted)

    def _ends_line(self, run: Run, behind: int, at: int) -> bool:
        """Whether a tag at `at` may follow the end tag before `behind`, with text between them."""
        between = run.text[behind:at]
        return between.endswith("\n") or not any(map(str.isalnum, between[:HEAD_LIMIT]))

    def _end_tags(self, key: str) -> tuple[str, ...]:
        """The end tags of a parameter's value."""
        return self.value_ends

    def _damaged(self, run: Run, key: str, start: int, at: int) -> int | None:
        """Where a damaged end tag begins before the tag at `at`; None without one, or after too many of them."""
        count = run.memo.get("damaged", (0, 0))[0]
        if count >= _DAMAGED:
            return None
        run.memo["damaged"] = count + 1, 0
        return damaged_end(run.text, start, at, self._end_tags(key), self._other_tags)

    def _near_end(self, run: Run, key: str, start: int, end: int) -> int | None:
        """Where a misspelt end tag begins before the right one at `end`; None without one."""
        return near_end(run.text, start, end, self._end_tags(key))

    def _with_end(self, run: Run, key: str, start: int, at: int, after: int, resume: int) -> _Value:
        """A value with its end tag at `at:after`, before the tag at `resume`."""
        end, note = self._last_end(run, start, at, resume), None
        if end == at and run.text[after:resume].strip():
            note = "a repeated end tag of a value"
        elif run.text[at:after] in self._variants:
            note = "another spelling of a tag"
        if (damaged := self._near_end(run, key, start, end)) is not None:
            end, note = damaged, "a damaged end tag of a value"
        return _Value(end, resume, note=note)

    def _without_end(self, run: Run, key: str, start: int, at: int, loose: int | None) -> _Value:
        """A value without an end tag before the tag at `at`; or, with an end tag at `loose`, text after it."""
        if loose is not None:
            end, note = loose, "text after a value"
        elif (damaged := self._damaged(run, key, start, at)) is not None:
            end, note = damaged, "a damaged end tag of a value"
        else:
            end, note = at, "the end tag of a value is missing"
            # The newline that the template has between two tags, and in formats with framing, that before the end tag.
            if end > start and run.text[end - 1] == "\n":
                end -= 1
        many = run.memo.get("damaged", (0, 0))[0] >= _DAMAGED
        broken = many or holds_damaged_end(run.text, start, end, self._end_tags(key))
        return _Value(at if broken else end, at, broken=broken, note=note)

    def _undecided(self, run: Run, sibling: int | None, quoted: _Value | None) -> _Value | None:
        """The end of a value that opens calls and ends with the end tags of one: before the call that follows the outer
        one, or at its own end if these calls are data."""
        siblings = run.memo.get("siblings", (0, 0))[0]
        if sibling is not None and siblings < _SIBLINGS:
            run.memo["siblings"] = (siblings + 1, 0)
            return _Value(sibling, sibling, broken=True)
        run.hints.add("quotes")
        return quoted and quoted._replace(note="a value opens calls and does not close them")

    def _is_sibling(self, run: Run, start: int, at: int, following: Beginning) -> Step[bool]:
        """Whether the opening tag at `at` in a value probably begins the next call: on a line of its own, of an offered
        tool, with a parameter that the tool has."""
        line = run.text[max(start, run.text.rfind("\n", start, at) + 1) : at]
        if (self.between and not self._wrapping.fullmatch(line)) or following.name not in run.tools.names():
            return False
        if following.mark.role is not TagRole.PARAMETER:
            return following.mark.role is not TagRole.TEXT
        head = yield from self._head(run, following.mark.end, self._parameter_head)
        return head is not None and run.tools.declares(following.name, head.name) is True

    def _nests(self, run: Run, call: OpenCall, key: str, position: int) -> Step[bool]:
        """Whether the tag before `position` opens an element in the value with the parameter's name."""
        yield from ()
        return False

    def _last_end(self, run: Run, start: int, first: int, end: int) -> int:
        """The one of the end tags between `first` and `end` that ends the value which begins at `start`."""
        if self.framed and run.text[start - 1] == "\n" != run.text[first - 1]:
            # Framed at its beginning, a value is framed at its end. Other end tags are data.
            for tag in self.value_ends:
                if (last := run.text.rfind("\n" + tag, first, end)) >= 0:
                    return last + 1
        return first

    def _closes(self, run: Run, key: str, position: int) -> Step[int | None]:
        """The position after the end tag of a value that ends at `position`; None if it is another parameter's."""
        yield from ()
        return position

    def _after_value(self, run: Run, key: str, position: int) -> Step[Mark]:
        """The mark after the end tag of a value, and after repeated end tags."""
        mark = yield from self._next(run, position)
        while mark.role is TagRole.END_VALUE:
            after = yield from self._closes(run, key, mark.end)
            if after is None:
                return Mark(mark.start, TagRole.TEXT, mark.start)
            mark = yield from self._next(run, after)
        if mark.role is TagRole.PARAMETER and self.heads != "pairs":
            head = yield from self._head(run, mark.end, self._parameter_head)
            if head is None:
                return Mark(mark.end, TagRole.TEXT, mark.end)
        return mark

    def _begins_parameter(self, run: Run, call: OpenCall, key: str, start: int, at: int, position: int) -> Step[str]:
        """The name in the opening tag at `at:position` if the call still lacks that parameter, else "".

        The tool need not have the parameter if a damaged end tag of the value, which begins at `start`, is before it.
        """
        head = yield from self._head(run, position, self._parameter_head)
        if head is None or head.dangling or head.name in call.arguments or head.name == key:
            return ""
        declared = run.tools.declares(call.name, head.name)
        if declared:
            return head.name
        if WORD.fullmatch(head.name) is None or (declared is False and self._damaged(run, key, start, at) is None):
            return ""
        return head.name

    def _section(self, run: Run, start: int) -> Step[int]:
        """The position after a CDATA section at `start`, or `start`."""
        position = yield from run.skip_space(start)
        if "open section" in run.hints or (yield from run.starts(position, _SECTION)) is None:
            return start
        while (end := (yield from run.find(_SECTION_END, position))) is not None:
            position = end.end()
            mark = yield from self._next(run, position)
            if mark.role is TagRole.END_VALUE:
                break
        if end is None:
            run.hints.add("open section")  # every later section is open, too
            return start
        return position
