"""Samples as `TrainingSample` of prime-rl, the unit of which its batches are made (its state of 2026-08)."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any, Final

from lachesis_messages.tokens import MASKED
from lachesis_tokens.samples.advantages import LossAverage, token_advantages
from lachesis_tokens.samples.samples import TokenSample
from lachesis_tokens.samples.verification import not_written, verify

FIELDS: Final = (
    *("token_ids", "mask", "logprobs", "temperatures", "env_name", "ref_logprobs", "mm_kwargs", "routed_experts"),
    *("mm_token_type_ids", "rl_weights", "ce_weights", "ref_kl_weights", "advantages"),
)
"""In the order of the wire, where they have no names. Later versions only append."""


def training_samples(
    given: Sequence[tuple[TokenSample, float]], env_name: str, average: LossAverage = LossAverage.SAMPLE
) -> list[dict[str, Any]]:
    """The arguments of `TrainingSample` for samples with the advantages of their rollouts, without discarded attempts.

    prime-rl takes the mean over all trained tokens of a step. `given` are those of a step: with `LossAverage.SAMPLE`
    the weights (`rl_weights`) make it the mean over rollouts of the mean over their tokens, however they split.

    Raises ValueError for a sample that may not be trained, or has what is not written here.
    """
    kept = [(sample, advantage) for sample, advantage in given if not sample.discarded]
    tokens: Counter[str] = Counter()
    for sample, _ in kept:
        tokens[sample.rollout_id] += sample.trained
        if reasons := not_written(sample) or verify(sample):
            raise ValueError(f"sample {sample.index} of rollout {sample.rollout_id}: {'; '.join(reasons)}")
    mean = tokens.total() / len(tokens) if tokens else 0.0
    rows = []
    for sample, advantage in kept:
        trained = [token != MASKED for token in sample.masks]
        temperatures = [1.0] * len(trained)  # prime-rl divides by those of the other tokens too
        for span in sample.spans:
            temperatures[span.start : span.end] = [float(span.sampling["temperature"])] * len(span)
        row: dict[str, Any] = {
            "token_ids": sample.tokens,
            "mask": trained,
            "logprobs": [value if kept else 0.0 for value, kept in zip(sample.logprobs, trained, strict=True)],
            "temperatures": temperatures,
            "env_name": env_name,
            "advantages": token_advantages(sample, advantage),
        }
        if average is LossAverage.SAMPLE:
            row["rl_weights"] = token_advantages(sample, mean / tokens[sample.rollout_id])
        rows.append(row)
    return rows


def encoded(rows: Sequence[Mapping[str, Any]]) -> bytes:
    """The rows as msgpack: what `msgspec` writes and reads for a list of `TrainingSample`."""
    import msgspec

    return msgspec.msgpack.encode([[row.get(name) for name in FIELDS] for row in rows])
