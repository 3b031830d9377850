"""The samples of some of the rollouts of a group, where they branched and one that is left out has the turns before a
fork."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import replace
from typing import Any, TypeAlias

from lachesis_messages.images import with_data_once, with_image_data
from lachesis_messages.records.tree_places import TreePlace
from lachesis_messages.tokens import MASKED
from lachesis_tokens.samples.sample_records import MalformedSample, read_sample
from lachesis_tokens.samples.samples import SampledSpan, TokenSample

Record: TypeAlias = Mapping[str, Any]
Given: TypeAlias = tuple[TokenSample, SampledSpan]
"""A span, with the sample that it is from."""


def without_rollouts(group: Record, left_out: Collection[str]) -> list[dict[str, Any]]:
    """The records of all samples of the group. What rollouts that are `left_out` sampled before a fork, the first other
    one through it trains too: their own samples are not to be trained.

    A sub-agent's turns stay where they are, and so do turns with the routing of experts or with sampling masks.
    """
    places = {each["rollout_id"]: TreePlace.from_record(each["tree"]) for each in group["rollouts"] if "tree" in each}
    if not any(place.first_own for place in places.values()):
        return list(group["samples"])
    records: list[dict[str, Any]] = with_image_data(group["samples"])
    read: dict[int, TokenSample] = {}
    for at, record in enumerate(records):
        try:
            read[at] = read_sample(record)
        except MalformedSample:
            continue  # who reads the records says so
    kept = {at: each for at, each in read.items() if each.rollout_id not in left_out and not each.discarded}
    given: dict[int, list[Given]] = {}
    for giver in read.values():
        replayed = giver.experts is not None or giver.sampling_mask is not None
        if giver.rollout_id not in left_out or giver.discarded or replayed:
            continue
        place = places[giver.rollout_id]
        for span in giver.spans:
            part, sent = place.parts[place.part_of(span.turn)], giver.tokens[: span.end]
            through = (at for at, each in kept.items() if part in places[each.rollout_id].parts)
            taker = next((at for at in through if kept[at].tokens[: span.end] == sent), None)
            if taker is not None and set(kept[taker].masks[span.start : span.end]) == {MASKED}:
                given.setdefault(taker, []).append((giver, span))
    for rollout_id in {read[at].rollout_id for at in given}:
        own = {at: each for at, each in read.items() if each.rollout_id == rollout_id}
        for at, sample in _with_given(own, given).items():
            records[at] = {**records[at], **sample.to_record()}
    return with_data_once(records)


def _with_given(own: Mapping[int, TokenSample], given: Mapping[int, Sequence[Given]]) -> dict[int, TokenSample]:
    """The samples of a rollout, which train the spans that they are given as its first turns."""
    added = [(at, each) for at in own for each in given.get(at, ())]
    more = sum(len(span) for _, (_, span) in added)
    found = {}
    for at, sample in own.items():
        spans = [replace(span, turn=span.turn + len(added)) for span in sample.spans]
        masks, logprobs, end_of_turn = list(sample.masks), list(sample.logprobs), dict.fromkeys(sample.end_of_turn)
        for turn, (taker, (giver, span)) in enumerate(added):
            if taker == at:
                part = slice(span.start, span.end)
                masks[part], logprobs[part] = giver.masks[part], giver.logprobs[part]
                end_of_turn.update(dict.fromkeys(giver.end_of_turn))
                spans.append(replace(span, turn=turn))
        sampled = sample.sampled + more
        changed = replace(
            sample,
            masks=masks,
            logprobs=logprobs,
            spans=tuple(sorted(spans, key=lambda span: span.start)),
            weight=sum(map(len, spans)) / sampled,
            sampled=sampled,
            end_of_turn=tuple(end_of_turn),
        )
        found[at] = replace(changed, digest=changed.header_digest() if sample.digest else "")
    return found
