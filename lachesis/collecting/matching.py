"""Which completions a returned sample is made of.

A sample is recognised by what was sampled: by the exact ids after their exact prompt, else by the exact text of every
part that it trains. Nothing is compared by similarity. Text that the model never said in a trained place makes the
sample refused.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

from lachesis.collecting.recording import Completion, Recording
from lachesis.collecting.returned import ReturnedSample

_ASSISTANTS = ("assistant", "agent", "gpt")


@dataclass(frozen=True, slots=True)
class Match:
    """What a sample was recognised as."""

    completions: tuple[Completion, ...] = ()
    """Those that it trains, in the order of sampling."""
    refused: str = ""
    """Why it was not recognised."""


@dataclass(frozen=True, slots=True)
class _Part:
    """Something that a sample trains."""

    text: str
    calls: Any = None
    before: tuple[Any, ...] | None = None
    """The conversation before it, where it is known."""


class Matcher:
    """Recognises the samples of one item, in their order.

    Args:
        decode: ids to text, special tokens included.
        ends: gives the texts of special tokens, which end and begin turns. Called when text is compared.
    """

    def __init__(
        self, recording: Recording, decode: Callable[[Sequence[int]], str], ends: Callable[[], Sequence[str]]
    ) -> None:
        self._recording = recording
        self._decode = decode
        self._special = ends
        self._taken: set[Completion] = set()

    def match(self, sample: ReturnedSample) -> Match:
        """The completions of a sample. Of several that fit equally, the first that no earlier sample has."""
        found = self._by_ids(sample) or self._by_text(sample)
        self._taken.update(found.completions)
        return found

    # By ids.

    def _by_ids(self, sample: ReturnedSample) -> Match | None:
        """The completions that stand in the sample after their exact prompt and are trained as a whole."""
        ids, runs = sample.tokens, sample.runs()
        if ids is None or not runs:
            return None
        spans: dict[tuple[int, int], Completion] = {}
        for completion in self._in_order():
            tokens = completion.tokens
            if tokens is None or not len(tokens) or tokens.after.length > len(ids):
                continue
            span = tokens.prompt.length, tokens.after.length
            if span in spans or not any(start <= span[0] and span[1] <= end for start, end in runs):
                continue
            if ids[span[0] : span[1]] == tokens.ids and ids[: span[0]] == tokens.prompt.ids:
                spans[span] = completion
        covered = [False] * len(ids)
        for start, end in spans:
            covered[start:end] = [True] * (end - start)
        for start, end in runs:
            others = [ids[at] for at in range(start, end) if not covered[at]]
            if others and self._without_ends(self._decode(others)):
                return None  # it trains something else too: is that text that was said?
        return Match(tuple(spans[span] for span in sorted(spans))) if spans else None

    def _in_order(self) -> list[Completion]:
        return sorted(self._recording.completions, key=lambda completion: completion in self._taken)

    # By text.

    def _by_text(self, sample: ReturnedSample) -> Match:
        parts = self._parts(sample)
        if isinstance(parts, str):
            return Match(refused=parts)
        found: list[Completion] = []
        for part in reversed(parts):  # the last turn first: its conversation says which the earlier ones were
            completion = self._said(part, found)
            if completion is None:
                shown = part.text if len(part.text) <= 200 else f"{part.text[:120]} ... {part.text[-60:]}"
                return Match(refused=f"it trains text that the model did not say: {shown!r}")
            if completion not in found:
                found.append(completion)
        return Match(tuple(sorted(found, key=self._recording.completions.index)))

    def _parts(self, sample: ReturnedSample) -> list[_Part] | str:
        """What the sample trains; a text says why that is unknown."""
        ids, runs = sample.tokens, sample.runs()
        chat = self._recording.chat_of(ids) if ids is not None else None
        if chat is not None and chat.trained is not None:
            return [_part(chat.messages, at) for at in chat.trained] or "it trains no message"
        if chat is not None and runs and ids is not None:
            said = [at for at, message in enumerate(chat.messages) if message.get("role") in _ASSISTANTS]
            if len(runs) == len(said):
                return [_part(chat.messages, at) for at in said]
            if len(runs) == 1 and runs[0][1] == len(ids) and said and said[-1] == len(chat.messages) - 1:
                return [_part(chat.messages, said[-1])]
        if ids is not None and runs:
            return [_Part(self._decode(ids[start:end])) for start, end in runs]
        if ids is not None and sample.masks is not None:
            return "its masks train nothing"
        if sample.messages is not None and (last := _part(sample.messages, len(sample.messages) - 1)):
            if sample.messages[-1].get("role") in _ASSISTANTS:
                return [last]
            return "its last message is not the model's, and it has no tokens"
        return "it has neither token ids with masks nor messages"

    def _said(self, part: _Part, later: Sequence[Completion]) -> Completion | None:
        """The completion that said a part: in the same conversation, else with the same text, else after a prompt that
        ends with the beginning of the text."""
        candidates = self._in_order()
        before = [each for each in candidates if _is_before(each, later)]
        for pool in (before, candidates):
            same = [each for each in pool if self._says(each, part)]
            if same:
                return next((each for each in same if _same_conversation(each, part)), same[0])
        text = self._without_ends(part.text)
        for completion in candidates:
            said = self._without_ends(completion.said)
            if said and text.endswith(said) and (completion.prompt + completion.said).rstrip().endswith(text):
                return completion
        return None

    def _says(self, completion: Completion, part: _Part) -> bool:
        if part.calls is not None or completion.response.message.tool_calls:
            calls = [(call.name, _value(call.arguments)) for call in completion.response.message.tool_calls]
            if part.calls == calls:
                return completion.said.strip() == part.text.strip()
        return self._without_ends(completion.said) == self._without_ends(part.text)

    @cached_property
    def _ends(self) -> tuple[str, ...]:
        return tuple(sorted({end for end in self._special() if end}, key=len, reverse=True))

    def _without_ends(self, text: str) -> str:
        """The text without white space and special tokens around it."""
        text = text.strip()
        changed = True
        while changed:
            changed = False
            for end in self._ends:
                if text.endswith(end):
                    text, changed = text[: -len(end)].rstrip(), True
                if text and text.startswith(end):
                    text, changed = text[len(end) :].lstrip(), True
        return text


def _part(messages: Sequence[Mapping[str, Any]], at: int) -> _Part:
    message = messages[at]
    calls = message.get("tool_calls") or None
    if calls is not None:
        calls = [_call(call) for call in calls]
    return _Part(_text(message.get("content")), calls, tuple(map(_canonical, messages[:at])))


def _call(call: Any) -> tuple[Any, Any]:
    function = call["function"] if isinstance(call, Mapping) else call.function
    get = function.get if isinstance(function, Mapping) else lambda name: getattr(function, name)
    return get("name"), _value(get("arguments"))


def _value(arguments: Any) -> Any:
    try:
        return json.loads(arguments) if isinstance(arguments, str) else arguments
    except ValueError:
        return arguments


def _text(content: Any) -> str:
    if isinstance(content, list | tuple):
        return "".join(str(part.get("text", "")) for part in content if isinstance(part, Mapping))
    return content if isinstance(content, str) else ""


def _canonical(message: Mapping[str, Any]) -> tuple[Any, str]:
    return message.get("role"), _text(message.get("content"))


def _same_conversation(completion: Completion, part: _Part) -> bool:
    if part.before is None or completion.messages is None:
        return False
    return tuple(map(_canonical, completion.messages)) == part.before


def _is_before(completion: Completion, later: Sequence[Completion]) -> bool:
    """Whether one of the later turns goes on from the tokens of this completion."""
    if completion.tokens is None:
        return False
    after = completion.tokens.after
    return any(
        each.tokens is not None and any(piece is after for piece in each.tokens.prompt.lineage()) for each in later
    )
