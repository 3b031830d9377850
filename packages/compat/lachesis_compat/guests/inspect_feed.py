"""Adds samples to an eval of Inspect that is running. Inspect runs one eval at a time in a process."""

from __future__ import annotations

import asyncio
import contextvars
import logging
from collections import Counter
from typing import TYPE_CHECKING, Any

from lachesis_compat.guests.guest_env import GuestFailed

if TYPE_CHECKING:
    from lachesis_tokens.endpoint import Recording

log = logging.getLogger(__name__)


class Feed:
    """Rollouts go in, and come back when Inspect has scored them. `source` is the dataset of the eval's task."""

    evaluation: asyncio.Task[None]
    """The eval. Nothing is added after its end."""

    def __init__(self) -> None:
        loop = asyncio.get_running_loop()
        self._context: asyncio.Future[contextvars.Context] = loop.create_future()
        """Of the eval's task: Inspect accepts samples from there only."""
        self._played: dict[tuple[str, int], tuple[Recording, asyncio.Future[Any]]] = {}
        """By sample and epoch. Each rollout of a sample is an epoch of it."""
        self._epochs: Counter[str] = Counter()
        self._in_flight: set[tuple[str, int]] = set()
        self._wake = asyncio.Event()
        self._ended = False

    async def play(self, sample: Any, recording: Recording) -> Any:
        """The `EvalSample`. Raises `GuestFailed` if the eval has ended."""
        from inspect_ai import enqueue_sample

        await asyncio.wait([self._context, self.evaluation], return_when=asyncio.FIRST_COMPLETED)  # type: ignore[type-var]
        if self.evaluation.done():
            raise self._no_eval()
        self._epochs[str(sample.id)] += 1
        key = (str(sample.id), self._epochs[str(sample.id)])
        done = asyncio.get_running_loop().create_future()
        self._played[key] = recording, done
        self._in_flight.add(key)
        try:
            self._context.result().run(enqueue_sample, sample, epoch=key[1])
            self._wake.set()
            await asyncio.wait([done, self.evaluation], return_when=asyncio.FIRST_COMPLETED)
            if not done.done():
                raise self._no_eval()
            return done.result()
        finally:
            del self._played[key]

    def recording_of(self, sample_id: Any, epoch: int) -> Recording | None:
        """Of a sample that runs; None if nobody waits for it any more."""
        recording, _ = self._played.get((str(sample_id), epoch), (None, None))
        return recording

    def source(self) -> Any:
        """An `inspect_ai.SampleSource`."""
        from inspect_ai import SampleSource

        feed = self

        class Source(SampleSource):  # type: ignore[misc]
            async def next_samples(self) -> list[Any] | None:
                """Called while no sample runs; those that were added meanwhile run when it returns."""
                if not feed._context.done():
                    feed._context.set_result(contextvars.copy_context())
                await feed._wake.wait()
                feed._wake.clear()
                return None if feed._ended else []

            async def sample_complete(self, sample: Any) -> None:
                feed._complete(sample.id, sample.epoch, sample)

            async def sample_abandoned(self, sample: Any, epoch: int) -> None:
                feed._complete(sample.id, epoch, None)

        return Source()

    async def end(self) -> None:
        """End the eval. Samples that still run are cancelled."""
        self._ended = True
        self._wake.set()
        if self._in_flight or not self._context.done():
            self.evaluation.cancel()
        await asyncio.wait([self.evaluation])
        if not self.evaluation.cancelled() and (error := self.evaluation.exception()) is not None:
            log.warning("Inspect's eval ended with %s: %s", type(error).__name__, str(error).partition("\n")[0])

    def _complete(self, sample_id: Any, epoch: int, sample: Any) -> None:
        key = (str(sample_id), epoch)
        self._in_flight.discard(key)
        if key in self._played:
            _, done = self._played[key]
            if sample is None:
                done.set_exception(GuestFailed("the sample was cancelled before it began"))
            else:
                done.set_result(sample)

    def _no_eval(self) -> GuestFailed:
        error = None if self.evaluation.cancelled() else self.evaluation.exception()
        if isinstance(error, GuestFailed):  # it has Inspect's own words
            return GuestFailed(str(error))
        failed = GuestFailed(f"Inspect's eval has ended{f': {type(error).__name__}: {error}' if error else ''}")
        failed.__cause__ = error
        return failed
