"""Shards of a batch run, joined: each sample once, with its line, in a new folder."""

from __future__ import annotations

import fcntl
import shutil
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from datetime import datetime
from itertools import chain, islice
from pathlib import Path
from typing import Any

import orjson

from lachesis.batch.files import STATISTICS, BatchFiles, write_batch_report, write_json
from lachesis.batch.totals import Totals
from lachesis.run_folder import OtherSettings, RunFolderError, changes
from lachesis.runs.file_sink import unscored_groups
from lachesis.trajectories import JsonlWriter, read_lines

_AT_ONCE = 64
_KINDS = {"kept": ".jsonl", "discarded": ".discarded.jsonl", "failed": ".failed.jsonl"}


@dataclass(slots=True)
class Merged:
    """What a merge found."""

    out: Path
    shards: list[Path]
    missing: list[str]
    """Shards that there is no folder of."""
    totals: Totals = field(default_factory=Totals)
    doubled: int = 0
    wanted: int = 0
    """Samples of the shards that are there, as far as they know."""

    @property
    def unplayed(self) -> int:
        return max(0, self.wanted - self.totals.done - self.doubled)

    def lines(self) -> Iterator[str]:
        totals = self.totals
        counts = f"{totals.kept} kept, {totals.discarded} discarded, {totals.failed} failed"
        yield f"{len(self.shards)} shards: {counts}: {self.out}"
        if self.doubled:
            yield f"{self.doubled} samples were in more than one shard; one of each is kept"
        if self.unplayed:
            yield f"{self.unplayed} samples are not played yet; start their shards again, and merge again"
        if self.missing:
            yield f"missing: {', '.join(self.missing)}; play them and merge again"


def merge_shards(run: Path, out: Path) -> Merged:
    """Join `run/shard_I_of_N` in the folder `out`, which appears when it is whole and replaces an earlier one.

    Raises:
        RunFolderError: there are no shards, they were made with other settings than the first one, or their batch files
            are not complete.
    """
    shards = sorted(path for path in run.glob("shard_*_of_*") if path.is_dir())
    if not shards:
        raise RunFolderError(f"{run} holds no shard_I_of_N; play them with `lachesis batch ... --shard I/N`")
    counts = {path.name.rpartition("_")[2] for path in shards}
    if len(counts) > 1:
        raise RunFolderError(
            f"{run} holds shards of {' and of '.join(sorted(counts))} parts; move those of one number away"
        )
    (count,) = counts
    wanted = [f"shard_{number:03d}_of_{count}" for number in range(1, int(count) + 1)]
    found = {path.name for path in shards}
    merged = Merged(out, shards, [name for name in wanted if name not in found])
    manifests = [_manifest(path) for path in shards]
    for path, manifest in zip(shards, manifests, strict=True):
        if changed := changes(manifests[0]["settings"], manifest["settings"]):
            raise OtherSettings(f"{path} was made with other settings than {shards[0]} ({changed}); play it anew")
    if (out / "groups.jsonl").exists() and not (out / STATISTICS).exists():
        raise RunFolderError(f"{out} is not a merged run; choose another folder with --out")
    temporary = out.with_name(f"{out.name}.tmp")
    try:
        shutil.rmtree(temporary, ignore_errors=True)
        with ExitStack() as stack:
            for shard in shards:
                stack.enter_context(_at_rest(shard))
            _write(merged, temporary, manifests[0])
        if out.exists():
            shutil.rmtree(out)
        temporary.rename(out)
    except OSError as error:
        raise RunFolderError(
            f"cannot write {out}: {error.strerror or error}; make room, or choose another with --out"
        ) from error
    return merged


def _write(merged: Merged, folder: Path, manifest: dict[str, Any]) -> None:
    statistics = [_statistics(shard) for shard in merged.shards]
    merged.wanted = sum(max(0, each.get("total_prompts", 0)) for each in statistics)
    batches = BatchFiles(folder, max(each.get("batch_size", 1) for each in statistics))
    seen: set[str] = set()
    for kind, ending in _KINDS.items():
        with JsonlWriter(folder / f"groups{ending}") as groups:
            for shard in merged.shards:
                pairs = _samples(shard, kind)
                while now := list(islice(pairs, _AT_ONCE)):
                    fresh = []
                    for record, line in now:
                        if (key := record["item_key"]) in seen:
                            merged.doubled += 1
                            continue
                        seen.add(key)
                        merged.totals.add(kind, record)
                        fresh.append(({**record, "number": merged.totals.kept - 1} if line else record, line))
                    groups.write_all(record for record, _ in fresh)
                    batches.append([line for _, line in fresh if line])
    batches.close()
    batches.join()
    fresh_manifest = {**manifest, "groups": "groups.jsonl"}
    write_json(folder / "groups.run.json", fresh_manifest)
    known = statistics[0]
    write_json(
        folder / STATISTICS,
        {
            **{name: known.get(name) for name in ("run_name", "distribution", "model")},
            "batch_size": batches.size,
            "total_prompts": sum(each.get("total_prompts", 0) for each in statistics),
            "total_batches": len(batches.lines),
            "completed_at": datetime.now().isoformat(),
            "shards": [shard.name for shard in merged.shards],
            **merged.totals.statistics(known.get("tool_statistics", ())),
        },
    )
    failures = unscored_groups(folder / "groups.failed.jsonl", frozenset())
    records = chain(failures.values(), read_lines(folder / "groups.jsonl"))
    count = merged.totals.kept + len(failures)
    write_batch_report(folder, f"{known.get('run_name')}: {known.get('model')}", records, count)


def _samples(shard: Path, kind: str) -> Iterator[tuple[dict[str, Any], dict[str, Any]]]:
    """The records of one kind, those that are kept with their lines."""
    path = shard / f"groups{_KINDS[kind]}"
    if kind == "failed":
        done = {record["item_key"] for record in read_lines(shard / "groups.jsonl", torn_tail=True)}
        yield from ((record, {}) for record in unscored_groups(path, done).values())
        return
    records = read_lines(path, torn_tail=True) if path.exists() else iter(())
    if kind != "kept":
        yield from ((record, {}) for record in records)
        return
    batches = BatchFiles(shard, 1)
    batches.open()
    lines = chain.from_iterable(read_lines(part) for part in batches.paths)
    for record in records:
        if (line := next(lines, None)) is None:
            raise RunFolderError(
                f"{shard}: its batch files lack lines, as after a kill; start this shard again, then merge"
            )
        yield record, line


@contextmanager
def _at_rest(shard: Path) -> Iterator[None]:
    """Keep the shard from being started; to be merged while it is written would tear its files."""
    with (shard / "groups.lock").open("a") as lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_SH | fcntl.LOCK_NB)
        except BlockingIOError as error:
            raise RunFolderError(f"{shard} is being played; merge when it has ended") from error
        yield


def _manifest(shard: Path) -> dict[str, Any]:
    try:
        return dict(orjson.loads((shard / "groups.run.json").read_bytes()))
    except (OSError, ValueError) as error:
        raise RunFolderError(f"{shard} was not begun ({error}); start this shard, then merge") from error


def _statistics(shard: Path) -> dict[str, Any]:
    """Of the last start of the shard; without most of it where every start was killed."""
    try:
        return dict(orjson.loads((shard / STATISTICS).read_bytes()))
    except (OSError, ValueError) as error:
        raise RunFolderError(
            f"{shard} has not ended yet ({STATISTICS}: {error}); start it again, then merge"
        ) from error
