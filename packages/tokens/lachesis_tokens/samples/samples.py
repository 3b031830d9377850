"""The token samples of a rollout: every sampled token once, in the context in which it was sampled.

The pieces of a rollout's tokens form a tree (`TokenPrefix`). A sample is one path of the tree, from the root to a
sampled piece without a sampled descendant. Where two paths share a sampled piece, the first one trains it and the
others mask it. Nothing here compares text or ids: two completions with the same text are two completions.
"""

from __future__ import annotations

import sys
from array import array
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from hashlib import blake2b
from typing import Any, Final, Protocol

from backends.errors import LachesisError
from lachesis_messages.frozen import thaw
from lachesis_messages.images import PlacedImage, image_data, images_digest
from lachesis_messages.messages import Purpose
from lachesis_messages.records.digests import json_digest
from lachesis_messages.replay import RoutedExperts, SamplingMask, join_experts, join_masks
from lachesis_messages.responses import ChatResponse
from lachesis_messages.tokens import (
    MASKED,
    MASKED_LOGPROB,
    Floats,
    PromptChecked,
    SampledTokens,
    TokenPrefix,
    Versions,
)

SAMPLE_SCHEMA: Final = "lachesis.sample/1"
"""The value of `schema` in the record of a sample."""


class NoTokens(LachesisError, ValueError):
    """A completion has no token ids, so the sampled tokens are unknown."""


class SampledHistory(Protocol):
    """The input of `samples`; `MessageHistory` is one."""

    def completions(self) -> Sequence[ChatResponse]:
        """Every completion of all branches and sub-agents, in the order of sampling."""
        ...

    def ended_on(self) -> Iterable[ChatResponse]:
        """The completions on the path on which the conversation ended, first to last."""
        ...

    def replaced_attempts(self) -> Iterable[ChatResponse]:
        """The completions that could not be used and that later ones replaced."""
        ...

    def message_digests(self) -> Mapping[int, str]:
        """By `id(tokens.after)` of a completion: the digest of the conversation up to its message (`Node.digest`).
        Without completions of which the messages are not known."""
        ...


@dataclass(frozen=True, slots=True)
class SampledSpan:
    """One completion that a sample trains: `tokens[start:end]`."""

    turn: int
    """The number of the completion in the rollout, in the order of sampling, from 0."""
    start: int
    end: int
    prefix_digest: str
    """`digest_of(tokens[:start])`, recorded from the prompt that the model was given."""
    digest: str
    """`digest_of(tokens[:end])`."""
    logprobs_digest: str
    """`logprobs_digest` of `logprobs[start:end]`."""
    model: str | None
    model_version: str | None
    """The server's name for the weights; None where it gives none."""
    finish_reason: str
    sampling: Mapping[str, Any] = field(default_factory=dict)
    """The sampling parameters and the kind of logprobs; see `sampling_problem`."""
    experts_digest: str = ""
    """`RoutedExperts.digest(start - 1, end - 1)`: the routing of the tokens after which the span's own were sampled.
    Empty where the server reports none."""
    prompt_checked: PromptChecked = "none"
    """How the server confirmed `tokens[:start]`. Only "ids" and "length" tie `prefix_digest` to what it really saw."""
    versions: Versions = ()
    interrupts: int = 0
    """How often the server aborted the completion, and it went on."""
    images_digest: str = ""
    """`images_digest` of the images that the model saw before it, which `prefix_digest` does not tell apart."""
    purpose: Purpose = "turn"
    messages_digest: str = ""
    """Of the messages up to the one that was read in it (`Node.digest`). Empty where no conversation is recorded."""
    completion_id: str = ""
    """`SampledTokens.completion_id`: two spans with the same one train one completion twice. Empty in older records."""

    def __len__(self) -> int:
        return self.end - self.start

    def to_record(self) -> dict[str, Any]:
        """Plain JSON."""
        record: dict[str, Any] = {name: getattr(self, name) for name in _SPAN_NAMES}
        record["sampling"] = thaw(self.sampling)
        record["versions"] = [list(each) for each in self.versions]
        return record

    def _header(self) -> dict[str, Any]:
        """What its sample's digest covers: `to_record()` without the fields that older records do not have."""
        header = {name: value for name in _SPAN_NAMES if (value := getattr(self, name)) not in _UNSET[name]}
        return {**header, "sampling": dict(self.sampling)}


@dataclass(frozen=True, slots=True)
class TokenSample:
    """One sequence for a trainer. It ends with its last sampled token; later tokens were never a context."""

    tokens: list[int]
    masks: list[int]
    """The token id where the token is trained, -100 elsewhere. As long as `tokens`."""
    logprobs: list[float]
    """The engine's natural logarithm where the token is trained, 1.0 elsewhere. As long as `tokens`."""
    spans: tuple[SampledSpan, ...]
    """The completions that the sample trains, in order and disjoint."""
    rollout_id: str
    weight: float
    """The sample's share of the tokens of the rollout. The weights of a rollout add up to 1, and the mean losses of its
    samples, weighted with them, add up to the mean loss of a sampled token of the rollout, however it splits."""
    outcome: str
    """How the rollout ended."""
    index: int
    """The number of the sample in its rollout, from 0."""
    count: int
    """The number of samples of the rollout."""
    sampled: int
    """The tokens that the whole rollout sampled."""
    end_of_turn: tuple[int, ...] = ()
    """The ids that end a turn of the model."""
    discarded: bool = False
    """All that it trains are discarded attempts: completions that the agent could not use, did nothing about and
    sampled again."""
    experts: RoutedExperts | None = field(default=None, repr=False)
    """Of all tokens but the last; None where the server reports none."""
    sampling_mask: SamplingMask | None = field(default=None, repr=False)
    """As long as `tokens`, with ids where the token is trained; None where the server reports none."""
    images: tuple[PlacedImage, ...] = ()
    """Those that the model saw, in the order of their tokens."""
    digest: str = ""
    """`header_digest()` when the sample was made. Empty in the records of older versions."""

    @property
    def trained(self) -> int:
        """The number of tokens that the sample trains."""
        return sum(map(len, self.spans))

    @property
    def policy_versions(self) -> list[tuple[str, int, int]]:
        """(version of the weights, start, end) of the trained tokens of which it is known, over `tokens`."""
        return [(name, span.start + low, span.start + high) for span in self.spans for name, low, high in span.versions]

    @property
    def version_count(self) -> int:
        """How many versions of the weights sampled its trained tokens, as far as it is known."""
        return len({name for name, _, _ in self.policy_versions})

    @property
    def masked_tokens(self) -> list[int]:
        """`masks`, under Atropos' name."""
        return self.masks

    def __getitem__(self, name: str) -> Any:
        """An attribute, for code that reads a sample as a dict."""
        return getattr(self, name)

    def header_digest(self) -> str:
        """Hex digest of everything but the three lists, which the digests of the spans cover.

        Fields with the value that they have in records without them are left out, so that a field that a later version
        adds changes no digest.
        """
        header = _without_defaults(replace(self, spans=(), digest="").certificate())
        header["spans"] = [span._header() for span in self.spans]
        if self.experts is not None:
            header["experts"] = [self.experts.start, *self.experts.row, self.experts.size, _digest(self.experts.data)]
        if self.sampling_mask is not None:
            header["sampling_mask"] = [_digest(self.sampling_mask.counts), _digest(self.sampling_mask.ids)]
        return json_digest(header)

    def certificate(self) -> dict[str, Any]:
        """The record without the three lists: the fields that verify them."""
        return {
            "schema": SAMPLE_SCHEMA,
            "rollout_id": self.rollout_id,
            "index": self.index,
            "count": self.count,
            "sampled": self.sampled,
            "weight": self.weight,
            "outcome": self.outcome,
            "end_of_turn": list(self.end_of_turn),
            "discarded": self.discarded,
            "spans": [span.to_record() for span in self.spans],
            **({"images": [placed.to_record() for placed in self.images]} if self.images else {}),
            **({"digest": self.digest} if self.digest else {}),
        }

    def to_record(self) -> dict[str, Any]:
        """Plain JSON. Shares the lists with the sample. Without `experts` and `sampling_mask` where there are none.

        With images, `image_data` has their data URLs by digest.
        """
        record = {**self.certificate(), "tokens": self.tokens, "masks": self.masks, "logprobs": self.logprobs}
        data = image_data([self.images])
        return {**record, **self.replay_record(), **({"image_data": data[0]} if data else {})}

    def replay_record(self) -> dict[str, Any]:
        """The records of `experts` and `sampling_mask`, if there are any."""
        found = {"experts": self.experts, "sampling_mask": self.sampling_mask}
        return {name: value.to_record() for name, value in found.items() if value is not None}


def samples(history: SampledHistory, *, rollout_id: str = "", outcome: str = "") -> list[TokenSample]:
    """The fewest sequences that train every sampled token of a rollout exactly once, each after its exact prefix, and
    discarded attempts apart from the rest.

    The path on which the conversation ended comes first and trains the completions that it shares with others. The
    other paths follow in the order of sampling, discarded attempts last. A completion that is listed twice counts once;
    one without tokens makes no sample. O(tokens of the samples).

    Raises:
        NoTokens: a completion has no tokens. Tokens are never made from its text.
    """
    completions = _completions(history)
    open_: dict[TokenPrefix, tuple[int, ChatResponse, SampledTokens]] = {
        tokens.after: (turn, response, tokens) for turn, (response, tokens) in enumerate(completions) if len(tokens)
    }
    routed = {piece: tokens.experts for piece, (_, _, tokens) in open_.items() if tokens.experts is not None}
    sampled = sum(piece.own_length for piece in open_)
    replaced = {each.tokens.after for each in history.replaced_attempts() if each.tokens is not None} & open_.keys()
    said = history.message_digests()
    leaves = _end_first(_leaves([piece for piece in open_ if piece not in replaced]), history)
    leaves += _leaves([piece for piece in open_ if piece in replaced])
    found = []
    for index, leaf in enumerate(leaves):
        discarded = leaf in replaced
        tokens: list[int] = []
        masks: list[int] = []
        logprobs: list[float] = []
        spans: list[SampledSpan] = []
        end_of_turn: dict[int, None] = {}
        experts: list[RoutedExperts] = []
        allowed: list[SamplingMask | int] = []
        for piece in reversed(list(leaf.lineage())):
            ids = piece.own_ids
            trained = open_.pop(piece, None) if (piece in replaced) is discarded else None
            allowed.append(len(ids))
            if piece in routed:
                experts.append(routed[piece])
            if trained is None:
                masks += [MASKED] * len(ids)
                logprobs += [MASKED_LOGPROB] * len(ids)
            else:
                turn, response, completion = trained
                spans.append(_span(turn, response, completion, said.get(id(piece), "")))
                masks += ids
                logprobs += completion.logprobs[:]
                end_of_turn.update(dict.fromkeys(completion.end_of_turn))
                if completion.sampling_mask is not None:
                    allowed[-1] = completion.sampling_mask
            tokens += ids
        routing = join_experts(experts) if experts else None
        if routing is not None:
            spans = [replace(s, experts_digest=routing.digest(s.start - 1, s.end - 1)) for s in spans]
        sample = TokenSample(
            tokens=tokens,
            masks=masks,
            logprobs=logprobs,
            spans=tuple(spans),
            rollout_id=rollout_id,
            weight=sum(map(len, spans)) / sampled,
            outcome=str(outcome),
            index=index,
            count=len(leaves),
            sampled=sampled,
            end_of_turn=tuple(end_of_turn),
            discarded=discarded,
            experts=routing,
            sampling_mask=None if set(map(type, allowed)) == {int} else join_masks(allowed),
            images=leaf.images,
        )
        found.append(replace(sample, digest=sample.header_digest()))
    return found


def logprobs_digest(logprobs: Iterable[float]) -> str:
    """Hex digest of logprobs: blake2b over their little-endian float64.

    Raises:
        TypeError, OverflowError: a value is not a number, or does not fit a float64.
    """
    values = array("d")
    if isinstance(logprobs, Floats):
        values.frombytes(logprobs.packed)
    else:
        values.extend(logprobs)
    if sys.byteorder == "big":
        values.byteswap()
    return blake2b(values.tobytes(), digest_size=16).hexdigest()


def _completions(history: SampledHistory) -> list[tuple[ChatResponse, SampledTokens]]:
    found: dict[TokenPrefix, tuple[ChatResponse, SampledTokens]] = {}
    for turn, response in enumerate(history.completions()):
        if response.tokens is None:
            raise NoTokens(
                f"completion {turn} (model {response.model or 'unnamed'}, server {response.server or 'unnamed'}) has "
                "no token ids, so there is nothing to train on; use a Phase 2 server, one that takes token ids and "
                "reports the sampled ids and logprobs"
            )
        found.setdefault(response.tokens.after, (response, response.tokens))
    return list(found.values())


def _leaves(pieces: Sequence[TokenPrefix]) -> list[TokenPrefix]:
    """The pieces without a descendant among the others, in the same order."""
    passed: set[TokenPrefix] = set()
    for piece in pieces:
        ancestor = piece.parent
        while ancestor is not None and ancestor not in passed:
            passed.add(ancestor)
            ancestor = ancestor.parent
    return [piece for piece in pieces if piece not in passed]


def _end_first(leaves: list[TokenPrefix], history: SampledHistory) -> list[TokenPrefix]:
    if len(leaves) < 2:
        return leaves
    end = None
    for response in history.ended_on():
        if response.tokens is not None and len(response.tokens):
            end = response.tokens.after
    # Of the paths through the end, where there are others than its own: the latest.
    first = next((leaf for leaf in reversed(leaves) if end is not None and any(p is end for p in leaf.lineage())), None)
    return leaves if first is None else [first, *(leaf for leaf in leaves if leaf is not first)]


def _span(turn: int, response: ChatResponse, tokens: SampledTokens, messages_digest: str) -> SampledSpan:
    return SampledSpan(
        turn=turn,
        start=tokens.prompt.length,
        end=tokens.after.length,
        prefix_digest=tokens.prompt.digest,
        digest=tokens.after.digest,
        logprobs_digest=logprobs_digest(tokens.logprobs),
        model=response.model,
        model_version=response.model_version,
        finish_reason=str(response.finish_reason),
        sampling=response.sampling,
        prompt_checked=tokens.prompt_checked,
        versions=tokens.versions,
        interrupts=tokens.interrupts,
        images_digest=images_digest(tokens.prompt.images),
        purpose=response.purpose,
        messages_digest=messages_digest,
        completion_id=tokens.completion_id,
    )


def _digest(data: bytes) -> str:
    return blake2b(data, digest_size=16).hexdigest()


def _without_defaults(record: Mapping[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in record.items() if name not in ADDED or value != ADDED[name]}


ADDED: Final[Mapping[str, Any]] = {
    "discarded": False,
    "experts_digest": "",
    "prompt_checked": "none",
    "versions": [],
    "interrupts": 0,
    "images_digest": "",
    "purpose": "turn",
    "messages_digest": "",
    "completion_id": "",
    "digest": "",
}
"""Fields that older records of samples and spans do not have, and what they are there."""
_SPAN_NAMES: Final = tuple(each.name for each in fields(SampledSpan))
_UNSET: Final = {name: (ADDED[name], ()) if name in ADDED else () for name in _SPAN_NAMES}
"""Values of a span that are the same as no value; a list of none is a tuple in a span."""
