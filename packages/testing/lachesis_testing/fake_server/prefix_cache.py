"""The prefix caches of a server, one for each data-parallel rank, and the time that prefill takes."""

from __future__ import annotations

import asyncio
from collections import OrderedDict
from collections.abc import Iterator, Sequence
from typing import Final

BLOCK: Final = 16
"""Tokens that are cached together: vLLM's default block."""


class PrefixCache:
    """Blocks of tokens, each known by all tokens up to its end. The least recently used ones make room."""

    def __init__(self, tokens: int) -> None:
        self._capacity = tokens // BLOCK
        self._blocks: OrderedDict[int, None] = OrderedDict()

    def cached(self, ids: Sequence[int]) -> int:
        """Tokens of the prompt that need not be computed: whole blocks, and never its last token."""
        count = 0
        for block in _blocks(ids[:-1]):
            if block not in self._blocks:
                break
            self._blocks.move_to_end(block)
            count += BLOCK
        return count

    def add(self, ids: Sequence[int]) -> None:
        """These tokens were computed."""
        # The end first: of a chain, its beginning stays longest.
        for block in reversed(list(_blocks(ids))):
            self._blocks[block] = None
            self._blocks.move_to_end(block)
        while len(self._blocks) > self._capacity:
            self._blocks.popitem(last=False)

    def clear(self) -> None:
        self._blocks.clear()


class Ranks:
    """The data-parallel ranks of a server.

    Args:
        count: ranks.
        cache_tokens: the size of the cache of each; 0 caches nothing.
        prefill_tokens_per_second: uncached tokens that one rank computes, one request after the other. None takes no
            time.
    """

    def __init__(self, count: int, cache_tokens: int, prefill_tokens_per_second: float | None) -> None:
        self.caches = [PrefixCache(cache_tokens) for _ in range(count)]
        self._lanes = [asyncio.Lock() for _ in range(count)]
        self._speed = prefill_tokens_per_second
        self._next = 0

    def choose(self, named: object) -> int:
        """The rank that a request names, or the next in turn. Raises `ValueError` for one that does not exist."""
        if named is None:
            self._next += 1
            return self._next % len(self.caches)
        rank = int(named) if isinstance(named, (str, int)) else -1
        if not 0 <= rank < len(self.caches):
            raise ValueError(f"data_parallel_rank {named} is out of range [0, {len(self.caches)}).")
        return rank

    async def prefill(self, rank: int, prompt: Sequence[int]) -> int:
        """Compute a prompt, in turn; returns the tokens that were cached."""
        cache = self.caches[rank]
        async with self._lanes[rank]:
            cached = cache.cached(prompt)
            if self._speed is not None:
                await asyncio.sleep((len(prompt) - cached) / self._speed)
            cache.add(prompt)
        return cached


def _blocks(ids: Sequence[int]) -> Iterator[int]:
    digest = 0
    for start in range(0, len(ids) - BLOCK + 1, BLOCK):
        digest = hash((digest, *ids[start : start + BLOCK]))
        yield digest
