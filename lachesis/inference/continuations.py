"""What a chat template writes behind a sampled turn, found without writing that turn again.

A stand-in conversation, `[user, assistant, *new messages]`, is rendered, and what comes behind the stand-in's own text
is what follows the sampled ids. Where the turn ends in there is its seam: a model that sampled its end-of-turn token
has it already, one that was cut off has not.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum
from functools import partial
from typing import Any

from lachesis.inference.chat_template import ChatTemplate, TemplateMessage, Tools

_MARKS = tuple(f"stand-in-turn-{number}" for number in range(32))
"""Texts for the stand-in to say. A conversation that says one of them gets the next."""
_USER: TemplateMessage = {"role": "user", "content": "stand-in"}


class Shape(StrEnum):
    """What kind of turn stands in for the sampled one: templates write something else behind each."""

    TEXT = "text"
    """Content alone."""
    CALLS = "calls"
    """Tool calls with the ids and names of the sampled ones."""


@dataclass(frozen=True, slots=True)
class StandIn:
    """How a stand-in conversation is put together."""

    shape: Shape
    system: bool = False
    """The system message of the conversation comes first."""
    tools: bool = False
    """The tools are offered."""


@dataclass(frozen=True, slots=True)
class Seam:
    """Where a turn ends in the text that a template writes behind its words."""

    shape: Shape
    end: str = ""
    """The token that ends the turn, "" where the template writes none."""
    lead: str = ""
    """What the template writes between the words of a turn and `end`; belongs to the end, not to the words."""
    closing: int = 0
    """Characters that close the calls, where there is no `end` to find behind them."""
    opens: bool = False
    """`end` opens the next message, too: where the model ended its turn with another token, it is still to come."""
    sampled_end: str = ""
    """The token that a model is trained to end such a turn with; mostly `end`."""

    def rest(self, behind: str, ended_by: str = "", last: str = "") -> str | None:
        """What is still to come of `behind`; None where the end of the turn is not in it.

        `ended_by` is the end-of-turn token that the sampled ids end with, "" where none does; `last` is the added token
        that they end with, of whatever kind.
        """
        if not self.end:
            return behind[self.closing :]
        at = behind.find(self.end)
        if at < 0:
            return None
        if ended_by and (ended_by == self.end or not self.opens):
            return behind[at + len(self.end) :]
        if ended_by:
            return behind[at:]
        start = 0
        if self.shape is Shape.CALLS:
            start = at - len(self.lead) if behind.endswith(self.lead, 0, at) else at
        if last and behind.startswith(last, start):
            start += len(last)  # a stop at a token of the template's that does not end the turn by itself
        return behind[start:]


class Markup:
    """The added tokens of a tokenizer that occur in what a template writes."""

    def __init__(self, tokens: Collection[str], ends: Collection[str], *texts: str) -> None:
        """`tokens` are all added tokens, `ends` those that end a turn, `texts` some renderings."""
        self.ends = frozenset(ends)
        found = sorted((token for token in tokens if any(token in text for text in texts)), key=len, reverse=True)
        self._any = re.compile("|".join(map(re.escape, found))) if found else None

    def find(self, text: str) -> list[str]:
        """Those in `text`, in order."""
        return self._any.findall(text) if self._any is not None else []


def behind(
    template: ChatTemplate,
    stand_in: StandIn,
    following: Sequence[TemplateMessage],
    *,
    calls: Sequence[tuple[str, str]] = (),
    system: TemplateMessage | None = None,
    tools: Tools | None = None,
    generation_prompt: bool = True,
) -> str | None:
    """What the template writes behind the words of a turn that `following` follows; `calls` are its ids and names.

    None where the template leaves the stand-in out or repeats it. Raises TemplateRefused.
    """
    first = [system] if stand_in.system and system is not None else []
    offered = tools if stand_in.tools else None
    for turn in _turns(template, stand_in, calls):
        for mark in _MARKS:
            messages = [*first, template.prepare(_USER), turn(mark), *following]
            text = template.render(messages, offered, generation_prompt=generation_prompt)
            if not (count := text.count(mark)):
                break  # written otherwise
            if count == 1:
                return text[text.index(mark) + len(mark) :]
    return None


def generation_prompt_of(text: str, without: str, tokens: Collection[str]) -> str:
    """The end of `text` that it has more than the same rendering without a generation prompt.

    A template may write something else in its place. `tokens` are the added tokens: none is cut in two.
    """
    at = len(without)
    if not text.startswith(without):
        pairs = enumerate(zip(text, without, strict=False))
        at = next((at for at, (a, b) in pairs if a != b), min(len(text), len(without)))
    if at < len(text):
        starts = (text.find(token, max(0, at - len(token) + 1), at + len(token) - 1) for token in tokens)
        at = min((start for start in starts if 0 <= start < at), default=at)
    return text[at:]


def seam_of(
    markup: Markup, shape: Shape, header: str, *, last: str, last_text: str, header_text: str, between: str | None
) -> Seam:
    """The seam of a turn.

    Args:
        markup: the added tokens that count.
        shape: the turn's.
        header: what stands between the words of the turn and those of the next message, or the end of the prompt.
        last: what stands behind the words of the turn where it is the last message.
        last_text: the same for a turn of text; tells whether the template writes ends of turns at all.
        header_text: `header` for a turn of text.
        between: what stands between the words of two calls, None where there cannot be two.
    """
    text = _seam_of_text(markup, header_text, last_text)
    if shape is Shape.TEXT:
        return text
    written, ahead = markup.find(last), markup.find(header)
    if text.end and not text.opens:
        known = [token for token in written if token in markup.ends or token == text.end]
        closers = [token for token in written if token in ahead and not (between and token in between)]
        if end := next((token for token in known if token in ahead), None):
            return Seam(shape, end, text.lead, sampled_end=end)
        if closers:  # only calls end with it
            return Seam(shape, closers[-1], text.lead, opens=True, sampled_end=closers[-1])
        if end := next((token for token in ahead if token in markup.ends or token == text.end), None):
            return Seam(shape, end, text.lead, sampled_end=known[0] if known else end)
    closing = len(last) if header.startswith(last) else 0
    opener = next(iter(markup.find(header[closing:])), "")
    return Seam(shape, opener, closing=closing, opens=True, sampled_end=opener)


def _seam_of_text(markup: Markup, header: str, last: str) -> Seam:
    written, ahead = markup.find(last), markup.find(header)
    if not ahead:
        return Seam(Shape.TEXT)
    if not written:
        # Nothing ends the turn but the next message: the model has to sample what opens that.
        opener = ahead[0] if header.lstrip().startswith(ahead[0]) else ""
        return Seam(Shape.TEXT, opener, opens=True, sampled_end=opener)
    common = [token for token in ahead if token in written]
    end = next((token for token in common if token in markup.ends), common[0] if common else ahead[0])
    sampled = end if end in written else next((token for token in written if token in markup.ends), written[0])
    return Seam(Shape.TEXT, end, header[: header.index(end)], sampled_end=sampled)


def _turns(
    template: ChatTemplate, stand_in: StandIn, calls: Sequence[tuple[str, str]]
) -> list[Callable[[str], TemplateMessage]]:
    """Turns that say a mark, the likeliest to be written first."""
    if stand_in.shape is Shape.TEXT:
        return [partial(_turn, template, (), None)]
    # The last call comes last in nearly every template, and where it does not, the content would. Some show the first
    # call alone, and some no call, but the content.
    places = dict.fromkeys((len(calls) - 1, 0, None))
    return [partial(_turn, template, calls, place) for place in places]


def _turn(template: ChatTemplate, calls: Sequence[tuple[str, str]], place: int | None, mark: str) -> TemplateMessage:
    turn: dict[str, Any] = {"role": "assistant", "content": mark if place is None else ""}
    if calls:
        turn["tool_calls"] = [
            {
                "id": call_id,
                "type": "function",
                "function": {"name": name, "arguments": {"stand_in": mark if number == place else ""}},
            }
            for number, (call_id, name) in enumerate(calls)
        ]
    return template.prepare(turn)


def calls_of(message: Mapping[str, Any]) -> tuple[tuple[str, str], ...]:
    """The ids and names of the calls of an OpenAI message."""
    return tuple((call.get("id", ""), call["function"]["name"]) for call in message.get("tool_calls") or ())
