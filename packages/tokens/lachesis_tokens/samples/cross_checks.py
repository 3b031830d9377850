"""Facts that the record of a group has twice, compared: they catch a writer who changes one and computes digests again.

Scores and rewards, the spans of samples and what the rollouts say of their completions, the texts of the messages and
the digests that were made of them when they were sampled.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from itertools import groupby, pairwise
from operator import itemgetter
from typing import Any

from lachesis_messages.errors import MISSHAPEN
from lachesis_messages.records.digests import LINE_DIGEST, digest_problem
from lachesis_messages.records.tree_places import TreePlace
from lachesis_messages.responses import message_digest
from lachesis_tokens.samples.samples import SampledSpan, TokenSample

Record = Mapping[str, Any]


def contradictions(group: Record, samples: Sequence[TokenSample]) -> Iterator[tuple[str, str]]:
    """(id of a rollout, or "", and a reason) for each, in a group with `rollouts`. `samples` are its valid ones."""
    rollouts = group.get("rollouts")
    if not isinstance(rollouts, list):
        return
    named = [each for each in rollouts if isinstance(each, Mapping) and isinstance(each.get("rollout_id"), str)]
    yield from _guarded("", _of_scores(group, named))
    yield from _guarded("", _of_trees(named))
    for rollout in named:
        rollout_id = rollout["rollout_id"]
        own = [sample for sample in samples if sample.rollout_id == rollout_id]
        yield from _guarded(rollout_id, _of_rollout(group, rollout, own))


def line_problems(group: Record, samples: Sequence[TokenSample]) -> Iterator[tuple[str, str]]:
    """(id of a rollout, or "", and a reason) for each in the record of a group. `samples` are its valid ones."""
    of_newer = isinstance(group.get("rollouts"), list) and any(sample.digest for sample in samples)
    if (LINE_DIGEST in group or of_newer) and (reason := digest_problem(group)) is not None:
        yield "", reason
    yield from contradictions(group, samples)


def says_sampled(rollout: Record) -> bool:
    """Whether its record names a completion, whatever it says of tokens."""
    completions = rollout.get("completions")
    if isinstance(completions, Mapping) and completions.get("finish_reasons"):
        return True
    turns = rollout.get("message_turns")
    if isinstance(turns, list) and any(turn is not None for turn in turns):
        return True
    if rollout.get("inherited_tokens") is not None:  # its turns may be those of another rollout
        return bool(rollout.get("completion_tokens"))
    return any(rollout.get(name) for name in ("turns", "api_calls", "completion_tokens"))


def _guarded(rollout_id: str, reasons: Iterator[str]) -> Iterator[tuple[str, str]]:
    """The reasons. A record that cannot be read is one."""
    try:
        for reason in reasons:
            yield rollout_id, reason
    except MISSHAPEN as error:
        yield rollout_id, f"the record of its group cannot be read: {error!r}"[:300]


def _of_scores(group: Record, rollouts: Sequence[Record]) -> Iterator[str]:
    scores, scored = group.get("scores"), [each for each in rollouts if each.get("place") is not None]
    places = [each["place"] for each in scored]
    if places != list(range(len(scored))) or bool in map(type, places):
        yield f"the places {places} of the rollouts do not match the order of their scores"
        return
    if not isinstance(scores, list) or len(scores) != len(scored):
        return  # the account says so
    for rollout, score in zip(scored, scores, strict=True):
        if "reward" not in rollout and LINE_DIGEST not in group:
            continue
        reward = rollout.get("reward")
        if type(score) not in (int, float) or not math.isfinite(score) or score != reward:
            of = f"rollout {rollout['rollout_id']}"
            yield f"scores[{rollout['place']}] is {score!r}, but the reward of {of} is {reward!r}"
        weights = rollout.get("reward_weights")
        if weights:
            total = math.fsum(weight * rollout["metrics"][f"reward/{name}"] for name, weight in weights.items())
            if not math.isclose(total, reward or 0.0, rel_tol=1e-9, abs_tol=1e-9):
                yield f"the reward of rollout {rollout['rollout_id']} is {reward!r}, and its components are {total!r}"
    messages = group.get("messages")
    if isinstance(messages, list) and len(messages) != len(scores):
        yield f"{len(messages)} conversations and {len(scores)} scores"


def _of_trees(rollouts: Sequence[Record]) -> Iterator[str]:
    """The places of rollouts that branched: what two of them say of the part that they share is the same."""
    places = {
        rollout["rollout_id"]: TreePlace.from_record(rollout["tree"]) for rollout in rollouts if "tree" in rollout
    }
    if places and len(places) < len(rollouts):
        yield f"{len(places)} of {len(rollouts)} rollouts have a place in a tree"
    ends = [place.path for place in places.values()]
    parts: dict[str, list[Any]] = {}
    for rollout_id, place in places.items():
        if ends.count(place.path) > 1 or any(end.startswith(f"{place.path}.") for end in ends):
            yield f"rollout {rollout_id} ends at {place.path}, where another one ends or goes on"
        if place.turns[0] != 0 or any(before >= after for before, after in pairwise(place.turns)):
            yield f"the parts of rollout {rollout_id} begin at the turns {[*place.turns]}"
        for part, *facts in zip(place.parts, place.turns, place.weights, strict=True):
            if parts.setdefault(part, facts) != facts:
                yield f"rollout {rollout_id} and another one say different things of part {part} of their tree"


def _of_rollout(group: Record, rollout: Record, samples: Sequence[TokenSample]) -> Iterator[str]:
    if "completed" in rollout and rollout["completed"] is not (rollout.get("outcome") == "completed"):
        yield f"its outcome is {rollout.get('outcome')!r}, and completed is {rollout['completed']!r}"
    if "unscored_kind" in rollout and bool(rollout["unscored_kind"]) is not (rollout.get("reward") is None):
        yield f"its reward is {rollout.get('reward')!r}, and unscored_kind is {rollout['unscored_kind']!r}"
    before = rollout.get("regraded")
    outcome = (before if isinstance(before, Mapping) else rollout).get("outcome")
    for sample in samples:
        if outcome is not None and sample.outcome != outcome:
            yield f"the outcome of its sample {sample.index} is {sample.outcome!r}, that of the rollout {outcome!r}"
    spans = {span.turn: span for sample in samples for span in sample.spans}
    discarded = {span.turn for sample in samples if sample.discarded for span in sample.spans}
    completions = rollout.get("completions")
    if isinstance(completions, Mapping):
        yield from _of_completions(completions, spans, discarded, samples[0].sampled if samples else None)
    elif samples and LINE_DIGEST in group:
        yield "the record of its completions is missing"
    elif isinstance(dropped := rollout.get("discarded"), list):
        attempts = {turn for each in dropped if each.get("attempt") for turn in each.get("message_turns") or ()}
        if any("message_turns" in each for each in dropped) or not dropped:
            yield from (f"turn {turn} is not a discarded attempt" for turn in sorted(discarded - attempts))
    if samples:
        yield from _of_sums(rollout, spans, samples[0].sampled)
        yield from _of_messages(group, rollout, spans)


def _of_completions(
    completions: Record, spans: Mapping[int, SampledSpan], discarded: set[int], sampled: int | None
) -> Iterator[str]:
    """What the spans say of each completion, and what `completions` says."""
    finish_reasons, tokens = completions["finish_reasons"], completions["tokens"]
    count = len(finish_reasons)
    models = [(model, version) for model, version, times in completions["models"] for _ in range(min(times, count))]
    if len(models) != count or (tokens is not None and len(tokens) != count):
        yield f"its completions are {count}, with {len(models)} models and the tokens of {tokens and len(tokens)}"
        return
    if tokens is None:
        if spans:
            yield "it has samples, and its completions have no tokens"
        return
    if sampled not in (None, sum(tokens)):
        yield f"its samples say that it sampled {sampled} tokens, its completions have {sum(tokens)}"
    attempts = set(completions["replaced_attempts"])
    versions = _Ranges(completions["versions"])
    if versions.length != sum(tokens):
        yield f"the versions of its completions are of {versions.length} tokens, and it sampled {sum(tokens)}"
    starts = [0]
    for each in tokens:
        starts.append(starts[-1] + each)
    for turn, span in sorted(spans.items()):
        if turn >= count:
            yield f"turn {turn} is in a sample, but it has {count} completions"
            continue
        model, model_version = models[turn]
        compared = {
            "finish_reason": (span.finish_reason, finish_reasons[turn]),
            "model": (span.model, model),
            "model_version": (span.model_version, model_version),
            "number of tokens": (len(span), tokens[turn]),
            "versions": (
                _Ranges([(name, end - start) for name, start, end in span.versions] or [(None, len(span))]).entries,
                versions.part(starts[turn], starts[turn + 1]),
            ),
            "discarded": (turn in discarded, turn in attempts),
        }
        for name, (here, there) in compared.items():
            if here != there:
                yield f"turn {turn}: its {name} in the sample is {here!r}, in the record of the rollout {there!r}"


class _Ranges:
    """(name, length) one after the other, equal neighbours joined."""

    def __init__(self, entries: Iterable[Sequence[Any]]) -> None:
        self.entries = [(name, sum(length for _, length in same)) for name, same in groupby(entries, itemgetter(0))]
        self.length = sum(length for _, length in self.entries)

    def part(self, start: int, end: int) -> list[tuple[Any, int]]:
        found, at = [], 0
        for name, length in self.entries:
            if (inside := min(end, at + length) - max(start, at)) > 0:
                found.append((name, inside))
            at += length
        return found


def _of_sums(rollout: Record, spans: Mapping[int, SampledSpan], sampled: int) -> Iterator[str]:
    """Its versions and interrupts, which are those of all spans where all of them are here."""
    if sum(map(len, spans.values())) != sampled:
        return
    ordered = [span for _, span in sorted(spans.items())]
    versions = list(dict.fromkeys(name for span in ordered for name, _, _ in span.versions))
    if "policy_versions" in rollout and rollout["policy_versions"] != versions:
        yield f"its samples are of the versions {versions}, its record says {rollout['policy_versions']}"
    interrupts = sum(span.interrupts for span in ordered)
    if "interrupts" in rollout and rollout["interrupts"] != interrupts:
        yield f"its samples were interrupted {interrupts} times, its record says {rollout['interrupts']}"


# Messages.


def _of_messages(group: Record, rollout: Record, spans: Mapping[int, SampledSpan]) -> Iterator[str]:
    """The conversation up to each completion has the digest that was made when it was sampled."""
    wanted = {turn: span.messages_digest for turn, span in spans.items() if span.messages_digest}
    if not wanted:
        return
    place = rollout.get("place")
    messages = rollout["messages"] if place is None else group["messages"][place]
    changed: list[int] = []
    for turn, digest in _conversation({**rollout, "messages": messages}):
        if (expected := wanted.pop(turn, None)) is not None and digest != expected:
            changed.append(turn)
    for turns, what in ((changed, "other messages than when it was sampled"), (wanted, "no message of its record")):
        if turns:
            shown = sorted(turns)
            yield f"turn{'s' if len(shown) > 1 else ''} {', '.join(map(str, shown[:5]))}: {what}"


def _conversation(chat: Record) -> Iterator[tuple[int, str]]:
    """(turn, digest up to it) of every completion in a conversation, its branches and its sub-agents."""
    dropped = chat.get("discarded") or []
    chains: dict[int, list[str]] = {}

    def chain(branch: int, below: int) -> list[str]:
        if branch not in chains:
            if below > len(dropped):
                raise ValueError("its discarded branches follow each other in a circle")
            of_branch = chat if branch < 0 else dropped[branch]
            after = None if branch < 0 else of_branch["after"]
            before = "" if after is None else chain(after[0], below + 1)[after[1]]
            found = []
            for message in of_branch["messages"]:
                before = message_digest(before, message)
                found.append(before)
            chains[branch] = found
        return chains[branch]

    for branch in range(-1, len(dropped)):
        of_branch = chat if branch < 0 else dropped[branch]
        for turn, digest in zip(of_branch["message_turns"], chain(branch, 0), strict=True):
            if turn is not None:
                yield turn, digest
    for call in (chat.get("calls") or {}).values():
        if (below := call.get("subagent")) is not None:
            yield from _conversation(below)
