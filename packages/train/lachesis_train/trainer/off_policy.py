"""Sequences that other weights sampled: truncated and rejected by the importance ratio of the whole sequence.

With p the probability of a token under the weights that are trained, before the step, and q that of the sampler, the
ratio of a sequence is the product of p / q over its trained tokens, or their geometric mean. docs/training.md has the
names of these in other trainers.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace

import numpy as np

from lachesis_train.tinker_sdk import Datum
from lachesis_train.trainer.datums import PreparedBatch, TrainedSample
from lachesis_train.trainer.settings import TrainingSettings

OFF_POLICY = "off_policy"
"""Why a sequence is left out."""


def scored(batch: PreparedBatch) -> list[Datum]:
    """What the engine computes logprobs of, without gradients."""
    data = [each.datum() for each in batch.samples]
    return [Datum(each.tokens, each.targets, {"weights": np.ones(len(each.tokens), np.float32)}) for each in data]


def correct(
    batch: PreparedBatch, logprobs: Sequence[Sequence[float]], rules: TrainingSettings
) -> tuple[PreparedBatch, dict[str, float]]:
    """The batch without the sequences that are rejected, the others weighted, and figures of the weights.

    Args:
        logprobs: the engine's, for the targets of each datum of `scored`.
    """
    left_out = dict(batch.left_out)
    kept: list[TrainedSample] = []
    weights: list[float] = []
    for each, of_targets in zip(batch.samples, logprobs, strict=True):
        ours = np.asarray(of_targets, np.float64)[each.sample.trained - 1]
        total = float((ours - each.sample.logprobs).sum())
        ratio = _exp(total if rules.reject_ratio == "product" else total / len(ours))
        below, above = rules.reject_ratio_below, rules.reject_ratio_above
        if (below is not None and ratio < below) or (above is not None and ratio > above):
            bounds = f"training.reject_ratio_below {below}, reject_ratio_above {above}"
            left_out[each.group, each.at] = OFF_POLICY, f"the {rules.reject_ratio} ratio is {ratio:.4g}; {bounds}"
            continue
        if rules.max_sequence_ratio is not None:
            weights.append(min(_exp(total), rules.max_sequence_ratio))
            each = replace(each, sent=ours, scale=each.scale * weights[-1])  # the ratio of each token is 1 now
        kept.append(each)
    figures = {}
    if weights:
        figures = {
            "sequence_ratio/mean": math.fsum(weights) / len(weights),
            "sequence_ratio/max": max(weights),
            "sequence_ratio/truncated": sum(weight == rules.max_sequence_ratio for weight in weights) / len(weights),
        }
    return replace(batch, samples=kept, left_out=left_out), figures


def _exp(log_ratio: float) -> float:
    return math.exp(max(-700.0, min(700.0, log_ratio)))
