"""Texts: the words of messages, and text that has a form in UTF-8."""

from __future__ import annotations


def counted(count: int, noun: str) -> str:
    """`1 group`, `2 groups`, `12,000 tokens`: a noun whose plural ends in s."""
    return f"{count:,} {noun}{'' if count == 1 else 's'}"


def duration(seconds: float) -> str:
    """`40 s`, `2 min 5 s`, `3 h 20 min`."""
    minutes, rest = divmod(round(seconds), 60)
    if minutes >= 60:
        return f"{minutes // 60:,} h {minutes % 60} min"
    return f"{minutes} min {rest} s" if minutes else f"{rest} s"


def escaped(text: str) -> str:
    """The text in one line for a terminal: what moves the cursor, and halves of surrogate pairs, as escapes."""
    return "".join(letter if letter.isprintable() else repr(letter)[1:-1] for letter in text)


def without_lone_surrogates(text: str) -> str:
    """Lone surrogates, which models write as escapes, become U+FFFD. Two adjacent halves are one character."""
    return text.encode("utf-16-le", "surrogatepass").decode("utf-16-le", "replace")
