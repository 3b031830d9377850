"""The file of finished groups, the settings that made them, and the lock that keeps other runs out.

One invariant: a finished group is one whole line, written and flushed before the run counts it. A run that is
killed at any instant therefore repeats only what was in flight.
"""

from __future__ import annotations

import fcntl
import os
from collections.abc import Iterator, Mapping
from datetime import UTC, datetime
from pathlib import Path
from typing import IO, Any

import orjson

from lachesis.run_folder import OtherSettings, RunFolderError, changes
from lachesis.trajectories import JsonlWriter, read_lines
from lachesis.trajectories.jsonl import sync_folder


class Ledger:
    """An append-only JSONL file of groups, beside a manifest of the settings that made them.

    Args:
        path: the JSONL file. `NAME.run.json` beside it is the manifest, `NAME.lock` keeps other runs out.
        settings: those that decide the content of groups; a second start must have the same.
    """

    def __init__(self, path: Path, settings: Mapping[str, Any]) -> None:
        self.path = path
        self.done: set[str] = set()
        """Keys of the items of finished groups."""
        self._settings = orjson.loads(orjson.dumps(dict(settings), default=str, option=orjson.OPT_SORT_KEYS))
        self._manifest = path.with_suffix(".run.json")
        self._lock: IO[str] | None = None
        self._writer: JsonlWriter | None = None

    def records(self) -> Iterator[dict[str, Any]]:
        """The finished groups, read from disk."""
        return read_lines(self.path) if self.path.exists() else iter(())

    def open(self) -> None:
        """Take the lock, compare the settings, read what is done.

        Raises:
            RunFolderError: not writable, in use by another run, or made with other settings.
        """
        try:
            self._take_lock()
            self._compare_settings()
            self._writer = JsonlWriter(self.path, fsync=True)
            self.done.update(record["item_key"] for record in self.records())
        except BaseException:
            self.close()
            raise

    def _take_lock(self) -> None:
        path = self.path.with_suffix(".lock")
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            self._lock = path.open("a")
        except OSError as error:
            raise RunFolderError(
                f"cannot write to {path.parent}: {error.strerror}; choose another folder "
                "(--env.data_path_to_save_groups or --env.data_dir_to_save_evals) or make it writable"
            ) from error
        try:
            fcntl.flock(self._lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError as error:
            raise RunFolderError(f"another run is writing {self.path}; wait for it or choose another path") from error
        except OSError as error:
            raise RunFolderError(
                f"{path} cannot be locked ({error.strerror or error}); choose a folder on a file system that has flock"
            ) from error

    def _compare_settings(self) -> None:
        now = self._settings
        if not self.path.exists() or self.path.stat().st_size == 0:
            self._write_manifest({"created": datetime.now(UTC).isoformat(), "settings": now})
            return
        try:
            changed = changes(orjson.loads(self._manifest.read_bytes())["settings"], now)
        except (OSError, ValueError, KeyError, AttributeError) as error:
            raise RunFolderError(
                f"{self.path} exists, but {self._manifest.name} beside it cannot be read ({error}), so it is unknown "
                "what made it; choose another path or move the file away"
            ) from error
        if changed:
            raise OtherSettings(
                f"{self.path} was begun with other settings ({changed}); "
                "start with the same ones to continue it, or choose another path"
            )

    def _write_manifest(self, manifest: Mapping[str, Any]) -> None:
        """Replace the file. When this returns, the new one is on the disk; until then, the old one is."""
        path, temporary = self._manifest, self._manifest.with_suffix(".tmp")
        try:
            with temporary.open("wb") as file:
                file.write(orjson.dumps(manifest, option=orjson.OPT_INDENT_2))
                file.flush()
                os.fsync(file.fileno())
            temporary.replace(path)
            sync_folder(path.parent)
        except OSError as error:
            reason = error.strerror or error
            raise RunFolderError(f"cannot write {path}: {reason}; make room or choose another") from error

    def append(self, record: dict[str, Any]) -> None:
        """Write one group; when this returns, it survives `kill -9`. Blocks for the disk: call it in a thread."""
        if self._writer is None:
            raise RuntimeError("the ledger is not open")
        self._writer.write(record)
        self.done.add(record["item_key"])

    def close(self) -> None:
        if self._writer is not None:
            self._writer.close()
            self._writer = None
        if self._lock is not None:
            self._lock.close()
            self._lock = None
