"""Compression of one entry to a budget of tokens.

An entry that cannot be compressed, for whatever reason, stays as it was and says so in its `compression_metrics`.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from concurrent.futures import Executor
from dataclasses import asdict, dataclass, field
from functools import partial
from operator import itemgetter
from threading import Event
from typing import Any, Final, NamedTuple, Protocol, TypeVar

from backends.errors import LachesisError
from lachesis_data.compression.conversation import Conversation, UnknownEntry, without_media
from lachesis_data.compression.region import Turn, choose_region, protected
from lachesis_data.compression.settings import CompressionFileSettings
from lachesis_data.compression.summary import Passage, SummaryAnswer, SummaryFailed
from lachesis_messages.errors import MessageError

T = TypeVar("T")
NOT_VALID = "not a valid conversation"
MARK: Final = "compression_metrics"
"""The field of an entry that says what compression did."""
_ATTEMPTS: Final = 2
"""Summaries of one entry at most: where one is longer than it should be, a longer region is tried."""
_CORRECTIONS: Final = 16
_NONE: Final = range(-1, -1)

_Count = Callable[[Conversation], int]
Summarizer = Callable[[Sequence[Passage]], Awaitable[SummaryAnswer]]
"""Raises SummaryFailed."""


class TokenCounter(Protocol):
    """Tokens of the model that is trained."""

    def conversation(
        self, messages: Sequence[dict[str, Any]], tools: Sequence[dict[str, Any]], stopped: Callable[[], bool]
    ) -> int:
        """Those of a whole conversation, as the chat template renders it. Raises LachesisError where it cannot, and
        TimeoutError soon after `stopped` says yes."""
        ...

    def text(self, text: str) -> int:
        """Those of a text."""
        ...


@dataclass(slots=True)
class EntryMetrics:
    """The metrics of an entry's compression, under the names of the removed implementation."""

    original_tokens: int = 0
    compressed_tokens: int = 0
    tokens_saved: int = 0
    compression_ratio: float = 1.0
    """Tokens that are left, as a share."""
    original_turns: int = 0
    compressed_turns: int = 0
    turns_removed: int = 0
    compression_region: dict[str, int] = field(default_factory=dict)
    """The replaced turns: the index of the first, the index after the last, and how many."""
    was_compressed: bool = False
    still_over_limit: bool = False
    skipped_under_target: bool = False
    summarization_api_calls: int = 0
    summarization_errors: int = 0
    target_max_tokens: int = 0
    protected_tokens: int = 0
    """Those of the turns that no summary may replace, and of what the chat template writes around all of them."""
    uncounted_parts: int = 0
    """Images and other parts whose tokens are not in the counts."""
    error: str | None = None
    """Why the entry stayed as it was."""

    def set_result(self, region: range, tokens: int) -> None:
        """Note the replaced turns, of which there may be none, and the tokens that the entry has now."""
        self.was_compressed = bool(region)
        self.compression_region = {"start_idx": region.start, "end_idx": region.stop, "turns_count": len(region)}
        self.compressed_tokens, self.tokens_saved = tokens, self.original_tokens - tokens
        self.turns_removed = len(region) - bool(region)
        self.compressed_turns = self.original_turns - self.turns_removed
        self.compression_ratio = round(tokens / self.original_tokens, 4) if self.original_tokens else 1.0
        self.still_over_limit = tokens > self.target_max_tokens


class Compressed(NamedTuple):
    """An entry after compression."""

    entry: Any
    metrics: dict[str, Any]


class Compressor:
    """Compresses entries, several at once.

    Args:
        summarize: writes summaries. None: only say what would be compressed, with an estimate of the result.
        executor: where tokens are counted, away from the event loop.
    """

    def __init__(
        self,
        settings: CompressionFileSettings,
        counter: TokenCounter,
        summarize: Summarizer | None,
        executor: Executor | None = None,
    ) -> None:
        self._settings, self._counter, self._summarize = settings, counter, summarize
        self._executor = executor

    async def compress(self, entry: Any) -> Compressed:
        """The compressed entry, or the same with the reason why it is not compressed."""
        metrics = EntryMetrics(target_max_tokens=self._settings.compression.target_max_tokens)
        timeout, found, stop = self._settings.processing.per_trajectory_timeout, None, Event()
        try:
            async with asyncio.timeout(timeout):
                found = await self._compress(entry, metrics, partial(self._count, stop.is_set))
        except TimeoutError:
            metrics.error = f"not finished within {timeout:g} s (processing.per_trajectory_timeout)"
        except SummaryFailed as error:
            metrics.summarization_api_calls += error.api_calls
            metrics.summarization_errors += 1
            metrics.error = f"summary: {error}"
        except (UnknownEntry, MessageError) as error:
            metrics.error = f"{NOT_VALID}: {error}"
        except _Uncountable as error:
            metrics.error = str(error)
        finally:
            stop.set()  # a thread that still counts ends
        if isinstance(found, Compressed):
            return found
        if metrics.error is not None:
            metrics.set_result(_NONE, metrics.original_tokens)
        # The template's share of the turns that went is counted above.
        metrics.protected_tokens = min(metrics.protected_tokens, metrics.compressed_tokens)
        said = asdict(metrics)
        if not isinstance(entry, dict):
            return Compressed(entry, said)
        return Compressed({**(entry if found is None else found.entry), MARK: said}, said)

    async def _compress(self, entry: Any, metrics: EntryMetrics, count: _Count) -> Conversation | Compressed | None:
        target = metrics.target_max_tokens
        conversation = await self._in_thread(Conversation.read, entry)
        whole, turns = await self._in_thread(_measure, conversation, count)
        metrics.original_tokens, metrics.original_turns = whole, len(turns)
        kept = protected(turns, self._settings.protected_turns)
        metrics.protected_tokens = whole - sum(turn.tokens for at, turn in enumerate(turns) if at not in kept)
        metrics.uncounted_parts = conversation.uncounted_parts
        metrics.set_result(_NONE, whole)
        if (done := _earlier(entry, metrics)) is not None:
            return done
        if whole <= target and self._settings.processing.skip_under_target:
            metrics.skipped_under_target = True
            return None
        found = await self._in_thread(self._fitting, conversation, turns, whole, "", count)
        if found is None:
            return None
        region, left = found
        if self._summarize is None:
            metrics.set_result(region, left)
            return None
        roles, texts = conversation.roles, conversation.texts
        for _ in range(_ATTEMPTS):
            summary = await self._summarize([Passage(roles[index], texts[index]) for index in region])
            metrics.summarization_api_calls += summary.api_calls
            compressed, tokens = await self._in_thread(self._replace, conversation, region, summary.text, count)
            if tokens >= whole:
                raise SummaryFailed("the summary makes the entry no shorter", 0)
            metrics.set_result(region, tokens)
            if tokens <= target:
                break
            wider = await self._in_thread(self._fitting, conversation, turns, whole, summary.text, count)
            if wider is None or wider[0] == region:
                break
            region = wider[0]
        return compressed

    def _fitting(
        self, conversation: Conversation, turns: Sequence[Turn], whole: int, summary: str, count: _Count
    ) -> tuple[range, int] | None:
        """The shortest region that leaves the entry short enough with a summary like `summary`, or as the settings say,
        and the tokens that are left then. If none does, the one that leaves least.

        The counts of turns are estimates, so the region is corrected, to both sides, by counts of the whole.
        """
        budget = self._settings.compression
        target = budget.target_max_tokens if whole > budget.target_max_tokens else 0
        reserve = 0 if summary else budget.summary_target_tokens
        goal = target - (whole - sum(turn.tokens for turn in turns))  # the template writes headers and tools too
        left: dict[range, int] = {}
        for correction in range(_CORRECTIONS):
            region = choose_region(turns, self._settings, goal)
            if region is None or (region in left and min(left.values()) <= target):
                break
            seen = region in left
            if not seen:
                compressed = conversation.with_summary(region, summary, self._notice)
                left[region] = count(compressed) + reserve
            # The last correction may have been too small for one more turn.
            goal -= (left[region] - target) << (correction if seen else 0)
        fitting = {region: tokens for region, tokens in left.items() if tokens <= target}
        found = max(fitting.items(), key=_tokens) if fitting else min(left.items(), key=_tokens, default=None)
        return found if found is not None and found[1] < whole else None

    def _count(self, stopped: Callable[[], bool], conversation: Conversation) -> int:
        messages, tools = [without_media(message) for message in conversation.messages], conversation.tools
        try:
            return self._counter.conversation(messages, tools, stopped)
        except (LachesisError, ValueError, TypeError, LookupError) as error:  # tool definitions of any shape
            raise _Uncountable(f"its tokens cannot be counted: {error}") from error

    def _replace(
        self, conversation: Conversation, region: range, summary: str, count: _Count
    ) -> tuple[Conversation, int]:
        """The compressed conversation and its tokens."""
        longest = 2 * self._settings.compression.summary_target_tokens
        if not summary.strip():
            raise SummaryFailed("it is empty", 0)
        if (length := self._counter.text(summary)) > longest:
            raise SummaryFailed(f"it has {length} tokens, more than {longest}", 0)
        compressed = conversation.with_summary(region, summary, self._notice)
        compressed.validate()
        return compressed, count(compressed)

    @property
    def _notice(self) -> str:
        output = self._settings.output
        return output.summary_notice_text if output.add_summary_notice else ""

    async def _in_thread(self, call: Callable[..., T], *args: Any) -> T:
        return await asyncio.get_running_loop().run_in_executor(self._executor, partial(call, *args))


_tokens = itemgetter(1)


def _measure(conversation: Conversation, count: _Count) -> tuple[int, list[Turn]]:
    """The tokens of the whole, and the turns with an estimate of theirs: a share of it by length."""
    whole, lengths = count(conversation), [len(text) for text in conversation.texts]
    characters = max(1, sum(lengths))
    return whole, conversation.turns([length * whole // characters for length in lengths])


class _Uncountable(Exception):
    """The chat template rejects the conversation."""


def _earlier(entry: dict[str, Any], metrics: EntryMetrics) -> Compressed | None:
    """The entry, if an earlier compression to the same budget left it like this without an error."""
    mark = entry.get(MARK)
    if not isinstance(mark, dict) or mark.get("error") is not None or not mark.get("was_compressed"):
        return None
    same = ("target_max_tokens", metrics.target_max_tokens), ("compressed_tokens", metrics.original_tokens)
    return Compressed(entry, mark) if all(mark.get(name) == value for name, value in same) else None
