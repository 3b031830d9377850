"""Finished groups in the shape of Atropos' rollout API: `tokens`, `masks`, `scores`, `inference_logprobs` and the rest.

A group is sent whole and verified, or not at all: `build_group` returns a `TrainingGroup`, or a `RejectedGroup` with
the reason.
"""

from __future__ import annotations

import json
import math
from collections.abc import Container, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any, Final, Literal

import orjson

from backends.text import without_lone_surrogates
from lachesis_messages.errors import MISSHAPEN
from lachesis_messages.images import image_data, joined_data
from lachesis_messages.records.digests import COVERED, json_digest
from lachesis_messages.records.split_rollouts import LARGEST_REWARD, DiscardedAttempts, SplitRollouts, check_split
from lachesis_messages.records.tree_places import TreePlace
from lachesis_tokens.samples.advantages import (
    Advantage,
    has_signal,
    rollout_advantages,
    sample_advantage,
    token_advantages,
)
from lachesis_tokens.samples.sample_records import MalformedSample, read_sample
from lachesis_tokens.samples.samples import TokenSample, logprobs_digest
from lachesis_tokens.samples.tree_credit import part_advantages
from lachesis_tokens.samples.turn_credit import turn_advantages, turns_of_spans
from lachesis_tokens.samples.verification import verify_records

CERTIFICATE: Final = "lachesis"
"""Key of `overrides[i]` under which the certificate of sample `i` travels; Atropos passes on what it does not know."""

_OF_DELIVERY: Final = ("group_id", "begin_step")
"""Keys of `group_overrides` that are added when a group is sent."""

OVERRIDES: Final = frozenset(
    {CERTIFICATE, "temperature", "turn_rewards", "judged_score", "length_penalty", "repaired_calls", "policy_versions"}
    | {"experts", "sampling_mask", "tree"}
)
"""The keys of `overrides[i]` that describe sample `i` and no other sample of its rollout."""

OF_TOKENS: Final = frozenset({"advantages", "ref_logprobs", "distill_token_ids", "distill_logprobs"})
"""Fields of a group, other than its tokens, masks and logprobs, that have one entry per token of each sample."""


NO_SPLIT_GROUPS: Final = (
    "split_rollouts all makes groups of more than group_size sequences, and Atropos' rollout API hands out none of "
    "these. Nor can a group be sent as several of group_size: trainers at this API compute advantages from the scores "
    "of each group, so that every part would get another baseline, and a rollout would count as often as it has "
    "samples. Set --env.split_rollouts final, or start `lachesis api` in its place, which takes groups of any size"
)
"""Why a split rollout cannot go through the stock API."""


class RejectReason(StrEnum):
    """Why a group is rejected."""

    INCOMPLETE = "incomplete"
    """Not `group_size` rollouts, or one of them has no reward or no token to train."""
    BAD_SCORE = "bad_score"
    """A reward is not finite, or beyond `LARGEST_REWARD`: the stock API would lose the whole batch because of it."""
    UNPROVEN = "unproven"
    """A sample fails `verify`, or the samples of a rollout are incomplete."""
    UNCHECKED_PROMPTS = "unchecked_prompts"
    """The server confirmed neither the ids nor the length of a prompt: it may have sampled after another one."""
    MIXED_TEMPERATURES = "mixed_temperatures"
    """One sequence was sampled at two temperatures; a trainer divides all its logits by one."""
    TOO_LONG = "too_long"
    """A sequence reaches the trainer's limit."""
    MALFORMED_MESSAGES = "malformed_messages"
    """A message has no role; the API answers such a group with 422."""
    SAME_SCORES = "same_scores"
    """All rewards are equal, so every advantage is 0 (`ensure_scores_are_not_same`)."""


@dataclass(frozen=True, slots=True)
class RolloutSamples:
    """The contribution of one rollout to its group."""

    rollout_id: str
    reward: float | None
    """None: not scored."""
    samples: Sequence[TokenSample]
    messages: Sequence[Mapping[str, Any]] | None = None
    """The conversation as OpenAI messages; None: send none."""
    turn_rewards: Sequence[float] | None = None
    """One for each turn; travels in the `overrides` of the rollout's samples."""
    repaired_calls: tuple[int, int] = (0, 0)
    """`AgentResult.repaired_calls`; travels there too, for the trainer's figures."""
    turn_ids: Sequence[str] = ()
    """The `completion_id` of each turn; where they are not those of `turn_rewards`, it counts as one turn."""
    below: Container[str] = ()
    """The ids of sub-agents' completions; for credit by turn."""
    given_up: str | None = None
    """The id of the completion with which it ended, where that is no turn; for credit by turn."""
    tree: TreePlace | None = None
    """In a group of trees; travels there too."""
    length_penalty: float | None = None
    """Added to the reward where it becomes a score; None where there is no such penalty."""

    @property
    def sampled(self) -> int:
        """Tokens sampled in the whole rollout."""
        return self.samples[0].sampled if self.samples else 0


@dataclass(frozen=True, slots=True)
class GroupSettings:
    """The settings that decide the shape of a group, and whether it is sent."""

    group_size: int
    """Rollouts of a complete group."""
    split_rollouts: SplitRollouts = SplitRollouts.FINAL
    ensure_scores_are_not_same: bool = True
    max_token_len: int = -1
    """Every sequence must be shorter. 0 or less: no limit."""
    discarded_attempts: DiscardedAttempts = "none"
    unchecked_prompts: Literal["refuse", "allow"] = "refuse"
    """How to treat a group with a prompt that the server did not confirm."""
    turn_discount: float | None = None
    """Credit by turn with this discount (see `turn_credit`); None: each token has the advantage of its rollout."""
    tree_credit: Literal["parts", "leaves"] = "parts"
    """Of groups of trees: see `tree_credit`."""

    def __post_init__(self) -> None:
        check_split(self.split_rollouts, self.discarded_attempts)


@dataclass(frozen=True, slots=True)
class RejectedGroup:
    """A group that is not sent."""

    reason: RejectReason
    detail: str
    """Which rollout, what exactly, and what to set where a setting helps."""
    undelivered: Mapping[str, int] = field(default_factory=dict)
    """Tokens sampled in each of its rollouts."""


@dataclass(frozen=True, slots=True)
class TrainingGroup:
    """A group that may be sent: every sample is verified, and every list has one entry a sample."""

    samples: tuple[TokenSample, ...]
    rollouts: tuple[RolloutSamples, ...]
    """The rollout of each sample."""
    scores: tuple[float, ...]
    """Its reward with the penalty for its length, or the penalty of a discarded attempt."""
    advantages: tuple[Advantage, ...] | None
    """The advantage of each trained token of a sample; None leaves it to the trainer."""
    undelivered: Mapping[str, int]
    """Sampled tokens left out on purpose, by rollout; rollouts without any are absent."""

    @property
    def delivered(self) -> int:
        """Trained tokens in it."""
        return sum(sample.trained for sample in self.samples)

    @property
    def messages(self) -> list[list[dict[str, Any]]] | None:
        """None where a rollout has none. `content` is present and not null: the API takes no others."""
        given = [rollout.messages for rollout in self.rollouts if rollout.messages is not None]
        if len(given) < len(self.rollouts):
            return None
        return [
            [{**message, "content": "" if (said := message.get("content")) is None else said} for message in messages]
            for messages in given
        ]

    def to_atropos(self, env_id: int | None = None) -> dict[str, Any]:
        """The body of `POST /scored_data`. Shares its long lists with the samples.

        `images[i]` has the data URLs, by digest, of the images of sample `i` that no earlier sample has; null if no
        sample has any. `overrides[i]` holds the temperature, the sample's certificate (see `samples_from_atropos`),
        `turn_rewards` where the rollout has them, its place in a `tree` (`TreePlace`), `judged_score` and
        `length_penalty` where lengths are penalised (a score is their sum), `repaired_calls` where a parser read calls
        in it, and what the server reported: `policy_versions` ([version, start, end] over the sample's tokens),
        `experts` and `sampling_mask`.
        Beside the certificate are the `score` and, where it is sent, the `advantage` once more; `group_overrides` has
        the digest of the group (`group_digest`).
        """
        temperatures = [next(iter(_temperatures(sample))) for sample in self.samples]
        said: list[dict[str, Any]] = [{"score": score} for score in self.scores]
        for entry, advantage in zip(said, self.advantages or (), strict=False):
            entry["advantage"] = advantage
        content = {
            "tokens": [sample.tokens for sample in self.samples],
            "masks": [sample.masks for sample in self.samples],
            "scores": list(self.scores),
            "advantages": None
            if self.advantages is None
            else list(map(token_advantages, self.samples, self.advantages)),
            "ref_logprobs": None,
            "messages": self.messages,
            "generation_params": _shared_sampling(self.samples),
            "inference_logprobs": [sample.logprobs for sample in self.samples],
            "overrides": [
                {"temperature": temperature, CERTIFICATE: {**sample.certificate(), **entry}, **sample.replay_record()}
                | ({} if rollout.turn_rewards is None else {"turn_rewards": list(rollout.turn_rewards)})
                | (
                    {"judged_score": rollout.reward, "length_penalty": rollout.length_penalty}
                    if rollout.length_penalty is not None
                    else {}
                )
                | ({} if rollout.tree is None else {"tree": rollout.tree.to_record()})
                | ({"repaired_calls": list(rollout.repaired_calls)} if rollout.repaired_calls[1] else {})
                | ({"policy_versions": versions} if (versions := list(map(list, sample.policy_versions))) else {})
                for sample, entry, temperature, rollout in zip(
                    self.samples, said, temperatures, self.rollouts, strict=True
                )
            ],
            # Never null: Atropos' BaseEnv calls get() on it.
            "group_overrides": {} if self.advantages is None else {"group_size": len(self.samples)},
            "images": image_data(sample.images for sample in self.samples),
            "env_id": env_id,
        }
        return with_digest(content)


def with_digest(group: dict[str, Any]) -> dict[str, Any]:
    """The group with its digest in `group_overrides`. One that cannot become JSON has none: sending it is the error."""
    overrides = {name: value for name, value in group["group_overrides"].items() if name != CERTIFICATE}
    with suppress(TypeError, ValueError, RecursionError, OverflowError):
        overrides[CERTIFICATE] = group_digest(group)
    return {**group, "group_overrides": overrides}


def group_digest(group: Mapping[str, Any]) -> str:
    """The expected `group_overrides.lachesis`: a digest of everything that the digests of the samples do not cover.

    Raises:
        TypeError, ValueError, OverflowError, RecursionError: JSON cannot hold it, or an advantage is not a number.
    """
    covered: dict[str, Any] = {name: group.get(name) for name in ("scores", "messages", "generation_params")}
    covered["advantages"] = [logprobs_digest(values) for values in group.get("advantages") or ()]
    covered["overrides"] = [
        {name: value for name, value in each.items() if name not in COVERED} for each in group["overrides"]
    ]
    covered["group_overrides"] = {
        name: value for name, value in group["group_overrides"].items() if name not in (CERTIFICATE, *_OF_DELIVERY)
    }
    try:
        return json_digest(covered, strict=True)
    except TypeError:  # half of a surrogate pair, which is sent as U+FFFD
        sent = without_lone_surrogates(json.dumps(covered, ensure_ascii=False))
        return json_digest(orjson.loads(sent), strict=True)


def samples_from_atropos(group: Mapping[str, Any]) -> list[TokenSample]:
    """The samples, with certificates, of a group as a trainer receives it from `GET /batch`.

    Raises:
        ValueError: the group was not made by `TrainingGroup.to_atropos`.
    """
    try:
        data = joined_data(group.get("images") or ())
        return [
            read_sample(
                {**overrides, **overrides[CERTIFICATE], "tokens": tokens, "masks": masks, "logprobs": logprobs}
                | {"image_data": data}
            )
            for overrides, tokens, masks, logprobs in zip(
                group["overrides"], group["tokens"], group["masks"], group["inference_logprobs"], strict=True
            )
        ]
    except MalformedSample:
        raise
    except (KeyError, TypeError, ValueError) as error:
        raise ValueError(f"a group without the certificates of its samples: {error!r}") from error


def group_problems(group: Mapping[str, Any], samples: Sequence[TokenSample]) -> list[str]:
    """Why a group from `GET /batch` is not the one that was sent. `samples` are its own, which are not verified here.

    Empty also for a group of an earlier version, whose samples have no digest, and which has none itself.
    """
    given = (group.get("group_overrides") or {}).get(CERTIFICATE)
    if given is None:
        newer = any(sample.digest for sample in samples)
        return ["the digest of the group is missing, and its samples have their own"] if newer else []
    try:
        digest = group_digest(group)
        if digest != given:
            return [f"the digest of the group does not match its fields ({digest}): they are not what was sent"]
        return list(_group_contradictions(group, samples))
    except MISSHAPEN as error:
        return [f"the group cannot be read: {error!r}"[:300]]


def _group_contradictions(group: Mapping[str, Any], samples: Sequence[TokenSample]) -> Iterator[str]:
    """Facts that a group contains twice, if they differ."""
    of_rollouts: dict[str, float] = {}
    for at, (sample, overrides) in enumerate(zip(samples, group["overrides"], strict=True)):
        certificate, score = overrides[CERTIFICATE], group["scores"][at]
        if certificate.get("score") != score:
            yield f"scores[{at}] is {score!r}, and {certificate.get('score')!r} in its certificate"
        if not sample.discarded and (before := of_rollouts.setdefault(sample.rollout_id, score)) != score:
            yield f"scores[{at}] is {score!r}, and that of another sample of its rollout {before!r}"
        if "advantage" in certificate:
            carried = (group.get("advantages") or [None] * (at + 1))[at]
            if carried != token_advantages(sample, certificate["advantage"]):
                yield f"advantages[{at}] are not {certificate['advantage']!r}, as its certificate says"
        versions = list(map(list, sample.policy_versions))
        if (overrides.get("policy_versions") or []) != versions:
            yield f"overrides[{at}].policy_versions do not match its spans"
        if {overrides.get("temperature")} != _temperatures(sample):
            yield f"overrides[{at}].temperature is {overrides.get('temperature')!r}, not that of its spans"


def build_group(rollouts: Sequence[RolloutSamples], settings: GroupSettings) -> TrainingGroup | RejectedGroup:
    """The group as it is sent, or the reason why not. CPU-bound: some milliseconds for each 32k tokens."""
    rejection = _incomplete(rollouts, settings) or _bad_score(rollouts) or _unproven(rollouts)
    if rejection is None and settings.unchecked_prompts == "refuse":
        rejection = _unchecked_prompts(rollouts)
    if rejection is None:
        group = _shape(rollouts, settings)
        rejection = _mixed_temperatures(group) or _too_long(group, settings) or _malformed_messages(group)
        of_turns = settings.turn_discount is not None and any(map(has_signal, group.advantages or ()))
        same = len(set(group.scores)) == 1 and not of_turns
        if rejection is None and settings.ensure_scores_are_not_same and same:
            what = "scores" if any(each.length_penalty for each in rollouts) else "rewards"
            detail = f"all {len(rollouts)} {what} are {group.scores[0]:g}; env.ensure_scores_are_not_same allows it"
            rejection = RejectReason.SAME_SCORES, detail
        if rejection is None:
            return group
    return RejectedGroup(*rejection, {rollout.rollout_id: rollout.sampled for rollout in rollouts})


def _shape(rollouts: Sequence[RolloutSamples], settings: GroupSettings) -> TrainingGroup:
    rewards = [
        float(rollout.reward) + (rollout.length_penalty or 0.0) for rollout in rollouts if rollout.reward is not None
    ]
    baseline = math.fsum(rewards) / len(rewards)
    sent: list[tuple[TokenSample, RolloutSamples, float, Advantage]] = []
    undelivered: dict[str, int] = {}
    of_turns = _by_completion(rollouts, rewards, settings)
    for rollout, reward, advantage, by_id in zip(rollouts, rewards, rollout_advantages(rewards), of_turns, strict=True):
        chosen = _chosen(rollout, settings)
        trained = sum(sample.trained for sample in chosen)
        if rollout.sampled > trained:
            undelivered[rollout.rollout_id] = rollout.sampled - trained
        for sample in chosen:
            score, values = reward, [advantage or 0.0]
            if sample.discarded and isinstance(settings.discarded_attempts, float | int):
                score = float(settings.discarded_attempts)
                values = [score - baseline]
            elif by_id:
                values = [by_id[span.completion_id] for span in sample.spans]
            values = [sample_advantage(sample, value, of=trained) for value in values]
            sent.append((sample, rollout, score, values[0] if len(set(values)) == 1 else values))
    samples, of_rollouts, scores, advantages = zip(*sent, strict=True)
    carried = settings.split_rollouts is SplitRollouts.ALL or any(of_turns)
    return TrainingGroup(samples, of_rollouts, scores, advantages if carried else None, undelivered)


def _by_completion(
    rollouts: Sequence[RolloutSamples], rewards: Sequence[float], settings: GroupSettings
) -> list[dict[str, float]]:
    """For each rollout the advantages of its completions, by `completion_id`; empty without credit by turn or tree."""
    places = [rollout.tree for rollout in rollouts if rollout.tree is not None]
    if len(places) == len(rollouts):
        of_parts = part_advantages(places, rewards, settings.tree_credit)
        return [
            {span.completion_id: advantages[place.part_of(span.turn)] for sample in of.samples for span in sample.spans}
            for of, place, advantages in zip(rollouts, places, of_parts, strict=True)
        ]
    discount = settings.turn_discount
    if discount is None:
        return [{} for _ in rollouts]
    turns = [
        rollout.turn_ids if len(rollout.turn_ids) == len(rollout.turn_rewards or ()) else () for rollout in rollouts
    ]
    earned = [(rollout.turn_rewards or ()) if of else () for rollout, of in zip(rollouts, turns, strict=True)]
    of_spans = [
        turns_of_spans(rollout.samples, of, below=rollout.below, given_up=rollout.given_up)
        for rollout, of in zip(rollouts, turns, strict=True)
    ]
    unfinished = [bool(of) and len(of) in found.values() for of, found in zip(turns, of_spans, strict=True)]
    advantages = turn_advantages(rewards, earned, discount, unfinished)
    return [
        {name: of_turns[turn] for name, turn in found.items()}
        for found, of_turns in zip(of_spans, advantages, strict=True)
    ]


def _chosen(rollout: RolloutSamples, settings: GroupSettings) -> list[TokenSample]:
    """The samples that are sent."""
    leave_out = settings.discarded_attempts == "none" or settings.split_rollouts is SplitRollouts.FINAL
    found = [sample for sample in rollout.samples if not (leave_out and sample.discarded)]
    if settings.split_rollouts is SplitRollouts.ALL or not found:
        return found
    if settings.split_rollouts is SplitRollouts.LONGEST:
        return [max(found, key=lambda sample: sample.trained)]  # the first of several
    return [min(found, key=lambda sample: sample.index)]


_Found = tuple[RejectReason, str] | None


def _incomplete(rollouts: Sequence[RolloutSamples], settings: GroupSettings) -> _Found:
    if len(rollouts) != settings.group_size:
        return RejectReason.INCOMPLETE, f"{len(rollouts)} rollouts, but the group size is {settings.group_size}"
    for rollout in rollouts:
        if rollout.reward is None:
            return RejectReason.INCOMPLETE, f"rollout {rollout.rollout_id} has no reward"
        if not rollout.samples:
            return RejectReason.INCOMPLETE, f"rollout {rollout.rollout_id} has no sampled tokens"
        if not _chosen(rollout, settings):
            return RejectReason.INCOMPLETE, f"rollout {rollout.rollout_id} has nothing but discarded attempts"
    return None


def _bad_score(rollouts: Sequence[RolloutSamples]) -> _Found:
    for rollout in rollouts:
        if rollout.reward is not None and not abs(rollout.reward) <= LARGEST_REWARD:
            detail = f"rollout {rollout.rollout_id} has reward {rollout.reward!r}; return a finite number or None"
            return RejectReason.BAD_SCORE, detail
    return None


def _unproven(rollouts: Sequence[RolloutSamples]) -> _Found:
    for rollout in rollouts:
        for sample in rollout.samples:
            if sample.rollout_id != rollout.rollout_id:
                return (
                    RejectReason.UNPROVEN,
                    f"rollout {rollout.rollout_id} has a sample of {sample.rollout_id or 'nobody'}",
                )
    totals = verify_records(sample.to_record() for rollout in rollouts for sample in rollout.samples)
    if totals.ok and totals.rollouts == len(rollouts):
        return None
    if totals.ok:
        return RejectReason.UNPROVEN, f"two of the {len(rollouts)} rollouts have the same id"
    first = totals.problems[0]
    more = f" (and {totals.problem_count - 1} more)" if totals.problem_count > 1 else ""
    return RejectReason.UNPROVEN, f"rollout {first.rollout_id}: {first.reason}{more}"


def _unchecked_prompts(rollouts: Sequence[RolloutSamples]) -> _Found:
    for rollout in rollouts:
        for sample in rollout.samples:
            turns = [span.turn for span in sample.spans if span.prompt_checked == "none"]
            if turns:
                detail = (
                    f"rollout {rollout.rollout_id}, turn {turns[0]}: the server repeated neither the ids nor the "
                    "number of tokens of the prompt, so it may have sampled after another one; use an engine and a "
                    "server that report one of them, or trust this server with --env.unchecked_prompts allow"
                )
                return RejectReason.UNCHECKED_PROMPTS, detail
    return None


def _mixed_temperatures(group: TrainingGroup) -> _Found:
    for sample in group.samples:
        found = _temperatures(sample)
        if len(found) > 1:
            listed = ", ".join(f"{temperature:g}" for temperature in sorted(found))
            return (
                RejectReason.MIXED_TEMPERATURES,
                f"rollout {sample.rollout_id}: one sequence with temperatures {listed}; use one for all turns",
            )
    return None


def _too_long(group: TrainingGroup, settings: GroupSettings) -> _Found:
    longest = max(group.samples, key=lambda sample: len(sample.tokens))
    if 0 < settings.max_token_len <= len(longest.tokens):
        detail = (
            f"rollout {longest.rollout_id} has a sequence of {len(longest.tokens)} tokens; the trainer takes fewer "
            f"than {settings.max_token_len}; lower env.max_token_length or raise the trainer's max_token_len"
        )
        return RejectReason.TOO_LONG, detail
    return None


def _malformed_messages(group: TrainingGroup) -> _Found:
    for rollout, messages in zip(group.rollouts, group.messages or (), strict=False):
        for at, message in enumerate(messages):
            if not isinstance(message.get("role"), str):
                return RejectReason.MALFORMED_MESSAGES, f"rollout {rollout.rollout_id}: message {at} has no role"
    return None


def _temperatures(sample: TokenSample) -> set[float]:
    return {float(span.sampling["temperature"]) for span in sample.spans}


def _shared_sampling(samples: Iterable[TokenSample]) -> dict[str, Any]:
    """The sampling parameters that all spans have in common."""
    first, *others = [span.sampling for sample in samples for span in sample.spans]
    return {name: value for name, value in first.items() if all(other.get(name) == value for other in others)}
