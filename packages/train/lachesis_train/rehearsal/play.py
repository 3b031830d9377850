"""Plays a run in virtual time: `serve`'s pipeline and sink as they are, with simulated servers, API and trainer."""

from __future__ import annotations

import asyncio
import io
import itertools
import tempfile
from collections import Counter
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from random import Random
from typing import Any, Final

from rich.console import Console

from lachesis.runs.commands import longest_group
from lachesis.runs.decisions import Decision, Kept, LeftOut
from lachesis.runs.failures import FailureBrake
from lachesis.runs.pipeline import Pipeline
from lachesis.runs.registration import TrainerInfo
from lachesis.settings.settings import HermesAgentEnvConfig
from lachesis_tokens.samples.decision import SAME_SCORES
from lachesis_train.rehearsal.fleet import Fleet, SimulatedTurn, Span, Workload
from lachesis_train.rehearsal.memory_api import MemoryApi, MemoryOutbox
from lachesis_train.rehearsal.virtual_time import run_in_virtual_time
from lachesis_train.rollout_api import EnvDescription
from lachesis_train.rollout_api_sink import TOO_OLD, RolloutApiSink
from lachesis_train.trainer.batches import POLL

TOO_LONG: Final = "too long"
"""The reason of groups with a sequence that the trainer does not take."""
MOST_GROUPS: Final = 10
"""Groups that are played at most for each one that the steps need. Where fewer than a tenth are delivered, the run ends
early: it has shown what is wrong, and takes the longer the fewer there are; without any it would never end."""
LONGEST_WAIT: Final = 86_400.0
"""Seconds that the trainer waits for a batch at most, where groups do not even end."""
IDLE_BYTES: Final = 91e6
ROLLOUT_BYTES: Final = 104e3
"""Memory of the environment's process: without a rollout, and for each one in flight (docs/benchmarks.md, Memory)."""


@dataclass(frozen=True)
class RehearsalPlan:
    """The facts of a run. Times are in seconds."""

    config: HermesAgentEnvConfig
    batch_size: int
    """Sequences of a step."""
    work: Workload
    servers: int = 1
    places: int = 64
    """Requests that a server works on at once."""
    tokens_per_second: float = 2000.0
    """Of a server with all places in use."""
    latency: Span = (0.5, 0.5)
    """To the first token."""
    step_seconds: float = 30.0
    trained_per_second: float | None = None
    """Tokens that the trainer takes a second, on top of `step_seconds`; None: their number costs nothing."""
    prompt_tokens: int = 0
    """Of a rollout that are not sampled: its prompt and what tools returned."""
    max_token_len: int = 2048
    max_policy_lag: int | None = None
    steps: int = 40
    seed: int = 0

    @property
    def workers(self) -> int:
        """Groups in flight at most, as the environment computes it."""
        most = self.config.max_num_workers
        return self.config.max_num_workers_per_node * self.servers if most == -1 else most


@dataclass(frozen=True)
class RehearsalMark:
    """Totals at the moment at which the trainer received a batch, or at an early end."""

    seconds: float = 0.0
    batches: int = 0
    tokens: int = 0
    busy: float = 0.0
    """Seconds of all places of the servers with a request."""
    waited: float = 0.0
    """Seconds of the trainer without a batch."""
    trained: int = 0
    """Sequences in the steps."""
    off_policy: int = 0
    """Sequences that `training.max_policy_lag` left out."""
    left_out: Mapping[str, int] = field(default_factory=Counter)
    """Groups that were not sent, by reason."""
    ages: Mapping[int, int] = field(default_factory=Counter)
    """Delivered groups by age in batches."""
    limits: Mapping[str, int] = field(default_factory=Counter)
    """Looks, one each second, by the setting that bounds the groups in flight."""


class _Sink(RolloutApiSink[dict[str, Any]]):
    async def _write_refused(self, line: Mapping[str, Any], group: bytes = b"null") -> None:
        """Nobody reads it, and a rehearsal shall not wait for a disk."""


class Rehearsal:
    """One run; `play` it inside `run_in_virtual_time`."""

    def __init__(self, plan: RehearsalPlan, folder: Path) -> None:
        self.plan, self.chance = plan, Random(plan.seed)
        config, size = plan.config, plan.config.group_size
        speed = plan.tokens_per_second / plan.places
        self.fleet = Fleet(plan.servers, places=plan.places, speed=speed, latency=plan.latency, chance=self.chance)
        self.outbox = MemoryOutbox(folder)
        trainer = TrainerInfo(plan.batch_size, plan.max_token_len)
        self.api = MemoryApi(self.outbox, trainer, group_size=size, num_steps=plan.steps)
        self.console = Console(file=io.StringIO())
        self.sink = _Sink(
            config.model_copy(update={"total_steps": -1, "steps_per_eval": 0}),
            workers=plan.workers,
            build=self._decide,
            api=self.api,
            env=EnvDescription("rehearsal", config.max_token_length, size),
            outbox=self.outbox,
            refused=folder / "refused.jsonl",
            console=self.console,
        )
        self.trained = 0
        """Steps that the weights contain."""
        self.marks = [RehearsalMark()]
        self.ended = ""
        """Why it ended before its last step."""
        self._asked = 0.0
        """When the trainer began to wait for the next batch."""
        self.most_playing = 0
        self._items = itertools.count()
        self._limits = Counter[str]()

    async def play(self) -> list[RehearsalMark]:
        """A mark for the start, for each batch, and for the end where it comes before the last batch."""
        pipeline = Pipeline(
            title="rehearsal",
            next_item=self._next_item,
            play=self._play_group,
            sink=self.sink,
            console=self.console,
            brake=FailureBrake(self.console, 0),
            timeout=longest_group(self.plan.config),
        )
        others = asyncio.gather(self._train(pipeline), self._look(pipeline))
        await pipeline.run()
        if self.marks[-1].batches < self.plan.steps:
            self.ended = pipeline.reason
            self._mark()
        others.cancel()
        with suppress(asyncio.CancelledError):
            await others
        return self.marks

    async def _next_item(self) -> int:
        return next(self._items)

    async def _play_group(self, item: int, key: str) -> list[dict[str, Any]]:
        chance = Random(f"{self.plan.seed}/{item}")
        rollouts = self.plan.work.group(chance, self.plan.config.group_size)
        played = await asyncio.gather(*map(self._play_rollout, rollouts))
        tokens, versions = zip(*played, strict=True)
        equal = chance.random() < self.plan.work.equal
        return [{"tokens": tokens, "versions": versions, "equal": equal}]

    async def _play_rollout(self, turns: Sequence[SimulatedTurn]) -> tuple[int, int]:
        """Sampled tokens, and the steps that the oldest weights contained that sampled one."""
        config, begun, sampled = self.plan.config, self.trained, 0
        with suppress(TimeoutError):
            async with asyncio.timeout(config.rollout_timeout):
                for turn in turns[: config.max_agent_turns]:
                    tokens = min(turn.tokens, config.max_token_length)
                    await self.fleet.complete(tokens)
                    sampled += tokens
                    await asyncio.sleep(turn.tools)
        return sampled, begun

    def _decide(self, group: dict[str, Any], info: TrainerInfo) -> Decision:
        size, longest = sum(group["tokens"]), max(group["tokens"]) + self.plan.prompt_tokens
        if group["equal"] and self.plan.config.ensure_scores_are_not_same:
            return LeftOut(SAME_SCORES, "no signal", size, [0.0])
        if longest >= info.max_token_len:
            return LeftOut(TOO_LONG, f"{longest} tokens", size, [0.0, 1.0])
        return Kept(group, size, rewards=[0.0, 1.0])

    async def _train(self, pipeline: Pipeline[dict[str, Any]]) -> None:
        clock, plan = asyncio.get_running_loop().time, self.plan
        while self.trained < plan.steps:
            self._asked = clock()
            while (batch := self.api.batch()) is None:
                if reason := self._in_vain():
                    pipeline.stop(reason)
                    return
                await asyncio.sleep(POLL)
            sequences = [pair for each in batch for pair in zip(each["tokens"], each["versions"], strict=True)]
            lag = plan.max_policy_lag
            kept = [tokens for tokens, version in sequences if lag is None or self.trained - version <= lag]
            self._mark(batches=1, trained=len(kept), off_policy=len(sequences) - len(kept))
            tokens = sum(kept) + plan.prompt_tokens * len(kept)
            await asyncio.sleep(plan.step_seconds + tokens / (plan.trained_per_second or float("inf")))
            self.trained += 1

    def _in_vain(self) -> str:
        """Why the trainer waits for no batch any longer; empty while it does."""
        finished = self.outbox.state.delivered + self.outbox.state.refused.total()
        needed = self.plan.steps * self.plan.batch_size // self.plan.config.group_size
        if finished >= MOST_GROUPS * needed:
            return f"{finished} groups were played, {MOST_GROUPS} times as many as the steps need"
        if asyncio.get_running_loop().time() - self._asked > LONGEST_WAIT:
            return f"the trainer waited {LONGEST_WAIT / 3600:.0f} hours for a batch"
        return ""

    def _mark(self, batches: int = 0, trained: int = 0, off_policy: int = 0) -> None:
        now, state, last = asyncio.get_running_loop().time(), self.outbox.state, self.marks[-1]
        mark = RehearsalMark(
            now,
            last.batches + batches,
            self.fleet.tokens,
            self.fleet.busy(),
            last.waited + now - self._asked,
            last.trained + trained,
            last.off_policy + off_policy,
            Counter(state.refused),
            Counter(state.ages),
            Counter(self._limits),
        )
        self.marks.append(mark)

    async def _look(self, pipeline: Pipeline[dict[str, Any]]) -> None:
        while True:
            await asyncio.sleep(1.0)
            self.most_playing = max(self.most_playing, pipeline.playing)
            held = "env.max_staleness" if self.sink.held_by is not None else "env.max_batches_offpolicy"
            self._limits["env.max_num_workers" if pipeline.playing >= self.sink.workers else held] += 1


@dataclass(frozen=True)
class RehearsalResult:
    """Figures from the first batch after the start-up, a quarter of the steps, to the last one, or to an early end."""

    steps: int
    """Batches that the trainer received."""
    ended: str
    """Why there are no more; empty if there are all."""
    seconds: float
    rollouts_per_second: float
    """That are trained."""
    tokens_per_second: float
    """That are sampled."""
    batches_per_hour: float
    staleness: float
    """Mean age of groups in batches."""
    oldest: int
    servers_idle: float
    """Share of the places of all servers without a request."""
    trainer_waits: float
    """Share of its time."""
    too_old: float
    """Share of the finished groups, or of sequences at the trainer, that are thrown away for their age."""
    without_signal: float
    too_long: float
    groups_in_flight: int
    """The most at once."""
    memory_bytes: float
    disk_bytes_a_day: float
    limit: str
    """The setting that bounds the groups in flight, most of the time."""


def rehearse(plan: RehearsalPlan) -> RehearsalResult:
    """Play the plan; takes no real time but that of the computation."""
    with tempfile.TemporaryDirectory() as folder:
        rehearsal = Rehearsal(plan, Path(folder))
        return result_of(plan, run_in_virtual_time(rehearsal.play()), rehearsal.most_playing, rehearsal.ended)


def result_of(
    plan: RehearsalPlan, marks: Sequence[RehearsalMark], most_playing: int, ended: str = ""
) -> RehearsalResult:
    """The figures between two marks; from the start, if there was no batch."""
    first, last = marks[max(1, (len(marks) - 1) // 4) if len(marks) > 2 else 0], marks[-1]
    seconds = last.seconds - first.seconds
    ages, left_out = Counter(last.ages) - Counter(first.ages), Counter(last.left_out) - Counter(first.left_out)
    trained, off_policy = last.trained - first.trained, last.off_policy - first.off_policy
    finished = max(1, ages.total() + left_out.total())
    tokens = (last.tokens - first.tokens) / seconds
    rollouts = most_playing * plan.config.group_size
    return RehearsalResult(
        steps=last.batches,
        ended=ended,
        seconds=seconds,
        rollouts_per_second=trained / seconds,
        tokens_per_second=tokens,
        batches_per_hour=3600 * (last.batches - first.batches) / seconds,
        staleness=sum(age * count for age, count in ages.items()) / max(1, ages.total()),
        oldest=max(ages, default=0),
        servers_idle=1 - (last.busy - first.busy) / (seconds * plan.servers * plan.places),
        trainer_waits=(last.waited - first.waited) / seconds,
        too_old=max(left_out[TOO_OLD] / finished, off_policy / max(1, trained + off_policy)),
        without_signal=left_out[SAME_SCORES] / finished,
        too_long=left_out[TOO_LONG] / finished,
        groups_in_flight=most_playing,
        memory_bytes=IDLE_BYTES + ROLLOUT_BYTES * rollouts,
        disk_bytes_a_day=86_400 * tokens * plan.work.record_bytes,
        limit=(Counter(last.limits) - Counter(first.limits)).most_common(1)[0][0] if last.limits else "",
    )
