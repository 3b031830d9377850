"""Where a stop text ends a completion: its ids end with the token that completes the text.

Servers look for stop texts in the text, some after a step that sampled several tokens (speculative decoding). The ids
of such a step after the stop text belong to nothing that the model or anybody else reads.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from lachesis_client.sampling import Sampling
from lachesis_messages.messages import FinishReason
from lachesis_tokens.engines.base import Generation

Decode = Callable[[Sequence[int]], str]


@dataclass(frozen=True, slots=True)
class StopTexts:
    """The stops of one request.

    `least` tokens come before any stop text counts (vLLM's `min_tokens`; SGLang ends a completion at any). `stop_ids`
    are ids that end a completion in addition to the ends of a turn.
    """

    texts: tuple[str, ...]
    decode: Decode
    least: int = 0
    stop_ids: frozenset[int] = frozenset()

    def __bool__(self) -> bool:
        return bool(self.texts or self.stop_ids)

    @classmethod
    def of(cls, sampling: Sampling, extra_body: Mapping[str, Any], decode: Decode) -> StopTexts:
        """`extra_body` has further fields of the request, from the settings of its server."""
        extra = {**extra_body, **sampling.extra}
        stop_ids = frozenset(extra.get("stop_token_ids") or ())
        return cls(tuple(filter(None, sampling.stop)), decode, int(extra.get("min_tokens") or 0), stop_ids)

    def cut(self, generation: Generation) -> Generation:
        """The completion without the ids after the one that completes the first stop."""
        count = self.end(generation.ids)
        if count is None:
            return generation
        if count == len(generation.ids):
            aborted = generation.finish_reason is FinishReason.ABORT
            return replace(generation, finish_reason=FinishReason.STOP) if aborted else generation
        return replace(
            generation,
            ids=generation.ids[:count],
            logprobs=generation.logprobs[:count],
            versions=tuple((name, first, min(end, count)) for name, first, end in generation.versions if first < count),
            finish_reason=FinishReason.STOP,
        )

    def end(self, ids: Sequence[int]) -> int | None:
        """How many ids there are up to the one that completes the first stop; None without a stop."""
        count = None
        if not self.stop_ids.isdisjoint(ids):
            found = (place for place, token in enumerate(ids, 1) if token in self.stop_ids and place > self.least)
            count = next(found, None)
            ids = ids[:count]
        if not self.texts:
            return count
        before = len(self.decode(ids[: self.least])) if self.least else 0

        def stopped(count: int) -> bool:
            text = self.decode(ids[:count])
            return any(text.find(marker, max(0, before - len(marker) + 1)) >= 0 for marker in self.texts)

        if not stopped(len(ids)):
            return count
        if len(ids) > 1 and not stopped(len(ids) - 1):
            return len(ids)
        low, high = 0, len(ids) - 1
        while high - low > 1:
            middle = (low + high) // 2
            low, high = (low, middle) if stopped(middle) else (middle, high)
        return max(high, 1)


def first_stop(text: str, stop: Sequence[str], start: int = 0) -> int:
    """The offset of the first stop text from `start` on, the length of the text if there is none."""
    found = [at for marker in stop if marker and (at := text.find(marker, start)) >= 0]
    return min(found, default=len(text))


def completed_stop(text: str, stop: Sequence[str], last: int, start: int = 0) -> int:
    """The offset of the first stop text that ends after `last`, the beginning of the last token, and begins at `start`
    or later; the length of the text if there is none."""
    found = (first_stop(text, (marker,), max(start, last - len(marker) + 1)) for marker in stop)
    return min(found, default=len(text))
