"""One completion, independent of any API: the request, the policy's reply, the result."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, fields, replace
from functools import cached_property
from hashlib import blake2b
from random import Random
from typing import Any, Protocol

from lachesis_client.sampling import LogprobsKind, Sampling
from lachesis_testing.fake_server.images import seen_ids
from lachesis_testing.fake_server.model import FakeModel, hash_of
from lachesis_testing.fake_server.tokenizer import Codec
from lachesis_tokens.model_routes.host import ABORTED
from lachesis_tokens.model_routes.requests import SamplingRequest


@dataclass(frozen=True)
class Call(SamplingRequest):
    """A request for completions, independent of its API."""

    @cached_property
    def hashes(self) -> Sequence[blake2b]:
        """Of the prompts, for the model."""
        return tuple(hash_of(seen_ids(each, self.images)) for each in self.prompts)

    @classmethod
    def of(cls, request: SamplingRequest) -> Call:
        """The same request."""
        return cls(**{each.name: getattr(request, each.name) for each in fields(request)})


@dataclass(frozen=True, slots=True)
class Ask:
    """One completion that a policy has to make."""

    call: Call
    prompt_ids: Sequence[int]
    hashed: blake2b
    """Their hash, for the model."""
    index: int
    """The index among the `n` completions of this prompt."""
    number: int
    """The number of the request to this server, from 0."""
    model: FakeModel
    codec: Codec
    logprobs: LogprobsKind
    limit: int
    """Maximum of tokens: `max_tokens`, or the room that the context leaves."""
    seed: str
    """Seeds `rng`. Equal for the same prompt and index, unless the server varies repeated prompts."""

    @property
    def sampling(self) -> Sampling:
        return self.call.sampling

    @property
    def end_ids(self) -> frozenset[int]:
        """Ids that end a turn."""
        return self.model.end_ids

    @property
    def turn(self) -> int:
        """The number of the model's turns in the prompt."""
        return self.codec.turns(self.prompt_ids)

    @property
    def prompt(self) -> str:
        """The prompt as text."""
        return self.codec.decode(self.prompt_ids)

    def rng(self, purpose: str = "policy") -> Random:
        """Random numbers, equal for equal asks and different for each purpose."""
        return Random(f"{self.seed}/{purpose}")

    def ended(self, ids: Sequence[int]) -> list[int]:
        """`ids` and an end-of-turn id."""
        return [*ids, min(self.end_ids)] if self.end_ids else list(ids)


@dataclass(frozen=True, slots=True)
class Reply:
    """The reply of a policy."""

    ids: Sequence[int]
    """The end-of-turn id included, if there is one."""
    finish_reason: str | None = None
    """None means "length" if `limit` cuts the ids, else "stop"."""
    logprobs: Sequence[float] | None = None
    """The logprobs of `ids` if they are known; otherwise the model scores them."""
    as_is: bool = False
    """Whether the ids are sent unchanged, not cut at an end-of-turn id or a stop text."""


class Policy(Protocol):
    """Answers requests. It is called once for each completion, in the event loop."""

    def reply(self, ask: Ask) -> Reply: ...


@dataclass(slots=True)
class Completion:
    """The result. `ids` and `logprobs` are what was sampled, also if a wire fault reports others."""

    prompt: int
    """The index of the prompt in the request."""
    index: int
    ids: list[int]
    logprobs: list[float]
    text: str
    finish_reason: str
    stop_reason: int | str | None
    """The stop id or text that ended it; None for an end-of-turn id and for "length", as in vLLM."""
    faults: list[str] = field(default_factory=list)
    """Its token faults."""
    scripted: bool = False
    """Whether its ids were decided at once, and not sampled one after the other: an interrupt does not change them."""
    weights: list[tuple[FakeModel, str, int, int]] = field(default_factory=list, repr=False)
    """(model, its version, start, end): contiguous ranges over all ids."""

    @property
    def versions(self) -> list[tuple[str, int, int]]:
        """(version of the weights, start, end): contiguous ranges over all ids."""
        found: list[tuple[str, int, int]] = []
        for _, version, start, end in self.weights:
            first = found.pop()[1] if found and found[-1][0] == version else start
            found.append((version, first, end))
        return found

    def record(self) -> dict[str, Any]:
        """The fields for JSON, with `versions` in place of the models."""
        named = {each.name: getattr(self, each.name) for each in fields(self) if each.name != "weights"}
        return {**named, "versions": self.versions}


def finish(ask: Ask, prompt: int, reply: Reply, faults: list[str]) -> Completion:
    """Cut a reply where a server would end it, score it and decode it."""
    call, codec = ask.call, ask.codec
    ids, reason, end = list(reply.ids), reply.finish_reason, None
    stop_reason: int | str | None = None
    if not reply.as_is:
        enders = frozenset(call.stop_ids) if call.ignore_end else ask.end_ids.union(call.stop_ids)
        end = next((place for place, index in enumerate(ids) if index in enders), None)
        if end is not None:
            ids, reason = ids[: end + 1], "stop"
            stop_reason = ids[end] if ids[end] not in ask.end_ids else None
    if len(ids) > ask.limit:
        ids, reason, stop_reason, end = ids[: ask.limit], "length", None, None
    shown = ids[:end] if end is not None and not call.keep_stop else ids
    if call.sampling.stop and not reply.as_is and (found := _stopped(codec, ids, call)) is not None:
        count, text, stop_reason = found
        ids, reason = ids[:count], "stop"
    else:
        text = codec.decode(shown, skip_special=call.skip_special)
    if reply.logprobs is not None:
        logprobs = list(reply.logprobs[: len(ids)])
    else:
        logprobs = ask.model.score(ask.hashed, ids, call.sampling, ask.logprobs)
    return Completion(prompt, ask.index, ids, logprobs, text, reason or "stop", stop_reason, faults)


def cut_off(made: Completion, count: int, codec: Codec, call: Call) -> Completion:
    """The completion as it is after `count` tokens: aborted, unless it had ended by then."""
    if count >= len(made.ids):
        return made
    ids = made.ids[:count]
    return replace(
        made,
        ids=ids,
        logprobs=made.logprobs[:count],
        text=codec.decode(ids, skip_special=call.skip_special),
        finish_reason=ABORTED,
        stop_reason=None,
        weights=[
            (model, version, start, min(end, count)) for model, version, start, end in made.weights if start < count
        ],
    )


def joined(begun: Completion, rest: Completion, codec: Codec, call: Call) -> Completion:
    """One completion of two: the second was sampled after the first. A stop text may begin in the first."""
    shift = len(begun.ids)
    whole = replace(
        rest,
        ids=[*begun.ids, *rest.ids],
        logprobs=[*begun.logprobs, *rest.logprobs],
        text=codec.decode(begun.ids, skip_special=call.skip_special) + rest.text,
        faults=[*begun.faults, *rest.faults],
        weights=[
            *begun.weights,
            *((model, version, start + shift, end + shift) for model, version, start, end in rest.weights),
        ],
    )
    if call.sampling.stop and (found := _stopped(codec, whole.ids, call)) is not None:
        count, text, stop = found
        return replace(cut_off(whole, count, codec, call), text=text, finish_reason="stop", stop_reason=stop)
    return whole


def _stopped(codec: Codec, ids: Sequence[int], call: Call) -> tuple[int, str, str] | None:
    """The tokens up to the one that completes a stop text, the text before it, and the stop text."""
    skipped = codec.special_ids if call.skip_special else frozenset()
    longest = max(len(text.encode()) for text in call.sampling.stop)
    said = b""
    for count, index in enumerate(ids, 1):
        if index in skipped:
            continue
        before, said = len(said), said + codec.bytes_of[index]
        for stop in call.sampling.stop:
            at = said.find(stop.encode(), max(0, before - longest))
            if at >= 0:
                kept = said[: at + len(stop.encode())] if call.keep_stop else said[:at]
                return count, kept.decode("utf-8", "replace"), stop
    return None
