"""Who gets which slot, and how many workers there are: a thousand slots on a simulated clock."""

from __future__ import annotations

import contextlib
import heapq
import itertools
import random
from collections import Counter, defaultdict
from typing import Any

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from lachesis_pools.slots import Scale, SlotPool, SlotState, TooManyFailures, Wish


def lease(number: int) -> bytes:
    return number.to_bytes(16, "big")


class Simulation:
    """A pool of workers that take 1 to 60 s to start, of which some fail, and rollouts that come in bursts."""

    def __init__(self, seed: int, scale: Scale, *, failing: float, deaths: float) -> None:
        self.chance, self.pool = random.Random(seed), SlotPool({"": scale})
        self.failing, self.deaths = failing, deaths
        self.now = 0.0
        self.events: list[tuple[float, int, Any]] = []
        self.numbers = itertools.count(1)
        self.waits: dict[str, list[float]] = defaultdict(list)
        self.asked: dict[bytes, tuple[str, float, int]] = {}
        """Of each lease that waits or runs: the run, since when, and which rollout it is."""
        self.finished: Counter[int] = Counter()
        self.scored: dict[int, bytes] = {}
        self.lost = 0
        self.most = 0
        self.created = 0

    def after(self, seconds: float, act: Any) -> None:
        heapq.heappush(self.events, (self.now + seconds, next(self.numbers), act))

    def ask(self, run: str, rollout: int) -> None:
        number = next(self.numbers)
        self.asked[lease(number)] = run, self.now, rollout
        assert self.pool.ask(Wish(lease(number), run, "", self.now))

    def starts(self) -> None:
        missing = self.pool.missing()
        existing = len(self.pool.workers) + len(self.pool.starting)
        assert existing + missing <= self.pool.scales[""].most
        assert len(self.pool.starting) + missing <= self.pool.scales[""].starting
        for _ in range(missing):
            name = f"w{next(self.numbers)}"
            self.created += 1
            self.pool.begins(name, self.now)
            if self.chance.random() < self.failing:
                self.after(self.chance.uniform(1, 60), lambda name=name: self.pool.failed(name, "no room"))
            else:
                self.after(self.chance.uniform(1, 60), lambda name=name: self.join(name))
        self.most = max(self.most, len(self.pool.workers) + len(self.pool.starting))

    def join(self, name: str) -> None:
        self.pool.joined(name, self.pool.scales[""].slots, self.now)
        if self.chance.random() < self.deaths:
            self.after(self.chance.uniform(5, 120), lambda: self.die(name))

    def die(self, name: str) -> None:
        if name in self.pool.workers:
            for gone in self.pool.left(name):
                run, _, rollout = self.asked.pop(gone)
                self.lost += 1
                self.ask(run, rollout)  # from the beginning, in a new lease

    def end(self, one: bytes) -> None:
        if one not in self.asked:  # it was lost
            return
        _, _, rollout = self.asked.pop(one)
        assert self.pool.leases[one].state is SlotState.EXECUTING, "what is scored has its sandbox to the end"
        assert rollout not in self.scored
        self.scored[rollout] = one
        self.finished[rollout] += 1
        assert self.pool.releasing(one) is not None
        self.pool.released(one, self.now)

    def step(self) -> None:
        for wish, slot in self.pool.assign():
            run, since, _ = self.asked[wish.lease]
            self.waits[run].append(self.now - since)
            assert slot.lease == wish.lease and slot.worker in self.pool.workers
            self.pool.ready(wish.lease)
            self.after(self.chance.expovariate(1 / 20), lambda one=wish.lease: self.end(one))
        self.starts()

    def run(self, rollouts: int, until: float = 20_000.0) -> None:
        while len(self.finished) < rollouts and self.now < until:
            self.step()
            if self.events:
                self.now, _, act = heapq.heappop(self.events)
                act()
        assert len(self.finished) == rollouts, f"{len(self.finished)} of {rollouts} at {self.now:.0f} s"


@pytest.mark.parametrize("deaths", [0.0, 0.2])
def test_a_thousand_slots_serve_bursts_and_no_rollout_is_scored_in_a_lost_sandbox(deaths: float) -> None:
    simulation = Simulation(7, Scale(0, 1000, 1, starting=128), failing=0.05, deaths=deaths)
    rollouts = itertools.count()
    for burst in range(8):
        simulation.after(
            burst * 30,
            lambda burst=burst: [simulation.ask(f"run-{burst % 4}", next(rollouts)) for _ in range(500)],
        )
    simulation.run(4000)
    assert set(simulation.finished.values()) == {1}
    assert simulation.most <= 1000
    assert (simulation.lost > 0) == (deaths > 0)
    assert not simulation.pool.leases and not simulation.pool.waiting


def test_runs_that_ask_at_once_wait_alike() -> None:
    simulation = Simulation(3, Scale(0, 50, 4), failing=0.0, deaths=0.0)
    rollouts = itertools.count()
    for run, count in (("large", 2000), ("small", 100)):
        for _ in range(count):
            simulation.ask(run, next(rollouts))
    simulation.run(2100)
    waits = {run: sorted(found)[len(found) // 2] for run, found in simulation.waits.items()}
    assert waits["small"] < 0.5 * waits["large"], "a run of 100 does not wait behind one of 2,000"


def test_too_many_failures_end_a_pool_with_the_commonest_reason() -> None:
    pool = SlotPool({"": Scale(0, 100, 1, attempts=10, failures=0.5)})
    for number in range(4):
        pool.begins(f"good{number}", 0.0)
        pool.joined(f"good{number}", 1, 1.0)
    with pytest.raises(TooManyFailures, match="5 times: no image"):
        for number in range(20):
            pool.begins(f"bad{number}", 2.0)
            pool.failed(f"bad{number}", "no image" if number != 2 else "no room")
    assert number == 5, "6 of 10 are more than half"


def test_workers_without_work_end_and_the_least_stay() -> None:
    pool = SlotPool({"": Scale(1, 3, 2, idle=100.0)})
    for number in range(3):
        pool.joined(f"w{number}", 2, float(number))
    pool.ask(Wish(lease(1), "run"))
    [(_, slot)] = pool.assign()
    assert pool.idle(50.0) == []
    ended = pool.idle(1000.0)
    assert len(ended) == 2 and slot.worker not in ended
    for name in ended:
        pool.drain(name)
    assert pool.idle(1000.0) == [] and pool.missing() == 0
    pool.ask(Wish(lease(2), "run"))
    assert [slot.worker for _, slot in pool.assign()] == [slot.worker], "a draining worker gets no more"


def test_a_broken_slot_is_used_no_more_and_its_worker_ends() -> None:
    pool = SlotPool({"": Scale(1, 3, 1)})
    pool.joined("w", 1, 0.0)
    pool.ask(Wish(lease(1), "run"))
    pool.assign()
    pool.releasing(lease(1))
    pool.released(lease(1), 1.0, error=True)
    assert pool.states()["error"] == 1 and pool.idle(1.0) == ["w"]
    pool.ask(Wish(lease(2), "run"))
    assert pool.assign() == [] and pool.missing() == 1
    assert pool.idle(1.0) == ["w"], "also while a rollout waits"


def test_a_child_gets_its_slot_beside_its_parent_also_while_the_worker_drains() -> None:
    pool = SlotPool({"": Scale(0, 2, 2)})
    pool.joined("w", 2, 0.0)
    pool.joined("other", 2, 0.0)
    pool.ask(Wish(lease(1), "run"))
    [(_, slot)] = pool.assign()
    pool.drain(slot.worker)
    pool.ask(Wish(lease(2), "run", worker=slot.worker))
    pool.ask(Wish(lease(3), "run"))
    places = {wish.lease: slot.worker for wish, slot in pool.assign()}
    assert places[lease(2)] == slot.worker != places[lease(3)]


def test_the_same_question_again_is_one_lease() -> None:
    pool = SlotPool({"": Scale(0, 1, 2)})
    pool.joined("w", 2, 0.0)
    assert pool.ask(Wish(lease(1), "run")) and not pool.ask(Wish(lease(1), "run"))
    assert len(pool.assign()) == 1
    assert not pool.ask(Wish(lease(1), "run")) and pool.assign() == []


def test_a_full_pool_ends_an_idle_worker_for_one_of_another_profile_and_starts_it_then() -> None:
    pool = SlotPool({"": Scale(1, 3, 1, idle=1000.0), "gpu": Scale(0, 2, 1)}, most=3)
    for number in range(3):
        pool.joined(f"w{number}", 1, float(number))
    assert pool.idle(5.0) == []
    pool.ask(Wish(lease(1), "run", profile="gpu"))
    assert pool.assign() == [], "no other worker serves it"
    assert pool.missing("gpu") == 0, "it would be the fourth"
    assert pool.idle(5.0) == ["w0"], "as many as are needed"
    pool.drain("w0")
    assert pool.idle(5.0) == [] and pool.missing("gpu") == 0, "it still exists"
    pool.left("w0")
    assert pool.missing("gpu") == 1
    pool.begins("g", 6.0, "gpu")
    pool.joined("g", 1, 7.0, "gpu")
    [(_, slot)] = pool.assign()
    assert slot.worker == "g"


def test_no_lease_begins_that_its_worker_may_not_see_the_end_of() -> None:
    pool = SlotPool({"": Scale(1, 3, 2, lifetime=100.0)})  # a tenth of it is for the start
    pool.joined("old", 2, 0.0)
    pool.ask(Wish(lease(1), "run", lifetime=40.0))
    assert [slot.worker for _, slot in pool.assign(10.0)] == ["old"]
    pool.ask(Wish(lease(2), "run", lifetime=40.0))
    assert pool.assign(51.0) == [] and pool.missing(now=51.0) == 1, "another one takes its place"
    assert pool.idle(51.0) == [], "it has a lease"
    pool.joined("new", 2, 55.0)
    assert [slot.worker for _, slot in pool.assign(56.0)] == ["new"]
    pool.releasing(lease(1))
    pool.released(lease(1), 60.0)
    assert pool.idle(60.0) == [], "a shorter lease can still have it"
    pool.ask(Wish(lease(3), "run", lifetime=40.0))
    assert pool.idle(60.0) == ["old"]
    pool.left("old")
    pool.joined("old", 2, 70.0)
    assert pool.workers["old"].ends == 90.0, "its engine counts from its first start"


def test_a_profile_without_workers_does_not_wait_behind_all_rollouts_of_another_one() -> None:
    pool = SlotPool({"": Scale(0, 4, 1), "gpu": Scale(0, 2, 1)}, most=2)
    for number in range(2):
        pool.joined(f"w{number}", 1, 0.0)
    for number in range(100):
        pool.ask(Wish(lease(number), "large"))
    pool.assign()
    pool.ask(Wish(lease(200), "small", profile="gpu"))
    assert pool.missing("gpu") == 0
    [leaving] = pool.idle(1.0)
    pool.drain(leaving)
    assert pool.idle(2.0) == [], "one is enough"
    pool.left(leaving)
    assert pool.missing("gpu") == 1


def test_workers_that_drain_count_as_long_as_they_are_there() -> None:
    pool = SlotPool({"": Scale(0, 2, 1)})
    for number in range(2):
        pool.joined(f"w{number}", 1, 0.0)
        pool.ask(Wish(lease(number), "run"))
    pool.assign()
    pool.drain("w0")
    pool.ask(Wish(lease(9), "run"))
    assert pool.missing() == 0
    pool.left("w0")
    assert pool.missing() == 1


def test_a_rollout_goes_where_its_kind_may_be_warm() -> None:
    pool = SlotPool({"": Scale(0, 2, 3)})
    pool.joined("w0", 3, 0.0)
    pool.ask(Wish(lease(1), "run", "a"))
    pool.assign()
    pool.joined("w1", 3, 0.0)
    pool.drain("w0")
    pool.ask(Wish(lease(2), "run", "b"))
    pool.ask(Wish(lease(3), "run", "b"))
    assert [slot.worker for _, slot in pool.assign()] == ["w1", "w1"]
    pool.workers["w0"].draining = False
    pool.ask(Wish(lease(4), "run", "a"))
    assert [slot.worker for _, slot in pool.assign()] == ["w0"], "though the other one is fuller"


class Slots(RuleBasedStateMachine):
    """Any sequence of events, against what must always hold."""

    def __init__(self) -> None:
        super().__init__()
        self.pool = SlotPool({"": Scale(1, 4, 3, starting=2), "gpu": Scale(0, 2, 1)}, most=5)
        self.numbers = itertools.count(1)
        self.now = 0.0
        self.known: set[bytes] = set()
        self.starting: list[tuple[str, str]] = []

    @rule(run=st.sampled_from(["a", "b"]), beside=st.booleans(), profile=st.sampled_from(["", "gpu"]))
    def ask(self, run: str, beside: bool, profile: str) -> None:
        one = lease(next(self.numbers))
        worker = next((slot.worker for slot in self.pool.leases.values()), "") if beside else ""
        self.known.add(one)
        profile = self.pool.workers[worker].profile if worker else profile
        self.pool.ask(Wish(one, run, run, self.now, worker, profile))

    @rule()
    def assign(self) -> None:
        for wish, slot in self.pool.assign():
            assert wish.worker in ("", slot.worker)
            assert self.pool.workers[slot.worker].profile == wish.profile
            self.pool.ready(wish.lease)

    @rule(profile=st.sampled_from(["", "gpu"]))
    def start(self, profile: str) -> None:
        for _ in range(self.pool.missing(profile)):
            self.starting.append((f"w{next(self.numbers)}", profile))
            self.pool.begins(self.starting[-1][0], self.now, profile)

    @precondition(lambda self: self.starting)
    @rule(joins=st.booleans())
    def started(self, joins: bool) -> None:
        name, profile = self.starting.pop()
        if joins:
            self.pool.joined(name, self.pool.scales[profile].slots, self.now, profile)
        else:
            with contextlib.suppress(TooManyFailures):
                self.pool.failed(name, "no room")

    @precondition(lambda self: self.pool.workers)
    @rule(data=st.data(), dies=st.booleans())
    def lose(self, data: st.DataObject, dies: bool) -> None:
        name = data.draw(st.sampled_from(sorted(self.pool.workers)))
        if dies:
            self.known -= {*self.pool.left(name)}
        else:
            self.pool.drain(name)

    @precondition(lambda self: self.known)
    @rule(data=st.data(), error=st.booleans())
    def release(self, data: st.DataObject, error: bool) -> None:
        one = data.draw(st.sampled_from(sorted(self.known)))
        if not self.pool.forget(one):
            assert self.pool.releasing(one) is not None and self.pool.releasing(one) is None
            self.pool.released(one, self.now, error=error)
        self.known.discard(one)

    @rule(seconds=st.floats(0, 500))
    def wait(self, seconds: float) -> None:
        self.now += seconds
        for name in self.pool.idle(self.now):
            assert not any(slot.lease for slot in self.pool.workers[name].slots)

    @invariant()
    def each_lease_has_one_place(self) -> None:
        used = [slot.lease for worker in self.pool.workers.values() for slot in worker.slots if slot.lease]
        assert len(used) == len({*used}) == len(self.pool.leases)
        waiting = [wish.lease for of_run in self.pool._waiting.values() for wish in of_run.values()]
        assert {*used, *waiting} == self.known and len(waiting) == len({*waiting}) and not {*used} & {*waiting}

    @invariant()
    def never_more_than_wanted(self) -> None:
        assert len(self.pool.workers) + len(self.pool.starting) <= 5
        for profile, most in (("", 4), ("gpu", 2)):
            starting = sum(of == profile for _, of in self.starting)
            there = sum(worker.profile == profile for worker in self.pool.workers.values())
            assert starting + there <= most and starting <= 2


TestSlots = Slots.TestCase
TestSlots.settings = settings(max_examples=60, stateful_step_count=40, deadline=None)
