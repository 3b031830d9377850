"""The sink of `serve`: groups for a trainer, through the rollout API.

A finished group is built, written to the outbox and only then posted (`lachesis_train.relay`). A group that may
not be sent is written to another file with the reason. When enough groups are on their way, or another one could make
one in flight too old (`lachesis_train.staleness`), no new ones begin; those in flight are never cancelled to make
room.
"""

from __future__ import annotations

import asyncio
import math
import time
from collections import Counter
from collections.abc import AsyncIterator, Awaitable, Callable, Collection, Mapping
from contextlib import asynccontextmanager, suppress
from functools import partial
from pathlib import Path
from statistics import fmean
from typing import Any, TypeVar

from rich.console import Console

from backends.text import counted
from lachesis.figures.running_figures import RunningFigures
from lachesis.runs.decisions import Decision, Kept, LeftOut
from lachesis.runs.failures import ItemJob, RunStopped
from lachesis.runs.progress import Standing
from lachesis.runs.registration import TrainerInfo
from lachesis.runs.sink import Flight, RunCounts, Sink
from lachesis.settings.chosen import is_chosen
from lachesis.settings.settings import HermesAgentEnvConfig
from lachesis_messages.records.jsonl import JsonlError, JsonlWriter
from lachesis_tokens.samples.decision import SAME_SCORES
from lachesis_train.evaluation_schedule import EvaluationSchedule
from lachesis_train.group_encoding import GroupError, encode_json
from lachesis_train.item_pools import ItemPools
from lachesis_train.outbox import Outbox, OutboxError
from lachesis_train.outbox_state import Entry
from lachesis_train.relay import OutboxRelay, RelayError, RelayPace
from lachesis_train.rollout_api import EnvDescription, EnvStatus, RolloutApi
from lachesis_train.serve_result import ServeResult
from lachesis_train.signal_rates import SignalRates
from lachesis_train.staleness import StalenessCap, WhenStale

G = TypeVar("G")

_FLUSH_SECONDS = 10.0

TOO_OLD = "too old"
"""The reason of groups that are left out for their age."""

LEFT_OUT_IN_A_ROW = 16
"""Groups in a row that are not sent after which a line says so, and again after twice as many."""


class RolloutApiSink(Sink[G]):
    """One `serve` run's side of the trainer.

    Args:
        config: sets the pace; nothing that is read here decides the content of groups.
        workers: groups in flight at most.
        build: decides about a finished group, for a trainer; in a thread where the group is large.
        refused: JSONL file of the groups that are not sent, each with the reason.
        figures: those of the rollouts so far, for the display.
        evaluate: awaited for every `steps_per_eval` boundary that the trainer crosses.
        on_step: awaited with the trainer's step whenever it has changed.
        item_pause: seconds before an item whose group broke is played again; four times as long the next time.
        window: batches that may wait at the API (see `lachesis_train.relay`).
        pools: learn of the rewards of each group before it is written.
    """

    def __init__(
        self,
        config: HermesAgentEnvConfig,
        *,
        workers: int,
        build: Callable[[G, TrainerInfo], Decision],
        api: RolloutApi,
        env: EnvDescription,
        outbox: Outbox,
        refused: Path,
        console: Console,
        figures: RunningFigures | None = None,
        evaluate: Callable[[], Awaitable[Any]] | None = None,
        on_step: Callable[[int], Awaitable[None]] | None = None,
        item_pause: float = 5.0,
        window: int = 1,
        pace: RelayPace | None = None,
        pools: ItemPools | None = None,
    ) -> None:
        self.config = config
        self.build = build
        self.api = api
        self.env = env
        self.outbox = outbox
        self.console = console
        self.figures = figures or RunningFigures()
        self.on_step = on_step
        self.pools = pools
        self.signals = SignalRates(config.target_signal_rate)
        self.done = outbox.state.keys
        self.workers = workers
        self.retry_pause = item_pause
        self.cap = StalenessCap(config.max_staleness, WhenStale(config.when_stale))
        self.ends_groups = self.cap.ends_groups
        self.held_by: Flight | None = None
        """The group that new ones wait for, by the cap on age."""
        self.held_seconds = 0.0
        self._held_since = 0.0
        self._logged_ages = Counter[int]()
        self.evaluations = EvaluationSchedule(evaluate, every=config.steps_per_eval, tell=self.tell)
        self.relay = OutboxRelay(
            api,
            outbox,
            env,
            on_refused=self._refuse_posted,
            report=self.tell,
            on_change=lambda: self._changed(),
            drop=self._drop_aged if self.ends_groups else None,
            window=window,
            pace=pace,
            split=config.split_rollouts == "all",
        )
        self._changed: Callable[[], None] = lambda: None
        self._delivering: asyncio.Task[None] | None = None
        self._refused_path = refused
        self._refused: JsonlWriter | None = None
        self._reasons: set[str] = set()
        self._left_out_in_a_row = 0
        self._of_split = 0
        self._equal_rewards: list[float] = []
        """Of the groups with equal rewards since the last one that was sent, and since the trainer's last step."""
        self._step: int | None = None

    def tell(self, line: str) -> None:
        self.console.print(line, style="yellow", markup=False, highlight=False, soft_wrap=True)

    @asynccontextmanager
    async def opened(self, changed: Callable[[], None]) -> AsyncIterator[None]:
        self._changed = changed
        try:
            await self.outbox.open()
            try:
                self._refused = await self.outbox.run(partial(JsonlWriter, self._refused_path, fsync=True))
                if self.pools is not None:
                    await self.outbox.run(self.pools.open, self.done)
                self._logged_ages = Counter(self.outbox.state.ages)  # earlier starts have logged those
                if left := self.outbox.state.undelivered:
                    self.tell(f"continuing {self.outbox.folder}: {counted(left, 'group')} on the way")
                self._delivering = delivering = asyncio.create_task(self.relay.run())
                delivering.add_done_callback(lambda _: changed())
                try:
                    yield
                finally:
                    await self._flush(delivering)
            finally:
                if self.pools is not None:
                    await self.outbox.run(self.pools.close)
                if self._refused is not None:
                    await self.outbox.run(self._refused.close)
                await self.api.close()
                await self.outbox.close()
        except (JsonlError, OutboxError, RelayError) as error:
            raise RunStopped(str(error)) from error

    async def _flush(self, delivering: asyncio.Task[None]) -> None:
        """Post what fits, and tell the API that the environment leaves."""
        self.relay.stop()
        await asyncio.wait({delivering}, timeout=_FLUSH_SECONDS)
        delivering.cancel()
        await asyncio.wait({delivering})
        with suppress(TimeoutError):
            async with asyncio.timeout(_FLUSH_SECONDS):
                await self.relay.leave()
        if unsent := self.outbox.state.unsent:
            self.tell(f"{unsent} finished groups stay in {self.outbox.folder}; start again to post them")
        if not delivering.cancelled() and (error := delivering.exception()) is not None:
            raise error

    # The pace.

    async def check(self) -> None:
        assert self._delivering is not None
        if self._delivering.done():
            self._delivering.result()
        self._hold(None)
        known = self.outbox.state.known
        if known is None or self.relay.status is None or known.step == self._step:
            return
        self.evaluations.at_step(known.step, self._changed)
        self._step = self.step = known.step
        self._equal_rewards.clear()  # other weights may find groups easier or harder
        if self.on_step is not None:
            await self.on_step(known.step)

    def ending(self) -> str:
        return "" if self.evaluations.task is not None else self._trained() or self._nothing_to_learn()

    @property
    def settled(self) -> bool:
        return self.evaluations.task is None and not self.outbox.state.unsent

    @property
    def background(self) -> set[asyncio.Task[None]]:
        return {self.evaluations.task} if self.evaluations.task is not None else set()

    def _trained(self) -> str:
        """Why the trainer needs no more groups; empty while it does."""
        known = self.outbox.state.known
        if known is None or self.relay.status is None:
            return ""
        total = self._total()
        return f"the trainer has made {known.step} of {counted(total, 'step')}" if 0 <= total <= known.step else ""

    def _nothing_to_learn(self) -> str:
        """Why no group teaches anything any more; empty while one may."""
        rewards, most = self._equal_rewards, self.config.max_equal_groups
        if most is None or len(rewards) < most:
            return ""
        return (
            f"nothing is left to learn: {counted(len(rewards), 'group')} in a row had equal rewards, "
            f"{fmean(rewards):.3f} on average, while the trainer made no step. The task is solved, or too hard for "
            f"this model (env.max_equal_groups){self._without_signal()}"
        )

    def _without_signal(self) -> str:
        """The next step where no rollout earns anything; empty where some do."""
        if max(self._equal_rewards, default=1.0) > 0:
            return ""
        return (
            "; no rollout earned anything: `lachesis train --warm-start 64` first trains on what the environment's "
            "reference policy plays"
        )

    def _total(self) -> int:
        known = self.outbox.state.known
        total = self.config.total_steps if is_chosen(self.config, "total_steps") else -1
        return total if total >= 0 or known is None else known.num_steps

    def room(self, busy: int, flights: Collection[Flight]) -> int:
        free = self._free(busy)
        state, status, info = self.outbox.state, self.relay.status, self.relay.info
        if not free or status is None or info is None or state.known is None:
            return 0
        self.step = state.known.step  # that to which `state.sequences` belongs
        holding = self.cap.holding(self.step, (flight.step for flight in flights))
        fits = self.cap.room(
            step=self.step,
            holding=holding,
            waiting=state.sequences,
            busy=busy,
            share=info.batch_size * self._share(status),
            group_size=self.env.group_size,
        )
        if fits < 1:
            self._hold(next((flight for flight in flights if flight.step == holding < self.step), None))
        return int(max(0, min(free, fits)))

    def _hold(self, flight: Flight | None) -> None:
        now = time.monotonic()
        if self.held_by is not None:
            self.held_seconds += now - self._held_since
        self.held_by, self._held_since = flight, now

    def _share(self, status: EnvStatus) -> float:
        """The part of a batch that may come from this environment."""
        return status.unallocated_fraction + (self.env.min_batch_allocation or 0.0)

    def _free(self, busy: int) -> int:
        """Groups that may begin whatever the age of others."""
        config, info, status = self.config, self.relay.info, self.relay.status
        if info is None or status is None or self._trained():
            return 0
        workers, handling = self.workers, config.eval_handling.value
        if self.evaluations.task is not None and handling != "NONE":
            workers = int(workers * config.eval_limit_ratio) if handling == "LIMIT_TRAIN" else 0
        allocation = self.env.min_batch_allocation or 0.0
        sequences = config.max_batches_offpolicy * info.batch_size
        own = self.outbox.state.undelivered + busy
        others = max(0, status.queue_size - status.self_queue_size)
        bound = max(1, math.ceil(int(sequences * self._share(status)) / self.env.group_size))
        needed = math.ceil(sequences * allocation / self.env.group_size)  # whatever the others have in the queue
        return max(0, min(workers - busy, max(bound - own - others, needed - own)))

    # Groups.

    def too_old(self, step: int) -> LeftOut | None:
        detail = self._why_too_old(step, self.outbox.state.sequences + self.env.group_size)
        again = self.cap.policy is WhenStale.REPLAY
        return LeftOut(TOO_OLD, detail, again=again, too_old=True) if detail else None

    def _why_too_old(self, begun: int, sequences: int) -> str:
        known = self.outbox.state.known  # `step` may be some milliseconds older
        if known is None:
            return ""
        return self.cap.too_old(begun, step=known.step, sequences=sequences, batch_size=known.batch_size)

    async def _drop_aged(self, entry: Entry, queued: int) -> bool:
        """Write down that a finished group has become too old while it waited."""
        if detail := self._why_too_old(entry.step, queued + entry.sequences):
            await self._write_refused({**entry.to_record(), "reason": TOO_OLD, "detail": detail})
            await self.outbox.refused(TOO_OLD, entry)
        return bool(detail)

    def decide(self, group: G) -> Decision:
        info = self.relay.info
        assert info is not None
        return self.build(group, info)

    async def accept(self, job: ItemJob, decision: Decision, step: int) -> Decision:
        if self.pools is not None:
            await self.pools.finished(job.key, decision.rewards)
        self.signals.add(job.key, decision.rewards)
        if isinstance(decision, Kept):
            try:
                await self.outbox.append(
                    decision.content,
                    key=job.key,
                    tokens=decision.tokens,
                    undelivered=decision.undelivered,
                    step=step,
                )
            except GroupError as error:
                tokens = decision.tokens + decision.undelivered
                decision = LeftOut("malformed", str(error), tokens, decision.rewards, tracebacks=decision.tracebacks)
            else:
                self._left_out_in_a_row = 0
                self._equal_rewards.clear()
                self._of_split += decision.of_split
                self.relay.wake()
                return decision
        await self._leave_out(job.key, decision)
        return decision

    async def _leave_out(self, key: str, decision: LeftOut) -> None:
        line = {"key": key, "reason": decision.reason, "detail": decision.detail, "tokens": decision.tokens}
        await self._write_refused({**line, "rewards": list(decision.rewards), **decision.record})
        await self.outbox.left_out(key, decision.reason, decision.tokens)
        if decision.reason not in self._reasons:
            # Every group may have the same fault: a server that does not stop where the template ends turns, say.
            self._reasons.add(decision.reason)
            self.tell(
                f"a group is not sent: {decision.reason}: {decision.detail[:300]}; {self._refused_path} lists it and "
                "all others that are not sent"
            )
        if decision.reason == SAME_SCORES:
            self._equal_rewards.append(next((reward for reward in decision.rewards if reward is not None), math.nan))
        self._left_out_in_a_row += 1
        waves, rest = divmod(self._left_out_in_a_row, LEFT_OUT_IN_A_ROW)
        if not rest and not waves & (waves - 1):
            self.tell(
                f"{self._left_out_in_a_row} groups in a row are not sent, so the trainer waits; the last one: "
                f"{decision.reason}: {decision.detail[:300]}{self._without_signal()}"
            )

    async def _refuse_posted(self, entry: Entry, reason: str) -> None:
        group = await self.outbox.payload(entry)
        await self._write_refused({**entry.to_record(), "reason": reason}, group)
        self.tell(f"a group is set aside in {self._refused_path}: {reason[:300]}")

    async def _write_refused(self, line: Mapping[str, Any], group: bytes = b"null") -> None:
        assert self._refused is not None
        refused = self._refused
        await self.outbox.run(lambda: refused.write_line(encode_json(line)[:-1] + b',"group":' + group + b"}\n"))

    # Figures.

    def standing(self, counts: RunCounts) -> Standing:
        result = self.result(counts)
        rows = self.figures.rows(fresh=bool(counts.reason))
        return Standing(result.step, result.total, "step", result.line(), rows)

    def age_metrics(self) -> dict[str, float]:
        """The rate of groups with a signal, and the ages of those that were delivered since the last call, for W&B."""
        ages = self.outbox.state.ages - self._logged_ages
        self._logged_ages += ages
        signal = {} if (rate := self.signals.rate) is None else {"train/signal_rate": rate}
        if not ages:
            return signal
        mean = sum(age * count for age, count in ages.items()) / ages.total()
        left_out = self.outbox.state.refused[TOO_OLD]
        return {**signal, "train/age_mean": mean, "train/age_max": max(ages), "train/too_old": left_out}

    def result(self, counts: RunCounts) -> ServeResult:
        state = self.outbox.state
        return ServeResult(
            step=state.known.step if state.known is not None else 0,
            total=self._total(),
            delivered=state.delivered,
            at_api=state.undelivered - state.unsent,
            waiting=state.unsent,
            refused=dict(state.refused),
            delivered_tokens=state.delivered_tokens,
            undelivered_tokens=state.undelivered_tokens,
            of_split=self._of_split,
            ages=dict(state.ages),
            oldest=state.oldest.key if state.oldest is not None else "",
            max_staleness=self.cap.most,
            replayed=dict(counts.replayed),
            held_by=f"{self.held_by.job.key}, begun at step {self.held_by.step}" if self.held_by is not None else "",
            held_seconds=self.held_seconds,
            requeued=state.requeued,
            groups=counts.groups,
            rollouts=counts.rollouts,
            reward=fmean(counts.rewards) if counts.rewards else math.nan,
            playing=counts.playing,
            trouble=self.relay.trouble,
            reason=counts.reason,
            signals=self.signals,
            pools={} if self.pools is None else self.pools.counts(),
        )
