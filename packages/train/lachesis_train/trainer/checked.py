"""Groups from `GET /batch` as samples that may be trained on, each checked first.

A group of ours carries the certificate of each of its samples and a digest of the rest: all are verified. A group of a
stock Atropos environment carries none; where the settings allow it, what can be checked is: lengths, masks, logprobs,
scores.
A group with one bad sample is refused whole: the baseline of its advantages is the mean of all of its rewards.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

from lachesis_messages.records.split_rollouts import LARGEST_REWARD
from lachesis_messages.tokens import MASKED
from lachesis_tokens.prompts.vocabulary import ANY_ROW
from lachesis_tokens.samples.group_shapes import CERTIFICATE, group_problems, samples_from_atropos
from lachesis_tokens.samples.samples import TokenSample
from lachesis_tokens.samples.verification import verify

Uncertified = Literal["refuse", "allow"]


class Refusal(StrEnum):
    """Why a group is not trained on."""

    UNCERTIFIED = "uncertified"
    """It carries no certificates."""
    UNPROVEN = "unproven"
    """The certificate of a sample does not hold, or the lists of a group do not fit together."""
    TEMPERATURE = "temperature"
    """Sampled at another temperature than 1: engines compute logprobs of undivided logits."""
    UNSUPPORTED = "unsupported"
    """It holds what Tinker's wire cannot express, such as images."""
    DUPLICATE = "duplicate"
    """A group with this `group_id` was trained before."""


class GroupRefused(Exception):
    """A group is not trained on. The message says which sample, and what to do."""

    def __init__(self, reason: Refusal, detail: str) -> None:
        super().__init__(detail)
        self.reason = reason
        self.detail = detail


@dataclass(frozen=True, slots=True)
class CheckedSample:
    """One sequence of a group."""

    rollout: str
    """Id of its rollout, unique in the group."""
    tokens: Sequence[int]
    trained: NDArray[np.intp]
    """Places of the trained tokens in `tokens`, in order; never 0."""
    logprobs: NDArray[np.float64]
    """The sampler's, of the trained tokens."""
    score: float
    own_score: bool
    """Whether the score is that of the sample, a discarded attempt, and another sample has that of its rollout."""
    advantages: NDArray[np.float64] | None
    """Of the trained tokens, as the group carries them; None where it carries none."""
    versions: tuple[str, ...]
    """The versions of the weights that sampled trained tokens of it, as far as the server reported them."""


def checked_group(
    body: Mapping[str, Any], uncertified: Uncertified = "refuse", rows: int = ANY_ROW
) -> list[CheckedSample]:
    """The samples of one group, in its order. CPU-bound: some milliseconds for each 32k tokens.

    Args:
        rows: rows of the model's embedding; an id beyond is none of its tokens.

    Raises:
        Refused: the group must not be trained on.
    """
    overrides = body.get("overrides") or [{}] * len(body.get("tokens") or ())
    if _certified(overrides):
        found = _verified(body, uncertified)
    elif uncertified == "refuse":
        raise GroupRefused(
            Refusal.UNCERTIFIED,
            "the group has no certificates, like groups of stock Atropos environments; --training.uncertified allow "
            "trains on it after a check of lengths, masks and logprobs",
        )
    else:
        found = _unverified(body)
    scores = _numbers("scores", body.get("scores"), len(found))
    if any(abs(score) > LARGEST_REWARD for score in scores):
        raise GroupRefused(Refusal.UNPROVEN, f"a score is beyond {LARGEST_REWARD:g}")
    carried = body.get("advantages")
    if carried is not None and len(carried) != len(found):
        raise GroupRefused(Refusal.UNPROVEN, f"{len(carried)} lists of advantages, {len(found)} sequences")
    judged = {sample.rollout_id for sample in found if not sample.discarded}
    checked = []
    for at, (sample, override) in enumerate(zip(found, overrides, strict=True)):
        _check_temperature(at, body, override, sample)
        places = np.flatnonzero(np.asarray(sample.masks) != MASKED)
        if not places.size or not places[0]:
            what = "its first token is trained, but nothing predicts it" if places.size else "it trains nothing"
            raise GroupRefused(Refusal.UNPROVEN, f"sequence {at}: {what}")
        if min(sample.tokens) < 0 or max(sample.tokens) >= rows:
            found_ids = f"token ids from {min(sample.tokens)} to {max(sample.tokens)}, and the model has {rows} rows"
            raise GroupRefused(
                Refusal.UNPROVEN, f"sequence {at}: {found_ids}; give the environment the tokenizer of the trained model"
            )
        logprobs = np.asarray(sample.logprobs, np.float64)[places]
        if (abs(logprobs) > np.finfo(np.float32).max).any():
            raise GroupRefused(Refusal.UNPROVEN, f"sequence {at}: the logprob {logprobs.min()} is infinite in float32")
        advantages = None
        if carried is not None:
            advantages = _of_tokens(f"advantages[{at}]", carried[at], len(sample.tokens))[places]
            if override.get("set_advantage_to_zero"):
                advantages = np.zeros_like(advantages)
        elif override.get("set_advantage_to_zero"):
            advantages = np.zeros(places.size)
        checked.append(
            CheckedSample(
                rollout=sample.rollout_id or str(at),
                tokens=sample.tokens,
                trained=places,
                logprobs=logprobs,
                score=scores[at],
                own_score=sample.discarded and carried is not None and sample.rollout_id in judged,
                advantages=advantages,
                versions=tuple(dict.fromkeys(str(entry[0]) for entry in override.get("policy_versions") or ())),
            )
        )
    return checked


def _certified(overrides: Sequence[Any]) -> bool:
    """Whether any sample has a certificate: a group of which one is missing is one of ours, and damaged."""
    return any(isinstance(override, Mapping) and CERTIFICATE in override for override in overrides)


def _verified(body: Mapping[str, Any], uncertified: Uncertified) -> list[TokenSample]:
    try:
        samples = samples_from_atropos(body)
        problems = group_problems(body, samples)
    except ValueError as error:
        raise GroupRefused(Refusal.UNPROVEN, str(error)) from error
    if problems:
        raise GroupRefused(Refusal.UNPROVEN, problems[0])
    if uncertified == "refuse" and not all(sample.digest for sample in samples):
        raise GroupRefused(
            Refusal.UNCERTIFIED,
            "the certificates have no digest, because an earlier version wrote them: update the environment's "
            "Lachesis, or train on its groups with --training.uncertified allow",
        )
    trained: set[tuple[str, int]] = set()
    for at, sample in enumerate(samples):
        if reasons := verify(sample):
            more = f" (and {len(reasons) - 1} more)" if len(reasons) > 1 else ""
            raise GroupRefused(Refusal.UNPROVEN, f"sequence {at}, rollout {sample.rollout_id}: {reasons[0]}{more}")
        for span in sample.spans:
            if (sample.rollout_id, span.turn) in trained:
                raise GroupRefused(
                    Refusal.UNPROVEN, f"rollout {sample.rollout_id}: turn {span.turn} is in two sequences"
                )
            trained.add((sample.rollout_id, span.turn))
        _check_expressible(at, sample)
    return samples


def _check_expressible(at: int, sample: TokenSample) -> None:
    what = "images" if sample.images else "sampling masks (top-p, top-k)" if sample.sampling_mask is not None else ""
    if what:
        raise GroupRefused(
            Refusal.UNSUPPORTED, f"sequence {at}, rollout {sample.rollout_id}: this trainer cannot train on {what}"
        )


def _unverified(body: Mapping[str, Any]) -> list[TokenSample]:
    """The sequences of a group without certificates, each its own rollout, of which nothing is known but its tokens."""
    lists = {name: body.get(name) for name in ("tokens", "masks", "inference_logprobs")}
    for name, value in lists.items():
        if not isinstance(value, list) or not value:
            raise GroupRefused(Refusal.UNPROVEN, f"the group has no {name}; the environment must send them")
    found = []
    for at, (tokens, masks, logprobs) in enumerate(zip(*lists.values(), strict=False)):
        lengths = {len(part) if isinstance(part, list) else -1 for part in (tokens, masks, logprobs)}
        if len(lengths) > 1 or -1 in lengths or len({len(part) for part in lists.values() if part}) > 1:
            raise GroupRefused(
                Refusal.UNPROVEN, f"sequence {at}: tokens, masks and inference_logprobs differ in length"
            )
        ids, labels = np.asarray(tokens), np.asarray(masks)
        if ids.dtype.kind != "i" or labels.dtype.kind != "i" or (ids < 0).any():
            raise GroupRefused(Refusal.UNPROVEN, f"sequence {at}: tokens and masks are not token ids")
        wrong = np.flatnonzero((labels != MASKED) & (labels != ids))
        if wrong.size:
            place = int(wrong[0])
            hint = "; masks hold the token id or -100, not 0 and 1" if set(masks) <= {0, 1} else ""
            raise GroupRefused(
                Refusal.UNPROVEN, f"sequence {at}: masks[{place}] is {masks[place]}, the token {tokens[place]}{hint}"
            )
        of_trained = _of_tokens(f"inference_logprobs[{at}]", logprobs, len(tokens))[labels != MASKED]
        if (of_trained > 0).any():
            raise GroupRefused(Refusal.UNPROVEN, f"sequence {at}: a trained token has a logprob above 0")
        made: dict[str, Any] = {"spans": (), "weight": 1.0, "outcome": "", "index": 0, "count": 1, "sampled": 0}
        found.append(TokenSample(tokens, masks, logprobs, rollout_id=str(at), **made))
    return found


def _check_temperature(at: int, body: Mapping[str, Any], override: Mapping[str, Any], sample: TokenSample) -> None:
    """Atropos' order for groups without certificates: the sequence's, the parameters', the group's."""
    named = [
        (where or {}).get("temperature")
        for where in (override, body.get("generation_params"), body.get("group_overrides"))
    ]
    of_spans = [float(span.sampling["temperature"]) for span in sample.spans]
    given = of_spans or [value for value in named if value is not None][:1]
    if wrong := [value for value in given if value != 1]:
        raise GroupRefused(
            Refusal.TEMPERATURE,
            f"sequence {at} was sampled at temperature {wrong[0]:g}, and Tinker's wire computes logprobs at "
            "temperature 1 only; set --env.agent_temperature 1.0 for the environment",
        )


def _numbers(name: str, values: Any, count: int) -> list[float]:
    if not isinstance(values, list) or len(values) != count:
        raise GroupRefused(Refusal.UNPROVEN, f"{name} is not a list of {count} numbers")
    if not all(isinstance(value, int | float) and math.isfinite(value) for value in values):
        raise GroupRefused(Refusal.UNPROVEN, f"{name} contains a value that is not a finite number")
    return [float(value) for value in values]


def _of_tokens(name: str, values: Any, count: int) -> NDArray[np.float64]:
    try:
        found = np.asarray(values, np.float64)
    except (TypeError, ValueError):
        found = np.zeros(0)
    if found.shape != (count,) or not np.isfinite(found).all():
        raise GroupRefused(Refusal.UNPROVEN, f"{name} is not a list of {count} finite numbers")
    return found
