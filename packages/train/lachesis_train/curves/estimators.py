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

import numpy as np

LARGEST_LOG_RATIO = 20.0
"""Log ratios are cut to this before they are exponentiated, in figures and in losses: one token must not turn any of
these into infinity."""


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
    parts = [tuple(np.asarray(each, np.float64) for each in sample) for sample in samples]
    for of_sampler, of_trainer, _ in parts:
        if len(of_sampler) != len(of_trainer):
            raise ValueError(f"{len(of_sampler)} logprobs of the sampler, {len(of_trainer)} of the trainer")
    if not sum(len(of_sampler) for of_sampler, _, _ in parts):
        return TokenEstimates(0, *[math.nan] * 13)
    sampler, trainer = (np.concatenate([part[at] for part in parts]) for at in (0, 1))
    advantages = np.concatenate([np.broadcast_to(advantage, len(of_sampler)) for of_sampler, _, advantage in parts])
    logs = trainer - sampler
    ratios = np.exp(logs.clip(-LARGEST_LOG_RATIO, LARGEST_LOG_RATIO))
    low, high = bounds or (0.0, math.inf)
    return TokenEstimates(
        tokens=len(logs),
        sampler_logprob=float(sampler.mean()),
        trainer_logprob=float(trainer.mean()),
        mean_difference=float(abs(logs).mean()),
        largest_difference=float(abs(logs).max()),
        kl_k1=float(-logs.mean()),
        kl_k3=float((ratios - 1 - logs).mean()),
        entropy=float(-sampler.mean()),
        ratio_mean=float(ratios.mean()),
        ratio_min=float(ratios.min()),
        ratio_max=float(ratios.max()),
        effective_sample_size=float(ratios.sum() ** 2 / (len(ratios) * (ratios**2).sum())),
        clipped_low=float(((advantages < 0) & (ratios < low)).mean()),
        clipped_high=float(((advantages > 0) & (ratios > high)).mean()),
    )
