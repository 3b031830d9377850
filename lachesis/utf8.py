"""Text that has a form in UTF-8."""

from __future__ import annotations


def without_lone_surrogates(text: str) -> str:
    """Lone surrogates, which models write as escapes, become U+FFFD. Two adjacent halves are one character."""
    return text.encode("utf-16-le", "surrogatepass").decode("utf-16-le", "replace")
