"""The file of finished records, and the settings that made them.

One invariant: a finished record is one whole line, written and flushed before the run counts it. A run that is
killed at any instant therefore repeats only what was in flight.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from datetime import UTC, datetime
from pathlib import Path
from typing import IO, Any

import orjson

from lachesis.run_folder import OtherSettings, RunFolderError, changes, take_lock, write_manifest
from lachesis.trajectories import JsonlWriter, read_lines


class Ledger:
    """An append-only JSONL file of records, each with a unique key, beside a manifest of the settings that made them.

    Args:
        path: the JSONL file. `NAME.run.json` beside it is the manifest, `NAME.lock` keeps other runs out.
        settings: those that decide the content of records; a second start must have the same.
        key: field of a record that names it.
    """

    def __init__(self, path: Path, settings: Mapping[str, Any], *, key: str) -> None:
        self.path = path
        self.key = key
        self.done: set[str] = set()
        """Keys of the finished records."""
        self._settings = orjson.loads(orjson.dumps(dict(settings), default=str, option=orjson.OPT_SORT_KEYS))
        self._manifest = path.with_suffix(".run.json")
        self._lock: IO[str] | None = None
        self._writer: JsonlWriter | None = None

    def records(self) -> Iterator[dict[str, Any]]:
        """The finished records, read from disk."""
        return read_lines(self.path) if self.path.exists() else iter(())

    def open(self) -> None:
        """Take the lock, compare the settings, read what is done.

        Raises:
            RunFolderError: not writable, in use by another run, or made with other settings.
        """
        self._lock = take_lock(
            self.path.with_suffix(".lock"),
            taken=f"another run is writing {self.path}; wait for it or choose another path",
            options=" (--env.data_path_to_save_groups or --env.data_dir_to_save_evals)",
        )
        try:
            self._compare_settings()
            self._writer = JsonlWriter(self.path, fsync=True)
            self.done.update(record[self.key] for record in self.records())
        except BaseException:
            self.close()
            raise

    def _compare_settings(self) -> None:
        if not self.path.exists() or self.path.stat().st_size == 0:
            created = datetime.now(UTC).isoformat()
            write_manifest(self._manifest, {"created": created, "settings": self._settings})
            return
        try:
            changed = changes(orjson.loads(self._manifest.read_bytes())["settings"], self._settings)
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

    def append(self, record: dict[str, Any]) -> None:
        """Write one record; when this returns, it survives `kill -9`. Blocks for the disk: call it in a thread."""
        if self._writer is None:
            raise RuntimeError("the ledger is not open")
        self._writer.write(record)
        self.done.add(record[self.key])

    def close(self) -> None:
        if self._writer is not None:
            self._writer.close()
            self._writer = None
        if self._lock is not None:
            self._lock.close()
            self._lock = None
