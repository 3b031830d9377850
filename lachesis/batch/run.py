"""One batch run: the pipeline of `process`, with rows as items, one sample a group, and the files of a batch."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from lachesis.base_env import HermesAgentBaseEnv
from lachesis.batch.entries import EntryFormat
from lachesis.batch.files import TRAJECTORIES
from lachesis.batch.prompts import Prompts
from lachesis.batch.rows import Rows, in_shard
from lachesis.batch.sink import BatchSink, Work
from lachesis.batch.totals import Caps, Totals
from lachesis.errors import SettingsError
from lachesis.runs.commands import about_content
from lachesis.runs.failures import FailureBrake
from lachesis.runs.item_keys import item_digest
from lachesis.runs.pipeline import Pipeline
from lachesis.runs.results import Row, RunFiles
from lachesis.runs.server_settings import describe


@dataclass(frozen=True, slots=True, kw_only=True)
class BatchSettings:
    """What a batch run is told beside the settings of its environment."""

    folder: Path
    run_name: str
    rows: Rows | None
    """None takes the items of the environment's own dataset."""
    batch_size: int
    concurrency: int
    samples: int = 1
    """Of each prompt."""
    seed: int = 0
    max_items: int | None = None
    """Items that are taken from the environment's own dataset."""
    shard: tuple[int, int] = (1, 1)
    """Of the environment's own items; that of `rows` is in it."""
    grace_period: float = 60.0
    """Seconds that samples in flight get to finish when the run is stopped."""
    caps: Caps = field(default_factory=Caps)
    retry_failed: bool = False
    keep_without_reasoning: bool = False
    allow_missing_toolsets: bool = False


@dataclass(frozen=True, slots=True)
class BatchResult:
    """How a batch run came out."""

    folder: Path
    files: RunFiles
    totals: Totals
    total: int
    """Samples wanted; -1 where it is not known."""
    cost: float | None
    seconds: float
    tokens: int
    """Completion tokens of this start."""
    played: int
    """Samples that this start kept."""
    reason: str
    """Why the run ended."""

    @property
    def failed(self) -> bool:
        """Whether the exit code is 1."""
        return bool(self.totals.failed)

    def rows(self) -> Iterator[Row]:
        totals = self.totals
        wanted = f" of {self.total}" if self.total >= 0 else ""
        yield (
            "samples",
            f"{totals.done}{wanted}: {totals.kept} kept ({self.played} in this start), "
            + (f"{totals.discarded} discarded for no reasoning, {totals.failed} failed"),
        )
        yield "completed", f"{totals.completed} of the {totals.kept}"
        if totals.outcomes:
            yield "failures", ", ".join(f"{name} {count}" for name, count in totals.outcomes.most_common())
        if totals.rewards:
            yield "mean reward", f"{sum(totals.rewards) / len(totals.rewards):.3f}"
        calls = totals.calls
        yield "tool calls", f"{calls['count']}, {calls['failure']} failed"
        turns = totals.reasoning
        yield "reasoning", f"in {turns['turns_with_reasoning']} of {turns['turns']} turns"
        if totals.uncounted:
            yield "tokens", "the server does not count them"
        else:
            yield "tokens", f"{totals.prompt_tokens} of prompts, {totals.completion_tokens} of completions"
        if self.cost is not None:
            yield "cost", f"{self.cost:.4f}"
        yield "tokens/s", f"{self.tokens / max(self.seconds, 1e-9):.0f} ({self.tokens} in {self.seconds:.1f} s)"
        yield "ended", self.reason

    def paths(self) -> Iterator[Row]:
        yield "trajectories", str(self.folder / TRAJECTORIES)
        yield "groups", str(self.files.groups)
        yield "report", str(self.files.report)

    def warnings(self) -> Iterator[str]:
        if self.totals.failed:
            yield f"{self.totals.failed} samples failed, see {self.files.failures}; --retry_failed plays them again"
        if self.totals.discarded and not self.totals.kept:
            yield (
                f"all {self.totals.discarded} finished samples are discarded: the model writes no reasoning; ask for "
                "it in the system prompt (<think>...</think>), or keep such samples with --keep_without_reasoning"
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
    rows = settings.rows
    total = -1 if rows is None else settings.samples * await asyncio.to_thread(rows.check)
    async with env.running():
        about = {**about_content(env, evaluation=False), "seed": settings.seed}
        about["keep_without_reasoning"] = settings.keep_without_reasoning
        work = Work(_items(env, settings), settings=item_digest(about)[:8], samples=settings.samples)
        sink = BatchSink(
            settings.folder,
            entries=entry_format(env, settings.keep_without_reasoning),
            work=work,
            caps=settings.caps,
            batch_size=settings.batch_size,
            retry_failed=settings.retry_failed,
            about={"run_name": settings.run_name, "distribution": env.config.distribution},
            files=RunFiles(settings.folder / "groups.jsonl"),
            environment=env.run_name,
            model=describe(env.server_configs),
            settings=about,
            total=total,
            workers=settings.concurrency,
            system=env.config.trajectory_system_prompt,
            console=env.console,
        )
        brake = FailureBrake(env.console, env.config.max_failed_groups)
        pipeline = Pipeline(
            title=settings.run_name,
            next_item=work.next_item,
            keys=work,
            play=lambda item, key: env.play_item(item, key, size=1),
            sink=sink,
            console=env.console,
            brake=brake,
            grace_period=settings.grace_period,
        )
        await pipeline.run(signals=True)
    return BatchResult(
        folder=settings.folder,
        files=sink.files,
        totals=sink.totals,
        total=total,
        cost=settings.caps.cost_of(sink.totals),
        seconds=time.monotonic() - started,
        tokens=sink.sampled,
        played=sink.played,
        reason=pipeline.reason,
    )


def entry_format(env: HermesAgentBaseEnv, keep_without_reasoning: bool) -> EntryFormat:
    """The format of the lines of an environment's samples."""
    return EntryFormat(
        all_tools=tuple(env.tools),
        system=env.config.trajectory_system_prompt,
        prompt_field=env.config.prompt_field,
        with_reward=not isinstance(env, Prompts),
        keep_without_reasoning=keep_without_reasoning,
    )


def _check(env: HermesAgentBaseEnv, settings: BatchSettings) -> None:
    if env.collects:
        raise SettingsError(
            f"{env.run_name} collects its groups itself; play it with `process` and use `lachesis export`"
        )
    if (missing := env.missing_toolsets()) and not settings.allow_missing_toolsets:
        raise SettingsError(
            f"toolsets that have no tools here: {', '.join(missing)}; choose another --distribution "
            "(--list_distributions), or leave them out with --allow-missing-toolsets"
        )


async def _items(env: HermesAgentBaseEnv, settings: BatchSettings) -> AsyncIterator[tuple[int, Any, str]]:
    """Each item with its place in the input and its digest: of the rows, or of the environment's own dataset."""
    if settings.rows is not None:
        for row in settings.rows:
            yield row.index, row.content, row.digest
        return
    for index in range(settings.max_items or 0):
        if (item := await env.get_next_item()) is None:
            return
        digest = item_digest(item)
        if in_shard(digest, settings.shard):
            yield index, item, digest
