"""`serve`: play groups for a trainer, as many as it can use, and deliver each of them once.

A finished group is built, written to the outbox and only then posted (`lachesis.training.relay`). What may not be
sent is written to a file of its own with the reason. Rollouts in flight are never cancelled to make room: when enough
groups are on their way, no new ones are begun. The run ends when the trainer has made its steps, on SIGTERM or Ctrl-C,
or when the environment has no more items; groups that are not posted by then stay in the outbox for the next start.
"""

from __future__ import annotations

import asyncio
import math
import signal
import time
import traceback
from collections import deque
from collections.abc import Awaitable, Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any, Generic, TypeVar

from rich.console import Console

from lachesis.agent.rollout import is_cancelled
from lachesis.runs.items import ItemKeys
from lachesis.runs.process import NextItem, RunStopped
from lachesis.runs.serve_progress import ServeProgress, ServeResult, Tally
from lachesis.training.outbox import Outbox, OutboxError
from lachesis.training.outbox_state import Entry
from lachesis.training.relay import OutboxRelay, Pace, RelayError
from lachesis.training.rollout_api import EnvDescription, GroupError, RolloutApi, encode_json
from lachesis.training.serve_settings import BuildGroup, Decision, PlayGroup, Sendable, ServeSettings, Unsendable
from lachesis.trajectories import JsonlError, JsonlWriter

G = TypeVar("G")

MAX_ATTEMPTS = 3
"""Times that a group is played while others succeed, before its item is given up."""

MAX_ATTEMPTS_ALONE = 8
"""Times that the very last item is tried, over some two minutes, when nothing else can succeed."""

_FLUSH_SECONDS = 10.0
_TICK = 1.0
_LONGEST_DELAY = 60.0


@dataclass(slots=True, eq=False)
class _Job:
    """One item to be played."""

    item: Any
    key: str
    failures: int = 0
    successes_then: int = -1
    """Groups of the run that had succeeded when it failed last."""
    alone: int = 0
    """Failures while it was the only item left."""
    not_before: float = 0.0
    """When it may be tried again, on the clock of `time.monotonic`."""
    tokens: int = 0
    """Sampled in the groups that failed: in none that is sent."""


class ServeRun(Generic[G]):
    """One `serve` run.

    Args:
        evaluate: awaited once for every `steps_per_eval` boundary that the trainer crosses. Several crossed at once are
            one evaluation: the weights of the earlier ones are gone. One that is crossed during an evaluation is
            evaluated right after it.
        refused: JSONL file of the groups that are not sent, each with the reason.
        on_group: awaited with every finished group and what was decided about it, after it is on the disk.
        on_step: awaited with the trainer's step whenever it has changed.
    """

    def __init__(
        self,
        *,
        next_item: NextItem,
        play: PlayGroup[G],
        build: BuildGroup[G],
        api: RolloutApi,
        env: EnvDescription,
        outbox: Outbox,
        refused: Path,
        settings: ServeSettings,
        console: Console,
        evaluate: Callable[[], Awaitable[Any]] | None = None,
        on_group: Callable[[G, Decision], Awaitable[None]] | None = None,
        on_step: Callable[[int], Awaitable[None]] | None = None,
        pace: Pace | None = None,
    ) -> None:
        self.next_item = next_item
        self.play = play
        self.build = build
        self.api = api
        self.env = env
        self.outbox = outbox
        self.settings = settings
        self.console = console
        self.evaluate = evaluate
        self.on_group = on_group
        self.on_step = on_step
        self.tally = Tally()
        self.relay = OutboxRelay(
            api,
            outbox,
            env,
            on_refused=self._refuse_posted,
            report=self.tell,
            on_change=self._notice,
            window=settings.window,
            pace=pace,
        )
        self._refused_path = refused
        self._refused: JsonlWriter | None = None
        self._keys = ItemKeys()
        self._draw = asyncio.Lock()
        self._building = asyncio.Lock()
        self._again: deque[_Job] = deque()
        self._exhausted = False
        self._drawing: set[asyncio.Task[None]] = set()
        self._playing: set[asyncio.Task[None]] = set()
        self._evaluation: asyncio.Task[None] | None = None
        self._evaluated: int | None = None
        self._evaluate_next = False
        self._step: int | None = None
        self._failed_in_a_row = 0
        self._begin_after = 0.0
        self._delay = _TICK
        self._noticed = asyncio.Event()
        self._reason = ""
        self._told: set[str] = set()
        self._hurry = asyncio.Event()

    def stop(self, reason: str) -> None:
        """Begin nothing new, give what is in flight its grace period, and end. Asked again, end at once."""
        if self._reason:
            self._hurry.set()
        self._reason = self._reason or reason
        self._noticed.set()

    async def run(self) -> ServeResult:
        """Serve until the trainer is done, the items are used up, or the run is stopped.

        Raises:
            RunStopped: the run cannot go on; the message says why, and what is finished is in the outbox.
        """
        progress = ServeProgress(self.console, self.env.desired_name)
        delivery: asyncio.Task[None] | None = None
        try:
            await self.outbox.open()
            self._refused = await self.outbox.run(partial(JsonlWriter, self._refused_path, fsync=True))
            if left := self.outbox.state.undelivered:
                self.tell(f"continuing {self.outbox.folder}: {left} groups are on their way")
            delivery = asyncio.create_task(self.relay.run())
            delivery.add_done_callback(self._notice)
            with _signals(self.stop), progress:
                try:
                    await self._manage(delivery, progress)
                except BaseException:
                    self._hurry.set()
                    raise
                finally:
                    await self._wind_down(delivery)
        except (JsonlError, OutboxError, RelayError) as error:
            raise RunStopped(str(error)) from error
        finally:
            if self._refused is not None:
                await self.outbox.run(self._refused.close)
            await self.api.close()
            await self.outbox.close()
        return self._result()

    def tell(self, line: str) -> None:
        self.console.print(line, style="yellow", markup=False, highlight=False, soft_wrap=True)

    # Managing.

    async def _manage(self, delivery: asyncio.Task[None], progress: ServeProgress) -> None:
        while True:
            self._noticed.clear()
            self._settle()
            if delivery.done():
                delivery.result()
            await self._look_at_step()
            self._reason = self._reason or self._all_done()
            if self._reason:
                self.tell(f"stopping: {self._reason}")
                return
            for _ in range(self._room()):
                task = asyncio.create_task(self._work())
                self._drawing.add(task)
                task.add_done_callback(self._notice)
            progress.show(self._result())
            with suppress(TimeoutError):
                async with asyncio.timeout(_TICK):
                    await self._noticed.wait()

    def _notice(self, _: Any = None) -> None:
        self._noticed.set()

    def _settle(self) -> None:
        """Take the finished tasks away. A group's failure is none of these: what is raised here, by an environment that
        cannot name its next item or by a full disk, ends the run."""
        for tasks in (self._drawing, self._playing):
            for task in [task for task in tasks if task.done()]:
                tasks.discard(task)
                task.result()
        if self._evaluation is not None and self._evaluation.done():
            self._evaluation = None

    def _trained(self) -> str:
        """Why the trainer needs no more groups; empty while it does."""
        known = self.outbox.state.known
        if known is None or self.relay.status is None:
            return ""
        total = self.settings.total_steps if self.settings.total_steps >= 0 else known.num_steps
        return f"the trainer has made {known.step} of {total} steps" if 0 <= total <= known.step else ""

    def _all_done(self) -> str:
        if self._evaluation is not None:
            return ""
        if trained := self._trained():
            return trained
        working = self._drawing or self._playing or self._again
        if self._exhausted and not working and not self.outbox.state.unsent:
            return "there are no more items, and all groups are posted"
        return ""

    def _room(self) -> int:
        """Groups that may be begun now."""
        settings, info, status = self.settings, self.relay.info, self.relay.status
        busy = len(self._drawing) + len(self._playing)
        if info is None or status is None or (self._exhausted and not self._ripe()) or self._trained():
            return 0
        if self._is_down():
            return int(not busy and time.monotonic() >= self._begin_after)
        workers = settings.max_workers
        if self._evaluation is not None and settings.eval_handling != "NONE":
            workers = int(workers * settings.eval_limit_ratio) if settings.eval_handling == "LIMIT_TRAIN" else 0
        allocation = self.env.min_batch_allocation or 0.0
        sequences = settings.max_batches_offpolicy * info.batch_size
        own = self.outbox.state.undelivered + busy
        others = max(0, status.queue_size - status.self_queue_size)
        bound = max(1, int(sequences * (status.unallocated_fraction + allocation)) // self.env.group_size)
        needed = math.ceil(sequences * allocation / self.env.group_size)  # whatever the others have in the queue
        return max(0, min(workers - busy, max(bound - own - others, needed - own)))

    def _is_down(self) -> bool:
        """Nothing succeeds: one group is tried now and then."""
        return self._failed_in_a_row >= MAX_ATTEMPTS

    async def _look_at_step(self) -> None:
        known = self.outbox.state.known
        if known is None or self.relay.status is None or known.step == self._step:
            return
        every = self.settings.steps_per_eval
        if self.evaluate is not None and every > 0:
            boundary = known.step // every
            if self._evaluated is None or known.step < (self._step or 0):
                self._evaluated = boundary
            elif boundary > self._evaluated:
                self._evaluated = boundary
                self._evaluate_next = True
                if self._evaluation is None:
                    self._evaluation = asyncio.create_task(self._evaluate())
                    self._evaluation.add_done_callback(self._notice)
        self._step = known.step
        if self.on_step is not None:
            await self.on_step(known.step)

    async def _evaluate(self) -> None:
        assert self.evaluate is not None
        while self._evaluate_next:
            self._evaluate_next = False
            try:
                await self.evaluate()
            except Exception:
                self.tell(f"the evaluation at step {self._step} failed:\n{traceback.format_exc()}")

    # One group.

    async def _work(self) -> None:
        task = asyncio.current_task()
        assert task is not None
        job = await self._next_job()  # where that raises, `_settle` finds the task among the drawing ones
        self._drawing.discard(task)
        if job is None or self._reason:
            return
        self._playing.add(task)
        step = self._step or 0
        limit = self.settings.worker_timeout
        try:
            async with asyncio.timeout(limit if limit > 0 else None) as timeout:
                group = await self.play(job.item, job.key)
        except RunStopped:
            raise
        except (Exception, asyncio.CancelledError) as error:
            if isinstance(error, asyncio.CancelledError) and is_cancelled():
                raise
            if timeout.expired():
                detail = f"the group took longer than worker_timeout = {limit:g} s"
                await self._leave_out(job.key, Unsendable("worker timeout", detail, job.tokens))
            else:
                await self._failed(job, f"{type(error).__name__}: {error}")
            return
        finishing = asyncio.ensure_future(self._finish(job, group, step))
        try:
            await asyncio.shield(finishing)
        except asyncio.CancelledError:
            await asyncio.wait({finishing})  # it is played: it is written down, whatever happens
            finishing.result()
            raise

    async def _next_job(self) -> _Job | None:
        async with self._draw:
            # While groups fail, other items are tried, too: it may be the doing of those that wait to be tried again.
            fresh_first = self._is_down() and len(self._again) < 2 * self.settings.max_workers
            ripe = self._ripe()
            if ripe is not None and not (fresh_first and not self._exhausted):
                self._again.remove(ripe)
                return ripe
            while not self._exhausted and not self._reason:
                item = await self.next_item()
                if item is None:
                    self._exhausted = True
                    break
                key = self._keys.key(item)
                if key not in self.outbox.state.keys:
                    return _Job(item, key)
                await asyncio.sleep(0)  # thousands may be done already, and the loop serves others, too
        return None

    def _ripe(self) -> _Job | None:
        """An item to be tried again whose pause is over."""
        now = time.monotonic()
        return next((job for job in self._again if job.not_before <= now), None)

    async def _finish(self, job: _Job, group: G, step: int) -> None:
        info = self.relay.info
        assert info is not None
        async with self._building:  # threads that compute share one GIL with the loop: it waits for each of them
            verdict = await asyncio.to_thread(self.build, group, info)
        if isinstance(verdict, Sendable):
            verdict = replace(verdict, undelivered=verdict.undelivered + job.tokens)
            verdict = await self._append(job.key, verdict, step)
        elif verdict.again:
            job.tokens += verdict.tokens
            await self._failed(job, verdict.detail)
            return
        else:
            verdict = replace(verdict, tokens=verdict.tokens + job.tokens)
        if isinstance(verdict, Unsendable):
            await self._leave_out(job.key, verdict)
        if self._is_down():
            self.tell("groups succeed again")
        self._failed_in_a_row, self._delay = 0, _TICK
        self.tally.add(verdict.rewards)
        if self.on_group is not None:
            await self.on_group(group, verdict)

    async def _append(self, key: str, verdict: Sendable, step: int) -> Decision:
        try:
            await self.outbox.append(
                verdict.payload,
                key=key,
                tokens=verdict.tokens,
                undelivered=verdict.undelivered,
                step=step,
            )
        except GroupError as error:
            tokens = verdict.tokens + verdict.undelivered
            return Unsendable("malformed", str(error), tokens, verdict.rewards)
        self.relay.wake()
        return verdict

    async def _leave_out(self, key: str, verdict: Unsendable) -> None:
        line = {"key": key, "reason": verdict.reason, "detail": verdict.detail, "tokens": verdict.tokens}
        await self._write_refused({**line, "rewards": list(verdict.rewards), **verdict.record})
        await self.outbox.left_out(key, verdict.reason, verdict.tokens)
        if verdict.reason not in self._told:
            # It may be so with every group: a server that does not stop where the template ends turns, for example.
            self._told.add(verdict.reason)
            self.tell(
                f"a group is not sent: {verdict.reason}: {verdict.detail[:300]}; this one and others stand in "
                f"{self._refused_path}"
            )

    async def _refuse_posted(self, entry: Entry, reason: str) -> None:
        group = await self.outbox.payload(entry)
        await self._write_refused({**entry.to_record(), "reason": reason}, group)
        self.tell(f"a group is set aside in {self._refused_path}: {reason[:300]}")

    async def _write_refused(self, line: Mapping[str, Any], group: bytes = b"null") -> None:
        assert self._refused is not None
        refused = self._refused
        await self.outbox.run(lambda: refused.write_line(encode_json(line)[:-1] + b',"group":' + group + b"}\n"))

    async def _failed(self, job: _Job, reason: str) -> None:
        """The infrastructure broke a group: its item is played again, with growing pauses while nothing succeeds."""
        self._failed_in_a_row += 1
        if self.tally.groups != job.successes_then:  # while nothing succeeds, it is not the item's doing
            job.failures += 1
            job.successes_then = self.tally.groups
        if self._exhausted and not self._again and len(self._playing) <= 1:
            job.alone += 1  # nothing else is left that could tell
        if job.failures >= MAX_ATTEMPTS or job.alone >= MAX_ATTEMPTS_ALONE:
            await self._leave_out(job.key, Unsendable("failed", reason, job.tokens))
            return
        now = time.monotonic()
        # Some groups still succeed when a server goes away: without a pause an item would use up its attempts by then.
        job.not_before = now + self.settings.item_pause * 4 ** (job.failures - 1)
        self._again.append(job)
        if self._failed_in_a_row == MAX_ATTEMPTS:
            self.tell(f"groups fail: {reason}; they are played again, one at a time until one succeeds")
        if self._is_down() and now >= self._begin_after:  # groups fail together: one pause
            self._begin_after = now + self._delay
            self._delay = min(_LONGEST_DELAY, 2 * self._delay)

    # The end.

    async def _wind_down(self, delivery: asyncio.Task[None]) -> None:
        """Let what is in flight finish within the grace period, write it down, post what fits, and say goodbye."""
        ends = time.monotonic() + self.settings.grace_period
        self._reason = self._reason or "the run failed"
        await _cancel(self._drawing)
        evaluation = {self._evaluation} if self._evaluation is not None else set()
        working: set[asyncio.Task[None]] = {*self._playing, *evaluation}
        if self._playing and not self._hurry.is_set():
            self.tell(
                f"in flight: {_groups(len(self._playing))}, with {self.settings.grace_period:g} s to finish; another "
                "Ctrl-C or SIGTERM ends them at once"
            )
        hurry = asyncio.create_task(self._hurry.wait())
        while working and not hurry.done() and (left := ends - time.monotonic()) > 0:
            done, _ = await asyncio.wait({*working, hurry}, timeout=left, return_when=asyncio.FIRST_COMPLETED)
            working -= done
        hurry.cancel()
        if given_up := len(working & self._playing):
            self.tell(f"{_groups(given_up)} did not finish; the next start plays their items again")
        await _cancel(working)
        self.relay.stop()
        await asyncio.wait({delivery}, timeout=_FLUSH_SECONDS)
        await _cancel({delivery})
        with suppress(TimeoutError):
            async with asyncio.timeout(_FLUSH_SECONDS):
                await self.relay.leave()
        if self.outbox.state.unsent:
            self.tell(
                f"{self.outbox.state.unsent} finished groups stay in {self.outbox.folder}; start again to post them"
            )
        for task in (*self._playing, *([delivery] if delivery.done() else ())):
            if not task.cancelled() and (error := task.exception()) is not None:
                raise error

    def _result(self) -> ServeResult:
        known = self.outbox.state.known
        total = self.settings.total_steps
        return ServeResult.of(
            self.outbox.state,
            self.tally,
            step=known.step if known is not None else 0,
            total=total if total >= 0 or known is None else known.num_steps,
            playing=len(self._playing),
            trouble=self.relay.trouble,
            reason=self._reason,
        )


def _groups(count: int) -> str:
    return "1 group" if count == 1 else f"{count} groups"


async def _cancel(tasks: set[asyncio.Task[None]]) -> None:
    """Cancel and see the end of it: a cancelled group releases its sandboxes first."""
    for task in tasks:
        task.cancel()
    if tasks:
        ended, _ = await asyncio.wait(tasks)
        for task in ended:
            if not task.cancelled():
                task.exception()  # the run ends for a reason already: nobody is to be told that this went unseen


@contextmanager
def _signals(stop: Callable[[str], None]) -> Iterator[None]:
    """SIGTERM and Ctrl-C call `stop` inside. Elsewhere than in a main thread they are somebody else's."""
    loop = asyncio.get_running_loop()
    taken = []
    for number in (signal.SIGTERM, signal.SIGINT):
        with suppress(NotImplementedError, ValueError, RuntimeError):
            loop.add_signal_handler(number, stop, number.name)
            taken.append(number)
    try:
        yield
    finally:
        for number in taken:
            loop.remove_signal_handler(number)
