"""The cap on age: whatever happens in whatever order, no group is too old, and nobody waits for ever."""

from __future__ import annotations

import math
from collections import deque
from dataclasses import dataclass, field

from hypothesis import given, settings
from hypothesis import strategies as st

from lachesis_train.staleness import StalenessCap, WhenStale
from tests.run import some


@dataclass
class World:
    """Environments that share a trainer. `ours` keeps to the cap; another one posts when it likes."""

    cap: StalenessCap
    group_size: int
    groups_a_batch: int
    workers: int
    others: int = 0
    """Sequences of another environment that wait at the API."""
    step: int = 0
    evaluating: bool = False
    flights: list[int] = field(default_factory=list)
    """The steps at which groups in flight began."""
    outbox: deque[int] = field(default_factory=deque)
    ages: list[int] = field(default_factory=list)
    dropped: int = 0
    begun: int = 0

    @property
    def batch_size(self) -> int:
        return self.group_size * self.groups_a_batch

    def room(self) -> int:
        fits = self.cap.room(
            step=self.step,
            holding=self.cap.holding(self.step, self.flights),
            waiting=len(self.outbox) * self.group_size,
            busy=len(self.flights),
            share=self.batch_size,
            group_size=self.group_size,
        )
        free = min(self.workers - len(self.flights), 1000 * self.groups_a_batch)
        return 0 if self.evaluating else int(max(0, min(free, fits)))

    def begin(self) -> None:
        for _ in range(self.room()):
            self.flights.append(self.step)
            self.begun += 1

    def too_old(self, begun: int, ahead: int) -> bool:
        sequences = (ahead + 1) * self.group_size
        return bool(self.cap.too_old(begun, step=self.step, sequences=sequences, batch_size=self.batch_size))

    def end_aged(self) -> None:
        aged = [begun for begun in self.flights if self.too_old(begun, len(self.outbox))]
        self.dropped += len(aged)
        for begun in aged:
            self.flights.remove(begun)

    def finish(self, number: int) -> None:
        """The flight with this number ends, youngest first: the worst order."""
        if self.flights:
            self.outbox.append(self.flights.pop(-1 - number % len(self.flights)))
            if self.too_old(self.outbox[-1], len(self.outbox) - 1):
                self.outbox.pop()
                self.dropped += 1
            self.end_aged()

    def take(self) -> bool:
        """The trainer asks for a batch."""
        ready = len(self.outbox) * self.group_size + self.others
        if ready < self.batch_size:
            return False
        from_others = min(self.others, self.batch_size) // self.group_size
        self.others -= from_others * self.group_size
        for _ in range(self.groups_a_batch - from_others):
            self.ages.append(self.step - self.outbox.popleft())
        self.step += 1
        self.end_aged()
        return True


EVENTS = st.lists(
    st.tuples(
        st.sampled_from(["finish", "finish", "finish", "take", "take", "break", "refuse", "evaluate", "others"]),
        st.sampled_from([0, 0, 0, 1, 3, 7]),
    ),
    min_size=10,
    max_size=80,
)


def run(world: World, events: list[tuple[str, int]], *, shared: bool) -> None:
    for event, number in events:
        world.begin()
        if event == "finish":
            world.finish(number)
        elif event == "take":
            world.take()
        elif event in ("break", "refuse") and world.flights:  # is played again, anew; is not sent
            world.flights.pop(number % len(world.flights))
        elif event == "evaluate":
            world.evaluating = not world.evaluating
        elif event == "others" and shared:
            world.others += number * world.group_size
        # Seen at any moment: a trainer that cannot go on waits for a group in flight, or for the evaluation.
        world.begin()
        if len(world.outbox) * world.group_size + world.others < world.batch_size and not world.evaluating:
            assert world.flights, "a trainer cannot go on, and nothing is played for it"


@settings(max_examples=some(200), deadline=None)
@given(
    most=st.integers(0, 5),
    policy=st.sampled_from([WhenStale.WAIT, WhenStale.DROP]),
    group_size=st.integers(1, 4),
    groups_a_batch=st.integers(1, 6),
    workers=st.integers(1, 40),
    shared=st.booleans(),
    events=EVENTS,
)
def test_no_group_is_too_old_and_a_trainer_always_gets_its_next_batch(
    most: int,
    policy: WhenStale,
    group_size: int,
    groups_a_batch: int,
    workers: int,
    shared: bool,
    events: list[tuple[str, int]],
) -> None:
    world = World(StalenessCap(most, policy), group_size, groups_a_batch, workers)
    run(world, events, shared=shared)
    assert policy is WhenStale.DROP or world.dropped == 0, "waiting loses nothing"
    if not shared:
        assert max(world.ages, default=0) <= most
    # The slowest of all: others are played around it as long as possible.
    world.evaluating = False
    for _ in range(3 * (most + 2)):
        before = world.step
        while not world.take():
            world.begin()
            assert world.flights
            world.finish(0)
        assert world.step == before + 1
        world.begin()
    while world.flights:
        world.finish(len(world.flights) - 1)
    while world.take():
        pass
    if not shared:
        assert max(world.ages) <= most


def test_a_group_that_others_have_made_too_old_holds_nothing_back() -> None:
    """Another environment fills batches meanwhile: to wait for it would help nobody."""
    cap = StalenessCap(2)
    assert cap.holding(9, [3, 6, 8]) == 8
    assert cap.holding(9, [3]) == 9


def test_without_a_cap_nothing_is_held_back_or_ended() -> None:
    for cap in (StalenessCap(None), StalenessCap(0, WhenStale.MARK)):
        assert cap.room(step=9, holding=cap.holding(9, [0]), waiting=500, busy=9, share=4, group_size=2) == math.inf
        assert cap.too_old(0, step=9, sequences=2, batch_size=4) == ""


def test_groups_that_are_too_large_for_a_batch_of_the_registered_size_hold_nobody_up() -> None:
    """Rollouts of several samples, sent with advantages: a batch is filled by fewer groups."""
    cap = StalenessCap(0)
    for waiting in range(8):
        room = cap.room(step=3, holding=cap.holding(3, []), waiting=waiting, busy=0, share=8, group_size=2)
        assert room >= 1, "the batch is not full yet"
