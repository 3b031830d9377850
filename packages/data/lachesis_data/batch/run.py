"""One batch run: the pipeline of `process`, with rows as items, one sample a group, and the files of a batch."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Iterator
from contextlib import suppress
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from shlex import quote
from typing import Any

from backends.errors import SettingsError
from backends.text import counted
from lachesis.base_env import HermesAgentBaseEnv
from lachesis.figures.item_keys import item_digest, or_none
from lachesis.figures.repaired_calls import NAME as REPAIRED_CALLS
from lachesis.figures.running_figures import RunningFigures
from lachesis.loop.outcome import listed
from lachesis.runs.commands import about_content
from lachesis.runs.failures import REPEATS, FailureBrake
from lachesis.runs.group_player import play_item, settled_group
from lachesis.runs.own_code import code_of
from lachesis.runs.own_place import own_place
from lachesis.runs.pipeline import Pipeline
from lachesis.runs.reports import NO_REPORT
from lachesis.runs.results import Row, RunFiles, omitted_rows
from lachesis.runs.run_folder import RunFolderError, changes, settings_of, unused
from lachesis_data.batch.entries import EntryFormat
from lachesis_data.batch.files import TRAJECTORIES
from lachesis_data.batch.prompts import Prompts
from lachesis_data.batch.rows import Rows, in_shard
from lachesis_data.batch.sink import GROUPS, PROMOTES, BatchSink, BatchWork
from lachesis_data.batch.totals import BatchTotals, Caps
from lachesis_messages.records.entries import omitting


@dataclass(frozen=True, slots=True, kw_only=True)
class BatchSettings:
    """The options of a batch run in addition to the settings of its environment."""

    folder: Path
    run_name: str
    named: bool = True
    """Whether somebody chose the folder. A run with other settings than the one there gets the next free one if not."""
    rows: Rows
    batch_size: int
    concurrency: int
    samples: int = 1
    """Of each prompt."""
    seed: int = 0
    grace_period: float = 60.0
    """Seconds that samples in flight get to finish when the run is stopped."""
    caps: Caps = field(default_factory=Caps)
    retry_failed: bool = False
    keep_without_reasoning: bool = False
    allow_missing_toolsets: bool = False


@dataclass(frozen=True, slots=True)
class BatchResult:
    """How a batch run came out."""

    sink: BatchSink
    seconds: float
    reason: str
    """Why the run ended."""

    @property
    def totals(self) -> BatchTotals:
        return self.sink.totals

    @property
    def failed(self) -> bool:
        """Whether the exit code is 1."""
        if self.totals.failed.groups:
            return True
        return self.sink.total != 0 and not self.totals.kept.groups  # a shard may have no rows

    def rows(self) -> Iterator[Row]:
        totals, sink = self.totals, self.sink
        tools, calls = totals.finished.tool_failures, totals.finished.repaired
        wanted = f" of {sink.total}" if sink.total >= 0 else ""
        gone = f" and {sink.gone} of rows that are not in the input any more" if sink.gone else ""
        yield (
            "rollouts",
            f"{totals.done - sink.gone}{wanted}{gone}: {totals.kept.groups} kept ({sink.played} in this start), "
            f"{totals.discarded} discarded for no reasoning, {totals.failed.groups} failed",
        )
        if sink.total >= 0 and (left := sink.total - totals.done + sink.gone) > 0:
            yield "not finished", f"{left}: without an answer so far, or none that counts; the next start plays them"
        yield "completed", f"{totals.kept.counts['completed']} of {totals.kept.groups}"
        if totals.failed.outcomes:
            yield "failures", listed(totals.failed.outcomes.most_common())
        if totals.kept.mean_reward is not None:
            yield "mean reward", f"{totals.kept.mean_reward:.3f}"
        yield "tool calls", f"{tools.calls.total()}, {tools.failed.total()} failed"
        for line in tools.lines():
            yield "failed calls", line
        if calls.parsed:
            yield "repaired calls", f"{calls.repaired} of {calls.parsed}: {REPAIRED_CALLS}"
        yield "reasoning", f"in {totals.reasoning['turns_with_reasoning']} of {totals.reasoning['turns']} turns"
        if totals.all.counts["uncounted_requests"]:
            yield "tokens", "the server does not count them"
        else:
            yield "tokens", f"{totals.all.prompts} of prompts, {totals.all.sampled} of completions"
        if sink.caps.prices is not None:
            cost = sink.caps.cost_of(totals)
            yield "cost", "unknown" if cost is None else f"{cost:.4f}"
        yield from omitted_rows(omitting(sink.folder / TRAJECTORIES))
        yield "tokens/s", f"{sink.sampled / max(self.seconds, 1e-9):.0f} ({sink.sampled} in {self.seconds:.1f} s)"
        yield "ended", self.reason

    def paths(self) -> Iterator[tuple[str, Path]]:
        yield "trajectories", self.sink.folder / TRAJECTORIES
        yield "groups", self.sink.files.groups
        if self.sink.files.report.exists():
            yield "report", self.sink.files.report

    def advice(self) -> Iterator[str]:
        yield from ()

    def next_steps(self) -> Iterator[str]:
        yield f"lachesis view {quote(str(self.sink.folder))}   (every rollout, in the browser)"

    def warnings(self) -> Iterator[str]:
        if not self.sink.files.report.exists():
            yield NO_REPORT
        if self.totals.failed.groups:
            failures = self.sink.files.failures
            causes = self.sink.figures.causes
            yield from causes.lines()
            again = (
                "--retry-failed plays them again"
                if causes.may_pass or not causes
                else f"{REPEATS} (with --retry-failed)"
            )
            yield f"{counted(self.totals.failed.groups, 'rollout')} failed, see {failures}; {again}"
        if discarded := self.totals.discarded:
            which = "finished rollouts" if self.totals.kept.groups else "finished rollouts, all of them,"
            yield (
                f"{discarded} {which} are discarded, since no turn of theirs has reasoning; ask for it in the system "
                f"prompt (<think>...</think>), or start again: {PROMOTES}"
            )


async def run_batch(env: HermesAgentBaseEnv, settings: BatchSettings) -> BatchResult:
    """Play every sample that no earlier start finished, and write it down.

    Raises:
        DatasetError: the input cannot be read, or a row of it cannot be played.
        RunFolderError: the folder cannot be used, or was made with other settings.
        SettingsError: a toolset does not exist here, or the environment makes no single rollouts.
    """
    started = time.monotonic()
    _check(env, settings)
    config, rows = env.config, settings.rows
    played, content = (-1, f"{rows.limit} items") if rows.source is None else await asyncio.to_thread(rows.check)
    kept_before = None
    with suppress(RunFolderError):  # the ledger says what is wrong with the manifest, where it needs one
        kept_before = settings_of(settings.folder / GROUPS).get("keep_without_reasoning")
    async with env.running():
        about = {
            **about_content(env, evaluation=False),
            "seed": settings.seed,
            # A start may begin to keep what an earlier one discarded; what is kept stays.
            "keep_without_reasoning": settings.keep_without_reasoning and kept_before is not False,
        }
        figures = RunningFigures(scores=not isinstance(env, Prompts))
        code, folder, takes_old_code = await asyncio.to_thread(code_of, env), settings.folder, False
        if settings.named:
            takes_old_code = config.when_code_changed == "continue"
        else:
            files = RunFiles(folder / GROUPS)
            files, takes_old_code = await own_place(
                files, about, (), code, named=False, choice=config.when_code_changed, console=env.console
            )
            folder = files.groups.parent
        before = None
        with suppress(RunFolderError):
            before = settings_of(folder / GROUPS)
        # The keys of a run that goes on are those of its first start, which may have been of an older version.
        same = before and not changes(before, about)
        work = BatchWork(
            _items(env, rows), settings=item_digest(before if same else about)[:8], samples=settings.samples
        )
        sink = BatchSink(
            folder,
            entries=EntryFormat(
                all_tools=tuple(env.tools),
                system=config.trajectory_system_prompt,
                prompt_field=config.prompt_field,
                with_reward=not isinstance(env, Prompts),
                keep_without_reasoning=settings.keep_without_reasoning,
            ),
            indices=work.indices,
            rows=rows if rows.source is not None else None,
            caps=settings.caps,
            batch_size=settings.batch_size,
            retry_failed=settings.retry_failed,
            about={
                "run_name": settings.run_name,
                "distribution": config.distribution,
                "input": f"{content}, {settings.samples} samples of each",
            },
            settings=about,
            total=max(-1, played * settings.samples),
            workers=settings.concurrency,
            console=env.console,
            size=1,
            figures=figures,
            code=code,
            takes_old_code=takes_old_code,
        )
        sink.ledger.elsewhere = f"--run-name {unused(folder).name}"
        pipeline = Pipeline(
            title=settings.run_name,
            next_item=work.next_item,
            keys=work,
            play=partial(play_item, env, size=1, finished=figures.add),
            sink=sink,
            console=env.console,
            brake=FailureBrake(env.console, config.max_failed_groups, figures.causes),
            ask_again=partial(settled_group, env, figures.add),
            grace_period=settings.grace_period,
        )
        await pipeline.run(signals=True)
    return BatchResult(sink, time.monotonic() - started, pipeline.reason)


def _check(env: HermesAgentBaseEnv, settings: BatchSettings) -> None:
    if env.collects:
        raise SettingsError(
            f"{env.run_name} collects its groups itself; play it with `process` and use `lachesis export`"
        )
    if (missing := env.agent_tools.missing()) and not settings.allow_missing_toolsets:
        raise SettingsError(
            f"toolsets that have no tools here: {', '.join(missing)}; choose another --distribution "
            "(--list-distributions), or leave them out with --allow-missing-toolsets"
        )


async def _items(env: HermesAgentBaseEnv, rows: Rows) -> AsyncIterator[tuple[int, Any, str]]:
    """Each item with its place in the input and its digest: of the rows, or of the environment's own dataset."""
    if rows.source is not None:
        for row in rows:
            yield row.index, row.content, row.digest
        return
    for index in range(rows.limit or 0):
        if (item := await or_none(env.get_next_item)) is None:
            return
        if in_shard(digest := item_digest(item), rows.shard):
            yield index, item, digest
