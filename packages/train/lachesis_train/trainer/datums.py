"""The batch of a step as the engine takes it: for each sequence its inputs, shifted targets, logprobs and advantages.

Engines of Tinker's wire sum the loss over all tokens of a batch. So each token's advantage is scaled here, and a
rollout counts as docs/training-data.md says: with `LossAverage.SAMPLE` the loss of a batch is the mean over its
rollouts of the mean over their trained tokens, with `LossAverage.TOKEN` the mean over all its trained tokens.
"""

from __future__ import annotations

import math
from collections.abc import Container, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from lachesis_messages.errors import MISSHAPEN
from lachesis_tokens.prompts.vocabulary import ANY_ROW
from lachesis_tokens.samples.advantages import LossAverage, rollout_advantages, spread
from lachesis_train.curves.estimators import LARGEST_LOG_RATIO
from lachesis_train.curves.records import SOUND, GroupRecord, SampleRecord
from lachesis_train.curves.rollouts import certificate_of, override_of
from lachesis_train.tinker_sdk import Datum
from lachesis_train.trainer.checked import CheckedSample, GroupRefused, Refusal, checked_group
from lachesis_train.trainer.settings import TREES_MASKED, TrainingSettings

NO_SIGNAL = "same_scores"
TOO_LONG = "too_long"
TOO_OLD = "too_old"
TRUNCATED = "truncated"
"""Why a checked group, or (all but the first) a single sequence of it, is not trained."""


@dataclass(slots=True)
class TrainedSample:
    """One sequence of the batch that is trained."""

    group: int
    at: int
    """Its place in its group."""
    sample: CheckedSample
    advantages: NDArray[np.float64]
    """Of its trained tokens, before they are scaled."""
    scale: float
    """What they are multiplied with, so that the sum over the batch is the mean of `LossAverage`."""
    sent: NDArray[np.float64] | None = None
    """Logprobs that the engine gets instead of the sampler's."""

    def datum(self, loss: str = "importance_sampling") -> Datum:
        """Its sequence for the engine: token t predicts token t + 1, and what is not trained has advantage 0.

        `gspo` also has the weights 1 and 0: its mean is over the trained tokens, some of which may have advantage 0.
        """
        count = len(self.sample.tokens) - 1
        advantages, logprobs = np.zeros(count, np.float32), np.zeros(count, np.float32)
        advantages[self.sample.trained - 1] = self.advantages * self.scale
        logprobs[self.sample.trained - 1] = self.sample.logprobs if self.sent is None else self.sent
        inputs = {"logprobs": logprobs, "advantages": advantages}
        if loss == "gspo":
            inputs["weights"] = np.zeros(count, np.float32)
            inputs["weights"][self.sample.trained - 1] = 1.0
        return Datum(self.sample.tokens[:-1], self.sample.tokens[1:], inputs)


@dataclass(frozen=True, slots=True)
class PreparedBatch:
    """A batch, checked, with advantages."""

    bodies: Sequence[Mapping[str, Any]]
    samples: Sequence[TrainedSample]
    """Those that are trained."""
    skipped: Mapping[int, tuple[str, str]]
    """Groups that are refused or have no signal: their place in the batch, the reason as a name, and in a sentence."""
    left_out: Mapping[tuple[int, int], tuple[str, str]]
    """Sequences of other groups that are not, even if they are all of their group: (group, place)."""
    lags: Mapping[int, Sequence[int | None]]
    """For each sequence of a group that was not refused: see `SampleRecord.staleness`."""
    new_ids: Sequence[str]
    """The ids of its groups, where they have any."""

    @property
    def refused(self) -> list[tuple[str, str]]:
        """Why groups were refused; a group whose scores are equal, or a second copy, is none."""
        return [reason for reason in self.skipped.values() if reason[0] not in SOUND]

    def records(self, logprobs: Sequence[Sequence[float]]) -> list[GroupRecord]:
        """The fate of each group, for the recorder. `logprobs`: the engine's, for the targets of each datum."""
        found = {
            (trained.group, trained.at): SampleRecord(
                advantage=float(trained.advantages.mean()),
                token_advantages=trained.advantages.tolist() if np.ptp(trained.advantages) else (),
                sampler_logprobs=trained.sample.logprobs.tolist(),
                trainer_logprobs=np.asarray(of_targets)[trained.sample.trained - 1].tolist(),
                staleness=self.lags[trained.group][trained.at],
            )
            for trained, of_targets in zip(self.samples, logprobs, strict=True)
        }
        records = []
        for at, body in enumerate(self.bodies):
            of_group = self.skipped.get(at)
            samples = []
            for place, lag in enumerate(self.lags.get(at, ())):
                if (at, place) in found:
                    samples.append(found[at, place])
                else:
                    reason = of_group or self.left_out[at, place]
                    samples.append(SampleRecord(skipped=reason[0], detail=reason[1], staleness=lag))
            skipped, detail = of_group or (None, "")
            records.append(GroupRecord(body=body, samples=samples, skipped=skipped, detail=detail))
        return records


def prepare(
    bodies: Sequence[Mapping[str, Any]],
    rules: TrainingSettings,
    *,
    run: str = "",
    step: int = 0,
    seen: Container[str] = (),
    rows: int = ANY_ROW,
) -> PreparedBatch:
    """Check the groups of a batch and give each trained token its advantage. CPU-bound.

    Args:
        run, step: the weights that are trained; `run` is what names of versions begin with.
        seen: ids of groups that were trained before.
        rows: rows of the model's embedding.
    """
    skipped: dict[int, tuple[str, str]] = {}
    left_out: dict[tuple[int, int], tuple[str, str]] = {}
    lags: dict[int, list[int | None]] = {}
    chosen: list[TrainedSample] = []
    ids: dict[str, None] = {}
    rollouts = tokens = 0
    for number, body in enumerate(bodies):
        try:
            group_id = (body.get("group_overrides") or {}).get("group_id")
            if group_id in seen or group_id in ids:
                raise GroupRefused(Refusal.DUPLICATE, f"group {group_id} was trained before")
            group = checked_group(body, rules.uncertified, rows)
            if rules.mask_truncated_completions and override_of(body, 0).get("tree"):
                raise GroupRefused(Refusal.UNSUPPORTED, f"its rollouts branch, and {TREES_MASKED}")
        except GroupRefused as error:
            skipped[number] = (error.reason, error.detail)
            continue
        except MISSHAPEN as error:  # a field of another type, of which no certificate says anything
            skipped[number] = (Refusal.UNPROVEN, f"the group cannot be read: {error!r}"[:300])
            continue
        if isinstance(group_id, str):
            ids[group_id] = None
        lags[number] = [_lag(sample, run, step) for sample in group]
        sizes = _sizes(group)
        rollouts += len(sizes)
        tokens += sum(sizes.values())
        advantages = _advantages(group, sizes, normalise=rules.advantage == "normalised")
        if not rules.trains_without_signal and not any(each.any() for each in advantages):
            skipped[number] = (
                NO_SIGNAL,
                "no rollout of the group is better than another, so there is nothing to learn",
            )
            continue
        cut = _truncated(body) if rules.mask_truncated_completions else frozenset()
        for at, (sample, of_tokens) in enumerate(zip(group, advantages, strict=True)):
            if reason := _unwanted(sample, lags[number][at], rules, cut=sample.rollout in cut):
                left_out[number, at] = reason
            else:
                scale = 1 / sizes[sample.rollout] if rules.loss_average is LossAverage.SAMPLE else 1.0
                chosen.append(TrainedSample(number, at, sample, of_tokens, scale))
    total = rollouts if rules.loss_average is LossAverage.SAMPLE else tokens
    for each in chosen:
        each.scale /= total
    return PreparedBatch(bodies, chosen, skipped, left_out, lags, tuple(ids))


def penalise_divergence(
    batch: PreparedBatch, other: Sequence[Sequence[float]], coefficient: float, reward_weight: float = 1.0
) -> tuple[float, int]:
    """Subtract a KL penalty against another model, the base model or a teacher, from the advantages; returns the mean
    difference of the logprobs, in nats, and the number of tokens whose difference was cut.

    The penalty of a token is `coefficient` times how much likelier the sampler found it than the other model, minus
    the mean of that over the batch, which keeps the advantages centred. Of a group without a signal it is all of the
    advantage. Differences are cut to `LARGEST_LOG_RATIO`: a -9999 for minus infinity would outweigh all other tokens,
    and through the mean push each of them up.

    Args:
        other: the other model's logprobs of all tokens of each sample.
        reward_weight: what the advantages so far are multiplied with.
    """
    differences = [
        each.sample.logprobs - np.asarray(of_other, np.float64)[each.sample.trained]
        for each, of_other in zip(batch.samples, other, strict=True)
    ]
    count = sum(each.size for each in differences)
    cut = sum(int((abs(each) > LARGEST_LOG_RATIO).sum()) for each in differences)
    differences = [each.clip(-LARGEST_LOG_RATIO, LARGEST_LOG_RATIO) for each in differences]
    mean = math.fsum(float(each.sum()) for each in differences) / count if count else 0.0
    for each, difference in zip(batch.samples, differences, strict=True):
        each.advantages = reward_weight * each.advantages - coefficient * (difference - mean)
    return mean, cut


def with_signal(batch: PreparedBatch) -> PreparedBatch:
    """The batch; without any sequence where every advantage is 0 in float32, as after sequences with others were left
    out, or with weights of sequences that are next to 0: engines make no step without a gradient."""
    if any((each.advantages * each.scale).astype(np.float32).any() for each in batch.samples):
        return batch
    detail = "no token of the batch has an advantage, so there is nothing to learn"
    left_out = {(each.group, each.at): (NO_SIGNAL, detail) for each in batch.samples}
    return replace(batch, samples=(), left_out={**batch.left_out, **left_out})


def _sizes(group: Sequence[CheckedSample]) -> dict[str, int]:
    """Trained tokens of each rollout in the group."""
    sizes: dict[str, int] = {}
    for sample in group:
        sizes[sample.rollout] = sizes.get(sample.rollout, 0) + sample.trained.size
    return sizes


def _advantages(
    group: Sequence[CheckedSample], sizes: Mapping[str, int], *, normalise: bool
) -> list[NDArray[np.float64]]:
    """Of the trained tokens of each sample: those of its rollout, or those that the group carries.

    Carried advantages are scaled by the sample's share of its rollout (`LossAverage.SAMPLE`); that is undone here.
    """
    rewards = {sample.rollout: sample.score for sample in group if not sample.own_score}
    of_rollouts = dict(zip(rewards, rollout_advantages(list(rewards.values()), normalise=normalise), strict=True))
    distance, scale = spread([*rewards.values()]) if normalise and len({*rewards.values()}) > 1 else (1.0, 1.0)
    found = []
    for sample in group:
        if sample.advantages is None:
            found.append(np.full(sample.trained.size, of_rollouts.get(sample.rollout) or 0.0))
        else:
            found.append(sample.advantages / distance * (sizes[sample.rollout] / sample.trained.size * scale))
    return found


def _lag(sample: CheckedSample, run: str, step: int) -> int | None:
    """Most steps between weights that sampled a token of it and those that are trained; None: unknown.

    A run that went back to a checkpoint may get samples of later weights: as many steps away.
    """
    steps = []
    for version in sample.versions:
        name, _, number = version.rpartition(":")
        if name != run or not number.isdecimal():
            return None
        steps.append(int(number))
    return max((abs(step - each) for each in steps), default=None)


def _truncated(body: Mapping[str, Any]) -> frozenset[str]:
    """Rollouts that a limit of tokens ended; where the outcome is unknown, those whose last completion was cut."""
    found = set()
    for at in range(len(body["tokens"])):
        certificate = certificate_of(body, at)
        last = (certificate.get("spans") or [{}])[-1].get("finish_reason")
        if (certificate.get("outcome") or last) in ("context_exhausted", "length"):
            found.add(str(certificate.get("rollout_id", at)))
    return frozenset(found)


def _unwanted(sample: CheckedSample, lag: int | None, rules: TrainingSettings, *, cut: bool) -> tuple[str, str] | None:
    if cut:
        return TRUNCATED, "a limit of tokens cut the rollout off, and training.mask_truncated_completions leaves it out"
    length = len(sample.tokens)
    if length >= rules.max_token_trainer_length:
        limit = f"the trainer takes fewer than training.max_token_trainer_length, {rules.max_token_trainer_length}"
        return TOO_LONG, f"a sequence of {length} tokens; {limit}"
    if rules.max_policy_lag is not None and lag is not None and lag > rules.max_policy_lag:
        limit = f"training.max_policy_lag allows {rules.max_policy_lag}"
        return TOO_OLD, f"sampled by weights that are {lag} steps older than the trained weights; {limit}"
    return None
