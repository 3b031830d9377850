"""Summaries: the request to a model, checks of its answer, and a summary that needs no model."""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from typing import Final, NamedTuple

from lachesis_data.compression.conversation import PREFIX
from lachesis_messages.markup import split_opened_think, split_think

_LONGEST, _HEAD = 3000, 0.75
"""Characters of a turn in a request, and how many of them are its beginning."""
_SHORTEST: Final = 80

_REQUEST: Final = """\
Here are consecutive turns from the middle of a conversation between a user, an assistant, and its tools:

<turns>
{turns}
</turns>

Write a summary that replaces these turns, so that the assistant can go on without them: what was asked, what was \
done and with which tools, and what was found. Keep names, paths, numbers, errors and decisions that matter later. \
Write plain prose in the past tense, without a heading, in at most {words} words. Answer with the summary only."""

_TAGS = re.compile(r"</(?:tool_call|tool_response|think)>|<(?:tool_response|think)>")
_NAMES: Final = {"system": "System", "human": "User", "gpt": "Assistant", "tool": "Tool result"}


class Passage(NamedTuple):
    """One turn to summarise."""

    role: str
    text: str


class SummaryAnswer(NamedTuple):
    """The answer of a summariser."""

    text: str
    api_calls: int = 0
    """Requests, failed ones included."""


class SummaryFailed(Exception):
    """There is no usable summary: the entry is left unchanged."""

    def __init__(self, reason: str, api_calls: int = 1) -> None:
        super().__init__(reason)
        self.api_calls = api_calls


def summary_request(
    passages: Sequence[Passage], tokens: int, *, max_tokens: int | None = None, count: Callable[[str], int] = len
) -> str:
    """The prompt for a summary of about `tokens` tokens.

    A long turn keeps its beginning and its end. With `max_tokens`, turns are shortened further until the prompt has no
    more, as `count` counts them. Raises SummaryFailed where it cannot.
    """
    longest = _LONGEST
    while True:
        turns = "\n\n".join(f"[{_NAMES[role]}]\n{_shortened(text, longest)}" for role, text in passages)
        request = _REQUEST.format(words=max(10, tokens * 3 // 4), turns=turns)  # models do not count tokens
        if max_tokens is None or (length := count(request)) <= max_tokens:
            return request
        if longest <= _SHORTEST:
            raise SummaryFailed(f"{len(passages)} turns do not fit into a request of {max_tokens} tokens", 0)
        longest = max(_SHORTEST, min(longest // 2, int(longest * max_tokens / length)))


def clean_summary(text: str) -> str:
    """The summary in a model's answer: without reasoning, and without the prefix that is written before it."""
    reasoning, rest = split_think(text.strip())
    if not reasoning:
        rest = split_opened_think(rest)[1]
    return rest.strip().removeprefix(PREFIX.strip()).strip()


def extractive_summary(passages: Sequence[Passage], tokens: int, count: Callable[[str], int]) -> str:
    """The beginnings of the turns, in at most `tokens` tokens: a line a turn. Of too many turns, some are left out.

    The same turns always give the same text.
    """
    lines = [(_NAMES[role], _plain(text)) for role, text in passages]
    longest = 400
    while len(lines) > max(2, tokens):  # each has a token at least
        longest, lines = 50, _thinned(lines)
    while True:
        text = "\n".join(f"{name}: {_start(said, longest)}" for name, said in lines)
        if count(text) <= tokens:
            return text
        if longest > _SHORTEST:
            longest //= 2
        elif len(lines) > 2:
            lines = _thinned(lines)
        elif longest > 1:
            longest //= 2
        else:
            raise SummaryFailed(f"no summary fits into {tokens} tokens; raise summary_target_tokens", 0)


def _thinned(lines: list[tuple[str, str]]) -> list[tuple[str, str]]:
    """Every second one, and always the last, on which the next turn builds."""
    return [*lines[:-1:2], lines[-1]]


def summarised_passages(summary: str) -> list[Passage]:
    """The turns that an extractive summary has lines of, to be summarised once more; any other one is one passage."""
    roles = {name: role for role, name in _NAMES.items()}
    lines = [line.partition(": ") for line in summary.splitlines()]
    if any(name not in roles for name, _, _ in lines):
        return [Passage("human", summary)]
    return [Passage(roles[name], said) for name, _, said in lines]


def _shortened(text: str, longest: int) -> str:
    if len(text) <= longest:
        return text
    head = int(longest * _HEAD)
    return f"{text[:head]}\n[... {len(text) - longest} characters ...]\n{text[len(text) - (longest - head) :]}"


def _plain(text: str) -> str:
    """One line: the words without reasoning, and calls as they are written."""
    said = (split_think(text)[1] or text).replace("<tool_call>", " called ")
    return " ".join(_TAGS.sub(" ", said).split())


def _start(text: str, longest: int) -> str:
    return text if len(text) <= longest else text[:longest].rstrip() + " ..."
