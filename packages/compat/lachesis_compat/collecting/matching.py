"""Which completions a returned sample is made of.

A sample is matched with what was sampled: by the exact ids after their exact prompt, else by the exact text of every
part that it trains. Nothing is compared by similarity. A sample that trains text which the model never wrote is
refused.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

from lachesis_compat.collecting.earlier_turns import EarlierTurns, earlier_turns
from lachesis_compat.collecting.recording import ItemRecording, NotedChat, RecordedCompletion
from lachesis_compat.collecting.returned import ReturnedSample

_ASSISTANTS = ("assistant", "agent", "gpt")
_MARKUP = re.compile(r"<[^<>]*>")
_TWINS = (
    "other samples with its text have other scores, and the model wrote this text only once, or in different tokens: "
    "it is unknown which one is meant"
)


@dataclass(frozen=True, slots=True)
class Match:
    """The match of a sample."""

    completions: tuple[RecordedCompletion, ...] = ()
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
    prompt: str | None = None
    """The text of the tokens before it, where that is known."""


class Matcher:
    """Recognises the samples of one item, in their order.

    Args:
        decode: ids to text, special tokens included.
        ends: gives the texts of special tokens, which end and begin turns. Called when text is compared.
    """

    def __init__(
        self, recording: ItemRecording, decode: Callable[[Sequence[int]], str], ends: Callable[[], Sequence[str]]
    ) -> None:
        self._recording = recording
        self._decode = decode
        self._special = ends
        self._taken: set[RecordedCompletion] = set()
        self._changed: set[RecordedCompletion] = set()
        """Of the sample that is looked at: answers that it seems to train in another form than they were said."""

    def match(self, groups: Sequence[Sequence[ReturnedSample]]) -> list[Match]:
        """The completions of each sample of the groups, one after the other; no completion is in two of them.

        Of several with the same ids after the same prompt, the first that no earlier sample has.
        """
        found: list[Match] = []
        twins: list[list[Any]] = []
        scores: dict[Any, set[float]] = {}
        samples = [(number, sample) for number, group in enumerate(groups) for sample in group]
        changed: list[set[RecordedCompletion]] = []
        for number, sample in samples:
            self._changed = set()
            by_ids = self._by_ids(sample)
            found.append(by_ids or self._free(self._by_text(sample)))
            changed.append(self._changed)
            self._taken.update(found[-1].completions)
            exact = by_ids is not None and sample.logprobs  # which only the ids of a server come with
            twins.append([] if exact else [_way(each) for each in found[-1].completions if self._has_twin(each)])
            if found[-1].completions:  # another sample of the group may have them too
                twins[-1].append((number, tuple(map(id, found[-1].completions))))
            for twin in twins[-1]:
                scores.setdefault(twin, set()).add(sample.score)
        mixed = {twin for twin, given in scores.items() if len(given) > 1}
        for at, answers in enumerate(changed):
            if lost := answers - self._taken:  # no sample has them as they were said either
                said = min(lost, key=self._recording.completions.index).said
                found[at] = Match(refused=f"it trains words that differ from the model's answer: {_short(said)}")
        found = [
            Match(refused=_TWINS) if mixed.intersection(own) and not match.refused else match
            for match, own in zip(found, twins, strict=True)
        ]
        return _once_each(found, samples)

    def _free(self, match: Match) -> Match:
        """The match with others that say the same after the same prompt, where earlier samples have its completions."""
        found = list(match.completions)
        for at, completion in enumerate(found):
            if completion in self._taken:
                others = (
                    each
                    for each in self._recording.completions
                    if each not in self._taken and each not in found and _way(each) == _way(completion)
                )
                found[at] = next(others, completion)
        return replace(match, completions=tuple(sorted(found, key=self._recording.completions.index)))

    def _has_twin(self, completion: RecordedCompletion) -> bool:
        """Whether the model answered the same prompt with the same text in other tokens, or without its end."""
        return completion.tokens is not None and any(
            each.said == completion.said
            and each.tokens is not None
            and each.tokens.ids != completion.tokens.ids
            and each.tokens.prompt.ids == completion.tokens.prompt.ids
            for each in self._recording.completions
        )

    # By ids.

    def _by_ids(self, sample: ReturnedSample) -> Match | None:
        """The completions that stand in the sample after their exact prompt and are trained as a whole."""
        ids, runs = sample.tokens, sample.runs()
        if ids is None or not runs:
            return None
        spans: dict[tuple[int, int], RecordedCompletion] = {}
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
        for start, end in sorted(spans, key=lambda span: (span[0], spans[span] in self._taken, -span[1])):
            if any(covered[start:end]):
                del spans[start, end]  # a shorter answer to the same prompt
            covered[start:end] = [True] * (end - start)
        for start, end in runs:
            others = [ids[at] for at in range(start, end) if not covered[at]]
            if others and self._without_ends(self._decode(others)):
                return None  # it trains something else too: is that text that was said?
        return Match(tuple(spans[span] for span in sorted(spans))) if spans else None

    def _in_order(self) -> list[RecordedCompletion]:
        return sorted(self._recording.completions, key=lambda completion: completion in self._taken)

    # By text.

    def _by_text(self, sample: ReturnedSample) -> Match:
        parts = self._parts(sample)
        if isinstance(parts, str):
            return Match(refused=parts)
        found: list[RecordedCompletion] = []
        for part in reversed(parts):  # the last turn first: its conversation says which the earlier ones were
            said = self._said(part, found)
            if not said or len(set(map(_prompt, said))) > 1:
                why = "that the model wrote in several conversations" if said else "that the model did not say"
                return Match(refused=f"it trains text {why}: {_short(part.text)}")
            earlier = self._earlier_turns(part, said[0])
            if earlier.cut is not None:
                return Match(refused=f"it trains a part of an answer of the model: {_short(earlier.cut.said)}")
            found += [said[0], *(each for each in earlier.turns if each not in found)]
            self._changed |= earlier.changed
        return Match(tuple(sorted(found, key=self._recording.completions.index)))

    def _parts(self, sample: ReturnedSample) -> list[_Part] | str:
        """The completions that the sample trains; a text says why they are unknown."""
        ids, runs = sample.tokens, sample.runs()
        chat = self._recording.chat_of(ids, sample.masks) if ids is not None else None
        if ids is not None and runs:
            texts = [_Part(self._decode(ids[start:end]), prompt=self._decode(ids[:start])) for start, end in runs]
            trained = self._trained(chat, texts)
            if trained:
                same = len(trained) == len(texts)
                return [replace(part, prompt=texts[at].prompt if same else None) for at, part in enumerate(trained)]
            return texts
        if chat is not None and chat.trained is not None:
            return [_part(chat.messages, at) for at in chat.trained] or "it trains no message"
        if ids is not None and sample.masks is not None:
            return "its masks train nothing"
        if sample.messages is not None and (last := _part(sample.messages, len(sample.messages) - 1)):
            if sample.messages[-1].get("role") in _ASSISTANTS:
                return [last]
            return "its last message is not the model's, and it has no tokens"
        return "it has neither token ids with masks nor messages"

    def _trained(self, chat: NotedChat | None, runs: Sequence[_Part]) -> list[_Part]:
        """The messages that a sample of this conversation trains; none where its masks do not train whole messages."""
        if chat is None:
            return []
        if chat.trained is not None:
            return [_part(chat.messages, at) for at in chat.trained]
        said = [at for at, message in enumerate(chat.messages) if message.get("role") in _ASSISTANTS]
        if len(runs) == 1:
            said = said[-1:]
        parts = [_part(chat.messages, at) for at in said]
        whole = len(parts) == len(runs) and all(map(self._is_whole, runs, parts))
        if whole and any(
            (text := _text(message.get("content")).strip()) and text in run.text and text not in (run.prompt or "")
            for run, at in zip(runs, said, strict=True)
            for message in chat.messages[:at]
        ):
            return []  # it trains earlier messages too
        return parts if whole else []

    def _is_whole(self, run: _Part, message: _Part) -> bool:
        """Whether a run of trained tokens is this message, with nothing but markup around it."""
        text, said = self._without_ends(run.text), self._without_ends(message.text)
        if message.calls:  # a template writes them in its own way
            return said in text and all(str(name) in text for name, _ in message.calls)
        for role in _ASSISTANTS:
            text = text.removeprefix(role).lstrip()
        return text.endswith(said) and not _MARKUP.sub("", text[: len(text) - len(said)]).strip()

    def _said(self, part: _Part, later: Sequence[RecordedCompletion]) -> list[RecordedCompletion]:
        """The completions that may have said a part, those that no earlier sample has first. An earlier turn than
        `later` has to stand in the conversation of the sample."""
        left = [each for each in self._in_order() if each not in later]
        said = [each for each in left if self._says(each, part)] or [each for each in left if self._goes_on(each, part)]
        here = [each for each in said if _same_conversation(each, part) or self._same_prompt(each, part)]
        before = [each for each in here or said if _is_before(each, later)]
        if later and not here and not before:
            return []
        said = before or here or said
        return [each for each in said if each not in self._taken] or said

    def _goes_on(self, completion: RecordedCompletion, part: _Part) -> bool:
        """Whether it said the end of a part, after a prompt that ends with its beginning."""
        text, said = self._without_ends(part.text), self._without_ends(completion.said)
        prefill = text[: len(text) - len(said)]
        if part.prompt == "" or any(end in prefill for end in self._ends):
            return False  # it trains earlier messages too
        return bool(said) and text.endswith(said) and (completion.prompt + completion.said).rstrip().endswith(text)

    def _earlier_turns(self, part: _Part, last: RecordedCompletion) -> EarlierTurns:
        before = self._recording.completions[: self._recording.completions.index(last)]
        before.sort(key=lambda completion: completion in self._taken)
        return earlier_turns(self._without_ends(part.text), last, before, lambda text: not self._without_ends(text))

    def _same_prompt(self, completion: RecordedCompletion, part: _Part) -> bool:
        if part.prompt is None or not completion.prompt:
            return False
        return self._without_ends(completion.prompt) == self._without_ends(part.prompt)

    def _says(self, completion: RecordedCompletion, part: _Part) -> bool:
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


def _once_each(found: Sequence[Match], samples: Sequence[tuple[int, ReturnedSample]]) -> list[Match]:
    """The matches, without those that have a completion of an earlier one."""
    owners: dict[RecordedCompletion, tuple[int, ReturnedSample]] = {}
    kept = []
    for match, (number, sample) in zip(found, samples, strict=True):
        again = next((each for each in match.completions if each in owners), None)
        if again is None:
            owners.update(dict.fromkeys(match.completions, (number, sample)))
            kept.append(match)
            continue
        other, first = owners[again]
        which = f"sample {first.place}" + (f" of group {other} of its item" if other != number else "")
        why = f"it trains an answer that {which} trains, and each answer is trained once: {_short(again.said)}"
        kept.append(Match(refused=why))
    return kept


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


def _short(text: str) -> str:
    return repr(text if len(text) <= 200 else f"{text[:120]} ... {text[-60:]}")


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


def _same_conversation(completion: RecordedCompletion, part: _Part) -> bool:
    if part.before is None or completion.messages is None:
        return False
    return tuple(map(_canonical, completion.messages)) == part.before


def _prompt(completion: RecordedCompletion) -> Any:
    """What a completion answers, comparable with others'."""
    if completion.tokens is not None:
        return tuple(completion.tokens.prompt.ids)
    return completion.prompt if completion.messages is None else tuple(map(_canonical, completion.messages))


def _way(completion: RecordedCompletion) -> Any:
    return _prompt(completion), completion.said


def _is_before(completion: RecordedCompletion, later: Sequence[RecordedCompletion]) -> bool:
    """Whether one of the later turns goes on from the tokens of this completion."""
    if completion.tokens is None:
        return False
    after = completion.tokens.after
    return any(
        each.tokens is not None and any(piece is after for piece in each.tokens.prompt.lineage()) for each in later
    )
