"""The suffix of a sampled turn: the text that a chat template writes after it, found without rendering that turn.

A placeholder conversation, `[user, assistant, *new messages]`, is rendered. The text after the placeholder's own words
is the suffix. A `SuffixTemplate` says where in it the turn ends: a model that sampled its end-of-turn token has that
part already, a model that was cut off has not.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum
from secrets import token_hex
from typing import Any, NamedTuple

from lachesis_tokens.templates.chat_template import ChatTemplate, TemplateMessage, Tools

_MARK = f"placeholder-{token_hex(8)}"
"""The words of the placeholder: no message can contain them, even by intent."""
_USER: TemplateMessage = {"role": "user", "content": "placeholder"}


class Shape(StrEnum):
    """The kind of the placeholder turn. Templates write another suffix after each."""

    TEXT = "text"
    """Content alone."""
    CALLS = "calls"
    """Tool calls with the ids and names of the sampled ones."""


class Placeholder(NamedTuple):
    """How a placeholder conversation is composed."""

    shape: Shape
    system: bool = False
    """It begins with the system message of the conversation."""
    tools: bool = False
    """It offers the tools."""


@dataclass(frozen=True, slots=True)
class SuffixTemplate:
    """Where a turn ends in its suffix."""

    shape: Shape
    end: str = ""
    """The token that ends the turn, "" if the template writes none."""
    lead: str = ""
    """The text between the words of a turn and `end`; part of the end, not of the words."""
    closing: int = 0
    """Characters that close the calls, if no `end` follows them."""
    opens: bool = False
    """`end` also opens the next message. If the model ended its turn with another token, `end` is still missing."""
    sampled_end: str = ""
    """The token that a model is trained to end such a turn with; mostly `end`."""

    def missing(self, suffix: str, ended_by: str = "", last: str = "") -> str | None:
        """The part of the suffix that the sampled ids lack; None if the suffix has no end of the turn.

        `ended_by` is the end-of-turn token at the end of the sampled ids, "" without one. `last` is the added token of
        any kind at their end.
        """
        if not self.end:
            return suffix[self.closing :]
        at = suffix.find(self.end)
        if at < 0:
            return None
        if ended_by and (ended_by == self.end or not self.opens):
            return suffix[at + len(self.end) :]
        if ended_by:
            return suffix[at:]
        start = 0
        if self.shape is Shape.CALLS:
            start = at - len(self.lead) if suffix.endswith(self.lead, 0, at) else at
        if last and suffix.startswith(last, start):
            start += len(last)  # sampling stopped at a token of the template that does not end the turn
        return suffix[start:]


class TemplateTokens:
    """The added tokens of a tokenizer that occur in the text of a template."""

    def __init__(self, tokens: Collection[str], ends: Collection[str], *texts: str) -> None:
        """`tokens` are all added tokens, `ends` those that end a turn, `texts` some renderings."""
        self.ends = frozenset(ends)
        found = sorted((token for token in tokens if any(token in text for text in texts)), key=len, reverse=True)
        self._any = re.compile("|".join(map(re.escape, found))) if found else None

    def find(self, text: str) -> list[str]:
        """Those in `text`, in order."""
        return self._any.findall(text) if self._any is not None else []


def render_suffix(
    template: ChatTemplate,
    placeholder: Placeholder,
    following: Sequence[TemplateMessage],
    *,
    calls: Sequence[tuple[str, str]] = (),
    system: TemplateMessage | None = None,
    tools: Tools | None = None,
    before: Sequence[TemplateMessage] | None = None,
    add_generation_prompt: bool = True,
) -> str | None:
    """The text that the template writes after the words of a turn, up to the end of `following`.

    `calls` are the ids and names of the turn's calls. `before` replaces the placeholder's messages before the turn.
    None if the template leaves the placeholder out or repeats it. Raises `TemplateError`.
    """
    if before is None:
        before = [*([system] if placeholder.system and system is not None else []), template.prepare(_USER)]
    offered = tools if placeholder.tools else None
    for turn in _turns(template, placeholder, calls):
        text = template.render([*before, turn, *following], offered, add_generation_prompt=add_generation_prompt)
        if text.count(_MARK) == 1:
            return text.partition(_MARK)[2]
    return None


def generation_prompt_of(text: str, without: str, tokens: Collection[str]) -> str:
    """The end of `text` that a rendering `without` a generation prompt lacks.

    A template may write other text in its place. `tokens` are the added tokens; none is cut in two.
    """
    at = shared_length(text, without)
    if at < len(text):
        starts = (text.find(token, max(0, at - len(token) + 1), at + len(token) - 1) for token in tokens)
        at = min((start for start in starts if 0 <= start < at), default=at)
    return text[at:]


def shared_length(a: str, b: str) -> int:
    """The length of the common beginning of two texts."""
    if a.startswith(b):
        return len(b)
    return next((at for at, (one, other) in enumerate(zip(a, b, strict=False)) if one != other), len(a))


def suffix_template_of(
    known: TemplateTokens,
    shape: Shape,
    header: str,
    *,
    last: str,
    last_text: str,
    header_text: str,
    between: str | None,
) -> SuffixTemplate:
    """The suffix template of a turn.

    Args:
        known: the added tokens in the template's text.
        shape: the shape of the turn.
        header: the text between the words of the turn and those of the next message, or the end of the prompt.
        last: the text after the words of the turn if it is the last message.
        last_text: `last` for a turn of text; shows whether the template writes ends of turns at all.
        header_text: `header` for a turn of text.
        between: the text between the words of two calls, None if the template takes only one.
    """
    text = _after_text(known, header_text, last_text)
    if shape is Shape.TEXT:
        return text
    written, ahead = known.find(last), known.find(header)
    if text.end and not text.opens:
        ends = [token for token in written if token in known.ends or token == text.end]
        closers = [token for token in written if token in ahead and not (between and token in between)]
        if end := next((token for token in ends if token in ahead), None):
            return SuffixTemplate(shape, end, text.lead, sampled_end=end)
        if closers:  # only calls end with it
            return SuffixTemplate(shape, closers[-1], text.lead, opens=True, sampled_end=closers[-1])
        if end := next((token for token in ahead if token in known.ends or token == text.end), None):
            return SuffixTemplate(shape, end, text.lead, sampled_end=ends[0] if ends else end)
    closing = len(last) if header.startswith(last) else 0
    opener = next(iter(known.find(header[closing:])), "")
    return SuffixTemplate(shape, opener, closing=closing, opens=True, sampled_end=opener)


def _after_text(known: TemplateTokens, header: str, last: str) -> SuffixTemplate:
    written, ahead = known.find(last), known.find(header)
    if not ahead:
        return SuffixTemplate(Shape.TEXT)
    if not written:
        # Only the next message ends the turn: the model has to sample the token that opens it.
        opener = ahead[0] if header.lstrip().startswith(ahead[0]) else ""
        return SuffixTemplate(Shape.TEXT, opener, opens=True, sampled_end=opener)
    common = [token for token in ahead if token in written]
    end = next((token for token in common if token in known.ends), common[0] if common else ahead[0])
    sampled = end if end in written else next((token for token in written if token in known.ends), written[0])
    return SuffixTemplate(Shape.TEXT, end, header[: header.index(end)], sampled_end=sampled)


def _turns(
    template: ChatTemplate, placeholder: Placeholder, calls: Sequence[tuple[str, str]]
) -> Iterator[TemplateMessage]:
    """Turns with the mark as their words, the most widely supported form first."""
    if placeholder.shape is Shape.TEXT:
        yield _turn(template, (), None, _MARK)
        return
    # Nearly every template writes the last call last, and the others write the content last. Some show only the first
    # call, and some only the content.
    for place in dict.fromkeys((len(calls) - 1, 0, None)):
        yield _turn(template, calls, place, _MARK)


def _turn(template: ChatTemplate, calls: Sequence[tuple[str, str]], place: int | None, mark: str) -> TemplateMessage:
    turn: dict[str, Any] = {"role": "assistant", "content": mark if place is None else ""}
    if calls:
        turn["tool_calls"] = [
            {
                "id": call_id,
                "type": "function",
                "function": {"name": name, "arguments": {"placeholder": mark if number == place else ""}},
            }
            for number, (call_id, name) in enumerate(calls)
        ]
    return template.prepare(turn)


def placeholder_turn(template: ChatTemplate, calls: Sequence[tuple[str, str]]) -> TemplateMessage:
    """A turn in the place of a sampled one, with calls of the same ids and names."""
    return _turn(template, calls, len(calls) - 1 if calls else None, "placeholder")


def calls_of(message: Mapping[str, Any]) -> tuple[tuple[str, str], ...]:
    """The ids and names of the calls of an OpenAI message."""
    return tuple((call.get("id", ""), call["function"]["name"]) for call in message.get("tool_calls") or ())
