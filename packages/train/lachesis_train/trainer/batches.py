"""Batches from a rollout API, each exactly once relative to the weights.

`lachesis api` numbers its batches and keeps each until it is acknowledged: a trainer that goes back to a checkpoint
asks for those after it again. A stock `run-api` forgets a batch with the answer, so batches from there are written to
the run's folder first, numbered in the order of their arrival, and read from there after a restart.
"""

from __future__ import annotations

import asyncio
import contextlib
import math
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Final

import orjson

from backends.errors import LachesisError
from lachesis_train.rollout_api import EXTENSION, ApiDown, ApiRefused, RolloutApi, TrainerRegistration
from lachesis_train.whole_files import write_atomically

POLL: Final = 0.25
"""Seconds between two questions for a batch."""
_LOOK: Final = 2.0
"""Seconds between two looks whether environments are there, while it waits for a batch."""
_PATIENCE: Final = 20.0
"""Seconds in which an acknowledgement has to succeed; a later one contains it."""
_TIMEOUT: Final = 600.0
"""Seconds for an answer: a batch is large."""


class BatchError(LachesisError):
    """The rollout API refuses the trainer."""


@dataclass(frozen=True, slots=True)
class Batch:
    """The groups of one step."""

    id: int
    """From 1, increasing."""
    groups: list[dict[str, Any]]
    queue: int | None = None
    """Groups that wait at the API."""


class BatchSource:
    """The trainer's side of a rollout API.

    Args:
        folder: where batches of a stock API are kept until they are acknowledged.
        end_without_environments: seconds to wait once all environments have left; None: for ever. A stock API does not
            say whether one is there.
        say: called once with what it waits for, and when that is over.
    """

    def __init__(
        self,
        url: str,
        registration: TrainerRegistration,
        folder: Path,
        *,
        token: str | None = None,
        end_without_environments: float | None = None,
        say: Callable[[str], None] = lambda _: None,
    ) -> None:
        self._api = RolloutApi(url, token=token or "", timeout=_TIMEOUT)
        self.url = self._api.url
        self._registration = registration
        self._kept = _KeptBatches(folder)
        self._end_without_environments = end_without_environments
        self._say = say
        self._told = False
        """That it waits for a batch."""
        self.instance: str | None = None
        """The database of the API, whose batch ids are comparable; None for a stock API."""
        self._replaced = False
        """Another API answers at the URL: nothing there is to be acknowledged."""
        self.acknowledged = 0
        """The last batch that a trainer has acknowledged there; 0 for a stock API."""
        self._before = 0
        """Environments that had registered before the trainer did."""
        self._left = math.inf
        """When it was seen that all environments had left, on the clock of `time.monotonic`."""

    async def register(self, step: int) -> None:
        """Wait for the API and register with it.

        Raises:
            BatchError: it is not a rollout API, or it refuses the registration.
        """
        about = await self._object("GET", "/")
        self.instance = str(about.get("instance")) if about.get("message") == EXTENSION else None
        answer = await self._object("POST", "/register", replace(self._registration, starting_step=step))
        if "uuid" not in answer:
            raise BatchError(f"{self.url} is not a rollout API: it answered the registration with {str(answer)[:200]}")
        self.acknowledged = int(answer.get("acknowledged", 0))
        environments = (await self._object("GET", "/status")).get("environments")
        self._before = environments["registered"] - environments["connected"] if environments else 0

    async def next(self, after: int, step: int) -> Batch:
        """The first batch with an id above `after`. Waits for it, and for the API if it is down.

        Args:
            step: what to register with, if the API was restarted.

        Raises:
            BatchError: another API answers there now, or all environments have left.
        """
        if self.instance is None and (kept := self._kept.first(after)) is not None:
            return kept
        path = "/batch" if self.instance is None else f"/batch?after={after}"
        looked = time.monotonic()
        self._left = math.inf
        while True:
            answer = await self._object("GET", path)
            if answer.get("status") == "error":
                self._say("the rollout API was restarted; registering again")
                before = self.instance
                await self.register(step)
                if self.instance != before:
                    self.instance, self._replaced = before, True
                    raise BatchError(
                        f"{self.url} now has a different database, with its own batch numbers: start the same "
                        "command again"
                    )
            elif answer.get("batch"):
                break
            elif not self._told:  # once: after it the steps say that batches come
                self._told = True
                self._say(f"waiting for a batch: {self._registration.batch_size} sequences at {self.url}")
            elif time.monotonic() - looked >= _LOOK:
                looked = time.monotonic()
                await self._look_for_environments(looked)
            await asyncio.sleep(POLL)
        number = after + 1
        if self.instance is not None:
            number = int(answer["batch_id"])
        else:  # the API has forgotten it
            await asyncio.to_thread(self._kept.keep, Batch(number, answer["batch"]))
        status = await self._object("GET", "/status")
        return Batch(number, answer["batch"], status.get("queue_size"))

    async def _look_for_environments(self, now: float) -> None:
        status, limit = await self._object("GET", "/status"), self._end_without_environments
        environments = status.get("environments")
        if limit is None or environments is None or environments["registered"] <= self._before:
            return  # the first one is still to come
        if environments["connected"]:
            if self._left < now:
                self._say("an environment is there again")
            self._left = math.inf
            return
        waiting = f"{status['sequences']} sequences wait, and a batch has {self._registration.batch_size}"
        if self._left == math.inf:
            self._left = now
            self._say(f"all environments have left {self.url}: {waiting}. The run ends in {limit:g} s unless one comes")
        if now - self._left >= limit:
            raise BatchError(
                f"all environments have left {self.url}: {waiting}. To go on, start an environment that has more to "
                "play and the same command again; or lower --training.num_steps "
                "(--training.end_without_environments sets how long the trainer waits)"
            )

    async def acknowledge(self, batch_id: int) -> None:
        """A checkpoint contains everything up to `batch_id`. If the API is down, the next call says so."""
        if self.instance is None:
            await asyncio.to_thread(self._kept.forget, batch_id)
            return
        if self._replaced:
            return
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(_PATIENCE):
                await self._object("POST", "/ack", {"batch_id": batch_id})

    async def close(self) -> None:
        """Close the connection."""
        await self._api.close()

    async def _object(self, method: str, path: str, body: Any = None) -> dict[str, Any]:
        """The answer, a JSON object. Waits while the API is down or busy.

        Raises:
            BatchError: it refuses the request.
        """
        pause, down = POLL, False
        while True:
            try:
                raw = await self._api.ask(method, path, body)
            except ApiRefused as error:
                raise BatchError(str(error)) from error
            except ApiDown as error:
                if not down:
                    down = True
                    self._say(f"waiting for the {error}; start it with `lachesis api`")
                await asyncio.sleep(pause)
                pause = min(5.0, 2 * pause)
                continue
            if down:
                self._say(f"the rollout API at {self.url} answers again")
            return self._parse(path, raw)

    def _parse(self, path: str, raw: bytes) -> dict[str, Any]:
        with contextlib.suppress(orjson.JSONDecodeError):
            answer = orjson.loads(raw)
            if isinstance(answer, dict):
                return answer
        raise BatchError(f"{self.url} is not a rollout API: {path} answered {_text(raw)}; set env.rollout_server_url")


class _KeptBatches:
    """Batches in a folder, one file each, written whole or not at all."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder

    def first(self, after: int) -> Batch | None:
        numbers = [number for number in self._numbers() if number > after]
        if not numbers:
            return None
        return Batch(min(numbers), orjson.loads(self._path(min(numbers)).read_bytes()))

    def keep(self, batch: Batch) -> None:
        self._folder.mkdir(parents=True, exist_ok=True)
        write_atomically(self._path(batch.id), orjson.dumps(batch.groups))

    def forget(self, up_to: int) -> None:
        for number in self._numbers():
            if number <= up_to:
                self._path(number).unlink(missing_ok=True)

    def _numbers(self) -> list[int]:
        return [int(path.stem) for path in self._folder.glob("*.json") if path.stem.isdecimal()]

    def _path(self, number: int) -> Path:
        return self._folder / f"{number}.json"


def _text(raw: bytes) -> str:
    return raw[:300].decode("utf-8", "replace").strip()
