"""The figures of a step under the names that W&B and `metrics.jsonl` have.

Where TRL's GRPOTrainer has a figure, its name is taken, as it appears in W&B (`train/reward_std`); the means of
the logprobs have the names of tinker-atropos (`logprobs/mean_training`). docs/training-report.md lists all of them.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, Final

from lachesis.figures.intervals import mean_of, mean_over_items
from lachesis_train.curves.estimators import token_estimates
from lachesis_train.curves.records import SOUND, GroupRecord, SampleRecord, StepRecord
from lachesis_train.curves.rollouts import certificate_of, environment_of, override_of, repaired_calls, samples_of

OF_MODELS: Final = ("wait", "train", "base_logprobs", "teacher_logprobs", "ratios", "evaluate")
"""Phases of a step in which models compute; the rest is the pipeline's own time."""


def step_metrics(record: StepRecord) -> dict[str, Any]:
    """One flat dict; a figure that the step does not have is absent."""
    total = math.fsum(record.seconds.values())
    overhead = math.fsum(seconds for phase, seconds in record.seconds.items() if phase not in OF_MODELS)
    trained = [sample for group in record.groups for sample in samples_of(group) if sample.skipped is None]
    metrics: dict[str, Any] = {
        "version": record.version,
        "batch_id": record.batch_id,
        **{f"train/{name.partition(':')[0]}": value for name, value in record.loss.items()},
        **{f"eval/{name}": value for name, value in record.evaluation.items()},
        "train/learning_rate": record.learning_rate,
        "train/samples": record.samples,
        **(_of_batch(record, trained) if record.groups else {}),
        "train/tokens": record.tokens if record.tokens is not None else sum(map(_count, trained)),
        "train/queue": record.queue,
        "train/step_time": total or None,
        "train/overhead": overhead / total if total else None,
        **{f"time/{phase}": seconds for phase, seconds in record.seconds.items()},
    }
    if total:
        metrics["train/tokens_per_second"] = metrics["train/tokens"] / total
    return {name: value for name, value in metrics.items() if value is not None and _finite(value)}


def _of_batch(record: StepRecord, trained: Sequence[SampleRecord]) -> dict[str, Any]:
    return {
        "train/groups": len(record.groups),
        "train/samples": len(trained),
        **_rewards(record.groups),
        **_length_penalty(record.groups),
        **_of_environments(record.groups),
        **_estimates(trained, record.ratio_bounds),
        **_completions(record.groups),
        **_repaired_calls(record.groups),
        **_staleness(record.groups),
        **_skipped(record.groups),
    }


def _count(sample: SampleRecord) -> int:
    return len(sample.trainer_logprobs)


def rollout_rewards(body: Mapping[str, Any]) -> list[float]:
    """The reward of each rollout of a group, without the penalty for its length. `scores` has one entry a sample, and
    a discarded attempt may have its own; without certificates every sequence is a rollout."""
    found: dict[Any, float] = {}
    for at, score in enumerate(body.get("scores") or ()):
        certificate = certificate_of(body, at)
        if not certificate.get("discarded") and isinstance(score, float | int) and math.isfinite(score):
            judged = override_of(body, at).get("judged_score")
            found.setdefault(certificate.get("rollout_id", at), judged if isinstance(judged, float | int) else score)
    return list(found.values())


def _rewards(groups: Sequence[GroupRecord]) -> dict[str, Any]:
    """Over all groups of the batch, trained or not: a group without a signal was played too."""
    rewards = [found for group in groups if (found := rollout_rewards(group.body))]
    if not rewards:
        return {}
    mean = mean_over_items(rewards)
    return {
        "train/reward": mean.mean,
        "train/reward_low": mean.low,
        "train/reward_high": mean.high,
        "train/reward_std": _deviation([reward for group in rewards for reward in group]),
        "train/frac_reward_zero_std": sum(len(set(group)) == 1 for group in rewards) / len(rewards),
    }


def _length_penalty(groups: Sequence[GroupRecord]) -> dict[str, Any]:
    """The mean over rollouts, where lengths are penalised."""
    found: dict[Any, float] = {}
    for number, group in enumerate(groups):
        for at in range(len(samples_of(group))):
            penalty = override_of(group.body, at).get("length_penalty")
            if isinstance(penalty, float | int):
                found[number, certificate_of(group.body, at).get("rollout_id", at)] = penalty
    return {"train/length_penalty": math.fsum(found.values()) / len(found)} if found else {}


def _of_environments(groups: Sequence[GroupRecord]) -> dict[str, Any]:
    """For each environment that groups are of: reward with its interval, trained tokens, share of the sequences, and
    groups that were refused."""
    found: dict[str, Any] = {}
    sequences = sum(len(samples_of(group)) for group in groups)
    for name in sorted({name for group in groups if (name := environment_of(group.body)) is not None}):
        own = [group for group in groups if environment_of(group.body) == name]
        samples = [sample for group in own for sample in samples_of(group)]
        if rewards := [each for group in own if (each := rollout_rewards(group.body))]:
            mean = mean_over_items(rewards)
            found[f"train/{name}/reward"] = mean.mean
            found |= {f"train/{name}/reward_low": mean.low, f"train/{name}/reward_high": mean.high}
        found |= {
            f"train/{name}/tokens": sum(_count(sample) for sample in samples if sample.skipped is None),
            f"train/{name}/share": len(samples) / sequences if sequences else None,
            f"train/{name}/refused": sum(group.skipped not in (None, *SOUND) for group in own),
        }
    return found


def _estimates(trained: Sequence[SampleRecord], bounds: tuple[float, float] | None) -> dict[str, Any]:
    found = token_estimates(
        (
            (sample.sampler_logprobs, sample.trainer_logprobs, sample.token_advantages or sample.advantage)
            for sample in trained
        ),
        bounds,
    )
    clipped = {
        "train/clip_ratio/low_mean": found.clipped_low,
        "train/clip_ratio/high_mean": found.clipped_high,
        "train/clip_ratio/region_mean": found.clipped_low + found.clipped_high,
    }
    return {
        "train/entropy": found.entropy,
        **(clipped if bounds is not None else {}),
        "train/sampling/kl_k1": found.kl_k1,
        "train/sampling/kl_k3": found.kl_k3,
        "train/sampling/sampling_logp_difference/mean": found.mean_difference,
        "train/sampling/sampling_logp_difference/max": found.largest_difference,
        "train/sampling/importance_sampling_ratio/min": found.ratio_min,
        "train/sampling/importance_sampling_ratio/mean": found.ratio_mean,
        "train/sampling/importance_sampling_ratio/max": found.ratio_max,
        "train/sampling/effective_sample_size": found.effective_sample_size,
        "logprobs/mean": found.sampler_logprob,
        "logprobs/mean_training": found.trainer_logprob,
        "logprobs/diff": found.sampler_logprob - found.trainer_logprob,
    }


def _completions(groups: Sequence[GroupRecord]) -> dict[str, Any]:
    """Lengths in sampled tokens, and how the rollouts ended, as far as certificates say so."""
    lengths: list[int] = []
    cut = 0
    outcomes: dict[Any, str] = {}
    for number, group in enumerate(groups):
        for at in range(len(samples_of(group))):
            certificate = certificate_of(group.body, at)
            spans = certificate.get("spans")
            if not spans:
                continue
            lengths.append(sum(span["end"] - span["start"] for span in spans))
            cut += spans[-1].get("finish_reason") == "length"
            outcomes[(number, certificate.get("rollout_id"))] = certificate.get("outcome") or "unknown"
    if not lengths:
        return {}
    return {
        "train/completions/mean_length": math.fsum(lengths) / len(lengths),
        "train/completions/min_length": min(lengths),
        "train/completions/max_length": max(lengths),
        "train/completions/clipped_ratio": cut / len(lengths),
        **{f"train/outcome/{name}": count for name, count in sorted(Counter(outcomes.values()).items())},
    }


def _repaired_calls(groups: Sequence[GroupRecord]) -> dict[str, Any]:
    """The share of calls that the parser repaired, over all rollouts, and under `repaired_calls` how many it repaired
    and read in each group. W&B gets names with a slash only."""
    counts = []
    for group in groups:
        of_rollouts = {}
        for at in range(len(samples_of(group))):
            of_rollouts[certificate_of(group.body, at).get("rollout_id", at)] = repaired_calls(group.body, at)
        counts.append([sum(each) for each in zip((0, 0), *of_rollouts.values(), strict=True)])
    repaired, parsed = (sum(each) for each in zip((0, 0), *counts, strict=True))
    return {"train/repaired_call_rate": repaired / parsed, "repaired_calls": counts} if parsed else {}


def _staleness(groups: Sequence[GroupRecord]) -> dict[str, Any]:
    """Over all sequences, trained or not: those that are too old count most."""
    known = [sample.staleness for group in groups for sample in samples_of(group) if sample.staleness is not None]
    return {"train/staleness/mean": sum(known) / len(known), "train/staleness/max": max(known)} if known else {}


def _skipped(groups: Sequence[GroupRecord]) -> dict[str, int]:
    """Sequences that were not trained, by reason."""
    reasons = Counter(reason for group in groups for reason in _reasons(group))
    return {f"train/skipped/{reason}": count for reason, count in sorted(reasons.items())}


def _reasons(group: GroupRecord) -> Iterator[str]:
    found = [sample.skipped for sample in samples_of(group) if sample.skipped is not None]
    if group.skipped is not None and not found:  # a group that has no sequence
        found = [group.skipped]
    yield from found


def _deviation(values: Sequence[float]) -> float:
    mean = mean_of(values)
    # Squares of large or small deviations would overflow or vanish.
    return math.hypot(*(value - mean for value in values)) / math.sqrt(len(values))


def _finite(value: Any) -> bool:
    return not isinstance(value, float) or math.isfinite(value)
