"""What this user's processes have running on this machine: one small file per sandbox, written before it is made.

Whoever is killed leaves its records behind; the next process finds by them what else may be left (`owner.py` says
whose they were).
"""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import stat
import tempfile
import time
from collections.abc import Iterator
from dataclasses import asdict, dataclass, replace
from pathlib import Path

from .base import BackendError, SandboxInfo, SandboxSpec
from .owner import ID_PREFIX, is_gone, is_of_this_boot, start_time, this_machine, this_owner

_RECORD = "sandbox.json"
_FORGOTTEN = 30 * 86_400.0
"""Seconds after which a record of a machine that never came back is removed: longer than any sandbox lives."""


@dataclass(frozen=True, slots=True)
class Record:
    """A sandbox that is being made, or exists."""

    backend: str
    id: str
    run_id: str
    task_id: str
    owner: str
    created: float
    """Unix time in seconds."""
    detail: str
    groups: tuple[str, ...] = ()
    """Folders of its cgroup."""
    pid: int = 0
    """Its first process on this machine, 0 before that is started."""
    start: str = ""
    """When that process was started: the number alone comes round again."""
    machine: str = ""
    """Where its owner is: several machines may have the folder of all in common."""

    @classmethod
    def new(cls, backend: str, id: str, spec: SandboxSpec, detail: str) -> Record:
        labels = spec.labels
        run_id, task_id = labels.get("run_id", ""), labels.get("task_id", "")
        return cls(backend, id, run_id, task_id, this_owner(), time.time(), detail, machine=this_machine())

    @property
    def orphan(self) -> bool:
        """Whether its owner is gone: by its process, or because this machine has been started again since.

        Another boot alone says nothing: with a $TMPDIR that machines share, it may be another machine's, and living.
        """
        if is_of_this_boot(self.owner):
            return is_gone(self.owner)
        return self.machine in ("", this_machine()) or time.time() - self.created > _FORGOTTEN

    @property
    def reachable(self) -> bool:
        """Whether its processes, if there are any, can be seen from here: those of another container cannot."""
        return self.orphan or _place(self.owner) == _place(this_owner())

    @property
    def runs(self) -> bool:
        """Whether its first process is seen to be there."""
        return self.pid > 0 and _place(self.owner) == _place(this_owner()) and start_time(self.pid) == self.start

    def started(self, pid: int) -> Record:
        return replace(self, pid=pid, start=start_time(pid))

    def info(self) -> SandboxInfo:
        detail = f"{self.detail}, process {self.pid}" if self.runs else f"{self.detail}, no process"
        return SandboxInfo(
            backend=self.backend,
            id=self.id,
            run_id=self.run_id,
            task_id=self.task_id,
            owner=self.owner,
            orphan=self.orphan,
            created=self.created,
            detail=detail,
        )


def _place(owner: str) -> str:
    return owner.partition(".")[0]  # boot and PID namespace


def folder(id: str = "") -> Path:
    """Where a sandbox' record is, and whatever else of it is on disk; without `id`, where all are."""
    return Path(tempfile.gettempdir()) / f"{ID_PREFIX}{os.getuid()}" / id


def prepare() -> Path:
    """Make the folder of all, which is nobody else's business. Raises as `private_folder`."""
    return private_folder(folder(), "set TMPDIR")


def private_folder(path: Path, otherwise: str) -> Path:
    """Make a folder that is this user's alone, or find it so. `otherwise` says how to have it elsewhere.

    Raises:
        BackendError: somebody else has made it, or it cannot be made.
    """
    try:
        with contextlib.suppress(FileExistsError):  # whatever it is that exists
            path.mkdir(mode=0o700)
        facts = path.lstat()
    except OSError as error:
        raise BackendError(f"{path} cannot be made: {error}. Next step: {otherwise} to a folder that exists") from error
    if not stat.S_ISDIR(facts.st_mode) or facts.st_uid != os.geteuid() or facts.st_mode & 0o077:
        raise BackendError(f"{path} is not a folder of this user alone. Next step: remove it, or {otherwise}")
    return path


def save(record: Record) -> None:
    """Write it for the first time, or over what was known before."""
    path = folder(record.id)
    try:
        for attempt in range(10):  # whoever forgets the last one may take the folder of all away in between
            try:
                path.mkdir(mode=0o700, exist_ok=True)
                break
            except FileNotFoundError:
                if attempt == 9:
                    raise
                prepare()
        (path / "new.json").write_text(json.dumps(asdict(record)))
        (path / "new.json").replace(path / _RECORD)
    except OSError as error:
        raise BackendError(f"{path} cannot be written: {error}") from error


def forget(id: str) -> None:
    """Remove its folder with all that is in it. What is not there is no error."""
    path = folder(id)
    for _ in range(3):  # a folder without permissions, and one that something still writes into
        if path.exists():
            shutil.rmtree(path, onerror=lambda _, failed, __: _permit(Path(failed)))
    with contextlib.suppress(OSError):
        path.parent.rmdir()


def _permit(failed: Path) -> None:
    for path in (failed.parent, failed):
        with contextlib.suppress(OSError):
            if not path.is_symlink():
                path.chmod(0o700)


def all_records(backend: str) -> Iterator[Record]:
    """Every record that can be read; one that a crash left half written is removed."""
    try:
        entries = sorted(folder().iterdir())
    except OSError:
        return
    for entry in entries:
        try:
            fields = json.loads((entry / _RECORD).read_text())
            record = Record(**{**fields, "groups": tuple(fields["groups"])})
        except FileNotFoundError:
            if entry.name.startswith(ID_PREFIX) and _age(entry) > 600.0:
                forget(entry.name)
            continue
        except OSError:  # it is there, and cannot be read just now: no descriptor is free, say
            continue
        except (ValueError, TypeError, KeyError):  # another version's
            continue
        if record.backend == backend and record.id == entry.name:
            yield record


def _age(entry: Path) -> float:
    try:
        return time.time() - entry.lstat().st_mtime
    except OSError:
        return 0.0
