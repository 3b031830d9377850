"""The file of finished groups, the settings that made them, and the lock that keeps other runs out.

One invariant: a finished group is one whole line, written and flushed before the run counts it. So a run that is killed
at any moment only repeats what was in flight.

Another: no two runs write to one file. Several runs may have one folder; one of them has the plain names of trajectory
files there, and the others begin these names with those of their groups files.
"""

from __future__ import annotations

import fcntl
import hashlib
import itertools
import os
import shlex
import uuid
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import IO, Any

import orjson

from backends.text import counted
from lachesis.figures.item_keys import is_part
from lachesis.runs.own_code import OwnCode
from lachesis.runs.run_folder import OtherSettings, RunFolderError, WrongFolder, changes, unused
from lachesis_messages.records.digests import certified
from lachesis_messages.records.entries import COMPLETED_FILE, FAILED_FILE
from lachesis_messages.records.jsonl import JsonlWriter, read_lines, sync_folder

CONTINUE = "to keep finished groups with their scores, add --env.when_code_changed continue"


@dataclass(frozen=True, slots=True)
class OldCode:
    """A run that other code of the environment made, with the settings and items of this one."""

    path: Path
    """Of its groups."""
    change: str
    """The differences, and how much is finished, in words."""
    same_file: bool
    """Whether that is an earlier state of the same file."""


def own_path(
    path: Path, settings: Mapping[str, Any], items: Sequence[str] = (), code: OwnCode | None = None
) -> tuple[Path, str, OldCode | None]:
    """Where a run with these settings has its file: `path`, or the same name in `FOLDER-2`, `FOLDER-3` and so on, the
    first that no other run has. And why it is not `path`, or an empty text; and the run among those before it that
    differs in its code only, the latest one or rather that of the same file.

    Raises:
        RunFolderError: nobody knows what made one of the files.
    """
    folder, why, older = path.parent, "", list[OldCode]()
    for number in itertools.count(2):
        ledger = Ledger(path, settings, items, code)
        if not (differs := ledger.differences()):
            break
        if (old := ledger.old_code()) is not None:
            older.append(old)
        why = why or differs
        path = folder.with_name(f"{folder.name}-{number}") / path.name
    begun = path.exists() and path.stat().st_size > 0
    return path, why, None if begun else max(reversed(older), key=lambda old: old.same_file, default=None)


class Ledger:
    """An append-only JSONL file of groups, each with its digest, next to a manifest of the settings that made them.

    Args:
        path: the JSONL file. `NAME.run.json` next to it is the manifest, and `NAME.lock` keeps other runs out.
        settings: those that decide the content of groups; a second start must have the same.
        items: digests of the items of an evaluation; a second start must have the same, and may have more or fewer.
        code: that of the environment; a second start must have the same, unless it `takes_old_code`.

    Each group gets `number`, its place in the file, from 0. A file that an older version began goes on without.
    """

    def __init__(
        self,
        path: Path,
        settings: Mapping[str, Any],
        items: Sequence[str] = (),
        code: OwnCode | None = None,
        *,
        takes_old_code: bool = False,
    ) -> None:
        self.path = path
        self.items = list(items)
        self.code = code
        self.takes_old_code = takes_old_code
        self.done: set[str] = set()
        """Keys of finished groups. A thread adds to them: look for keys only, and do not iterate."""
        self.items_done = 0
        """Finished groups without the further ones of an item."""
        self.run = ""
        """The id of the run, the same after each start; empty for one that an older version began."""
        self.elsewhere = ""
        """How to choose another folder, if it is not a flag of `process` or `eval`."""
        self.own_names = False
        """Whether the plain names of trajectory files belong to something else in the folder."""
        self._count = 0
        self._settings = orjson.loads(orjson.dumps(dict(settings), default=str, option=orjson.OPT_SORT_KEYS))
        self._manifest = path.with_suffix(".run.json")
        self._lock: IO[str] | None = None
        self._writer: JsonlWriter | None = None

    def records(self) -> Iterator[dict[str, Any]]:
        """The finished groups, read from disk."""
        return read_lines(self.path) if self.path.exists() else iter(())

    def earlier(self) -> Iterator[dict[str, Any]]:
        """The same, once after `open`: `done` and `items_done` are complete at its end. A file may have gigabytes, and
        is read once."""
        for record in self.records():
            self._note(record["item_key"])
            yield record

    def open(self) -> None:
        """Take the lock and compare the settings. What is done is known after `earlier`.

        Raises:
            RunFolderError: not writable, in use by another run, or made with other settings.
        """
        try:
            self._check_name()
            self._take_lock()
            self._claim()
            self._writer = JsonlWriter(self.path, fsync=True)
        except BaseException:
            self.close()
            raise

    def _take_lock(self) -> None:
        path = self.path.with_suffix(".lock")
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            self._lock = path.open("a")
        except OSError as error:
            place = "dir_to_save_evals" if self._settings.get("evaluation") else "path_to_save_groups"
            flags = "--output" if self.elsewhere else f"-o or --env.data_{place}"
            why = "it is a file" if path.parent.is_file() else error.strerror
            raise RunFolderError(f"cannot write to {path.parent}: {why}; choose another folder ({flags})") from error
        try:
            fcntl.flock(self._lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError as error:
            raise RunFolderError(f"another run is writing {self.path}; wait for it or choose another path") from error
        except OSError as error:
            raise RunFolderError(
                f"{path} cannot be locked ({error.strerror or error}); choose a folder on a file system that has flock"
            ) from error

    def _check_name(self) -> None:
        if self.path.name.endswith((COMPLETED_FILE, FAILED_FILE, ".failed.jsonl")):
            raise WrongFolder(f"{self.path} has the name of another file of a run; choose another name")

    def _claim(self) -> None:
        """Compare the settings, and settle the id of the run and the names of its files."""
        begun = self._begun()
        manifest = self._read_manifest(required=begun)
        if manifest.get("groups", self.path.name) != self.path.name:
            raise WrongFolder(f"{self._manifest} belongs to {manifest['groups']}; choose another name")
        if begun:
            if differs := self._differences(manifest):
                again = CONTINUE if self.old_code() else "start it as before to continue it"
                raise OtherSettings(f"{differs}; {again}, or write elsewhere: {self._elsewhere()}")
            if self.code is not None and (self._code_change(manifest) or "code" not in manifest):
                earlier = [*manifest.get("earlier_code", ()), *filter(None, [manifest.get("code")])]
                manifest = {**manifest, "code": self.code.to_record(), "earlier_code": earlier}
                self._write_manifest(manifest)
        else:
            fresh = {"created": datetime.now(UTC).isoformat(), "run": uuid.uuid4().hex, "groups": self.path.name}
            kept = {}
            # With trajectories, the groups file was removed. Without a finished group it may still be the same run.
            same = bool(manifest) and (manifest["settings"], manifest.get("items", [])) == (self._settings, self.items)
            unfinished_of = manifest.get("run", "") if same else ""
            if manifest and not self._has_trajectories(manifest.get("own_names") is True, unfinished_of):
                names = ("run", "own_names") if same else ("own_names",)
                kept = {name: manifest[name] for name in names if name in manifest}
            code = {} if self.code is None else {"code": self.code.to_record()}
            manifest = {**fresh, **kept, "settings": self._settings, **code}
            # Two runs that start together have both written this before they look for others: neither overlooks one.
            self._write_manifest(manifest)
        if self.items and len(self.items) > len(manifest.get("items", ())):
            manifest = {**manifest, "digests": self._digests(), "items": self.items}
            if begun or "own_names" in manifest:  # else it is written below
                self._write_manifest(manifest)
        self.run = manifest.get("run", "")
        if (own_names := manifest.get("own_names")) is None:
            own_names = self._plain_names_are_taken() or (not begun and self._has_trajectories(False))
            if own_names and not begun and self._has_trajectories(True):
                raise RunFolderError(
                    f"{self.path} is missing, and the files of its trajectories are not; move them away or choose "
                    "another path"
                )
            self._write_manifest({**manifest, "own_names": own_names})
        self.own_names = own_names

    def differences(self) -> str:
        """Why the run that the file has is another one; empty where this start begins or continues it.

        Raises:
            RunFolderError: nobody knows what made the file.
        """
        return self._differences(self._read_manifest(required=True)) if self._begun() else ""

    def old_code(self) -> OldCode | None:
        """The run that the file has, where it is another one only because other code made it."""
        if not self._begun() or self._other_run(manifest := self._read_manifest(required=True)):
            return None
        if not (change := self._code_change(manifest)):
            return None
        same_file = self.code is not None and manifest["code"]["file"] == self.code.file
        return OldCode(self.path, change, same_file)

    def _begun(self) -> bool:
        return self.path.exists() and self.path.stat().st_size > 0

    def _differences(self, manifest: Mapping[str, Any]) -> str:
        return self._other_run(manifest) or ("" if self.takes_old_code else self._code_change(manifest))

    def _code_change(self, manifest: Mapping[str, Any]) -> str:
        """The differences in the code, and how much the old run has finished."""
        if self.code is None or not (change := self.code.change(manifest.get("code"), self.path)):
            return ""
        unit = "sample" if self._settings.get("evaluation") else "group"
        with self.path.open("rb") as lines:
            return f"{change} ({counted(sum(1 for _ in lines), unit)} finished)"

    def _other_run(self, manifest: Mapping[str, Any]) -> str:
        theirs, ours = manifest["settings"].get("environment"), self._settings.get("environment")
        if theirs and ours != theirs:  # all other settings follow from it
            return f"{self.path} holds rollouts of {theirs}, not of {ours}"
        if changed := changes(manifest["settings"], self._settings):
            return f"{self.path} was started with other settings ({changed})"
        # An evaluation of some items and of others would be an evaluation of neither.
        before, now = Counter(manifest.get("items", ())), Counter(self.items)
        if (gone := before - now) and now - before:
            return (
                f"{self.path} was started with other items: {gone.total()} of its {before.total()} are not among the "
                f"{now.total()} that the environment gives now"
            )
        return ""

    def _elsewhere(self) -> str:
        """Flags for a folder that is free."""
        if self.elsewhere:
            return self.elsewhere
        here = self.path.parent
        folder = unused(here if here.name else Path("run"))
        verb, setting, place = "process", "data_path_to_save_groups", folder / self.path.name
        if self._settings.get("evaluation"):
            verb, setting, place = "eval", "data_dir_to_save_evals", folder
        short = f"-o {shlex.quote(str(folder))} (of `lachesis {verb}`)"
        return f"{short} or --env.{setting} {shlex.quote(str(place))}"

    def _digests(self) -> dict[str, str]:
        """For comparing runs by eye; what is compared by us is written out next to them."""
        model = {name: value for name, value in self._settings.items() if name.startswith(("model", "openai."))}
        parts = {"settings": self._settings, "data": sorted(self.items), "model": model}
        return {
            name: hashlib.sha256(orjson.dumps(part, option=orjson.OPT_SORT_KEYS)).hexdigest()[:16]
            for name, part in parts.items()
        }

    def _read_manifest(self, *, required: bool) -> dict[str, Any]:
        try:
            manifest = dict(orjson.loads(self._manifest.read_bytes()))
            set(manifest.get("items", ()))  # raises TypeError for what is not a list of keys
            return {**manifest, "settings": dict(manifest["settings"])}
        except (OSError, ValueError, KeyError, TypeError) as error:
            if not required:
                return {}
            raise RunFolderError(
                f"{self.path} exists, but {self._manifest.name} next to it cannot be read ({error}), so it is unknown "
                "which run made it; choose another path or move the file away"
            ) from error

    def _plain_names_are_taken(self) -> bool:
        """Whether another run of the folder has the plain names."""
        for path in self.path.parent.glob("*.run.json"):
            if path != self._manifest and path.is_file():
                try:
                    if orjson.loads(path.read_bytes())["own_names"] is not True:
                        return True
                except (OSError, ValueError, KeyError, TypeError):
                    return True  # of an older version, or in the making
        return False

    def _has_trajectories(self, own: bool, unfinished_of: str = "") -> bool:
        """Whether files of these names hold something else than conversations of a run that did not complete and have
        no reward. These were broken or interrupted before the run finished a group."""
        before = f"{self.path.stem}." if own else ""
        paths = [self.path.with_name(f"{before}{name}") for name in (COMPLETED_FILE, FAILED_FILE)]
        held = [path for path in paths if path.exists() and path.stat().st_size > 0]
        if not unfinished_of:
            return bool(held)
        entries = itertools.chain.from_iterable(read_lines(path, torn_tail=True) for path in held)
        return any(
            entry.get("completed") or entry.get("reward") is not None or entry.get("run") != unfinished_of
            for entry in entries
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

    def append_all(self, records: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
        """Write groups, which wait for the disk once; when this returns, they survive `kill -9`. Blocks for the disk:
        call it in a thread.

        Returns the records as they were written.
        """
        if self._writer is None:
            raise RuntimeError("the ledger is not open")
        if self.run:
            records = [{**record, "number": number} for number, record in enumerate(records, self._count)]
        records = [certified(record) for record in records]
        self._writer.write_all(records)
        for record in records:
            self._note(record["item_key"])
        return list(records)

    def _note(self, key: str) -> None:
        self._count += 1
        self.items_done += key not in self.done and not is_part(key)
        self.done.add(key)

    def close(self) -> None:
        if self._writer is not None:
            self._writer.close()
            self._writer = None
        if self._lock is not None:
            self._lock.close()
            self._lock = None
