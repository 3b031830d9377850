"""Shards of a batch run, joined: each sample once, with its line, in a new folder."""

from __future__ import annotations

import asyncio
import fcntl
import re
import shutil
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path
from typing import Any

import orjson
from rich.console import Console

from backends.text import counted
from lachesis.runs.file_sink import unscored_groups
from lachesis.runs.run_folder import OtherSettings, RunFolderError, changes
from lachesis_data.batch.entries import EntryFormat
from lachesis_data.batch.files import CHECKPOINT, STATISTICS, write_json
from lachesis_data.batch.prompts import DIGITS
from lachesis_data.batch.rows import in_shard
from lachesis_data.batch.sink import BatchSink
from lachesis_data.batch.totals import Caps
from lachesis_messages.records.digests import copies_of
from lachesis_messages.records.jsonl import JsonlWriter, read_lines

_NAME = re.compile(r"shard_(\d+)_of_(\d+)")


def shard_folder(run: Path, shard: tuple[int, int]) -> Path:
    """Where part i of n of a run is."""
    return run / f"shard_{shard[0]:03d}_of_{shard[1]:03d}" if shard[1] > 1 else run


def merge_shards(run: Path, out: Path) -> tuple[list[str], bool]:
    """Join `run/shard_I_of_N` in the folder `out`, which appears when it is whole and replaces an earlier one.

    While it is written it is `OUT.tmp`, and the earlier one `.OUT.old` until it is deleted. The next merge clears up
    after one that was killed.

    Returns what there is to say, and whether the run is complete.

    Raises:
        RunFolderError: there are no shards, one of them is being played or was not begun, or holds samples of another
            part, or they differ in their settings or their input; or `out` is no merged run.
    """
    folders = (path for path in sorted(run.glob("shard_*")) if path.is_dir())
    names = [(path, match) for path in folders if (match := _NAME.fullmatch(path.name))]
    shards = {(int(match[1]), int(match[2])): path for path, match in names}
    counts = {count for _, count in shards}
    if len(counts) != 1:
        found = f"shards of {' and of '.join(map(str, sorted(counts)))} parts" if counts else "no shard_I_of_N"
        raise RunFolderError(f"{run} holds {found}; play them with `lachesis batch ... --shard I/N`, all with one N")
    place = out.resolve() if out.is_symlink() else out
    temporary, old = place.with_name(f"{place.name}.tmp"), place.with_name(f".{place.name}.old")
    with ExitStack() as stack:
        for path in shards.values():
            stack.enter_context(_at_rest(path))
        if not place.exists() and _is_merged(old):
            old.rename(place)  # killed before the new one took its place
        if place.exists():
            if not _is_merged(place):
                raise RunFolderError(f"{out} is not a merged run, or was continued; choose another folder with --out")
            stack.enter_context(_at_rest(place))
        _delete(old)
        manifests = [_json(path / "groups.run.json") for path in shards.values()]
        known = [_facts(path, manifest) for path, manifest in zip(shards.values(), manifests, strict=True)]
        for path, facts in zip(shards.values(), known, strict=True):
            if changed := changes(known[0]["deciding"], facts["deciding"]):
                raise OtherSettings(
                    f"{path} was made with other settings than {known[0]['folder']} ({changed}); start both with the "
                    "same file, --samples and tools, or play one of them again if the run's settings differ"
                )
        try:
            shutil.rmtree(temporary, ignore_errors=True)
            temporary.mkdir(parents=True)
            write_json(temporary / "groups.run.json", manifests[0])
            seen: set[str] = set()
            for kind in ("", ".discarded", ".failed"):
                _collect(shards, kind, temporary, [manifest["run"] for manifest in manifests], seen)
            sink = _whole(temporary, manifests[0]["settings"], known, [path.name for path in shards.values()])
            if place.exists():
                place.rename(old)
            temporary.rename(place)
        except OSError as error:
            raise RunFolderError(
                f"cannot write {out}: {error.strerror or error}; make room, or choose another with --out"
            ) from error
        _delete(old)
    totals, (count,) = sink.totals, counts
    kinds = f"{totals.kept.groups} kept, {totals.discarded} discarded, {totals.failed.groups} failed"
    said = [f"{counted(len(shards), 'shard')}: {kinds}: {out}"]
    if (unplayed := sink.total - totals.done) > 0:
        said.append(f"{counted(unplayed, 'rollout')} not played yet; start their shards again, and merge again")
    if missing := [shard_folder(run, (i, count)).name for i in range(1, count + 1) if (i, count) not in shards]:
        said.append(f"missing: {', '.join(missing)}; play them and merge again")
    return said, len(said) == 1


def _is_merged(folder: Path) -> bool:
    return "shards" in _json(folder / CHECKPOINT)


def _delete(merged: Path) -> None:
    """Delete a folder, first what makes it a merged run: none that a kill leaves in part is taken for one."""
    with suppress(OSError):
        (merged / CHECKPOINT).unlink()
    shutil.rmtree(merged, ignore_errors=True)


def _collect(shards: dict[tuple[int, int], Path], kind: str, folder: Path, runs: Sequence[str], seen: set[str]) -> None:
    """The records of one kind that are not `seen`: a sample that failed may have been kept or discarded since."""
    with JsonlWriter(folder / f"groups{kind}.jsonl") as groups:
        for (shard, path), run in zip(shards.items(), runs, strict=True):
            source = path / f"groups{kind}.jsonl"
            lines = read_lines(source, torn_tail=True) if source.exists() else ()
            for record in unscored_groups(source, ()).values() if kind == ".failed" else lines:
                if not in_shard(record["item_key"][:DIGITS], shard):
                    raise RunFolderError(
                        f"{source} holds {record['item_key']}, which belongs to another part: the folder was copied or "
                        "renamed; move it away and play this part"
                    )
                if record["run"] != run or record["item_key"] in seen:  # of a run that was begun anew, or played since
                    continue
                seen.add(record["item_key"])
                moved = {**record, "run": runs[0]} | ({} if kind else {"number": len(seen) - 1})
                groups.write(copies_of(record)(moved))


def _whole(folder: Path, settings: dict[str, Any], known: Sequence[dict[str, Any]], shards: Sequence[str]) -> BatchSink:
    """Write what follows from the groups, as a start does after a kill."""
    totals, costs = ([facts[name] for facts in known] for name in ("total_prompts", "cost"))
    sink = BatchSink(
        folder,
        entries=EntryFormat(**known[0]["lines"]),
        indices={},
        rows=None,
        caps=Caps(),
        batch_size=max(facts["batch_size"] for facts in known),
        retry_failed=False,
        about={
            **{name: known[0][name] for name in ("run_name", "distribution", "input")},
            "shards": shards,
            "cost": None if None in costs else sum(costs),
            "duration_seconds": sum(facts["duration_seconds"] for facts in known),
        },
        settings=settings,
        total=-1 if min(totals) < 0 else sum(totals),
        workers=1,
        console=Console(emoji=False, quiet=True),
    )

    async def complete() -> None:
        async with sink.opened(lambda: None):
            pass

    asyncio.run(complete())
    return sink


@contextmanager
def _at_rest(shard: Path) -> Iterator[None]:
    """Keep the shard from being started; to be merged while it is written would tear its files."""
    try:
        with (shard / "groups.lock").open("a") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            yield
    except BlockingIOError as error:
        raise RunFolderError(f"{shard} is being played or merged; merge when that has ended") from error


def _facts(shard: Path, manifest: dict[str, Any]) -> dict[str, Any]:
    """The state of a shard. `deciding`: settings that must be the same in all shards."""
    known = _json(shard / STATISTICS) | _json(shard / CHECKPOINT)  # this is of the last start, however it ended
    if "settings" not in manifest or "lines" not in known:
        raise RunFolderError(f"{shard} has not ended yet; start it again, then merge")
    code = {"code": sorted(manifest["code"]["files"].values())} if "code" in manifest else {}
    deciding = {**manifest["settings"], **known["lines"], "input": known["input"], **code}
    return {**known, "folder": shard, "deciding": deciding}


def _json(path: Path) -> dict[str, Any]:
    """A file of a run; empty where it cannot be read."""
    try:
        return dict(orjson.loads(path.read_bytes()))
    except (OSError, ValueError):
        return {}
