"""Words of messages."""

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
