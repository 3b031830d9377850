"""The sink of `process` and `eval`: files, so that a second start continues where the first one stopped.

The groups file is the truth. The ShareGPT trajectories follow from it, and a start completes them from it if a run was
killed between the two writes.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Container, Mapping, Sequence
from contextlib import ExitStack, asynccontextmanager, suppress
from dataclasses import dataclass, replace
from itertools import chain
from pathlib import Path
from typing import Any, Final, Literal, TypeVar

from rich.console import Console

from backends.tasks import finish
from backends.text import counted
from lachesis.figures.costs import Prices
from lachesis.figures.evaluations import EvaluatedItems
from lachesis.figures.item_keys import whole_and_part
from lachesis.figures.running_figures import RunningFigures
from lachesis.figures.summary import Summary
from lachesis.loop.interrupted import InterruptedRollout
from lachesis.loop.rollout import PlayedGroup, Rollout
from lachesis.runs.decisions import Decision, Kept, LeftOut
from lachesis.runs.failures import ItemJob
from lachesis.runs.group_records import group_record, trajectories_of
from lachesis.runs.ledger import Ledger
from lachesis.runs.own_code import OwnCode
from lachesis.runs.progress import Standing
from lachesis.runs.reports import write_report
from lachesis.runs.results import RunFiles
from lachesis.runs.run_folder import RunFolderError
from lachesis.runs.sink import RunCounts, Sink
from lachesis_messages.records.digests import certified
from lachesis_messages.records.jsonl import JsonlWriter, read_lines

INTERRUPTED: Final = "interrupted"
"""Stands in place of the outcome in the trajectory of a rollout that was cancelled."""

T = TypeVar("T")


@dataclass(slots=True, eq=False)
class _Waiting:
    """A group that waits for the disk."""

    kind: str
    record: dict[str, Any]


class FileSink(Sink[PlayedGroup]):
    """The folder of one run.

    Args:
        settings: the settings that decide the content; a second start must have the same.
        total: groups wanted, those of earlier starts included.
        system: the system turn of trajectories.
        min_reward: minimum reward of a rollout to be among the completed trajectories; None means no minimum.
        save_trajectories: whether there are any. A later start that wants them writes those of all groups.
        size: rollouts of a group.
        figures: those of the rollouts so far, for the display.
        evaluation: of an evaluation, its items; every line says that it is one.
        on_earlier: called, in a thread, with every group that an earlier start finished.
        code, takes_old_code: see `Ledger`.
    """

    most_at_once = 16
    """Groups that are written together, whose lines are in memory until then."""

    def __init__(
        self,
        files: RunFiles,
        *,
        environment: str,
        model: str,
        settings: Mapping[str, Any],
        total: int,
        workers: int,
        system: Literal["generated", "actual"],
        min_reward: float | None = None,
        save_trajectories: bool = True,
        console: Console,
        size: int = 1,
        figures: RunningFigures | None = None,
        evaluation: EvaluatedItems | None = None,
        on_earlier: Callable[[Mapping[str, Any]], None] | None = None,
        code: OwnCode | None = None,
        takes_old_code: bool = False,
        prices: Prices | None = None,
    ) -> None:
        self.prices = prices
        self.on_earlier = on_earlier
        self.size = size
        self.figures = figures or RunningFigures()
        self.files = files
        self.environment = environment
        self.model = model
        self.total = total
        self.system = system
        self.min_reward = min_reward
        self.save_trajectories = save_trajectories
        self.evaluation = evaluation
        self.console = console
        items = () if evaluation is None else evaluation.digests
        self.ledger = Ledger(files.groups, settings, items, code, takes_old_code=takes_old_code)
        self.done = self.ledger.done
        self.workers = max(1, workers)
        self.played = 0
        self.failed_groups = 0
        self.declined = 0
        self.left_to_agents = 0
        self.tokens = 0
        self.summary: Summary | None = None
        """Of the whole run; known once the sink is closed."""
        self._earlier_done = 0
        self._writing = asyncio.Lock()
        self._waiting: list[_Waiting] = []
        self._broken: Exception | None = None
        """Why nothing more is written: what was written of the last groups is not known, and the next start sees it."""

    @asynccontextmanager
    async def opened(self, changed: Callable[[], None]) -> AsyncIterator[None]:
        with ExitStack() as stack:
            stack.callback(self.ledger.close)
            await to_its_end(self._open, stack)
            self._earlier_done = self._earlier()
            if self._earlier_done:
                done = counted(self._earlier_done, self.unit.removesuffix("s"))
                line = f"continuing {self.files.groups}: {done} done"
                self.console.print(line, markup=False, highlight=False, soft_wrap=True)
            try:
                yield
            except BaseException:
                with suppress(RunFolderError):  # what ended the run is said, and not that a full disk has no report
                    self.summary = await to_its_end(self._write_report)
                raise
            self.summary = await to_its_end(self._write_report)

    @property
    def unit(self) -> str:
        """The unit in which the run counts."""
        return "groups" if self.evaluation is None else "rollouts"

    @property
    def settled_groups(self) -> int:
        """Those that are not played again by this start, or in `process` by any, earlier ones included."""
        left_out = self.failed_groups + self.declined + self.left_to_agents
        return self._earlier_done + self.played + (left_out if self.evaluation is not None else 0)

    def _earlier(self) -> int:
        """What earlier starts finished. Sets `limit`."""
        if self.evaluation is not None:
            return len(self.ledger.done)
        self.limit = self.total - self.ledger.items_done
        return self.ledger.items_done

    def _open(self, stack: ExitStack) -> None:
        self.ledger.open()
        self.files = replace(self.files, own_names=self.ledger.own_names)
        paths = {True: self.files.samples, False: self.files.failed_samples} if self.save_trajectories else {}
        self._writers = {completed: stack.enter_context(JsonlWriter(path)) for completed, path in paths.items()}
        self._read_earlier()
        self._failures = stack.enter_context(JsonlWriter(self.files.failures))

    def standing(self, counts: RunCounts) -> Standing:
        return self._standing(counts, [counted(self.figures.figures.rollouts, "rollout")] if self.size > 1 else [])

    def _standing(self, counts: RunCounts, notes: list[str]) -> Standing:
        ended = self.played + self.failed_groups + self.declined + self.left_to_agents
        if self.failed_groups and self.evaluation is None:
            notes.append(f"{self.failed_groups} failed")
        if counts.playing:
            notes.append(f"{counts.playing} in flight")
        rows = self.figures.rows(fresh=bool(counts.reason))
        # An earlier start may have been of more items.
        total = self.total if self.total < 0 else max(self.total, self.settled_groups)
        part = max(0.0, self.figures.figures.rollouts / max(1, self.size) - ended)
        return Standing(self.settled_groups, total, self.unit, ", ".join(notes), rows, part=part)

    def decide(self, group: PlayedGroup) -> Decision:
        record = self._record(group)
        if record["scores"]:
            return Kept(record, rewards=group.rewards, tracebacks=group.tracebacks)
        return LeftOut(
            "declined" if group.declined else "unscored",
            group.declined or "no rollout has a reward",
            declined=bool(group.declined),
            left_to_agents=group.left_to_agents,
            rewards=group.rewards,
            record=record,
            again=any(rollout.may_pass_later for rollout in group.rollouts) and not group.of_broken_item,
            broken_item=group.of_broken_item,
            unscored_because=group.rollouts[-1].unscored_because if group.rollouts else "no rollouts",
            tracebacks=group.tracebacks,
        )

    async def accept(self, job: ItemJob, decision: Decision, step: int) -> Decision:
        record = (
            decision.content if isinstance(decision, Kept) else decision.record or self._without_rollouts(job, decision)
        )
        self.tokens += sum(
            rollout.get("completion_tokens", 0) + rollout["lost_completion_tokens"]
            for rollout in (*record.get("rollouts", ()), *filter(None, [record.get("beside")]))
        )
        await self._to_disk("kept" if isinstance(decision, Kept) else "failed", record)
        if isinstance(decision, Kept):
            self.played += 1
        else:
            if not decision.record:
                self.figures.add_record(record)
                self.figures.causes.add("environment", decision.detail, may_pass=False)
            self.declined += decision.declined
            self.left_to_agents += decision.left_to_agents
            if not (decision.declined or decision.left_to_agents):
                self.failed_groups += 1
        return decision

    def _without_rollouts(self, job: ItemJob, decision: LeftOut) -> dict[str, Any]:
        """The record of a group that an exception ended before it had rollouts."""
        trace = "".join(decision.tracebacks) or decision.detail
        rollouts = []
        if self.evaluation is not None:  # a sample is counted, whatever became of it
            broken = Rollout.broken(*whole_and_part(job.key), RuntimeError(decision.detail))
            rollouts.append(replace(broken, reason=decision.detail, traceback=trace))
        record = self._record(PlayedGroup(job.item, job.key, tools=[], rollouts=rollouts))
        return {**record, "traceback": trace}

    def _record(self, group: PlayedGroup) -> dict[str, Any]:
        record = group_record(group, environment=self.environment, model=self.model)
        if self.prices is not None:
            record = self.prices.add_to(record)
        run = self.ledger.run
        if self.evaluation is not None:
            record |= self.evaluation.about(group.item)
        return {**record, "run": run, "evaluation": self.evaluation is not None} if run else record

    async def _to_disk(self, kind: str, record: Mapping[str, Any]) -> None:
        """Returns when the group is on the disk. Those that come while others are written are written together.

        Args:
            kind: `kept`, `failed`, or another one that `_write` knows.
        """
        self._waiting.append(waiting := _Waiting(kind, dict(record)))
        async with self._writing:
            while waiting in self._waiting:
                if self._broken is not None:
                    raise self._broken
                await to_its_end(self._write_some)

    def _write_some(self) -> None:
        some = self._waiting[: self.most_at_once]
        of_kind: dict[str, list[dict[str, Any]]] = {}
        for each in some:
            of_kind.setdefault(each.kind, []).append(each.record)
        try:
            self._write(of_kind)
        except Exception as error:
            self._broken = error
            raise
        del self._waiting[: len(some)]

    def _write(self, of_kind: Mapping[str, list[dict[str, Any]]]) -> None:
        """Append the records of each kind to its files."""
        self._write_trajectories(self.ledger.append_all(of_kind.get("kept", [])))
        failures = of_kind.get("failed", [])
        self._failures.write_all(map(certified, failures))
        self._write_trajectories(failures, of_failure=True)

    async def keep_interrupted(self, item: Any, interrupted: Sequence[InterruptedRollout]) -> None:
        """Write the finished turns of rollouts that were cancelled into the failed trajectories. They have no outcome,
        and are in no other file: the next start plays their item from its beginning."""
        async with self._writing:
            for each in interrupted if self.save_trajectories else ():
                group = PlayedGroup(item, each.rollout.item_key, each.tools, [each.rollout])
                await to_its_end(self._write_interrupted, group)

    def _write_interrupted(self, group: PlayedGroup) -> None:
        entries = trajectories_of(self._record(group), system=self.system)
        self._writers[False].write_all({**entry, "outcome": INTERRUPTED} for entry in entries)

    def _write_trajectories(
        self, records: Sequence[Mapping[str, Any]], known: frozenset[str] = frozenset(), *, of_failure: bool = False
    ) -> None:
        """Write the entries of groups, except those of the rollouts in `known`; `of_failure`: of groups that are played
        again, only what did not complete."""
        if not self.save_trajectories:
            return
        entries = [
            entry
            for record in records
            if not (known and known.issuperset(rollout["rollout_id"] for rollout in record["rollouts"]))
            for entry in trajectories_of(record, system=self.system)
            if entry["rollout_id"] not in known and not (of_failure and entry["completed"])
        ]
        for good, writer in self._writers.items():
            writer.write_all(entry for entry in entries if self._is_good(entry) is good)

    def _is_good(self, entry: Mapping[str, Any]) -> bool:
        """Whether it is a trajectory for `files.samples`."""
        least, reward = self.min_reward, entry["reward"]
        return bool(entry["completed"]) and (least is None or (reward is not None and reward >= least))

    def _read_earlier(self) -> None:
        """Take in what earlier starts finished, and write the trajectories that a killed run did not get to."""
        known = frozenset(
            rollout_id
            for writer in self._writers.values()
            for rollout_id in read_lines(writer.path, field="rollout_id")
        )
        for record in self.ledger.earlier():
            self.figures.add_record(record)
            if self.on_earlier is not None:
                self.on_earlier(record)
            self._write_trajectories([record], known)
        self._forget_superseded_failures()
        for record in self._unscored_groups().values():
            self._write_trajectories([record], known, of_failure=True)

    def _unscored_groups(self) -> dict[str, dict[str, Any]]:
        """By key: the last failure of each that is still without a scored rollout.

        Until a group is finished the folder may be started over with other settings or items: earlier failures belong
            to another run.
        """
        unscored = unscored_groups(self.files.failures, self.ledger.done)
        return {key: group for key, group in unscored.items() if group.get("run", "") == self.ledger.run}

    def _forget_superseded_failures(self) -> None:
        """One line an item in the file of failures, however often the run is started."""
        if self.files.failures.exists():
            temporary = self.files.failures.with_name(f"{self.files.failures.name}.tmp")
            temporary.unlink(missing_ok=True)
            with JsonlWriter(temporary) as writer:
                for group in self._unscored_groups().values():
                    writer.write(group)
            temporary.replace(self.files.failures)

    def _write_report(self) -> Summary:
        groups = chain(self.ledger.records(), self._unscored_groups().values())
        try:
            return write_report(self.files.report, title=f"{self.environment}: {self.model}", groups=groups)
        except OSError as error:
            reason = error.strerror or error
            step = "make room there and start again, which continues the run"
            if isinstance(error, FileNotFoundError):
                step = "its folder was removed in the meantime"
            raise RunFolderError(f"cannot write {self.files.report}: {reason}; {step}") from error


def unscored_groups(failures: Path, done: Container[str]) -> dict[str, dict[str, Any]]:
    """By key: the last line of each group that is not among those that are done."""
    groups = read_lines(failures, torn_tail=True) if failures.exists() else ()
    return {group["item_key"]: group for group in groups if group["item_key"] not in done}


async def to_its_end(function: Callable[..., T], *args: Any) -> T:
    """Run `function` in a thread, and await its end also if this task is cancelled meanwhile."""
    return await finish(asyncio.to_thread(function, *args))
