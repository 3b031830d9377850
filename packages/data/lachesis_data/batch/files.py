"""The files of a batch run other than its groups file: `batch_001_output.jsonl` and so on, and `trajectories.jsonl`.

One invariant: line n of the batch files, counted through, is group n of the groups file. So a start completes them
after a kill, and they can be rebuilt from the groups.
"""

from __future__ import annotations

import json
import os
import re
import shutil
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from itertools import accumulate
from pathlib import Path
from typing import IO, Any

import orjson

from lachesis.runs.run_folder import RunFolderError
from lachesis_messages.records.jsonl import JsonlWriter, sync_folder

TRAJECTORIES, CHECKPOINT, STATISTICS = "trajectories.jsonl", "checkpoint.json", "statistics.json"

_INDEX = re.compile(rb'^(\{"prompt_index": ?)-?\d+')
"""At the beginning of a line, where `to_batch_entry` has it: nothing else of a line is written again."""


class BatchFiles:
    """The numbered files, of `size` lines each, in the order in which samples finished."""

    def __init__(self, folder: Path, size: int) -> None:
        self.folder = folder
        self.size = size
        self.lines: dict[int, int] = {}
        """Number of a file -> lines in it."""
        self._writer: JsonlWriter | None = None
        self._number = 0

    def open(self) -> None:
        """Count the lines that are there."""
        for path in self.folder.glob("batch_*_output.jsonl"):
            number = path.name.removeprefix("batch_").removesuffix("_output.jsonl")
            if number.isdecimal() and path.is_file():
                with JsonlWriter(path):  # moves a torn last line away
                    self.lines[int(number)] = _lines(path)[0]
        self.lines = dict(sorted(self.lines.items()))
        self._number = next(reversed(self.lines), 1)

    def last_lines(self) -> Iterator[tuple[int, Path, Mapping[str, Any]]]:
        """Of each file that has lines: the place of its last line among all lines, its path, and that line."""
        for (number, lines), end in zip(self.lines.items(), accumulate(self.lines.values()), strict=True):
            if lines:
                path = self._path(number)
                yield end - 1, path, json.loads(_lines(path)[1])

    def append(self, entries: Sequence[Mapping[str, Any]]) -> None:
        """Write lines, into further files as they get full. Blocks for the disk."""
        left = list(entries)
        while left:
            room = self.size - self.lines.get(self._number, 0)
            if room <= 0:
                self.close()
                self._number += 1
                continue
            if self._writer is None:
                self._writer = JsonlWriter(self._path(self._number))
            now, left = left[:room], left[room:]
            self._writer.write_all(now)
            self.lines[self._number] = self.lines.get(self._number, 0) + len(now)

    def renumber(self, indices: Iterable[int]) -> int:
        """Give the lines the places of their rows, by line; how many had another one."""
        moved, left = 0, iter(indices)
        for number in self.lines:
            path = self._path(number)
            with path.open("rb") as file:
                lines = [*file]
            now = [_INDEX.sub(rb"\g<1>%d" % index, line, count=1) for line, index in zip(lines, left, strict=False)]
            if changed := sum(old != new for old, new in zip(lines, now, strict=True)):
                moved += changed
                with _replacing(path) as written:
                    written.writelines(now)
        return moved

    def close(self) -> None:
        if self._writer is not None:
            self._writer.close()
            self._writer = None

    def join(self) -> None:
        """Write all lines into `trajectories.jsonl`, whole or not at all."""
        with _replacing(self.folder / TRAJECTORIES) as joined:
            for number in self.lines:
                with self._path(number).open("rb") as lines:
                    shutil.copyfileobj(lines, joined, 1 << 20)

    def _path(self, number: int) -> Path:
        return self.folder / f"batch_{number:03d}_output.jsonl"


def write_json(path: Path, content: Mapping[str, Any]) -> None:
    """Replace a file, whole or not at all."""
    with _replacing(path) as file:
        file.write(orjson.dumps(content, option=orjson.OPT_INDENT_2) + b"\n")


@contextmanager
def _replacing(path: Path) -> Iterator[IO[bytes]]:
    # Of one name, however often a run is killed here.
    temporary = path.with_suffix(".tmp")
    try:
        with temporary.open("wb") as file:
            yield file
            file.flush()
            os.fsync(file.fileno())
        temporary.replace(path)
        sync_folder(path.parent)
    except OSError as error:
        temporary.unlink(missing_ok=True)
        raise RunFolderError(
            f"cannot write {path}: {error.strerror or error}; free some space and start again: nothing is lost"
        ) from error


def _lines(path: Path) -> tuple[int, bytes]:
    """How many there are, and the last one."""
    count, line = 0, b""
    with path.open("rb") as file:
        for count, line in enumerate(file, 1):  # noqa: B007
            pass
    return count, line
