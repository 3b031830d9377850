"""`process`: play groups concurrently and write down every rollout, so that a second start goes on where one stopped.

The groups file is the truth. The ShareGPT trajectories follow from it, and are completed from it when a run was killed
between the two.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncGenerator, Awaitable, Callable, Mapping, Sequence
from contextlib import AsyncExitStack, aclosing
from dataclasses import dataclass
from itertools import chain
from pathlib import Path
from typing import Any, Literal, TypeVar

from rich.console import Console

from backends.tasks import finish
from lachesis.agent.rollout import Rollout
from lachesis.errors import LachesisError
from lachesis.inference import Unauthorized
from lachesis.runs.items import ItemKeys
from lachesis.runs.ledger import Ledger
from lachesis.runs.progress import RunProgress
from lachesis.runs.records import group_record, rollout_messages, trajectories_of
from lachesis.runs.report import write_report
from lachesis.runs.summary import Summary
from lachesis.trajectories import JsonlWriter, read_lines
from lachesis.trajectories.saving import COMPLETED_FILE, FAILED_FILE

T = TypeVar("T")

MAX_TRACEBACKS = 5
"""Different exceptions of the environment that are printed in full; all of them are in the report."""


class RunStopped(LachesisError):
    """The run cannot go on; what was finished is on disk. The message says why and how to continue."""


NextItem = Callable[[], Awaitable[Any]]
"""The next item, None when there are no more."""

PlayGroup = Callable[[Any, str], Awaitable[tuple[Sequence[Mapping[str, Any]], Sequence[Rollout]]]]
"""Plays the group of an item (and its key): the tool definitions that it was given, and its finished rollouts."""


@dataclass(frozen=True, slots=True)
class RunFiles:
    """Where a run's output lies: everything beside the groups file."""

    groups: Path

    @property
    def report(self) -> Path:
        return self.groups.with_suffix(".html")

    @property
    def failures(self) -> Path:
        return self.groups.with_suffix(".failed.jsonl")

    @property
    def samples(self) -> Path:
        return self.groups.with_name(COMPLETED_FILE)

    @property
    def failed_samples(self) -> Path:
        return self.groups.with_name(FAILED_FILE)


@dataclass(frozen=True, slots=True)
class RunResult:
    """How a run came out."""

    files: RunFiles
    summary: Summary
    played: int
    """Groups that this start finished; the others were there already."""
    seconds: float
    tokens: int
    """Completion tokens that this start sampled, left-out rollouts and broken starts included."""
    failed_groups: int
    """Groups of this start without a single scored rollout; a second start plays them again."""
    exceptions: int
    """Rollouts of this start that met an exception in the environment's own code."""
    exhausted: bool
    """The environment had no more items."""


class ProcessRun:
    """One `process` run over a folder.

    Args:
        settings: what decides the content; a second start must have the same.
        total: groups wanted, those of earlier starts included.
        concurrency: groups in flight.
        max_failed_groups: groups in a row without a scored rollout after which the run stops.
        on_group: awaited with every finished group's record, e.g. to log it.
    """

    def __init__(
        self,
        *,
        next_item: NextItem,
        play: PlayGroup,
        environment: str,
        model: str,
        files: RunFiles,
        settings: Mapping[str, Any],
        total: int,
        concurrency: int,
        max_failed_groups: int,
        system: Literal["generated", "actual"],
        console: Console,
        on_group: Callable[[dict[str, Any]], Awaitable[None]] | None = None,
    ) -> None:
        self.next_item = next_item
        self.play = play
        self.environment = environment
        self.model = model
        self.files = files
        self.total = total
        self.concurrency = max(1, concurrency)
        self.max_failed_groups = max_failed_groups
        self.system = system
        self.console = console
        self.on_group = on_group
        self.ledger = Ledger(files.groups, settings, key="item_key")
        self.failed_in_a_row = 0
        self.failed_groups = 0
        self.played = 0
        self.tokens = 0
        self.exceptions = 0
        self.exhausted = False
        self.shown: set[str] = set()

    async def run(self) -> RunResult:
        """Play until `total` groups are on disk.

        Raises:
            RunFolderError: the folder cannot be used.
            RunStopped: too many failures in a row, or a key that the server refuses.
        """
        started = time.monotonic()
        async with AsyncExitStack() as stack:
            stack.callback(self.ledger.close)
            await _undisturbed(self.ledger.open)
            await asyncio.to_thread(self.forget_superseded_failures)
            samples = stack.enter_context(JsonlWriter(self.files.samples))
            failed = stack.enter_context(JsonlWriter(self.files.failed_samples))
            self.failures = stack.enter_context(JsonlWriter(self.files.failures))
            self.writers = {True: samples, False: failed}
            await asyncio.to_thread(self.complete_trajectories)
            if self.ledger.done:
                told = f"continuing {self.files.groups}: {len(self.ledger.done)} groups are done"
                self.console.print(told, markup=False, highlight=False, soft_wrap=True)
            try:
                with RunProgress(self.console, self.environment, self.total, len(self.ledger.done)) as progress:
                    await self.play_all(progress)
            finally:
                summary = await _undisturbed(self.write_report)
        return RunResult(
            files=self.files,
            summary=summary,
            played=self.played,
            seconds=time.monotonic() - started,
            tokens=self.tokens,
            failed_groups=self.failed_groups,
            exceptions=self.exceptions,
            exhausted=self.exhausted,
        )

    async def play_all(self, progress: RunProgress) -> None:
        running: set[asyncio.Task[dict[str, Any]]] = set()
        async with aclosing(self.items()) as items:
            try:
                while True:
                    while len(running) < self.concurrency and (drawn := await anext(items, None)) is not None:
                        running.add(asyncio.create_task(self.play_group(*drawn)))
                    if not running:
                        return
                    await asyncio.wait(running, return_when=asyncio.FIRST_COMPLETED)
                    if failure := await self.settle_finished(running, progress):
                        raise failure
            finally:
                for task in running:
                    task.cancel()
                if running:
                    await asyncio.wait(running)
                    await self.settle_finished(running, progress)

    async def settle_finished(
        self, running: set[asyncio.Task[dict[str, Any]]], progress: RunProgress
    ) -> BaseException | None:
        """Take the finished tasks out of `running` and write their groups down; the first failure among them.

        One failure does not keep the others from being written: nothing that is finished is lost.
        """
        failure: BaseException | None = None
        for task in [task for task in running if task.done()]:
            running.discard(task)
            if task.cancelled():
                continue
            if (raised := task.exception()) is not None:
                failure = failure or raised
                continue
            try:
                await self.settle(task.result(), progress)
            except RunStopped as stopped:
                failure = failure or stopped
        return failure

    async def items(self) -> AsyncGenerator[tuple[Any, str], None]:
        """Items that are not done yet, each with its key; as many as are missing."""
        keys = ItemKeys()
        missing = self.total - len(self.ledger.done)
        done = set(self.ledger.done)
        while missing > 0:
            item = await self.next_item()
            if item is None:
                self.exhausted = True
                return
            key = keys.key(item)
            if key not in done:
                missing -= 1
                yield item, key
            else:
                await asyncio.sleep(0)  # thousands may be done already, and the loop serves others, too

    async def play_group(self, item: Any, key: str) -> dict[str, Any]:
        tools, rollouts = await self.play(item, key)
        for rollout in rollouts:
            if isinstance(rollout.error, Unauthorized):
                raise RunStopped(str(rollout.error)) from rollout.error
        return await asyncio.to_thread(  # samples of long rollouts take their time
            group_record,
            environment=self.environment,
            item=item,
            item_key=key,
            tools=tools,
            model=self.model,
            rollouts=rollouts,
        )

    async def settle(self, group: dict[str, Any], progress: RunProgress) -> None:
        """Write a finished group down, or count it as failed when nothing in it was scored."""
        self.tokens += sum(
            rollout.get("completion_tokens", 0) + rollout["lost_completion_tokens"] for rollout in group["rollouts"]
        )
        self.show_tracebacks(group)
        if group["scores"]:
            await _undisturbed(self.write, group)
            self.failed_in_a_row = 0
            self.played += 1
            if self.on_group is not None:
                await self.on_group(group)
            mean = sum(group["scores"]) / len(group["scores"])
            progress.advance(f"last reward {mean:.2f}, {self.failed_groups} failed")
            return
        await _undisturbed(self.failures.write, group)
        self.failed_groups += 1
        self.failed_in_a_row += 1
        if self.failed_in_a_row >= self.max_failed_groups:
            why = next((r["traceback"] or r["reason"] for r in group["rollouts"]), "no rollouts")
            raise RunStopped(
                f"{self.failed_in_a_row} groups in a row without a scored rollout; the last one: {why.strip()}\n"
                f"{self.played} groups of this start are in {self.files.groups}; start again to continue"
            )

    def show_tracebacks(self, group: Mapping[str, Any]) -> None:
        """Print each exception in the environment once, however many rollouts end in it."""
        for rollout in group["rollouts"]:
            if (trace := rollout["traceback"]) is None:
                continue
            self.exceptions += 1
            if trace not in self.shown and len(self.shown) < MAX_TRACEBACKS:
                self.shown.add(trace)
                self.console.print(f"exception in the environment, on {group['item_key']}:", style="red", markup=False)
                self.console.print(trace, markup=False, highlight=False)

    def write(self, group: dict[str, Any]) -> None:
        self.ledger.append(group)
        self.write_trajectories(group, known=frozenset())

    def write_trajectories(self, group: Mapping[str, Any], known: frozenset[str]) -> None:
        for entry in trajectories_of(group, system=self.system):
            if entry["rollout_id"] not in known:
                self.writers[entry["completed"]].write(entry)

    def complete_trajectories(self) -> None:
        """Write the trajectories that a killed run still owed."""
        known = frozenset(
            entry.get("rollout_id")
            for path in (self.files.samples, self.files.failed_samples)
            for entry in read_lines(path)
        )
        for group in self.ledger.records():
            self.write_trajectories(group, known)

    def unscored_groups(self) -> dict[str, dict[str, Any]]:
        """By item: the last failure of each that is still without a scored rollout."""
        if not self.files.failures.exists():
            return {}
        failures = read_lines(self.files.failures, torn_tail=True)
        return {group["item_key"]: group for group in failures if group["item_key"] not in self.ledger.done}

    def forget_superseded_failures(self) -> None:
        """One line an item in the file of failures, however often the run is started."""
        if self.files.failures.exists():
            temporary = self.files.failures.with_name(f"{self.files.failures.name}.tmp")
            temporary.unlink(missing_ok=True)
            with JsonlWriter(temporary) as writer:
                for group in self.unscored_groups().values():
                    writer.write(group)
            temporary.replace(self.files.failures)

    def write_report(self) -> Summary:
        groups = chain(self.ledger.records(), self.unscored_groups().values())
        return write_report(self.files.report, title=f"{self.environment}: {self.model}", groups=groups)


async def _undisturbed(function: Callable[..., T], *args: Any) -> T:
    """Run `function` in a thread to its end, also when this is cancelled meanwhile: no write goes on unwatched."""
    return await finish(asyncio.to_thread(function, *args))


def example_rollouts(files: RunFiles) -> dict[str, tuple[Mapping[str, Any], Mapping[str, Any], list[dict[str, Any]]]]:
    """The best and the worst scored rollout of a run, as (group, rollout, messages)."""
    found: dict[str, tuple[Mapping[str, Any], Mapping[str, Any], list[dict[str, Any]]]] = {}
    for group in read_lines(files.groups):
        for rollout in group["rollouts"]:
            if rollout["reward"] is None:
                continue
            entry = (group, rollout, rollout_messages(group, rollout))
            if "best" not in found or rollout["reward"] > found["best"][1]["reward"]:
                found["best"] = entry
            if "worst" not in found or rollout["reward"] < found["worst"][1]["reward"]:
                found["worst"] = entry
    return found
