"""The earlier turns of the model within one trained text, as where a tool's result stands inside one message."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from lachesis_compat.collecting.recording import RecordedCompletion

_TELLING = 12
"""Characters in a row that say that a text was made of an answer."""


@dataclass(frozen=True, slots=True)
class EarlierTurns:
    """The model's earlier texts, at places within a trained text."""

    turns: tuple[RecordedCompletion, ...] = ()
    """Those that stand in it word for word. The text between them counts as prompt."""
    changed: frozenset[RecordedCompletion] = frozenset()
    """Answers of which words stand in it, but not as they were said: cut, edited, or after another prompt."""
    cut: RecordedCompletion | None = None
    """An answer of which it trains only the end."""


def place_in(completion: RecordedCompletion, prompt: str) -> tuple[int, int] | None:
    """Start and end of what it said in a longer prompt that goes on from it, white space around it aside."""
    asked, said = completion.prompt, completion.said.strip()
    if not asked or len(asked) >= len(prompt) or not prompt.startswith(asked):
        return None
    start = _after(asked, prompt)
    return (start, start + len(said)) if prompt.startswith(said, start) else None


def _after(asked: str, prompt: str) -> int:
    """Where the text after a shorter prompt begins, white space aside."""
    return len(prompt) - len(prompt[len(asked) :].lstrip())


def earlier_turns(
    text: str, last: RecordedCompletion, before: Sequence[RecordedCompletion], is_blank: Callable[[str], bool]
) -> EarlierTurns:
    """The turns that `text`, which ends with what `last` said, trains before it.

    Args:
        text: without white space and special tokens around it.
        before: the completions before `last`. Of several at one place, one that `last` goes on from is taken, else the
            longest, else the first.
        is_blank: whether a text is white space and special tokens only.
    """
    whole = (last.prompt + last.said).rstrip()
    begin = len(whole) - len(text)
    if begin >= len(last.prompt) or not whole.endswith(text):
        return EarlierTurns()
    continued = set() if last.tokens is None else set(last.tokens.prompt.lineage())
    word_for_word: list[tuple[bool, int, int, RecordedCompletion]] = []
    others: list[tuple[int, RecordedCompletion]] = []
    for each in before:
        said = each.said.strip()
        if not each.prompt or len(each.prompt) >= len(last.prompt):
            continue
        if not last.prompt.startswith(each.prompt):
            if len(said) >= _TELLING and (start := last.prompt.find(said, begin)) >= 0:
                others.append((start, each))
            continue
        if (place := place_in(each, last.prompt)) is not None:
            word_for_word.append((each.tokens is not None and each.tokens.after in continued, *place, each))
        elif (start := _after(each.prompt, last.prompt)) >= begin or is_blank(last.prompt[start:begin]):
            others.append((start, each))
    turns: list[tuple[int, int, RecordedCompletion]] = []
    for _, start, end, each in sorted(word_for_word, key=lambda found: (not found[0], -found[1], -found[2])):
        if start < begin and end <= begin:
            continue
        if any(start == other or max(start, other) < min(end, its_end) for other, its_end, _ in turns):
            others.append((start, each))
        elif start < begin and not is_blank(last.prompt[start:begin]):
            return EarlierTurns(cut=each)
        else:
            turns.append((start, end, each))
    changed = set()
    for at, each in others:
        if not any(at == start or start < at < end for start, end, _ in turns):
            until = min((start for start, _, _ in turns if start > at), default=len(last.prompt))
            if _shares(last.prompt[at:until], each.said.strip()):
                changed.add(each)
    return EarlierTurns(tuple(each for _, _, each in turns), frozenset(changed))


def _shares(text: str, said: str) -> bool:
    """Whether the text has as many characters of the answer in a row as tell."""
    size = min(len(said), _TELLING)
    pieces = {text[at : at + size] for at in range(len(text) - size + 1)} if size else set()
    return any(said[at : at + size] in pieces for at in range(len(said) - size + 1))
