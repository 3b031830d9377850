"""End tags that a model did not write as it should: `</paramter>`, `</parameter`, `/parameter>`, `</function>`.

They are looked for where a value has no proper end tag, before a tag that may follow a value; and, more narrowly, right
before the proper end tag.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence

_REPEATS = 4
"""How many damaged tags in a row are read."""
_CHECKS = 64
"""How many closing tags of one value are compared."""
_CLOSING = re.compile(r"<[/\\]+\s*+((?>(?:｜\w++｜ )?)[^\s<>/\\\[\]]{1,64}+)")
_LAST_CLOSING = re.compile(_CLOSING.pattern + r"\s*+>?\Z")
_NAME = re.compile(r"\w+(?=\W*\Z)")


def damaged_end(text: str, start: int, end: int, ends: Sequence[str], others: Sequence[str]) -> int | None:
    """Where the damaged end tags begin that `text[start:end]` ends with, blanks aside; None if it ends with none.

    ends: the end tags of the value. others: the other tags of the format, which end a value by mistake.
    """
    longest = 2 * max(map(len, (*ends, *others))) + 8
    found = None
    for _ in range(_REPEATS):
        last = _rstrip(text, start, end)
        tail = text[max(start, last - longest) : last]
        length = max(_lengths(tail, ends, others), default=0)
        if not length or _opened(text, start, last - length, last):
            break
        found = end = last - length
        if text[start:end].rstrip().endswith("<"):  # as in `< /parameter>`
            found = end = text.rindex("<", start, end)
    return found


def near_end(text: str, start: int, end: int, ends: Sequence[str]) -> int | None:
    """Where a misspelt end tag begins that `text[start:end]` ends with, before the right one; None without one.

    A misspelt one has kept its `<` or its `>`: `/etc/parameters` is data. So is a right one, there or before more text.
    """
    last = _rstrip(text, start, end)
    tail = text[max(start, last - 2 * max(map(len, ends))) : last]
    if "/" not in tail or not ("<" in tail or tail.endswith(">")) or any(tag in tail for tag in ends):
        return None
    length = max(_near_length(tail, tag) for tag in ends)
    if "/" not in tail[len(tail) - length :] or _opened(text, start, last - length, last):
        return None
    return last - length


def holds_damaged_end(text: str, start: int, end: int, ends: Sequence[str]) -> bool:
    """Whether a damaged end tag is inside `text[start:end]`, without its opening tag before it."""
    names = [name.group() for tag in ends if (name := _NAME.search(tag))]
    closing = [match for _, match in zip(range(_CHECKS), _CLOSING.finditer(text, start, end), strict=False)]
    return any(
        not _opened(text, start, match.start(), match.end())
        and any(_distance(_last_word(match[1]), name, _edits(name)) is not None for name in names)
        for match in closing
    )


def _lengths(tail: str, ends: Sequence[str], others: Sequence[str]) -> Iterator[int]:
    """The lengths of what may be a tag at the end of `tail`."""
    yield from (len(tag) for tag in others if tail.endswith(tag))
    for tag in ends:
        if (length := _distance(tail, tag, _edits(tag) + 1)) is not None:
            yield length
        yield from (length for length in range(len(tag) - 1, 1, -1) if tail.endswith(tag[:length]))
    if (closing := _LAST_CLOSING.search(tail)) is not None:
        yield len(tail) - closing.start()


def _edits(tag: str) -> int:
    """How many edits make another tag of a tag, which its name decides: `</b>` has few neighbours."""
    return min(len(_last_word(tag)) // 4, 3)


def _distance(tail: str, tag: str, limit: int) -> int | None:
    """The length of the end of `tail` that is nearest to `tag`; None if more than `limit` edits are needed."""
    row = _distances(tail, tag, limit)
    nearest = min(row)
    length = row.index(nearest)
    return length if nearest <= limit and _ends_alike(tail[len(tail) - length :], tag) else None


def _near_length(tail: str, tag: str) -> int:
    """The length of the misspelt `tag` that `tail` ends with, from its `<` on if that is there; 0 without one."""
    limit = _edits(tag)
    row = _distances(tail, tag, limit)
    begins = ("<", tag[0])
    near = [
        (edits, tail[-length] not in begins, length)
        for length, edits in enumerate(row)
        if edits <= limit and length and (tail[-length] in begins or tail[-1] == ">")
    ]
    length = min(near)[2] if near else 0
    return length if length and _ends_alike(tail[-length:], tag) else 0


def _distances(tail: str, tag: str, limit: int) -> list[int]:
    """The edit distances of Levenshtein between `tag` and each end of `tail`, by its length, letter case aside.

    Ends that need more than `limit` edits for their length alone are left out.
    """
    tail, tag = tail[-len(tag) - limit :].replace("İ", "i").lower(), tag.lower()  # "İ".lower() has two characters
    row = list(range(len(tail) + 1))
    for count, wanted in enumerate(reversed(tag), 1):
        before, row[0] = row[0], count
        for index, got in enumerate(reversed(tail), 1):
            before, row[index] = row[index], min(row[index] + 1, row[index - 1] + 1, before + (got != wanted))
    return row


def _ends_alike(found: str, tag: str) -> bool:
    """Whether `found` is no tag with a word after it."""
    last, wanted = (found.split() or [""])[-1], tag.split()[-1]
    return len(last) > len(wanted) // 2 or not any(map(str.isalnum, last))


def _opened(text: str, start: int, tag: int, end: int) -> bool:
    """Whether the closing tag at `tag:end` has its opening tag in the value before it: then both are data."""
    if (closing := _CLOSING.search(text, tag, end)) is None:
        return False
    name, before = re.escape(closing[1]), text[start:tag]
    return len(re.findall(rf"<{name}[\s>/=]", before)) > len(re.findall(rf"</{name}\s*+>", before))


def _last_word(name: str) -> str:
    word = _NAME.search(name)
    return word.group() if word else name


def _rstrip(text: str, start: int, end: int) -> int:
    while end > start and text[end - 1].isspace():
        end -= 1
    return end
