"""The sink of a batch run: groups of one sample each, and the lines that follow from them.

The groups file is the source of truth, as for `process`. Samples without reasoning and failed samples are recorded in
files next to it, so that a start plays them again only on request.
"""

from __future__ import annotations

import time
from collections.abc import AsyncIterator, Mapping
from contextlib import ExitStack
from dataclasses import asdict
from datetime import datetime
from itertools import chain, islice
from pathlib import Path
from typing import Any

from backends import ImageUnavailable
from backends.errors import LachesisError
from backends.text import counted
from lachesis.figures.item_keys import ItemKeys, part_key, whole_and_part
from lachesis.figures.summary import Summary
from lachesis.loop.rollout import PlayedGroup, Rollout
from lachesis.runs.decisions import Decision, Kept, LeftOut
from lachesis.runs.failures import ItemJob
from lachesis.runs.file_sink import FileSink, unscored_groups
from lachesis.runs.group_records import group_record
from lachesis.runs.progress import Standing
from lachesis.runs.reports import write_report
from lachesis.runs.results import RunFiles
from lachesis.runs.run_folder import RunFolderError
from lachesis.runs.sink import RunCounts
from lachesis_data.batch.entries import NO_ANSWER, NO_REASONING, EntryFormat
from lachesis_data.batch.files import CHECKPOINT, STATISTICS, BatchFiles, write_json
from lachesis_data.batch.prompts import DIGITS
from lachesis_data.batch.rows import Rows
from lachesis_data.batch.totals import BatchTotals, Caps, completion_tokens
from lachesis_messages.records.digests import certified
from lachesis_messages.records.jsonl import JsonlWriter, read_lines

GROUPS = "groups.jsonl"
MOST_AT_ONCE = 64
"""Samples that wait for the disk together."""
MOST_IN_REPORT = 20_000
"""Samples; it holds some kilobytes of each."""
CHECKPOINT_EVERY = 60.0
NO_ROW = -1
"""The `prompt_index` of a sample whose row is not in the input any more."""
RETRY_PAUSE = 1.0
PROMOTES = "--keep-without-reasoning keeps such rollouts, and without playing also those that were discarded before"


class BatchWork(ItemKeys):
    """The plan of the run: each item `samples` times in a row, and the key of each sample.

    A key is the digest of the item, that of the settings, which of several equal items it is, and the number of the
    sample: `8f…3a…-1+2`. It does not depend on the order of the items.
    """

    def __init__(self, items: AsyncIterator[tuple[int, Any, str]], *, settings: str, samples: int) -> None:
        super().__init__()
        self.indices: dict[str, int] = {}
        """Key of a sample in flight -> place of its item in the input."""
        self._items = items
        self._settings = settings
        self._samples = samples
        self._again = 0
        self._index, self._item, self._digest = 0, object(), ""

    async def next_item(self) -> Any:
        """The next item; None when there are no more."""
        if not self._again:
            if (found := await anext(self._items, None)) is None:
                return None
            self._index, self._item, self._digest = found
            self._again = self._samples
        self._again -= 1
        return self._item

    def key(self, item: Any) -> str:
        self._seen[self._digest] += 1
        occurrence, sample = divmod(self._seen[self._digest] - 1, self._samples)
        key = part_key(f"{self._digest}{self._settings}-{occurrence + 1}", sample)
        self.indices[key] = self._index
        return key


class BatchSink(FileSink):
    """The folder of one batch run; see `FileSink` for what the other arguments mean.

    Args:
        indices: key of a sample in flight -> place of its item in the input.
        rows: the input; None where the environment has a dataset of its own.
        batch_size: lines of one batch file.
        retry_failed: play the samples again that failed in earlier starts.
        about: fields of `statistics.json` that are known.
    """

    most_at_once = MOST_AT_ONCE

    def __init__(
        self,
        folder: Path,
        *,
        entries: EntryFormat,
        indices: dict[str, int],
        rows: Rows | None,
        caps: Caps,
        batch_size: int,
        retry_failed: bool,
        about: Mapping[str, Any],
        settings: Mapping[str, Any],
        **others: Any,
    ) -> None:
        files = RunFiles(folder / GROUPS)
        names = {"environment": settings["environment"], "model": settings["model"], "system": entries.system}
        super().__init__(files, settings=settings, **names, **others)
        self.folder = folder
        self.entries = entries
        self.indices = indices
        self.rows = rows
        self.caps = caps
        self.about = about
        self.retry_failed = retry_failed
        self.retry_pause = RETRY_PAUSE
        self.batches = BatchFiles(folder, batch_size)
        self.totals = BatchTotals()
        self.earlier = 0
        """Samples that earlier starts finished."""
        self._places: dict[str, int] = {}
        """Key of a sample of an earlier start, without its number -> the place of its row in the input, which may have
        got other rows since."""
        self.started = time.monotonic()
        self.discards = self.files.groups.with_suffix(".discarded.jsonl")
        self._entries: dict[str, dict[str, Any]] = {}
        """Key of a sample that is kept and not yet written -> its line."""
        self._failed: set[str] = set()
        self._rows_done: list[tuple[str, int]] = []
        """Key of each kept sample, and the place of its row when it was played."""
        self._checkpoint_due = 0.0
        self._said_discards = False
        self._sampled_before = 0

    # The start.

    def _open(self, stack: ExitStack) -> None:
        self.ledger.open()
        stack.callback(self.batches.close)
        self.batches.open()
        self._complete_batches()
        if self.discards.exists():
            first: Mapping[str, Any] = next(read_lines(self.discards, torn_tail=True), {})
            if first.get("run") != self.ledger.run:  # of other settings, with which no sample was kept
                self.discards.unlink()
        if self.entries.keep_without_reasoning and self.discards.exists():
            self._promote()
        self._discarded = stack.enter_context(JsonlWriter(self.discards, fsync=True))
        for record in read_lines(self.discards):
            if record["item_key"] not in self.ledger.done:  # a start that promoted it was killed
                self._count("discarded", record)
        self._forget_superseded_failures()
        self._failures = stack.enter_context(JsonlWriter(self.files.failures, fsync=True))
        for record in self._unscored_groups().values():
            if self.retry_failed:
                self.totals.add("again", record)
            else:
                self._count("failed", record)
        self.earlier = self.totals.done
        self._sampled_before = self.totals.all.sampled
        self._write_checkpoint()

    def _find_rows(self) -> None:
        """Where the rows of earlier starts are now: lines of two starts have the places in one input."""
        if self.rows is None:
            return
        discarded = read_lines(self.discards, torn_tail=True) if self.discards.exists() else ()
        keys = {whole_and_part(key)[0] for key in (*self.ledger.done, *(each["item_key"] for each in discarded))}
        rows = {key: (key[:DIGITS], int(key.rpartition("-")[2])) for key in keys}
        places = self.rows.places(set(rows.values()))
        self._places = {key: places.get(row, NO_ROW) for key, row in rows.items()}

    def _index(self, key: str, played: int) -> int:
        """The place of a sample's row in the input now, by its key and by where the row was when it was played."""
        return self._places.get(whole_and_part(key)[0], played)

    def _entry(self, record: Mapping[str, Any]) -> dict[str, Any]:
        index = self._index(record["item_key"], record["prompt_index"])
        return self.entries.entry({**record, "prompt_index": index})

    @property
    def gone(self) -> int:
        """Samples that were kept and whose rows are not in the input any more."""
        return sum(self._index(*each) == NO_ROW for each in self._rows_done)

    unit = "rollouts"

    @property
    def settled_groups(self) -> int:
        return self.totals.done

    def _earlier(self) -> int:
        return self.earlier

    def _count(self, kind: str, record: Mapping[str, Any]) -> None:
        self.totals.add(kind, record)
        self.ledger.done.add(record["item_key"])
        if kind == "failed":
            self._failed.add(record["item_key"])
        elif kind == "kept":
            self._rows_done.append((record["item_key"], record["prompt_index"]))

    def _complete_batches(self) -> None:
        """Count the finished samples, and write the lines that a killed run did not get to.

        Raises:
            RunFolderError: the batch files are not those of the groups file.
        """
        lasts = self.batches.last_lines()
        last = next(lasts, None)
        written, count = sum(self.batches.lines.values()), 0
        for count, record in enumerate(self.ledger.records(), 1):
            self._count("kept", record)
            if last is not None and last[0] == count - 1:
                _, path, line = last
                if line.get("conversations") != self._entry(record)["conversations"]:
                    raise self._not_of_groups(f"the last line of {path} is not sample {count - 1} of")
                last = next(lasts, None)
        if count < written:
            raise self._not_of_groups(f"the batch files have {written} lines, and there are {count} samples in")
        self._find_rows()
        if moved := self.batches.renumber(self._index(*each) for each in self._rows_done):
            note = (
                f"note: the rows of the input are in other places than before: {counted(moved, 'line')} of the batch "
                f"files have another prompt_index now, {NO_ROW} where the row is gone"
            )
            self.console.print(note, style="yellow", markup=False, highlight=False, soft_wrap=True)
        missing = islice(self.ledger.records(), written, None) if count > written else iter(())
        while some := [self._entry(record) for record in islice(missing, MOST_AT_ONCE)]:
            self.batches.append(some)

    def _promote(self) -> None:
        """Keep the samples that were discarded for no reasoning. The next start completes one that is killed here."""
        with JsonlWriter(self.discards):  # moves a torn last line away
            pass
        records = (record for record in read_lines(self.discards) if record["item_key"] not in self.ledger.done)
        promoted = 0
        while some := list(islice(records, MOST_AT_ONCE)):
            entries = [self._entry(record) for record in some]
            self.ledger.append_all(some)
            self.batches.append(entries)
            for record in some:
                self._count("kept", record)
            promoted += len(some)
        self.discards.unlink()
        if promoted:
            line = f"{counted(promoted, 'rollout')} without reasoning, which earlier starts discarded, are kept now"
            self.console.print(line, markup=False, highlight=False, soft_wrap=True)

    def _not_of_groups(self, what: str) -> RunFolderError:
        return RunFolderError(
            f"{what} {self.files.groups}: the batch files were changed; move batch_*_output.jsonl away, and the next "
            "start writes them again"
        )

    # A sample.

    def decide(self, group: PlayedGroup) -> Decision:
        record = self._record(group)
        (rollout,) = group.rollouts
        found = self.entries.entry_or_reason(record)
        if not isinstance(found, str):
            self._entries[group.item_key] = found
            return Kept(record, rewards=group.rewards, tracebacks=group.tracebacks)
        if found == NO_REASONING:  # nothing failed
            return LeftOut("no reasoning", found, declined=True, record=record, tracebacks=group.tracebacks)
        record["bad_input"] = isinstance(rollout.error, ImageUnavailable)
        silent = found == NO_ANSWER and _heard_nothing(rollout)
        return LeftOut(
            "failed",
            found,
            completion_tokens(record),
            again=rollout.may_pass or silent,
            left_to_agents=found == NO_ANSWER and not silent,  # of a hard prompt: the next one may have a line
            broken_item=rollout.broken_item,
            record=record,
            unscored_because=found,
            tracebacks=group.tracebacks,
        )

    def _record(self, group: PlayedGroup) -> dict[str, Any]:
        record = group_record(
            group, environment=self.environment, model=self.model, of_unscored=not self.entries.with_reward
        )
        index = self.indices[group.item_key]
        return {**record, "prompt_index": index, "run": self.ledger.run, "evaluation": False}

    async def accept(self, job: ItemJob, decision: Decision, step: int) -> Decision:
        if isinstance(decision, Kept):
            kind, record, lost = "kept", dict(decision.content), decision.undelivered
        else:
            kind, record = "discarded" if decision.declined else "failed", dict(decision.record)
            if not record:  # an exception ended it before it had a rollout
                broken = Rollout.broken(*whole_and_part(job.key), RuntimeError(decision.detail))
                record = self._record(PlayedGroup(job.item, job.key, tools=[], rollouts=[broken]))
            lost = decision.tokens - completion_tokens(record)
        # Of attempts that failed before this one.
        record["rollouts"][0]["lost_completion_tokens"] += max(0, lost)
        await self._to_disk(kind, record)
        self.indices.pop(job.key, None)
        self.played += kind == "kept"
        self.failed_groups += kind == "failed"
        if kind == "discarded" and not self._said_discards:
            self._said_discards = True
            line = f"note: a rollout without any reasoning is discarded; {PROMOTES}"
            self.console.print(line, style="yellow", markup=False, highlight=False, soft_wrap=True)
        return decision

    def _write(self, of_kind: Mapping[str, list[dict[str, Any]]]) -> None:
        if kept := of_kind.get("kept"):
            self.ledger.append_all(kept)
            self.batches.append([self._entries.pop(record["item_key"]) for record in kept])
        self._discarded.write_all(map(certified, of_kind.get("discarded", ())))
        self._failures.write_all(map(certified, of_kind.get("failed", ())))
        for kind, records in of_kind.items():
            for record in records:
                self._count(kind, record)
        if time.monotonic() > self._checkpoint_due:
            self._write_checkpoint()

    # The run.

    @property
    def sampled(self) -> int:
        """Completion tokens of this start."""
        return self.totals.all.sampled - self._sampled_before

    def ending(self) -> str:
        return self.caps.reached(self.totals, self.started)

    def standing(self, counts: RunCounts) -> Standing:
        notes = [f"{self.totals.discarded} discarded for no reasoning"] if self.totals.discarded else []
        if (cost := self.caps.cost_of(self.totals)) is not None:
            notes.append(f"cost {cost:.4f}")
        return self._standing(counts, notes)

    # The end.

    def _write_report(self) -> Summary | None:  # type: ignore[override]
        """`trajectories.jsonl`, the statistics and the report."""
        try:
            self.batches.close()
            self.batches.join()
            self._write_checkpoint()
            write_json(self.folder / STATISTICS, self.statistics())
            failures = unscored_groups(self.files.failures, self.ledger.done - self._failed)
            groups = chain(failures.values(), self.ledger.records())
            title, count = f"{self.environment}: {self.model}", self.totals.kept.groups + len(failures)
            if count > MOST_IN_REPORT:
                title += f" (the first {MOST_IN_REPORT} of {count} rollouts)"
            return write_report(self.files.report, title=title, groups=islice(groups, MOST_IN_REPORT))
        except (OSError, LachesisError) as error:
            if self._broken is None:
                raise
            # The first error is the one to be reported.
            self.console.print(f"note: {error}", style="yellow", markup=False, highlight=False, soft_wrap=True)
            return None

    def statistics(self) -> dict[str, Any]:
        """The contents of `statistics.json`."""
        return {
            "batch_size": self.batches.size,
            "total_prompts": self.total,
            "total_batches": len(self.batches.lines),
            "model": self.model,
            "completed_at": datetime.now().isoformat(),
            "duration_seconds": round(time.monotonic() - self.started, 2),
            "cost": self.caps.cost_of(self.totals),
            **self.totals.statistics(self.entries.all_tools),
            "lines": asdict(self.entries),
            **self.about,
        }

    def _write_checkpoint(self) -> None:
        """For people and scripts; a start reads the groups file."""
        self._checkpoint_due = time.monotonic() + CHECKPOINT_EVERY
        content = {
            **self.about,
            "completed_prompts": sorted({self._index(*each) for each in self._rows_done} - {NO_ROW}),
            "samples": self.totals.kept.groups,
            "discarded_no_reasoning": self.totals.discarded,
            "failed": self.totals.failed.groups,
            "batch_stats": {str(number): {"samples": lines} for number, lines in self.batches.lines.items()},
            "last_updated": datetime.now().isoformat(),
        }
        write_json(self.folder / CHECKPOINT, content)


def _heard_nothing(rollout: Rollout) -> bool:
    """Whether the server answered without saying anything: it is tried again like one that does not answer."""
    said = [each.message for each in rollout.result.history.completions()] if rollout.result is not None else []
    return not any(each.text.strip() or each.reasoning or each.tool_calls for each in said)
