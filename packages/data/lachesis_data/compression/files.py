"""Compression of JSON Lines files: in the order of the input, in constant memory, and continued after a kill.

While it is written, the output is `NAME.part`, and `NAME.progress` has a line for each finished entry: the number and
the digest of its input line, the end and the digest of its output, and its metrics. The next start keeps the entries
whose input, settings and output are the same, up to the first that differs, and cuts off what is after them.
"""

from __future__ import annotations

import asyncio
import fcntl
import json
import os
from collections import deque
from collections.abc import AsyncGenerator, Callable, Iterator, Sequence
from contextlib import aclosing, contextmanager, suppress
from dataclasses import dataclass
from hashlib import blake2b
from itertools import chain
from pathlib import Path
from random import Random
from shlex import quote
from typing import IO, Any

from backends.errors import SettingsError, cannot_read
from backends.tasks import finish
from lachesis.runs.run_folder import has_groups
from lachesis_data.compression.compressor import Compressed, Compressor
from lachesis_messages.markup import load_json
from lachesis_messages.records.entries import COMPLETED_FILE
from lachesis_messages.records.jsonl import JsonlError, encode_line, sync_folder, unreadable

_AHEAD = 4
"""Entries in memory for each that is worked on: finished ones wait for those before them."""


@dataclass(frozen=True, slots=True)
class CompressionJob:
    """A file to compress, and where to."""

    source: Path
    output: Path

    @property
    def part(self) -> Path:
        return self.output.with_name(f"{self.output.name}.part")

    @property
    def progress(self) -> Path:
        return self.output.with_name(f"{self.output.name}.progress")


@dataclass(frozen=True, slots=True)
class EntrySample:
    """A part of the entries, chosen by the seed and the number of the line."""

    percent: float = 100.0
    seed: int = 42

    def __contains__(self, line: int) -> bool:
        return self.percent >= 100.0 or Random(f"{self.seed}:{line}").random() * 100.0 < self.percent


def find_jobs(source: Path, output: Path | None, suffix: str) -> list[CompressionJob]:
    """The files to compress: `source`, or the `*.jsonl` in it without the groups of runs; of the folder of a run, its
    completed trajectories. Raises SettingsError."""
    if source.is_dir():
        folder = output or source.with_name(source.name + suffix)
        found = [path for path in source.glob("*.jsonl") if path.is_file()]
        files = sorted(path for path in found if not has_groups(path))
        if any(source.glob("*.run.json")):
            files = [path for path in files if path.name.endswith(COMPLETED_FILE)] or files
        if not files and found:
            export = f"lachesis export {quote(str(source))} --format hermes -o trajectories.jsonl"
            raise SettingsError(f"{source} has groups and no trajectories; write these first: {export}")
        if not files:
            raise SettingsError(f"{source} has no *.jsonl file; name a folder with trajectories, or a file")
        if folder.exists() and not folder.is_dir():
            raise SettingsError(f"{folder} is a file, and the input a folder; name a folder with --output")
        jobs = [CompressionJob(path, folder / path.name) for path in files]
    elif source.is_file():
        if output is not None and output.is_dir():
            output /= source.name
        jobs = [CompressionJob(source, output or source.with_name(f"{source.stem}{suffix}{source.suffix}"))]
    else:
        raise SettingsError(f"{cannot_read(source)}; name trajectories with --input")
    for job in jobs:
        for path in (job.output, job.part, job.progress):
            if path.exists() and path.samefile(job.source):
                raise SettingsError(f"{path} is the input itself; name another file or folder with --output")
    return jobs


def left_out(source: Path, jobs: Sequence[CompressionJob]) -> list[Path]:
    """The files of trajectories in the folder of a run that are not compressed with it."""
    taken = {job.source for job in jobs}
    found = source.glob("*.jsonl") if source.is_dir() else ()
    return sorted(path for path in found if path not in taken and not has_groups(path))


async def compress_file(
    job: CompressionJob,
    compressor: Compressor,
    *,
    settings: bytes,
    sample: EntrySample,
    concurrency: int,
    save_over_limit: bool,
    report: Callable[[dict[str, Any], bool], None],
) -> None:
    """Compress a file, or the rest of it.

    Args:
        settings: a digest of everything but the input that the output depends on.
        concurrency: entries at once.
        report: gets the metrics of each entry, and whether an earlier start had finished it.

    Raises:
        JsonlError: a line is not JSON, or a file cannot be read or written. Finished entries stay.
    """

    def digest(line: bytes) -> str:
        return _digest(line.strip(), key=settings)

    lines = sampled_lines(job.source, sample)
    with _writing(job.progress) as progress:
        try:
            fcntl.flock(progress, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError as error:
            reason = "another process writes it; wait for its end, or name another --output"
            raise JsonlError(job.output, reason) from error
        if not job.part.exists() and job.output.exists() and os.fstat(progress.fileno()).st_size:
            with _naming(job.part):
                job.output.replace(job.part)  # killed after the last entry, or between two files
        with _writing(job.part) as part:
            size, noted, end, first = os.fstat(part.fileno()).st_size, 0, 0, []
            rows = _rows(progress)
            for number, line in lines:
                row, after = next(rows, ({}, 0))
                same = (row.get("line"), row.get("digest")) == (number, digest(line))
                if not same or not end <= row["offset"] <= size or not _is_whole(part, job.part, end, row):
                    first = [(number, line)]
                    break
                noted, end = after, row["offset"]
                report(row["metrics"], True)
            for file, path, length in ((progress, job.progress, noted), (part, job.part, end)):
                with _naming(path):
                    file.truncate(length)
                    file.seek(length)
            async with aclosing(compressed_lines(job.source, chain(first, lines), compressor, concurrency)) as entries:
                async for number, line, done in entries:
                    # An entry, then its row: the next start cuts off an entry without one.
                    written = b""
                    if save_over_limit or not done.metrics["still_over_limit"]:
                        written = _append(part, job.part, done.entry)
                    end += len(written)
                    row = {"line": number, "digest": digest(line), "offset": end, "output": _digest(written)}
                    row["metrics"] = done.metrics
                    _append(progress, job.progress, row)
                    report(done.metrics, False)
            with _naming(job.output):
                os.fsync(part.fileno())
                job.part.replace(job.output)
                sync_folder(job.output.parent)


def read_progress(job: CompressionJob) -> Iterator[dict[str, Any]]:
    """The metrics of the finished entries, with the numbers of their lines."""
    with job.progress.open("rb") as file:
        for row, _ in _rows(file):
            yield {"line": row["line"], **row["metrics"]}


async def compressed_lines(
    source: Path, lines: Iterator[tuple[int, bytes]], compressor: Compressor, concurrency: int
) -> AsyncGenerator[tuple[int, bytes, Compressed], None]:
    """The lines with their numbers and what compression made of them, in order. Raises JsonlError."""
    gate = asyncio.Semaphore(concurrency)

    async def work(number: int, line: bytes) -> tuple[int, bytes, Compressed]:
        async with gate:
            try:
                entry = load_json(line.decode("utf-8-sig" if number == 1 else "utf-8"))
            except ValueError as error:
                torn = "its writer was killed or still writes; complete" if not line.endswith(b"\n") else "correct"
                raise JsonlError(source, f"not JSON: {error}; {torn} or remove the line", line=number) from error
            return number, line, await compressor.compress(entry)

    window: deque[asyncio.Task[tuple[int, bytes, Compressed]]] = deque()
    try:
        for number, line in lines:
            window.append(asyncio.create_task(work(number, line)))
            if len(window) >= _AHEAD * concurrency:
                yield await window.popleft()
        while window:
            yield await window.popleft()
    finally:
        for task in window:
            task.cancel()
        if window:
            await finish(asyncio.wait(window))


def sampled_lines(path: Path, sample: EntrySample) -> Iterator[tuple[int, bytes]]:
    """The lines of a sample with their numbers, without blank ones. Raises JsonlError."""
    try:
        with path.open("rb") as file:
            yield from ((number, line) for number, line in enumerate(file, 1) if line.strip() and number in sample)
    except OSError as error:
        raise unreadable(path, error) from error


def _rows(file: IO[bytes]) -> Iterator[tuple[dict[str, Any], int]]:
    """The rows of a progress file from its beginning, each with where it ends, without a torn last one."""
    end = 0
    file.seek(0)
    while line := file.readline():
        end += len(line)
        try:
            yield json.loads(line), end
        except ValueError:
            return
        file.seek(end)


@contextmanager
def _writing(path: Path) -> Iterator[IO[bytes]]:
    """The open file, with what is in it."""
    with _naming(path):
        path.parent.mkdir(parents=True, exist_ok=True)
        file = path.open("r+b" if path.exists() else "w+b")
    try:
        yield file
    finally:
        with suppress(OSError):  # of what could not be written, for which there is an error already
            file.close()


def _append(file: IO[bytes], path: Path, value: Any) -> bytes:
    """Returns what was written."""
    line = encode_line(path, value)
    with _naming(path):
        file.write(line)
        file.flush()
    return line


def _is_whole(part: IO[bytes], path: Path, start: int, row: dict[str, Any]) -> bool:
    """Whether the output of a row is what was written. After a power loss, a file can have its length without its
    content. Rows of older versions have no digest of it."""
    if "output" not in row:
        return True
    with _naming(path):
        part.seek(start)
        return bool(_digest(part.read(row["offset"] - start)) == row["output"])


def _digest(data: bytes, key: bytes = b"") -> str:
    return blake2b(data, key=key, digest_size=16).hexdigest()


@contextmanager
def _naming(path: Path) -> Iterator[None]:
    """An OSError names the file and the next step."""
    try:
        yield
    except OSError as error:
        reason = f"cannot write ({error.strerror or error}); choose a folder that is writable and has space left"
        raise JsonlError(path, reason) from error
