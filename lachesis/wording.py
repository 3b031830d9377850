"""Words of messages."""

from __future__ import annotations


def counted(count: int, noun: str) -> str:
    """`1 group`, `2 groups`, `12,000 tokens`: a noun whose plural ends in s."""
    return f"{count:,} {noun}{'' if count == 1 else 's'}"
