"""Edits of text, without files: the V4A patch format, replacement of a unique text, and unified diffs.

Nothing here guesses: an edit that does not fit exactly one place is an error that shows the nearest place.

V4A is the format of OpenAI's `apply_patch`:

    *** Begin Patch
    *** Update File: path
    *** Move to: new path            (optional)
    @@ a line above the change       (optional, narrows the search)
     a line that stays
    -a line that goes
    +a line that comes
    *** End of File                  (optional, the change is at the end)
    *** Add File: path
    +every line of the new file
    *** Delete File: path
    *** End Patch
"""

from __future__ import annotations

import difflib
import itertools
import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

MAX_DIFF_LINES = 2000
"""Longer changed regions are counted, not shown: difflib takes quadratic time."""

MAX_SHOWN_PLACES = 10

_UNFINISHED = "\\ No newline at end of file"
"""The marker of diff and patch."""

_UNIFIED = re.compile(r"@@ -(\d+)(?:,\d+)? \+\d+(?:,\d+)? @@")


class EditError(ValueError):
    """The edit does not fit. The message names the place and the reason."""


@dataclass(slots=True)
class Hunk:
    """One change: `old` lines, found after `anchors`, become new lines."""

    anchors: list[str] = field(default_factory=list)
    near: int | None = None
    """A line number from a unified-diff header, to choose between several places."""
    lines: list[tuple[str, str]] = field(default_factory=list)
    """(' ', '-' or '+', text)."""
    at_end: bool = False

    @property
    def old(self) -> list[str]:
        return [text for sign, text in self.lines if sign != "+"]


@dataclass(slots=True)
class Operation:
    """The change of one file by a patch. `kind` is 'add', 'update' or 'delete'."""

    kind: str
    path: str
    move_to: str | None = None
    hunks: list[Hunk] = field(default_factory=list)
    added: list[str] = field(default_factory=list)
    """Lines of a new file."""
    blank: int = 0
    """Empty lines of the patch since the last one of a new file: models omit their '+'."""

    @property
    def content(self) -> str:
        return "".join(f"{line}\n" for line in self.added)


def parse_patch(text: str) -> list[Operation]:
    """The operations of a V4A patch, in order.

    Raises:
        EditError: the text is not a patch, or its end is missing: a truncated patch must not be applied.
    """
    lines = text.strip("\n").split("\n")
    if lines[0].strip() != "*** Begin Patch":
        raise EditError(f"a patch begins with the line '*** Begin Patch', not with {lines[0][:80]!r}")
    if lines[-1].strip() != "*** End Patch":
        raise EditError(f"a patch ends with the line '*** End Patch', not with {lines[-1][:80]!r}")
    operations: list[Operation] = []
    for number, line in enumerate(lines[1:-1], start=2):
        header = re.fullmatch(r"\*\*\* (Update|Add|Delete) File: (.+)", line.rstrip())
        if header:
            operations.append(Operation(header.group(1).lower(), header.group(2).strip()))
        elif not operations:
            if line.strip():
                raise EditError(f"line {number}: expected '*** Update File: path', Add or Delete, not {line[:80]!r}")
        else:
            _body_line(operations[-1], line, number)
    if not operations:
        raise EditError("the patch changes no file")
    for operation in operations:
        _settle_blank_lines(operation)
        if operation.kind == "update" and not operation.hunks and operation.move_to is None:
            raise EditError(f"the update of {operation.path} has no change")
        if any(not hunk.lines for hunk in operation.hunks):
            raise EditError(f"the update of {operation.path} has an '@@' without lines after it")
    return operations


def _body_line(operation: Operation, line: str, number: int) -> None:
    if operation.kind == "add":
        if line.startswith("+"):
            operation.added += [*[""] * operation.blank, line[1:]]
            operation.blank = 0
        elif line.strip():
            raise EditError(f"line {number}: every line of an added file begins with '+', not {line[:80]!r}")
        else:
            operation.blank += bool(operation.added)
        return
    if operation.kind == "delete":
        if line.strip():
            raise EditError(f"line {number}: nothing follows '*** Delete File', but there is {line[:80]!r}")
        return
    hunks = operation.hunks
    if line.startswith("*** Move to: "):
        if hunks or operation.move_to is not None:
            raise EditError(f"line {number}: '*** Move to' comes directly after '*** Update File'")
        operation.move_to = line.removeprefix("*** Move to: ").strip()
    elif line.rstrip() == "*** End of File":
        if not hunks:
            raise EditError(f"line {number}: '*** End of File' comes after the lines of a change")
        hunks[-1].at_end = True
    elif line.startswith("*** "):
        raise EditError(f"line {number}: unknown instruction {line[:80]!r}")
    elif line == "@@" or line.startswith("@@ "):
        if not hunks or hunks[-1].lines:
            hunks.append(Hunk())
        unified = _UNIFIED.match(line)
        anchor = line[2:].strip()
        if unified:
            hunks[-1].near = int(unified.group(1))
        elif anchor:
            hunks[-1].anchors.append(anchor)
    elif line[:1] in (" ", "-", "+", ""):
        if not hunks or hunks[-1].at_end:
            hunks.append(Hunk())
        hunks[-1].lines.append((line[:1], line[1:]))
    else:
        raise EditError(f"line {number}: a line of a change begins with ' ', '-', '+' or '@@', not {line[:80]!r}")


def _settle_blank_lines(operation: Operation) -> None:
    """Models omit the space of an empty context line; between two files, however, an empty line is layout."""
    if operation.hunks and not operation.hunks[-1].at_end:
        last = operation.hunks[-1].lines
        while last and last[-1] == ("", ""):
            last.pop()
    for hunk in operation.hunks:
        hunk.lines = [(sign or " ", text) for sign, text in hunk.lines]


def apply_hunks(text: str, hunks: Sequence[Hunk], path: str) -> str:
    """`text` with the changes applied, each below the one before it.

    Lines match exactly, or else without trailing white space; context lines keep the form that they have in the file.

    Raises:
        EditError: a change fits no place, or several.
    """
    ends_with_newline = text.endswith("\n") or not text
    lines = text.split("\n")
    if lines[-1] == "":
        lines.pop()
    result: list[str] = []
    position = 0
    for index, hunk in enumerate(hunks, start=1):
        label = f"{path}: change {index} of {len(hunks)}"
        start = _after_anchors(lines, hunk, position, label)
        place = _find(lines, hunk, start, label)
        result += lines[position:place]
        cursor = place
        for sign, content in hunk.lines:
            if sign == "+":
                result.append(content)
                continue
            if sign == " ":
                result.append(lines[cursor])
            cursor += 1
        position = cursor
    result += lines[position:]
    return "\n".join(result) + ("\n" if ends_with_newline and result else "")


def _after_anchors(lines: list[str], hunk: Hunk, position: int, label: str) -> int:
    for anchor in hunk.anchors:
        found = next((i for i in range(position, len(lines)) if lines[i].strip() == anchor), None)
        if found is None:
            hint = difflib.get_close_matches(anchor, [line.strip() for line in lines[:5000]], n=1, cutoff=0.6)
            nearest = f"; the nearest line is {hint[0]!r}" if hint else ""
            raise EditError(f"{label}: there is no line {anchor!r} from line {position + 1} on{nearest}")
        position = found + 1
    return position


def _find(lines: list[str], hunk: Hunk, start: int, label: str) -> int:
    old = hunk.old
    if not old:  # only new lines: below the anchor, or at the end
        if hunk.near is not None:  # a unified diff's "-N,0": after line N
            return max(start, min(hunk.near, len(lines)))
        return start if hunk.anchors and not hunk.at_end else len(lines)
    if hunk.anchors and not hunk.at_end and start > 0 and lines[start - 1].rstrip() == old[0].rstrip():
        start -= 1  # the anchor was repeated as the first line of context
    if hunk.at_end:
        start = max(start, len(lines) - len(old))
    most = 1 if hunk.anchors else None
    places = _places(lines, old, start, most, exact=True) or _places(lines, old, start, most, exact=False)
    if not places:
        raise EditError(f"{label} fits nowhere from line {start + 1} on. {nearest_region(lines, old)}")
    if len(places) == 1 or hunk.anchors:
        return places[0]
    if hunk.near is not None:
        near = hunk.near - 1
        return min(places, key=lambda place: abs(place - near))
    raise EditError(
        f"{label} fits {len(places)} places, at lines {numbers(place + 1 for place in places)}; "
        f"add lines of context, or a line '@@ <a line above it>'"
    )


def _places(lines: Sequence[str], old: Sequence[str], start: int, most: int | None, *, exact: bool) -> list[int]:
    """The first `most` places of `old`, from `start` on."""
    if not exact:
        lines, old = [line.rstrip() for line in lines], [line.rstrip() for line in old]
    size = len(old)
    first = old[0]
    fitting = (
        place
        for place in range(start, len(lines) - size + 1)
        if lines[place] == first and list(lines[place : place + size]) == list(old)
    )
    return list(itertools.islice(fitting, most))


def replace_text(text: str, old: str, new: str, *, replace_all: bool, path: str) -> tuple[str, int]:
    """`text` with `old` replaced, and the number of replacements.

    Raises:
        EditError: `old` is missing, or not unique without `replace_all`.
    """
    if not old:
        raise EditError("old_string is empty; to make a file use write_file")
    if old == new:
        raise EditError("old_string and new_string are the same")
    count = text.count(old)
    if count == 0:
        raise EditError(
            f"old_string is not in {path}. {nearest_region(text.split(chr(10)), old.strip(chr(10)).split(chr(10)))}"
        )
    # Overlapping places count as well: two closing braces are ambiguous within three.
    if not replace_all and text.find(old, text.find(old) + 1) >= 0:
        places = (found.start() for found in re.finditer(f"(?={re.escape(old)})", text))
        starts = [text.count("\n", 0, place) + 1 for place in itertools.islice(places, MAX_SHOWN_PLACES + 1)]
        raise EditError(
            f"old_string is in {path} {max(count, len(starts))} times, at lines {numbers(starts)}; "
            f"add the lines around it until it is unique, or set replace_all"
        )
    return text.replace(old, new), count


def numbers(values: Iterable[int]) -> str:
    listed = [str(value) for value in values]
    more = f" and {len(listed) - MAX_SHOWN_PLACES} more" if len(listed) > MAX_SHOWN_PLACES else ""
    return ", ".join(listed[:MAX_SHOWN_PLACES]) + more


def nearest_region(lines: Sequence[str], wanted: Sequence[str]) -> str:
    """A sentence with the region of `lines` that is most similar to `wanted`."""
    squeezed = [" ".join(line.split()) for line in lines]
    target = [" ".join(line.split()) for line in wanted]
    size = len(target)
    for place in range(len(lines) - size + 1):
        if squeezed[place : place + size] == target:
            return f"Lines {place + 1}-{place + size} differ from it only in white space:\n{_quote(lines, place, size)}"
    # Each line that occurs votes for the start of the region.
    index: dict[str, list[int]] = {}
    for number, line in enumerate(squeezed):
        if line:
            index.setdefault(line, []).append(number)
    votes: dict[int, float] = {}
    for row, line in enumerate(target):
        spots = index.get(line, [])
        if not spots and line and len(lines) <= 5000:
            near = difflib.get_close_matches(line, index, n=1, cutoff=0.7) if row < 20 else []
            spots = index[near[0]] if near else []
        for spot in spots[:100]:
            votes[max(0, spot - row)] = votes.get(max(0, spot - row), 0.0) + 1 / len(spots)
    if not votes:
        return "No line of it is like any line of the file; read the file again."
    place = max(votes, key=lambda key: (votes[key], -key))
    size = min(size, len(lines) - place)
    return f"The nearest lines are {place + 1}-{place + size}:\n{_quote(lines, place, size)}"


def _quote(lines: Sequence[str], place: int, size: int, most: int = 30) -> str:
    shown = [line[:300] for line in lines[place : place + min(size, most)]]
    return "\n".join([*shown, "..."] if size > most else shown)


def unified_diff(old: str | None, new: str | None, path: str) -> str:
    """A unified diff from `old` to `new`; None means no file."""
    before, after = _lines(old or ""), _lines(new or "")
    header = [f"--- {'/dev/null' if old is None else path}", f"+++ {'/dev/null' if new is None else path}"]
    # Skip the common head and tail, which are most of a file.
    head = next(
        (i for i, (a, b) in enumerate(zip(before, after, strict=False)) if a != b), min(len(before), len(after))
    )
    most = min(len(before), len(after)) - head
    tail = next((i for i in range(most) if before[-1 - i] != after[-1 - i]), most)
    start, stop_before, stop_after = max(0, head - 3), len(before) - max(0, tail - 3), len(after) - max(0, tail - 3)
    a, b = before[start:stop_before], after[start:stop_after]
    if len(a) + len(b) > MAX_DIFF_LINES:
        return "\n".join([*header, f"[lines {start + 1}-{stop_before} became {len(b)} other lines; too long to show]"])
    for group in difflib.SequenceMatcher(None, a, b, autojunk=False).get_grouped_opcodes(3):
        (_, i1, _, j1, _), (_, _, i2, _, j2) = group[0], group[-1]
        header.append(f"@@ -{_span(start + i1, i2 - i1)} +{_span(start + j1, j2 - j1)} @@")
        for kind, low, high, new_low, new_high in group:
            if kind == "equal":
                header += [" " + line for line in a[low:high]]
                continue
            header += ["-" + line for line in a[low:high]]
            header += ["+" + line for line in b[new_low:new_high]]
    return "\n".join(header)


def _lines(text: str) -> list[str]:
    """Lines end at newlines only, not at form feeds or line separators."""
    *lines, rest = text.split("\n")
    return [*lines, *([f"{rest}\n{_UNFINISHED}"] if rest else [])]


def _span(start: int, length: int) -> str:
    return f"{start + 1 if length else start},{length}"
