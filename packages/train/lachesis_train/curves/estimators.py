"""Estimates over the trained tokens of a step, from the logprobs of the sampler and of the trainer.

The trained tokens x were sampled from the sampler's distribution q; p is the trainer's. With the log ratio
r = log p(x) - log q(x), and the importance ratio w = exp(r):

* KL(q || p): `k1` = mean(-r), without bias, negative for some samples; `k3` = mean(exp(r) - 1 - r), without bias and
  never negative (J. Schulman, "Approximating KL Divergence", 2020).
* entropy of q = mean(-log q(x)).
* effective sample size = (sum w)^2 / (n * sum w^2): 1 where all ratios are equal, 1/n where one outweighs the others.
* clip share = the share of tokens whose gradient the clipped surrogate removes: w above the upper bound where the
  advantage is positive, w below the lower bound where it is negative (PPO; TRL's `clip_ratio`).
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

LARGEST_LOG_RATIO = 20.0
"""Log ratios are cut to this before they are exponentiated: one token must not turn a figure into infinity."""


@dataclass(frozen=True, slots=True)
class TokenEstimates:
    """Over the trained tokens of a step; NaN where there are none."""

    tokens: int
    sampler_logprob: float
    trainer_logprob: float
    mean_difference: float
    """Of |log p - log q|; the largest of them next."""
    largest_difference: float
    kl_k1: float
    kl_k3: float
    entropy: float
    ratio_mean: float
    ratio_min: float
    ratio_max: float
    effective_sample_size: float
    """As a share of the tokens, 0 to 1."""
    clipped_low: float
    clipped_high: float


def token_estimates(
    samples: Iterable[tuple[Sequence[float], Sequence[float], float | Sequence[float]]],
    bounds: tuple[float, float] | None = None,
) -> TokenEstimates:
    """The estimates over (logprobs of the sampler, of the trainer, advantage) of each sample. The advantage is that of
    all of its tokens, or of each.

    Raises:
        ValueError: a sample has more logprobs of the one than of the other.
    """
    sampler: list[float] = []
    logs: list[float] = []
    low = high = 0
    for of_sampler, of_trainer, advantage in samples:
        if len(of_sampler) != len(of_trainer):
            raise ValueError(f"{len(of_sampler)} logprobs of the sampler, {len(of_trainer)} of the trainer")
        sampler += of_sampler
        found = [p - q for q, p in zip(of_sampler, of_trainer, strict=True)]
        logs += found
        if bounds is not None:
            of_tokens = [advantage] * len(found) if isinstance(advantage, int | float) else advantage
            for r, of_token in zip(found, of_tokens, strict=True):
                low += of_token < 0 and _ratio(r) < bounds[0]
                high += of_token > 0 and _ratio(r) > bounds[1]
    count = len(sampler)
    if not count:
        return TokenEstimates(0, *[math.nan] * 13)
    ratios = list(map(_ratio, logs))
    entropy = -math.fsum(sampler) / count
    mean_log = math.fsum(logs) / count
    squares = math.fsum(ratio * ratio for ratio in ratios)
    return TokenEstimates(
        tokens=count,
        sampler_logprob=-entropy,
        trainer_logprob=mean_log - entropy,
        mean_difference=math.fsum(map(abs, logs)) / count,
        largest_difference=max(map(abs, logs)),
        kl_k1=-mean_log,
        kl_k3=math.fsum(w - 1 - r for w, r in zip(ratios, logs, strict=True)) / count,
        entropy=entropy,
        ratio_mean=math.fsum(ratios) / count,
        ratio_min=min(ratios),
        ratio_max=max(ratios),
        effective_sample_size=math.fsum(ratios) ** 2 / (count * squares),
        clipped_low=low / count,
        clipped_high=high / count,
    )


def _ratio(log_ratio: float) -> float:
    return math.exp(max(-LARGEST_LOG_RATIO, min(LARGEST_LOG_RATIO, log_ratio)))
