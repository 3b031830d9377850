"""Which batch a trainer gets, and when one is formed.

A trainer that acknowledges has leases on batches, and names the batch that its weights contain. One of the stock kind
cannot: its request for a batch says that it has what was sent to it completely.
"""

from __future__ import annotations

import asyncio
import time
from collections import Counter
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import asynccontextmanager
from typing import Final

from lachesis_train.api.packing import Sized, pack
from lachesis_train.api.requests import RequestRefused
from lachesis_train.api.settings import ApiSettings
from lachesis_train.api.state import ApiState, Group, PendingBatch
from lachesis_train.api.store import Store, StoreError
from lachesis_train.api.wire import own_sequences
from lachesis_train.rollout_api import TrainerRegistration

MOST_PASSED: Final = 64
"""Batches without the group that is the oldest of the queue: then it goes before all shares. So a group with k older
ones is in one of the next 65 * (k + 1) batches."""


class Dispatcher:
    """Forms batches and hands them out.

    Args:
        counts: `batches` is counted.
    """

    def __init__(self, store: Store, settings: ApiSettings, counts: Counter[str]) -> None:
        self.store = store
        self.settings = settings
        self.counts = counts
        self.lock = asyncio.Lock()
        """Of what changes registrations and batches."""
        self.room = asyncio.Event()
        """Set when there may be room for a group."""
        self.trainers: dict[str, float] = {}
        """When each was heard last, by the name that it gives."""
        self.environments: dict[int, float] = {}
        """When each was heard last."""
        self._since = 0.0
        """When the store was opened or reset."""
        self._behind: dict[int, float] = {}
        """Sequences that an environment has had less of than its share; more, if negative. No group is divided."""
        self._passed = 0
        """Batches since the oldest group of the queue became that: none of them has it."""
        self._no_fit_since: float | None = None
        self._starved = False
        """The trainer has asked for a batch, and there were too few groups."""
        self._sending: set[int] = set()
        """Batches that are being sent to trainers that cannot acknowledge."""

    @property
    def state(self) -> ApiState:
        return self.store.state

    def restarted(self) -> None:
        """The store was opened or reset: times are counted from now."""
        now = self._since = time.monotonic()
        self.trainers = {batch.holder: now for batch in self.state.batches.values() if batch.holder is not None}
        self.environments = {env.env_id: now for env in self.state.environments}
        self._passed, self._no_fit_since, self._starved = 0, None, False
        self._behind.clear()
        self._sending.clear()
        self.room.set()

    async def register(self, trainer: TrainerRegistration) -> None:
        """A trainer begins, anew or at all."""
        async with self.lock:
            state = self.state
            if not trainer.acknowledges and trainer.starting_step >= state.step:
                # Its weights contain what it was given.
                await self.store.acknowledge([batch for batch in state.batches.values() if batch.given])
            for batch in state.batches.values():
                await self.store.mark_given(batch, False)  # a stock trainer that begins anew gets it again
            await self.store.set_trainer(trainer, first_step=trainer.starting_step - state.acknowledged)
            self._sending.clear()
        self.room.set()

    async def leased(self, trainer: TrainerRegistration, name: str, after: int | None) -> PendingBatch | None:
        """The first batch with an id above `after`, from now on that of the trainer with this name."""
        async with self.lock:
            await self._asked(trainer, name, after)
            if (batch := self._first_for(name, after) or await self._form(trainer)) is not None:
                await self.store.hand_out(batch, name)
        return batch

    @asynccontextmanager
    async def given(self, trainer: TrainerRegistration, name: str) -> AsyncIterator[PendingBatch | None]:
        """The next batch for a trainer of the stock kind, to be sent inside `async with`."""
        async with self.lock:
            await self._asked(trainer, name, None)
            registrations = self.state.registrations
            await self._acknowledge([batch for batch in self.state.batches.values() if batch.given])
            left = (batch for batch in self.state.batches.values() if batch.id not in self._sending)
            if (batch := next(left, None) or await self._form(trainer)) is not None:
                self._sending.add(batch.id)
        if batch is None:
            yield None
            return
        try:
            yield batch
            async with self.lock:  # not reached if the connection broke
                if registrations == self.state.registrations:
                    try:
                        await self.store.mark_given(batch, True)
                    except StoreError:
                        batch.given = True  # it was sent, whether the disk knows or not
        finally:
            if registrations == self.state.registrations:
                self._sending.discard(batch.id)

    async def acknowledge(self, last: int, name: str) -> None:
        """The trainer with this name needs its batches up to `last` no more; one without a name means all."""
        async with self.lock:
            self.trainers[name] = time.monotonic()
            if last > self.state.last_batch:
                raise RequestRefused(409, f"no batch {last} was ever formed here; the last is {self.state.last_batch}")
            batches = [batch for batch in self.state.batches.values() if batch.id <= last]
            await self._acknowledge([batch for batch in batches if not name or batch.holder == name])

    def is_full(self) -> bool:
        """Whether groups have to wait until batches are acknowledged. Not while the trainer waits for groups."""
        state = self.state
        if state.stored < self.settings.most_stored:
            return False
        enough = state.trainer is None or state.waiting_sequences >= state.trainer.batch_size
        return enough or not self._starved

    async def _acknowledge(self, batches: Sequence[PendingBatch]) -> None:
        await self.store.acknowledge(batches)
        self.room.set()

    async def _asked(self, trainer: TrainerRegistration, name: str, after: int | None) -> None:
        """A trainer asks for a batch. After its registration, its first step follows the batch that it contains."""
        self.trainers[name] = time.monotonic()
        if not self.state.begun:
            contained = self.state.acknowledged if after is None else after
            await self.store.begin(first_step=trainer.starting_step - contained)

    def _first_for(self, name: str, after: int | None) -> PendingBatch | None:
        state = self.state
        gone = state.acknowledged_by.get(name, 0) if name else state.acknowledged
        if after is not None and after > state.last_batch:
            raise RequestRefused(
                409,
                f"no batch {after} was ever formed here, the last one is {state.last_batch}: this is another database "
                f"({state.instance}) than the one that the checkpoint belongs to, or it was reset",
            )
        if after is not None and after < gone:
            raise RequestRefused(
                410,
                f"the batches up to {gone} were acknowledged and are gone, some after {after} among them; resume from "
                f"a checkpoint that contains batch {gone}",
            )
        for batch in state.batches.values():
            if batch.id > (after or 0) and (batch.holder in (None, name) or self._is_silent(batch.holder)):
                return batch
        return None

    def _is_silent(self, trainer: str | None) -> bool:
        return time.monotonic() - self.trainers.get(trainer or "", 0.0) > self.settings.lease

    async def _form(self, trainer: TrainerRegistration) -> PendingBatch | None:
        """The next batch, if there are groups for one."""
        now, size = time.monotonic(), trainer.batch_size
        names = {env.desired_name for env in self.state.environments}
        if len(names) < self.settings.environments and now - self._since < self.settings.silent_env:
            return None  # the first batches would be of those that start faster, whatever their shares
        waiting = list(self.state.waiting.values())
        owned = self._owned(waiting)
        shares, least = self._due(size, owned)
        first = bool(owned) and self._goes_first(owned[0], shares, size)
        chosen = pack(owned, size, least, oldest_first=first)
        if chosen is None and (fitting := pack(owned, size, least, exact=False, oldest_first=first)) is not None:
            self._no_fit_since = self._no_fit_since or now
            if now - self._no_fit_since < self.settings.pack_wait:
                return None
            chosen = fitting
        self._no_fit_since, self._starved = None, chosen is None
        if chosen is None:
            self.room.set()
            return None
        batch = await self.store.form([waiting[at] for at in chosen])
        self._passed = self._passed + 1 if chosen[0] else 0
        self._settle(shares, [owned[at] for at in chosen], size)
        self.counts["batches"] += 1
        return batch

    def _owned(self, groups: Sequence[Group]) -> list[Sized]:
        """The groups, those of an environment that has left as of the one that has its name now: it was restarted."""
        environments = self.state.environments
        now = {env.desired_name: env.env_id for env in environments if env.connected}
        heir = {env.env_id: now.get(env.desired_name, env.env_id) for env in environments if not env.connected}
        return [
            Sized(group.sequences, None if group.env_id is None else heir.get(group.env_id, group.env_id))
            for group in groups
        ]

    def _due(self, batch_size: int, queue: Sequence[Sized]) -> tuple[Mapping[int, float], dict[int, int]]:
        """Sequences of a batch that are the share of each environment, and those that the next batch has to have of it,
        first of the one that is most behind. No batch waits for one that may be dead, nor for more than a share of
        one."""
        if self.state.stored >= self.settings.most_stored:
            return {}, {}  # there may be no room for the groups that it would wait for
        queued: Counter[int | None] = Counter()
        for group in queue:
            queued[group.env_id] += group.sequences
        now = time.monotonic()
        silent = {
            env.env_id
            for env in self.state.environments
            if now - self.environments.get(env.env_id, 0.0) >= self.settings.silent_env
        }
        known = [env for env in self.state.environments if env.env_id not in silent or queued[env.env_id]]
        shares = own_sequences(known, batch_size)
        behind = {env_id: self._behind.get(env_id, 0.0) for env_id in shares}
        least, room = {}, batch_size
        for env_id in sorted(behind, key=lambda env_id: -behind[env_id]):
            ready = queued[env_id] if env_id in silent else max(int(shares[env_id]), queued[env_id])
            least[env_id] = max(0, min(int(shares[env_id] + behind[env_id]), ready, room))
            room -= least[env_id]
        return shares, least

    def _goes_first(self, oldest: Sized, shares: Mapping[int, float], batch_size: int) -> bool:
        """Whether the oldest group goes before the shares. One without a share does when what they left is enough."""
        left = 0.0 if oldest.env_id in shares else batch_size - sum(shares.values())
        return self._passed >= MOST_PASSED or (self._passed + 1) * left >= oldest.sequences

    def _settle(self, shares: Mapping[int, float], chosen: Sequence[Sized], batch_size: int) -> None:
        """Remember by how much a batch, of the size that it has, missed the shares.

        One that had less is owed `batch_size` at most, and one that had more owes as much; but if the shares are less
        than a batch, as they are while others are silent, a group of its own, or what it owed before.
        """
        whole = sum(shares.values()) > batch_size - 0.5
        filled = sum(group.sequences for group in chosen) / batch_size
        for env_id, share in shares.items():
            own = [group.sequences for group in chosen if group.env_id == env_id]
            before = self._behind.get(env_id, 0.0)
            most = max([-before, *own, batch_size if whole else 0])
            self._behind[env_id] = max(-most, min(batch_size, before + share * filled - sum(own)))
