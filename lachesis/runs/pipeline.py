"""The one loop of every run: draw an item, play its group, decide, hand the decision to the sink.

`process`, `eval` and `serve` are this loop with different sinks, which also set the pace. One invariant: a group
that was played reaches the sink, whatever ends the run meanwhile. Only groups in flight are played again by the next
start.
"""

from __future__ import annotations

import asyncio
import math
import time
from array import array
from collections import Counter
from collections.abc import Awaitable, Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from typing import Any, Generic, TypeVar

from rich.console import Console

from backends.tasks import cancel_all, cancel_requests, finish, stopped_by_signals
from backends.text import counted
from lachesis.figures.item_keys import ItemKeys, or_none, part_key
from lachesis.runs.decisions import Decision, Kept, LeftOut
from lachesis.runs.failures import FailureBrake, ItemJob, Retries, RunStopped, broken, is_infrastructure
from lachesis.runs.held_groups import HeldGroups
from lachesis.runs.progress import Progress
from lachesis.runs.prose import print_prose
from lachesis.runs.sink import Flight, Sink

G = TypeVar("G")

NextItem = Callable[[], Awaitable[Any]]
"""The next item, None when there are no more."""

PlayItem = Callable[[Any, str], Awaitable[Sequence[G]]]
"""Plays the groups of an item (and its key), at least one."""

AskAgain = Callable[..., G]
"""`(group, last=False)`; after the last time, nothing is in doubt."""

_TICK = 1.0
_SHOWN_EVERY = 0.25
"""Seconds between two updates of the display."""


@dataclass(kw_only=True, eq=False)
class Pipeline(Generic[G]):
    """One run."""

    title: str
    next_item: NextItem
    play: PlayItem[G]
    """The one place where a run asks the environment for groups. After an exception the item is played again, except
    `RunStopped`, which ends the run."""
    sink: Sink[G]
    console: Console
    brake: FailureBrake
    """Ends the run when no group gets a score."""
    on_played: Callable[[G], None] | None = None
    """Called with every group that is played and in no doubt, also with those that are left out or played again."""
    on_group: Callable[[G, Decision], Awaitable[None]] | None = None
    """Awaited with every finished group and the decision about it, after it is on the disk."""
    ask_again: AskAgain[G] | None = None
    """The current evidence about a group that is `in_doubt`; None does not hold such groups back."""
    timeout: float = -1.0
    """Seconds for one group, 0 or less for any. A last resort: rollouts end themselves before."""
    grace_period: float = 0.0
    """Seconds that groups in flight get to finish when the run is stopped."""
    keys: ItemKeys = field(default_factory=ItemKeys)

    def __post_init__(self) -> None:
        self.groups = self.rollouts = 0
        """That this start has finished, kept or left out."""
        self.rewards = array("d")
        """Of these rollouts."""
        self.replayed = Counter[str]()
        """Times that an item was played again because its group became too old, by key."""
        self.exhausted = False
        """The environment has no more items."""
        self.reason = ""
        """Why the run ends; empty while it continues."""
        self._retries = Retries(self.sink.retry_pause or 0.0, self.tell)
        self._held: HeldGroups[G] = HeldGroups(self.ask_again, self._finish_decided, self.brake.most)
        self._begun = 0
        self._step = 0
        self._draw = asyncio.Lock()
        self._deciding = asyncio.Lock()
        self._drawing: set[asyncio.Task[None]] = set()
        self._playing: dict[asyncio.Task[None], Flight] = {}
        self._noticed = asyncio.Event()
        self._hurry = asyncio.Event()

    @property
    def playing(self) -> int:
        """Groups in flight."""
        return len(self._playing)

    def tell(self, line: str) -> None:
        print_prose(self.console, line, style="yellow")

    def stop(self, reason: str) -> None:
        """Begin no new group, give those in flight the grace period, and end. A second call ends them at once."""
        if self.reason:
            self._hurry.set()
        self.reason = self.reason or reason
        self._notice()

    async def run(self, *, signals: bool = False) -> None:
        """Play until the sink has enough, the items are used up, or the run is stopped.

        Args:
            signals: SIGTERM and Ctrl-C call `stop`.

        Raises:
            RunFolderError: the sink's folder cannot be used.
            RunStopped: the run cannot go on; the message says why.
        """
        # A signal while the sink closes must not end the process before its cleanup: the handlers stay until then.
        with stopped_by_signals(self.stop if signals else None):
            async with self.sink.opened(self._notice):
                with Progress(self.console, self.title) as progress:
                    progress.show(self.sink.standing(self))
                    try:
                        await self._manage(progress)
                    except BaseException:
                        self._hurry.set()
                        raise
                    finally:
                        await self._end()
                        progress.show(self.sink.standing(self), last=True)

    # Managing.

    async def _manage(self, progress: Progress) -> None:
        show_at = 0.0
        while True:
            self._noticed.clear()
            self._settle_tasks()
            await self.sink.check()
            self._age()
            if self._held and not (self._drawing or self._playing) and (self._held.full or self._nothing_left()):
                await self._held.give_up()
            if not self.reason:
                self.reason = self.sink.ending()
                if not self.reason and self._nothing_left() and not self._held:
                    ran_out = f"all items are played ({self._begun} in this start)"
                    self.reason = ran_out if self.exhausted else "all groups are played"
                    return
            if self.reason:
                self.tell(f"stopping: {self.reason}")
                return
            for _ in range(self._room()):
                task = asyncio.create_task(self._work())
                self._drawing.add(task)
                task.add_done_callback(self._notice)
                await asyncio.sleep(0)  # a group begins with milliseconds of work: not a hundred of them in one turn
            if time.monotonic() >= show_at:  # all of it costs as much as a request
                progress.show(self.sink.standing(self))
                show_at = time.monotonic() + _SHOWN_EVERY
            with suppress(TimeoutError):
                async with asyncio.timeout(_TICK):
                    await self._noticed.wait()

    def _notice(self, _: Any = None) -> None:
        self._noticed.set()

    def _settle_tasks(self) -> None:
        """Take the finished tasks away. An exception here, of `get_next_item` or of a full disk, ends the run."""
        for task in [task for task in (*self._drawing, *self._playing) if task.done()]:
            self._drawing.discard(task)
            self._playing.pop(task, None)
            task.result()

    def _age(self) -> None:
        """End the groups that are too old, on the clock of a trainer that may have gone back."""
        step, before = self.sink.step, self._step
        self._step = step
        if step < before or self.sink.ends_groups:  # otherwise a thousand groups would be looked at in vain
            for flight in self._playing.values():
                flight.step = min(flight.step, step)
                if flight.limit is not None and (decision := self.sink.too_old(flight.step)) is not None:
                    flight.end(decision)

    def _fresh(self) -> int:
        """New items that may still be drawn."""
        if self.exhausted:
            return 0
        limit = self.sink.limit
        return self.sink.workers if limit is None else limit - self._begun - len(self._drawing)

    def _nothing_left(self) -> bool:
        working = self._drawing or self._playing or self._retries
        return not working and self._fresh() <= 0 and self.sink.settled

    def _room(self) -> int:
        """Groups that may begin now."""
        busy = len(self._drawing) + len(self._playing)
        left = self._fresh()
        if self._held.full or (left <= 0 and not self._retries.ready()):
            return 0
        room = self.sink.room(busy, self._playing.values())
        if self._retries.down:
            # Groups that began before may take long, or hang: they are not waited for.
            trying = self._drawing or any(flight.alone for flight in self._playing.values())
            return int(room > 0 and not trying and not self._retries.pausing)
        return min(room, max(left, len(self._retries)))

    # One group.

    async def _work(self) -> None:
        task = asyncio.current_task()
        assert task is not None
        job = await self._next_job()  # where that raises, `_settle_tasks` finds the task among the drawing ones
        self._drawing.discard(task)
        if job is None or self.reason:
            return
        flight = self._playing[task] = Flight(job, self.sink.step, alone=self._retries.down)
        try:
            async with asyncio.timeout(self.timeout if self.timeout > 0 else None) as timeout:
                flight.limit = timeout
                try:
                    groups = await self.play(job.item, job.key)
                finally:
                    flight.limit = None
            if cancel_requests():  # `play` caught the cancellation: its group is cut short
                raise asyncio.CancelledError
            if timeout.expired():
                raise TimeoutError
        except RunStopped:
            raise
        except (Exception, asyncio.CancelledError) as error:
            if isinstance(error, asyncio.CancelledError) and cancel_requests():
                raise
            decision = flight.ended or broken(error, timeout, self.timeout)
            finishing = asyncio.ensure_future(self._fail(flight, decision, blameless=is_infrastructure(error)))
        else:
            finishing = asyncio.ensure_future(self._finish(flight, groups))
        try:
            await asyncio.shield(finishing)
        except asyncio.CancelledError:
            await asyncio.wait({finishing})  # the group is played: it reaches the sink
            finishing.result()
            raise

    async def _next_job(self) -> ItemJob | None:
        async with self._draw:
            # While groups fail, other items are tried too: those that wait for another attempt may be the cause.
            fresh_first = self._retries.down and len(self._retries) < 2 * self.sink.workers and not self.exhausted
            ready = self._retries.ready()
            if ready is not None and not fresh_first:
                return self._retries.take(ready)
            limit = self.sink.limit
            while not self.exhausted and not self.reason and (limit is None or self._begun < limit):
                item = await or_none(self.next_item)
                if item is None:
                    self.exhausted = True
                    break
                key = self.keys.key(item)
                if key not in self.sink.done:
                    self._begun += 1
                    return ItemJob(item, key)
                await asyncio.sleep(0)  # thousands may be done already, and the loop has other work
        return None

    async def _finish(self, flight: Flight, groups: Sequence[G]) -> None:
        """Hand over the groups of an item. The first one has the item's key and comes last: with it, the item is done.

        Further groups are written once, also if a killed run plays their item again.
        """
        job = flight.job
        for number in reversed(range(1, len(groups))):
            key = part_key(job.key, number)
            if key in self.sink.done:
                self.tell(f"{key}: an earlier start wrote this group; the new result of its item is left out")
            else:
                await self._finish_group(ItemJob(job.item, key), groups[number], flight)
        await self._finish_group(job, groups[0], flight)

    async def _finish_group(self, job: ItemJob, group: G, flight: Flight) -> None:
        if self.ask_again is not None and getattr(group, "in_doubt", False):
            self._held.put(job, group, flight)
            return
        await self._finish_decided(job, group, flight)
        await self._held.ask()

    async def _finish_decided(self, job: ItemJob, group: G, flight: Flight) -> None:
        if self.on_played is not None:
            self.on_played(group)
        async with self._deciding:  # threads that compute share one GIL with the loop: it waits for each of them
            if getattr(group, "is_small", False):  # a change of threads would take longer
                decision = self.sink.decide(group)
            else:
                decision = await asyncio.to_thread(self.sink.decide, group)
        if isinstance(decision, Kept) and (old := self.sink.too_old(flight.step)) is not None:
            tokens = decision.tokens + decision.undelivered
            decision = replace(old, tokens=tokens, rewards=decision.rewards, tracebacks=decision.tracebacks)
        if isinstance(decision, LeftOut) and job is not flight.job:
            decision = replace(decision, again=False)  # only whole items are played again
        settled = await self._settle(job, decision, flight)
        if settled is None:
            self.brake.show(job.key, decision)
            return
        self._retries.succeeded()
        self.groups += 1
        self.rollouts += len(settled.rewards)
        self.rewards.extend(reward for reward in settled.rewards if reward is not None and math.isfinite(reward))
        if self.on_group is not None:
            await self.on_group(group, settled)
        self.brake.check(job.key, settled)

    async def _fail(self, flight: Flight, decision: LeftOut, *, blameless: bool) -> None:
        key = flight.job.key
        settled = await self._settle(flight.job, decision, flight)
        if settled is None and blameless:
            self.brake.show(key, decision)
        else:  # exceptions in the environment's code and groups without an end do not pass by themselves
            self.brake.check(key, settled or decision)

    async def _settle(self, job: ItemJob, decision: Decision, flight: Flight) -> Decision | None:
        """Hand the decision to the sink. None for a group that is played again, or broke too often."""
        step = flight.step
        if isinstance(decision, LeftOut):
            if decision.too_old and decision.again:
                if self._retries.put_aged(job, decision.tokens):
                    self.replayed[job.key] += 1
                    return None
                decision = replace(decision, detail=f"{decision.detail}; played {counted(job.too_old, 'time')}")
            elif decision.again and self.sink.retry_pause is not None:
                if not self._retries.put(job, decision, last=self.exhausted and len(self._playing) <= 1):
                    tokens = decision.tokens + job.tokens
                    await self.sink.accept(job, replace(decision, reason="failed", again=False, tokens=tokens), step)
                return None
            decision = replace(decision, tokens=decision.tokens + job.tokens)
        else:
            decision = replace(decision, undelivered=decision.undelivered + job.tokens)
        return await self.sink.accept(job, decision, step)

    # The end.

    async def _end(self) -> None:
        """Wind down completely, however often the run is cancelled meanwhile."""
        winding_down = asyncio.create_task(self._wind_down())
        try:
            await asyncio.shield(winding_down)
        except asyncio.CancelledError:
            self._hurry.set()
            await finish(winding_down)
            raise

    async def _wind_down(self) -> None:
        """Let groups in flight finish within the grace period, and see the end of every task."""
        ends = time.monotonic() + self.grace_period
        self.reason = self.reason or "the run failed"
        await cancel_all(self._drawing)
        working: set[asyncio.Task[None]] = {*self._playing, *self.sink.background}
        if self._playing and not self._hurry.is_set():
            self.tell(
                f"in flight: {counted(len(self._playing), 'group')}, with {self.grace_period:g} s to finish; another "
                "Ctrl-C or SIGTERM ends them at once"
            )
        hurry = asyncio.create_task(self._hurry.wait())
        while working and not hurry.done() and (left := ends - time.monotonic()) > 0:
            done, _ = await asyncio.wait({*working, hurry}, timeout=left, return_when=asyncio.FIRST_COMPLETED)
            working -= done
        hurry.cancel()
        if self.grace_period and (given_up := len(working & self._playing.keys())):
            self.tell(f"{counted(given_up, 'group')} did not finish; the next start plays their items again")
        await cancel_all(working)
        await self._held.release()
        for task in self._playing:
            if not task.cancelled() and (error := task.exception()) is not None:
                raise error
