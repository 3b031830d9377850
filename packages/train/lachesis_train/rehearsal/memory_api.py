"""The outbox and the rollout API of a rehearsal: what the real ones decide, without a disk and a wire."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, TypeVar

from lachesis.runs.registration import Registration, TrainerInfo
from lachesis_train.outbox import Outbox
from lachesis_train.outbox_state import Entry, KnownApi
from lachesis_train.rollout_api import ApiIdentity, EnvDescription, EnvStatus, RolloutApi

T = TypeVar("T")


class MemoryOutbox(Outbox):
    """Keeps the state of groups as the outbox does, and their contents by id, in memory only."""

    def __init__(self, folder: Path) -> None:
        super().__init__(folder, {})
        self.contents: dict[str, Mapping[str, Any]] = {}

    async def open(self) -> None:
        """Nothing to open."""

    async def close(self) -> None:
        """Nothing to close."""

    async def run(self, function: Callable[..., T], *args: Any) -> T:
        return function(*args)

    async def body(self, entry: Entry, env_id: int) -> bytes:
        return entry.group_id.encode()

    async def _save(
        self,
        *entries: Entry,
        known: KnownApi | None = None,
        payload: Mapping[str, Any] | None = None,
        flush: bool = True,
    ) -> None:
        if payload is not None:
            self.contents[entries[0].group_id] = payload
        for entry in entries:
            self.state.put(entry)
        self.state.known = known or self.state.known


class MemoryApi(RolloutApi):
    """Answers as `lachesis api` does to one trainer and one environment whose groups all have `group_size` sequences.

    Args:
        batch_size: sequences of a batch.
    """

    def __init__(self, outbox: MemoryOutbox, trainer: TrainerInfo, *, group_size: int, num_steps: int) -> None:
        super().__init__("http://rehearsal")
        self.outbox, self.trainer, self.group_size, self.num_steps = outbox, trainer, group_size, num_steps
        self.queue: list[str] = []
        self.step = 0

    def batch(self) -> list[Mapping[str, Any]] | None:
        """The next batch for the trainer; None while too few groups wait. A group is never divided."""
        needed = self.trainer.batch_size // self.group_size
        if len(self.queue) < needed:
            return None
        taken, self.queue = self.queue[:needed], self.queue[needed:]
        self.step += 1
        return [self.outbox.contents.pop(group_id) for group_id in taken]

    async def identify(self) -> ApiIdentity:
        self.identity = ApiIdentity(instance="rehearsal")
        return self.identity

    async def info(self) -> TrainerInfo | None:
        return self.trainer

    async def register(self, env: EnvDescription) -> Registration | None:
        return Registration(env_id=0, starting_step=0, num_steps=self.num_steps)

    async def status_env(self, env_id: int) -> EnvStatus:
        groups = len(self.queue)
        sequences = groups * self.group_size
        return EnvStatus(self.step, groups, groups, 1.0, 1.0, frozenset(self.queue), sequences)

    async def send(self, body: bytes, *, connection: int) -> int:
        self.queue.append(body.decode())
        return 0

    async def disconnect(self, env_id: int, *, connection: int) -> None:
        """Nobody is told."""
