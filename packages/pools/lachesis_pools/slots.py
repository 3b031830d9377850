"""Which rollout gets which slot, and how many workers there should be. No input, no output, no clock.

A worker has a number of slots; each holds one sandbox at a time. A worker that is gone takes its leases with it: they
are lost, and never continue on another slot.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Mapping
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
    profile: str = ""
    """Of the workers that will do."""
    lifetime: float = 0.0
    """Seconds for which it may need the slot."""


@dataclass(slots=True)
class Worker:
    name: str
    slots: list[Slot]
    kinds: set[str] = field(default_factory=set)
    """Of the sandboxes that it may have warm."""
    idle_since: float = 0.0
    draining: bool = False
    profile: str = ""
    ends: float = math.inf
    """When its engine will end it."""

    free: list[Slot] = field(init=False)
    broken: int = 0
    """Slots in the state `error`."""

    def __post_init__(self) -> None:
        self.free = self.slots[::-1]  # the first one is used first

    @property
    def busy(self) -> int:
        return len(self.slots) - len(self.free)

    @property
    def usable(self) -> bool:
        """Whether it gets leases, now or later."""
        return not self.draining and self.broken < len(self.slots)


@dataclass(frozen=True, slots=True)
class Scale:
    """How many workers of a profile a pool may have."""

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
    lifetime: float = math.inf
    """Seconds after which the engine ends a worker: no lease begins that could last longer."""

    @property
    def margin(self) -> float:
        """Seconds of that lifetime in which a worker starts."""
        return 0.0 if self.lifetime == math.inf else min(120.0, self.lifetime / 10)

    @property
    def longest(self) -> float:
        """Lifetime of a lease, for which a new worker is good for a while."""
        return self.lifetime - 2 * self.margin


@dataclass(frozen=True, slots=True)
class WorkerStart:
    began: float
    profile: str


@dataclass(slots=True)
class _Starts:
    """What came of the starts of a profile."""

    joined: int = 0
    failed: int = 0
    reasons: Counter[str] = field(default_factory=Counter)


class SlotPool:
    """Every slot, every lease, and who waits.

    Args:
        scales: by profile. A worker serves the leases of one profile.
        most: workers of all profiles together.
    """

    def __init__(self, scales: Mapping[str, Scale], most: float = math.inf) -> None:
        self.scales, self._most = scales, most
        self.workers: dict[str, Worker] = {}
        self.leases: dict[bytes, Slot] = {}
        self.starting: dict[str, WorkerStart] = {}
        """Workers that were started and have not joined."""
        self._ends: dict[str, float] = {}
        """When the engine ends each worker."""
        self._wishes: dict[bytes, Wish] = {}
        """By lease."""
        self._waiting: dict[tuple[str, str, str, float], dict[bytes, Wish]] = {}
        """The same in groups that have the same place, in the order in which the groups are served next."""
        self._starts = {profile: _Starts() for profile in scales}

    # workers

    def begins(self, name: str, now: float, profile: str = "") -> None:
        """A worker was started."""
        self.starting[name] = WorkerStart(now, profile)

    def failed(self, name: str, reason: str) -> None:
        """A worker that was started ended, or never joined.

        Raises:
            TooManyFailures: too large a share has.
        """
        start = self.starting.pop(name, None)
        if start is None:
            return
        profile = start.profile
        scale, starts = self.scales[profile], self._starts[profile]
        starts.failed += 1
        starts.reasons[reason] += 1
        tried = starts.failed + starts.joined
        if tried >= scale.attempts and starts.failed > scale.failures * tried:
            most, count = starts.reasons.most_common(1)[0]
            of = f" of profile {profile}" if profile else ""
            raise TooManyFailures(
                f"{starts.failed} of {tried} workers{of} did not start; {count} times: {most}. Next step: start one by "
                "hand (`lachesis pool worker`), and see what it says"
            )

    def joined(self, name: str, slots: int, now: float, profile: str = "") -> None:
        """A worker is ready: a probe command was answered."""
        if (start := self.starting.pop(name, None)) is not None:
            self._starts[start.profile].joined += 1
        scale = self.scales.get(profile)
        ends = now + scale.lifetime - scale.margin if scale is not None else math.inf
        ends = self._ends.setdefault(name, ends)  # also of one that has joined before
        slots_of = [Slot(name, at) for at in range(slots)]
        self.workers[name] = Worker(name, slots_of, idle_since=now, profile=profile, ends=ends)

    def left(self, name: str) -> list[bytes]:
        """A worker is gone: the leases that are lost with it."""
        worker = self.workers.pop(name, None)
        lost = [slot.lease for slot in worker.slots if slot.lease] if worker is not None else []
        for lease in lost:
            del self.leases[lease]
        for wish in [wish for wish in self._wishes.values() if wish.worker == name]:
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
        if wish.lease in self.leases or wish.lease in self._wishes:
            return False
        self._wishes[wish.lease] = self._waiting.setdefault(_place(wish), {})[wish.lease] = wish
        return True

    def forget(self, lease: bytes) -> bool:
        """Whether a lease waited, and waits no more."""
        wish = self._wishes.pop(lease, None)
        if wish is None:
            return False
        wishes = self._waiting[_place(wish)]
        del wishes[lease]
        if not wishes:
            del self._waiting[_place(wish)]
        return True

    def assign(self, now: float = 0.0) -> list[tuple[Wish, Slot]]:
        """Slots for those that wait, one for each run in turn."""
        given: list[tuple[Wish, Slot]] = []
        if not self._waiting:
            return given
        free = {name: worker for name, worker in self.workers.items() if worker.free}
        served = True
        while served and free:
            served = False
            for place in list(self._waiting):
                able = _places(place, free, now)
                if not able:
                    continue
                wish = next(iter(self._waiting[place].values()))
                # One where such sandboxes may be warm, else the fullest: so that others become idle.
                worker = max(able, key=lambda worker: (wish.kind in worker.kinds, worker.busy))
                slot = worker.free.pop()
                served = True
                slot.state, slot.lease = SlotState.ACQUIRED, wish.lease
                self.leases[wish.lease] = slot
                worker.kinds.add(wish.kind)
                given.append((wish, slot))
                self.forget(wish.lease)
                if place in self._waiting:
                    self._waiting[place] = self._waiting.pop(place)  # behind the others
                if not worker.free:
                    del free[worker.name]
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
            worker = self.workers[slot.worker]
            slot.state, slot.lease, worker.idle_since = SlotState.AVAILABLE, b"", now
            if error:
                slot.state = SlotState.ERROR
                worker.broken += 1
            else:
                worker.free.append(slot)

    # how many

    @property
    def waiting(self) -> int:
        return len(self._wishes)

    def missing(self, profile: str = "", now: float = 0.0) -> int:
        """How many workers to start now: never more than are wanted while others are not ready yet."""
        scale = self.scales[profile]
        starting = sum(start.profile == profile for start in self.starting.values())
        mine = [worker for worker in self.workers.values() if worker.profile == profile]
        room = min(scale.starting, scale.most - len(mine)) - starting
        of_all = self._most - len(self.workers) - len(self.starting)
        return max(0, int(min(self._wanted(profile, now) - starting, room, of_all)))

    def _wanted(self, profile: str, now: float) -> int:
        """Workers of a profile that are not there, or starting."""
        scale = self.scales[profile]
        usable = self._usable(profile, now)
        placeless = sum(not wish.worker and wish.profile == profile for wish in self._wishes.values())
        wanted = usable + math.ceil(placeless / scale.slots)
        return min(scale.most, max(scale.least, wanted)) - usable

    def _usable(self, profile: str, now: float) -> int:
        mine = [worker for worker in self.workers.values() if worker.profile == profile]
        return sum(worker.usable and not self._spent(worker, now) for worker in mine)

    def _spent(self, worker: Worker, now: float) -> bool:
        """Whether its engine may end it before the leases that wait would end."""
        if worker.ends == math.inf:
            return False
        waiting = (place for place in self._waiting if place[1] == worker.profile and not place[2])
        return now + max((lifetime for _, _, _, lifetime in waiting), default=0.0) > worker.ends

    def idle(self, now: float) -> list[str]:
        """Workers to end: those that have had nothing to do for long; at once, those whose slots are broken or too
        old for a lease and that have nothing else, and those in whose place another profile needs one."""
        spare = {profile: self._usable(profile, now) - scale.least for profile, scale in self.scales.items()}
        wanted = sum(max(0, self._wanted(profile, now)) for profile in self.scales) - len(self.starting)
        full = len(self.workers) + len(self.starting) >= self._most
        leaving = sum(worker.draining for worker in self.workers.values())
        waiting = {wish.profile for wish in self._wishes.values()}
        found: list[str] = []
        for worker in sorted(self.workers.values(), key=lambda worker: worker.idle_since):
            if worker.draining or any(slot.lease for slot in worker.slots):
                continue
            if worker.broken or self._spent(worker, now):
                found.append(worker.name)
                continue
            if worker.profile in waiting or spare.get(worker.profile, 0) <= 0:
                continue
            replaced = full and leaving < wanted
            if replaced or now - worker.idle_since > self.scales[worker.profile].idle:
                found.append(worker.name)
                leaving += 1
                spare[worker.profile] -= 1
        if full and not leaving:  # a profile without workers does not wait behind all rollouts of another one
            there = {worker.profile for worker in self.workers.values() if not worker.draining}
            there |= {start.profile for start in self.starting.values()}
            others = [each for each in self.workers.values() if spare.get(each.profile, 0) > 0]
            if others and waiting - there:
                counts = Counter(each.profile for each in others)
                found.append(max(others, key=lambda each: (counts[each.profile], -each.busy)).name)
        return found

    def states(self) -> dict[str, int]:
        """How many slots are in each state."""
        found = Counter(slot.state.value for worker in self.workers.values() for slot in worker.slots)
        return {state.value: found[state.value] for state in SlotState}


def _place(wish: Wish) -> tuple[str, str, str, float]:
    """What decides where a wish can be served, and when: its run, its profile, its worker, its lifetime."""
    return wish.run, wish.profile, wish.worker, wish.lifetime


def _places(place: tuple[str, str, str, float], free: Mapping[str, Worker], now: float) -> list[Worker]:
    """The workers that a lease can have."""
    _, profile, name, lifetime = place
    if name:  # also one that drains
        return [free[name]] if name in free else []
    return [
        each for each in free.values() if each.profile == profile and not each.draining and now + lifetime <= each.ends
    ]
