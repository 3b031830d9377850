"""A tiny language model: its next-token distribution depends on every earlier id and can be recomputed.

The formula, for a model with `seed`, `rows` (256, or 32 for a large vocabulary) and vocabulary size V:

* `row = int(digest[:8], 16) % rows`, where `digest` is `TokenPrefix.digest` of all earlier ids,
  prompt and sampled: blake2b with 16 bytes over the little-endian 32-bit ids.
* `logits[id] = 8 * word[id] / 2**32`, where `word` are V little-endian 32-bit words of
  `shake_256(f"{seed}/{row}")`. With a `mean_length`, the end-of-turn ids together have probability
  `1 / mean_length` at temperature 1.
* `logprobs = log_softmax(logits / temperature)`, over the ids that remain after top-k, min-p and top-p, in this order.

So a logprob belongs to one exact prefix: after another prefix it almost surely differs.
"""

from __future__ import annotations

import functools
import math
import sys
from array import array
from bisect import bisect_right
from collections.abc import Collection, Iterable, Sequence
from hashlib import blake2b, shake_256
from itertools import accumulate
from random import Random
from typing import Final, NamedTuple

from lachesis_client.sampling import LogprobsKind, Sampling

_WORD: Final = next(code for code in "IL" if array(code).itemsize == 4)
_CACHED_FLOATS: Final = 2**23
_SPREAD: Final = 8.0
IMPOSSIBLE: Final = -9999.0
"""Logprob of an id that truncation excludes, which only a script can say. vLLM writes minus infinity so."""


class _Distribution(NamedTuple):
    logprobs: array[float]
    cumulative: array[float]
    """Running sums of unnormalised probabilities; the last is their total."""
    likeliest: int


class FakeModel:
    """Next-token distributions by formula (see the module). Deterministic in its arguments, on every machine."""

    def __init__(
        self,
        vocabulary_size: int,
        seed: int = 0,
        *,
        end_ids: Collection[int] = (),
        mean_length: float | None = None,
    ) -> None:
        """`mean_length`: tokens of a completion. None makes end-of-turn ids as likely as any other."""
        if mean_length is not None and not mean_length >= 1:
            raise ValueError(f"mean_length must be 1 or more, got {mean_length!r}")
        self.vocabulary_size = vocabulary_size
        self.seed = seed
        self.end_ids = frozenset(end_ids)
        self.mean_length = mean_length
        # A row of a large vocabulary costs milliseconds and megabytes. Fewer rows still distinguish prefixes.
        self.rows = 256 if vocabulary_size <= 2**13 else 32
        cached = max(self.rows // 4, _CACHED_FLOATS // (2 * vocabulary_size))
        self._distribution = functools.lru_cache(maxsize=cached)(self._compute)

    def logits(self, row: int) -> list[float]:
        """The logits of one row, an entry for each id."""
        words = array(_WORD)
        words.frombytes(shake_256(f"{self.seed}/{row}".encode()).digest(4 * self.vocabulary_size))
        if sys.byteorder == "big":
            words.byteswap()
        scale = _SPREAD / 2**32
        logits = [word * scale for word in words]
        if self.mean_length is not None and self.end_ids:
            others = math.fsum(math.exp(value) for index, value in enumerate(logits) if index not in self.end_ids)
            share = 1.0 / (self.mean_length * len(self.end_ids))
            rest = max(1.0 - 1.0 / self.mean_length, 1e-9)
            for index in self.end_ids:
                logits[index] = math.log(others * share / rest)
        return logits

    def score(
        self, prompt_ids: Iterable[int] | blake2b, ids: Sequence[int], sampling: Sampling, kind: LogprobsKind = "raw"
    ) -> list[float]:
        """The logprob of each of `ids` after `prompt_ids` and the earlier ids."""
        settings = _settings(sampling, kind)
        context, scored = hash_of(prompt_ids), []
        distribution, rows = self._distribution, self.rows
        for index in ids:
            row = int.from_bytes(context.digest()[:4]) % rows
            scored.append(distribution(row, *settings).logprobs[index])
            context.update(index.to_bytes(4, "little"))
        return scored

    def sample(
        self,
        prompt_ids: Iterable[int] | blake2b,
        sampling: Sampling,
        rng: Random,
        *,
        limit: int,
        stop_ids: Collection[int] = (),
        end_with: int | None = None,
        kind: LogprobsKind = "raw",
    ) -> tuple[list[int], list[float]]:
        """Up to `limit` ids and their logprobs. The first of `stop_ids` ends them.

        Without one, `end_with` is appended with its logprob at that position.
        """
        drawn_from, reported = _settings(sampling, "processed"), _settings(sampling, kind)
        greedy, same = sampling.temperature <= 0, drawn_from == reported
        context, ids, logprobs = hash_of(prompt_ids), [], []
        distribution, rows, last = self._distribution, self.rows, self.vocabulary_size - 1
        for _ in range(limit):
            row = int.from_bytes(context.digest()[:4]) % rows
            source = distribution(row, *drawn_from)
            if greedy:
                index = source.likeliest
            else:
                index = min(bisect_right(source.cumulative, rng.random() * source.cumulative[-1]), last)
            ids.append(index)
            logprobs.append((source if same else distribution(row, *reported)).logprobs[index])
            if index in stop_ids:
                return ids, logprobs
            context.update(index.to_bytes(4, "little"))
        if end_with is not None:
            ids.append(end_with)
            logprobs.append(distribution(int.from_bytes(context.digest()[:4]) % rows, *reported).logprobs[end_with])
        return ids, logprobs

    def top(
        self, prompt_ids: Iterable[int], ids: Sequence[int], sampling: Sampling, kind: LogprobsKind, count: int
    ) -> list[list[tuple[int, float]]]:
        """For each position of `ids`, the `count` likeliest ids with their logprobs, likeliest first."""
        settings = _settings(sampling, kind)
        context, found = hash_of(prompt_ids), []
        for index in ids:
            logprobs = self._distribution(int.from_bytes(context.digest()[:4]) % self.rows, *settings).logprobs
            best = sorted(range(len(logprobs)), key=logprobs.__getitem__, reverse=True)[:count]
            found.append([(candidate, logprobs[candidate]) for candidate in best])
            context.update(index.to_bytes(4, "little"))
        return found

    def _compute(self, row: int, temperature: float, top_k: int, top_p: float, min_p: float) -> _Distribution:
        logits = self.logits(row)
        highest = max(logits)
        weights = [math.exp((value - highest) / temperature) for value in logits]
        if top_k > 0 or top_p < 1 or min_p > 0:
            kept = _truncate(weights, top_k, top_p, min_p)
            weights = [weight if index in kept else 0.0 for index, weight in enumerate(weights)]
        total = math.log(math.fsum(weights))
        logprobs = array(
            "d",
            (
                (value - highest) / temperature - total if weight else IMPOSSIBLE
                for value, weight in zip(logits, weights, strict=True)
            ),
        )
        return _Distribution(logprobs, array("d", accumulate(weights)), logits.index(highest))


def _settings(sampling: Sampling, kind: LogprobsKind) -> tuple[float, int, float, float]:
    """Temperature, top_k, top_p and min_p of the distribution of this kind of logprobs."""
    temperature = sampling.temperature if sampling.temperature > 0 and kind != "raw" else 1.0
    if kind != "processed" or sampling.temperature <= 0:
        return temperature, 0, 1.0, 0.0
    return temperature, max(sampling.top_k, 0), sampling.top_p, sampling.min_p


def _truncate(weights: list[float], top_k: int, top_p: float, min_p: float) -> set[int]:
    order = sorted(range(len(weights)), key=weights.__getitem__, reverse=True)
    if top_k > 0:
        order = order[:top_k]
    if min_p > 0:
        least = min_p * weights[order[0]]
        order = [index for index in order if weights[index] >= least]
    if top_p < 1:
        enough, reached = top_p * math.fsum(weights[index] for index in order), 0.0
        for count, index in enumerate(order, 1):
            reached += weights[index]
            if reached >= enough:
                order = order[:count]
                break
    return set(order)


def hash_of(ids: Iterable[int] | blake2b) -> blake2b:
    """The hash of `lachesis_messages.tokens.TokenPrefix.digest`, over little-endian 32-bit words. A hash is copied.

    Raises `ValueError` for invalid ids.
    """
    return ids.copy() if isinstance(ids, blake2b) else blake2b(_packed(ids), digest_size=16)


def hash_after(hashed: blake2b, ids: Iterable[int]) -> blake2b:
    """The hash of the hashed ids and these."""
    longer = hashed.copy()
    longer.update(_packed(ids))
    return longer


def _packed(ids: Iterable[int]) -> array[int]:
    try:
        words = array(_WORD, ids)
    except (OverflowError, TypeError) as error:
        raise ValueError(f"token ids are whole numbers from 0 on: {error}") from None
    if sys.byteorder == "big":
        words.byteswap()
    return words
