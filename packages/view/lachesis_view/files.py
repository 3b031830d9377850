"""The files of a folder of runs: what each holds, which run it belongs to, and whether it only grew."""

from __future__ import annotations

import hashlib
import json
import os
import re
import sqlite3
from collections.abc import Iterable
from contextlib import suppress
from pathlib import Path
from typing import BinaryIO

from lachesis_messages.errors import MISSHAPEN
from lachesis_messages.records.step_files import ROLLOUTS
from lachesis_view.rows import parsed

MARK = 4096
"""Bytes at the beginning, and before where reading stopped, by which a file is known again."""
CHECKPOINT = "checkpoint.json"
"""What holds the settings of a training run, as a manifest does those of others."""
UNFINISHED = -1
"""Instead of the time of a file's last change, until it is read to its end."""
HEAD = 1 << 20
"""Bytes at the beginning of a file in which a line must say what the file holds. The first line may be a broken one."""

_GROUP = re.compile(rb'(?m)^[ \t]*\{\s*"schema":\s*"lachesis\.group/1"')
_TRAINED = re.compile(rb'(?m)^[ \t]*\{\s*"schema":\s*"lachesis\.trained_group/1"')
_STEP = re.compile(rb'(?m)^[ \t]*\{\s*"step":\s*\d')


def kind_of(path: Path) -> str:
    """The contents of a file: groups, failed groups, steps of a training run; empty for anything else, and for what
    keeps who opens it waiting (a FIFO), which agents leave in their folders."""
    if not path.is_file():
        return ""
    with path.open("rb") as file:
        head = file.read(256)
        head += b"" if _GROUP.match(head) else file.read(HEAD)
    if _GROUP.search(head):
        return "failed" if path.name.endswith(".failed.jsonl") else "groups"
    if _TRAINED.search(head):
        return "trained"
    return "steps" if path.name == "metrics.jsonl" and _STEP.search(head) else ""


def run_name(root: Path, path: Path) -> str:
    """The folder of a file from the root; with the name of the file where that is not a usual one."""
    of_step = path.parent.name == ROLLOUTS and path.name.startswith("step_")
    folder = (path.parent.parent if of_step and path.parent != root else path.parent).relative_to(root).as_posix()
    stem = path.name.removesuffix(".jsonl").removesuffix(".failed")
    usual = (
        of_step or stem in ("groups", "metrics") or (stem == "samples" and not path.with_name("groups.jsonl").exists())
    )
    # What would have the name of a folder gets another one: the folder may be another run.
    name = folder if folder != "." else f"{root.name} itself" if (root / root.name).is_dir() else root.name
    return name if usual or of_step else f"{name}/{stem}{'.jsonl' * (path.parent / stem).is_dir()}"


def manifest_of(path: Path) -> tuple[str, int]:
    """JSON of the settings of the run that a file belongs to, empty where it has no manifest; and the items of an
    evaluation, 0 where it says none."""
    found, planned = "{}", 0
    stem = path.name.removesuffix(".jsonl").removesuffix(".failed")
    folder = path.parent.parent if path.parent.name == ROLLOUTS else path.parent
    for manifest in filter(Path.is_file, (folder / CHECKPOINT, path.with_name(f"{stem}.run.json"))):
        with suppress(OSError, *MISSHAPEN):
            content = parsed(manifest.read_bytes())
            found = json.dumps(dict(content["settings"]))
            planned = len(content.get("items", ()))
    return found, planned


def locks_of(path: Path) -> tuple[Path, Path]:
    """What the program that writes a file locks: of groups, or of the steps of a trainer."""
    stem = path.name.removesuffix(".jsonl").removesuffix(".failed")
    return path.with_name(f"{stem}.lock"), path.with_name(".lock")


def written_now(locks: Iterable[Path]) -> set[Path]:
    """Those of the files on which a process of this machine has a lock, as Linux lists them. To try a lock would keep a
    run out that starts at this moment."""
    held: set[tuple[str, ...]] = set()
    with suppress(OSError):
        held = {
            tuple(line.split()[5].split(":"))
            for line in Path("/proc/locks").read_text().splitlines()
            if "->" not in line
        }
    found = set()
    for lock in locks if held else ():
        with suppress(OSError):
            status = lock.stat()
            device = (f"{number:02x}" for number in (os.major(status.st_dev), os.minor(status.st_dev)))
            if (*device, str(status.st_ino)) in held:
                found.add(lock)
    return found


def state_of(status: os.stat_result) -> tuple[int, int, int]:
    """Inode, size and the time of the last change, which no program can set."""
    return status.st_ino, status.st_size, status.st_ctime_ns


def known_state(row: sqlite3.Row) -> tuple[int, int, int]:
    return row["inode"], row["size"], row["changed"]


def has_grown(file: BinaryIO, status: os.stat_result, row: sqlite3.Row) -> bool:
    """Whether a file begins with what was read of it. One that changed and has the same size was written over."""
    if status.st_ino != row["inode"] or status.st_size < row["at"]:
        return False
    written_over = status.st_size == row["size"] and row["changed"] != UNFINISHED
    joint = os.pread(file.fileno(), 2, row["at"] - 1) if row["at"] else b""
    went_on = len(joint) == 2 and b"\n" not in joint  # what was read as the last line was the beginning of one
    mark: bytes = row["mark"]
    return not written_over and not went_on and mark_of(file, row["at"]) == mark


def mark_of(file: BinaryIO, at: int) -> bytes:
    """A digest of the beginning of a file, and of what comes before a place in it."""
    size = min(MARK, at)
    read = os.pread(file.fileno(), size, 0) + os.pread(file.fileno(), size, at - size)
    return hashlib.blake2b(read, digest_size=16).digest()
