"""Which rollout gets which slot, and how many workers there should be. No input, no output, no clock.

A worker has a number of slots; each holds one sandbox at a time. A worker that is gone takes its leases with it: they
are lost, and never continue on another slot.
"""

from __future__ import annotations

import math
from collections import Counter, deque
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from enum import StrEnum

from backends.errors import LachesisError


class TooManyFailures(LachesisError):
    """So many workers failed to start that more attempts are pointless."""


class SlotState(StrEnum):
    AVAILABLE = "available"
    ACQUIRED = "acquired"
    """A sandbox is being made in it."""
    EXECUTING = "executing"
    """A rollout uses its sandbox."""
    RELEASING = "releasing"
    ERROR = "error"
    """Its sandbox could not be removed: the slot is used no more."""


@dataclass(slots=True)
class Slot:
    worker: str
    number: int
    state: SlotState = SlotState.AVAILABLE
    lease: bytes = b""


@dataclass(frozen=True, slots=True)
class Wish:
    """A rollout that waits for a slot."""

    lease: bytes
    run: str
    """Slots go round over the runs that wait."""
    kind: str = ""
    """The sandboxes that it can share with others; see `WarmSandboxes`."""
    since: float = 0.0
    worker: str = ""
    """The only one that will do, if there is one."""


@dataclass(slots=True)
class Worker:
    name: str
    slots: list[Slot]
    kinds: set[str] = field(default_factory=set)
    """Of the sandboxes that it may have warm."""
    idle_since: float = 0.0
    draining: bool = False

    @property
    def busy(self) -> int:
        return sum(slot.state is not SlotState.AVAILABLE for slot in self.slots)

    @property
    def usable(self) -> bool:
        """Whether it gets leases, now or later."""
        return not self.draining and any(slot.state is not SlotState.ERROR for slot in self.slots)

    def free(self) -> Slot | None:
        return next((slot for slot in self.slots if slot.state is SlotState.AVAILABLE), None)


@dataclass(frozen=True, slots=True)
class Scale:
    """How many workers a pool may have."""

    least: int = 0
    most: int = 1
    slots: int = 1
    """Of each worker."""
    starting: int = 8
    """Workers that start at once."""
    idle: float = 300.0
    """Seconds after which a worker without work is ended."""
    failures: float = 0.5
    """The share of starts that may fail."""
    attempts: int = 10
    """Starts before that share counts."""


class SlotPool:
    """Every slot, every lease, and who waits."""

    def __init__(self, scale: Scale) -> None:
        self.scale = scale
        self.workers: dict[str, Worker] = {}
        self.leases: dict[bytes, Slot] = {}
        self.starting: dict[str, float] = {}
        """Workers that were started and have not joined, with the time."""
        self._waiting: dict[str, deque[Wish]] = {}
        """By run, in the order in which the runs are served next."""
        self._joined = self._failed = 0
        self._reasons: Counter[str] = Counter()

    # workers

    def begins(self, name: str, now: float) -> None:
        """A worker was started."""
        self.starting[name] = now

    def failed(self, name: str, reason: str) -> None:
        """A worker that was started ended, or never joined.

        Raises:
            TooManyFailures: too large a share has.
        """
        if self.starting.pop(name, None) is None:
            return
        self._failed += 1
        self._reasons[reason] += 1
        tried = self._failed + self._joined
        if tried >= self.scale.attempts and self._failed > self.scale.failures * tried:
            most, count = self._reasons.most_common(1)[0]
            raise TooManyFailures(
                f"{self._failed} of {tried} workers did not start; {count} times: {most}. Next step: start one by hand "
                "(`lachesis pool worker`), and see what it says"
            )

    def joined(self, name: str, slots: int, now: float) -> None:
        """A worker is ready: a probe command was answered."""
        if self.starting.pop(name, None) is not None:
            self._joined += 1
        self.workers[name] = Worker(name, [Slot(name, at) for at in range(slots)], idle_since=now)

    def left(self, name: str) -> list[bytes]:
        """A worker is gone: the leases that are lost with it."""
        worker = self.workers.pop(name, None)
        lost = [slot.lease for slot in worker.slots if slot.lease] if worker is not None else []
        for lease in lost:
            del self.leases[lease]
        for wish in [wish for wish in self._wishes() if wish.worker == name]:
            self.forget(wish.lease)
            lost.append(wish.lease)
        return lost

    def drain(self, name: str) -> None:
        """A worker gets no more leases."""
        if name in self.workers:
            self.workers[name].draining = True

    # leases

    def ask(self, wish: Wish) -> bool:
        """Wait for a slot. False if the lease waits or runs already: the question was sent again."""
        if wish.lease in self.leases or any(other.lease == wish.lease for other in self._wishes()):
            return False
        self._waiting.setdefault(wish.run, deque()).append(wish)
        return True

    def forget(self, lease: bytes) -> bool:
        """Whether a lease waited, and waits no more."""
        for run, wishes in self._waiting.items():
            for wish in wishes:
                if wish.lease == lease:
                    wishes.remove(wish)
                    if not wishes:
                        del self._waiting[run]
                    return True
        return False

    def assign(self) -> list[tuple[Wish, Slot]]:
        """Slots for those that wait, one for each run in turn."""
        given: list[tuple[Wish, Slot]] = []
        placed = {wish.worker for wish in self._wishes() if wish.worker}  # also of a draining worker
        open_ones = {
            name: worker
            for name, worker in self.workers.items()
            if (not worker.draining or name in placed) and worker.free() is not None
        }
        served = True
        while served and open_ones:
            served = False
            for run in list(self._waiting):
                anywhere = [worker for worker in open_ones.values() if not worker.draining]
                places = {*open_ones, *([""] if anywhere else [])}
                wish = next((wish for wish in self._waiting[run] if wish.worker in places), None)
                if wish is None:
                    continue
                worker = open_ones[wish.worker] if wish.worker else _best(anywhere, wish.kind)
                slot = worker.free()
                assert slot is not None
                served = True
                slot.state, slot.lease = SlotState.ACQUIRED, wish.lease
                self.leases[wish.lease] = slot
                worker.kinds.add(wish.kind)
                given.append((wish, slot))
                wishes = self._waiting.pop(run)
                wishes.remove(wish)
                if wishes:
                    self._waiting[run] = wishes  # behind the others
                if worker.free() is None:
                    del open_ones[worker.name]
        return given

    def ready(self, lease: bytes) -> None:
        """The sandbox of a lease exists."""
        if lease in self.leases:
            self.leases[lease].state = SlotState.EXECUTING

    def releasing(self, lease: bytes) -> str | None:
        """A lease ends: the worker that has it."""
        slot = self.leases.get(lease)
        if slot is None or slot.state is SlotState.RELEASING:
            return None
        slot.state = SlotState.RELEASING
        return slot.worker

    def released(self, lease: bytes, now: float, *, error: bool = False) -> None:
        """The sandbox of a lease is gone, or could not be removed."""
        slot = self.leases.pop(lease, None)
        if slot is not None:
            slot.state, slot.lease = (SlotState.ERROR if error else SlotState.AVAILABLE), b""
            self.workers[slot.worker].idle_since = now

    # how many

    @property
    def waiting(self) -> int:
        return sum(map(len, self._waiting.values()))

    def _wishes(self) -> Iterator[Wish]:
        for wishes in self._waiting.values():
            yield from wishes

    def missing(self) -> int:
        """How many workers to start now: never more than are wanted while others are not ready yet."""
        scale = self.scale
        usable = sum(worker.usable for worker in self.workers.values())
        placeless = sum(1 for wish in self._wishes() if not wish.worker)
        wanted = usable + math.ceil(placeless / scale.slots)
        wanted = min(scale.most, max(scale.least, wanted))
        room = min(scale.starting, scale.most - len(self.workers)) - len(self.starting)
        return max(0, min(wanted - usable - len(self.starting), room))

    def idle(self, now: float) -> list[str]:
        """Workers to end, as they have had nothing to do for long; those with broken slots and nothing else at once."""
        spare = sum(worker.usable for worker in self.workers.values()) - self.scale.least
        found: list[str] = []
        for worker in sorted(self.workers.values(), key=lambda worker: worker.idle_since):
            if worker.draining or any(slot.lease for slot in worker.slots):
                continue
            broken = any(slot.state is SlotState.ERROR for slot in worker.slots)
            if broken or (not self._waiting and len(found) < spare and now - worker.idle_since > self.scale.idle):
                found.append(worker.name)
        return found

    def states(self) -> dict[str, int]:
        """How many slots are in each state."""
        found = Counter(slot.state.value for worker in self.workers.values() for slot in worker.slots)
        return {state.value: found[state.value] for state in SlotState}


def _best(workers: Iterable[Worker], kind: str) -> Worker:
    """One where such sandboxes may be warm, else the fullest: so that others become idle."""
    return max(workers, key=lambda worker: (kind in worker.kinds, worker.busy))
