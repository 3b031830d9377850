"""The folder of a run: one process at a time, and a manifest of the settings that its files were made with."""

from __future__ import annotations

import fcntl
import os
from collections.abc import Mapping
from pathlib import Path
from typing import IO, Any

import orjson

from lachesis.errors import LachesisError
from lachesis.trajectories.jsonl import sync_folder


class RunFolderError(LachesisError):
    """The run's folder cannot be used; the message says why and what to do."""


class OtherSettings(RunFolderError):
    """The folder is of a run with other settings."""

    exit_code = 2


def take_lock(path: Path, *, taken: str, options: str = "") -> IO[str]:
    """Lock the folder for this process until the file is closed. Makes the folder if it is missing.

    Args:
        taken: the message if another process has it.
        options: the flags that choose the folder, for messages.

    Raises:
        RunFolderError: another process has it, it cannot be written to, or its file system knows no locks.
    """
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        file = path.open("a")
    except OSError as error:
        raise RunFolderError(
            f"cannot write to {path.parent}: {error.strerror}; choose another folder{options} or make it writable"
        ) from error
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError as error:
        file.close()
        if isinstance(error, BlockingIOError):
            raise RunFolderError(taken) from error
        raise RunFolderError(
            f"{path} cannot be locked ({error.strerror or error}); choose a folder on a file system that has flock"
        ) from error
    return file


def write_manifest(path: Path, manifest: Mapping[str, Any]) -> None:
    """Replace the file. When this returns, the new one is on the disk; until then, the old one is."""
    temporary = path.with_suffix(".tmp")
    try:
        with temporary.open("wb") as file:
            file.write(orjson.dumps(manifest, option=orjson.OPT_INDENT_2))
            file.flush()
            os.fsync(file.fileno())
        temporary.replace(path)
        sync_folder(path.parent)
    except OSError as error:
        raise RunFolderError(f"cannot write {path}: {error.strerror or error}; make room or choose another") from error


def changes(before: Mapping[str, Any], now: Mapping[str, Any]) -> str:
    """The differences between two sets of settings, in words; empty if there are none."""
    names = sorted(name for name in before.keys() | now.keys() if before.get(name) != now.get(name))
    return "; ".join(f"{name}: {before.get(name)!r} then, {now.get(name)!r} now" for name in names)
