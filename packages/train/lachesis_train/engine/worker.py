"""The one thread that uses the model: jobs in their order, and between two sampled tokens."""

from __future__ import annotations

import logging
import threading
from collections import deque
from collections.abc import Callable
from concurrent.futures import Future
from typing import Any, Final

from lachesis_train.engine.errors import RequestError
from lachesis_train.engine.model import Model
from lachesis_train.engine.prefixes import KeptPrefixes
from lachesis_train.engine.sampling import SamplingBatch, SamplingTask
from lachesis_train.engine.versions import Versions

STEPS_AT_ONCE: Final = 16
"""Tokens that a batch gets before another version's batch has its turn."""
MAX_WAITING: Final = 4096
"""Sampling requests that wait; the server answers 429 above it."""
log = logging.getLogger(__name__)


class EngineWorker:
    """Runs jobs (training, saving) before sampling: they are few, and a trainer waits for them."""

    def __init__(self, model: Model, versions: Versions) -> None:
        self.model = model
        self.versions = versions
        self._jobs: deque[tuple[Callable[[], Any], Future[Any]]] = deque()
        self._waiting: dict[str | None, deque[SamplingTask]] = {}
        self._batches: dict[str | None, SamplingBatch] = {}
        self._prefixes = KeptPrefixes()
        self._changed = threading.Condition()
        self._closed = False
        self._thread = threading.Thread(target=self._run, name="engine", daemon=True)

    def start(self) -> None:
        """Begin to work."""
        self._thread.start()

    def close(self) -> None:
        """End after the job or token that is being computed. What waits fails."""
        with self._changed:
            self._closed = True
            self._changed.notify()
        self._thread.join()

    @property
    def waiting(self) -> int:
        """Sampling requests that have not begun."""
        return sum(map(len, list(self._waiting.values())))

    @property
    def running(self) -> int:
        """Sequences that are being sampled."""
        return sum(len(batch.rows) for batch in list(self._batches.values()))

    def samples(self, version: str | None) -> bool:
        """Whether requests for these weights wait or are being answered."""
        with self._changed:
            return version in self._waiting or version in self._batches

    def run(self, job: Callable[[], Any]) -> Future[Any]:
        """Run a function on the thread of the model."""
        future: Future[Any] = Future()
        with self._changed:
            self._jobs.append((job, future))
            self._changed.notify()
        return future

    def sample(self, version: str | None, request: SamplingTask) -> None:
        """Sample from a version of the weights; None is the base model."""
        with self._changed:
            self._waiting.setdefault(version, deque()).append(request)
            self._changed.notify()

    def _run(self) -> None:
        while True:
            with self._changed:
                self._changed.wait_for(lambda: self._closed or self._jobs or self._waiting or self._batches)
                if self._closed:
                    break
                job = self._jobs.popleft() if self._jobs else None
            if job is not None:
                self._prefixes.clear()  # training needs the memory, and new weights come after it
                _finish(*job)
                continue
            for version in [*self._batches, *(set(self._waiting) - set(self._batches))]:
                self._advance(version)
        closed = RequestError("the engine is shutting down")
        for _, future in self._jobs:
            future.set_exception(closed)
        for request in self._all_requests():
            request.done(closed)

    def _all_requests(self) -> list[SamplingTask]:
        running = {id(row.request): row.request for batch in self._batches.values() for row in batch.rows}
        return [*running.values(), *(request for queue in self._waiting.values() for request in queue)]

    def _advance(self, version: str | None) -> None:
        batch = self._batches.setdefault(version, SamplingBatch(self.model, version, self._prefixes))
        new: list[SamplingTask] = []
        usable = False
        try:
            self.versions.use(version)
            usable = True
            for _ in range(STEPS_AT_ONCE):
                new = self._admitted(version, batch)
                if new:
                    batch.add(new)
                new = []
                if not batch.rows or self._closed or self._jobs:
                    break
                batch.step()
        except Exception as error:
            if not isinstance(error, RequestError):
                log.exception("sampling failed")
            failed = {id(request): request for request in (*new, *(row.request for row in batch.rows))}
            with self._changed:
                if not usable or isinstance(error, RequestError):  # those that wait would fail in the same way
                    failed |= {id(request): request for request in self._waiting.pop(version, ())}
            self._batches.pop(version)
            for request in failed.values():
                request.done(error)
            return
        if not batch.rows:
            self._batches.pop(version)

    def _admitted(self, version: str | None, batch: SamplingBatch) -> list[SamplingTask]:
        """Waiting requests that fit into the batch."""
        admitted: list[SamplingTask] = []
        with self._changed:
            queue = self._waiting.get(version)
            while queue and batch.room([*admitted, queue[0]]):
                request = queue.popleft()
                if not request.cancelled:
                    admitted.append(request)
            if queue is not None and not queue:
                del self._waiting[version]
        return admitted


def _finish(job: Callable[[], Any], future: Future[Any]) -> None:
    try:
        future.set_result(job())
    except Exception as error:
        if not isinstance(error, RequestError):
            log.exception("a job failed")
        future.set_exception(error)
