"""One small file for each sandbox of this user on this machine, written before the sandbox is made.

A process that is killed leaves its records. By them, the next process finds what else is left; `owner.py` tells whose
they were.
"""

from __future__ import annotations

import contextlib
import json
import os
import tempfile
import time
from collections.abc import Iterator
from dataclasses import asdict, dataclass, replace
from pathlib import Path

from backends.errors import BackendError
from backends.executor.trees import remove_tree
from backends.owner import ID_PREFIX, is_gone, is_of_this_boot, start_time, this_machine, this_owner
from backends.spec import SandboxInfo, SandboxSpec

from .folders import private_folder

_RECORD = "sandbox.json"
_SHORTLY = 1.0
"""Seconds for the removal of a folder without a record."""
_EXPIRED = 30 * 86_400.0
"""Seconds after which a record of a machine that never came back is removed: longer than any sandbox lives."""
_left: dict[str, str] = {}
"""`Record.left` of this process' sandboxes, in case that it cannot be saved: there may be no descriptor for it."""


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
    """When that process was started: numbers are used again."""
    machine: str = ""
    """Where its owner runs: several machines may share the folder of all."""
    left: str = ""
    """What could not be removed of it, and why; it has ended."""

    @classmethod
    def new(cls, backend: str, id: str, spec: SandboxSpec, detail: str, groups: tuple[str, ...] = ()) -> Record:
        run_id, task_id = spec.labels.get("run_id", ""), spec.labels.get("task_id", "")
        return cls(backend, id, run_id, task_id, this_owner(), time.time(), detail, groups, machine=this_machine())

    @property
    def orphan(self) -> bool:
        """Whether it has ended, or its owner is gone: its process has ended, or this machine has been restarted since.

        Another boot alone proves nothing: several machines may share a $TMPDIR, and the owner may live on another one.
        """
        if self.id in _left or (self.left and self.machine in ("", this_machine())):
            return True
        if is_of_this_boot(self.owner):
            return is_gone(self.owner)
        return self.machine in ("", this_machine()) or time.time() - self.created > _EXPIRED

    @property
    def reachable(self) -> bool:
        """Whether its processes are visible from here: those of another container are not."""
        return self.orphan or _place(self.owner) == _place(this_owner())

    @property
    def runs(self) -> bool:
        """Whether its first process is running."""
        return self.pid > 0 and _place(self.owner) == _place(this_owner()) and start_time(self.pid) == self.start

    def started(self, pid: int) -> Record:
        return replace(self, pid=pid, start=start_time(pid))

    def of(self, spec: SandboxSpec) -> Record:
        """The same sandbox in the use of another run or task."""
        return replace(self, run_id=spec.labels.get("run_id", ""), task_id=spec.labels.get("task_id", ""))

    def info(self) -> SandboxInfo:
        detail = f"{self.detail}, process {self.pid}" if self.runs else f"{self.detail}, no process"
        detail += f", not removed: {self.left}" if self.left else ""
        place = (self.backend, self.id, self.run_id, self.task_id)
        return SandboxInfo(*place, self.owner, self.orphan, self.created, detail)


def _place(owner: str) -> str:
    return owner.partition(".")[0]  # boot and PID namespace


def folder(id: str = "") -> Path:
    """The folder of a sandbox' record and of its other files on disk; without `id`, the folder of all."""
    return Path(tempfile.gettempdir()) / f"{ID_PREFIX}{os.getuid()}" / id


def prepare() -> Path:
    """Make the folder of all records. Raises as `private_folder`."""
    return private_folder(folder(), "set TMPDIR")


def save(record: Record) -> None:
    """Write it for the first time, or again."""
    path = folder(record.id)
    try:
        for attempt in range(10):  # forgetting the last record removes the folder of all
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


def forget(record: Record, left: str) -> None:
    """Remove the folder of all if it is empty now; or keep the record of a sandbox that is not removed."""
    if left:
        _left[record.id] = left
        with contextlib.suppress(BackendError):
            save(replace(record, left=left))
    else:
        _forgotten(record.id)


def _forgotten(id: str) -> None:
    _left.pop(id, None)
    with contextlib.suppress(OSError):
        folder().rmdir()


def all_records(backend: str) -> Iterator[Record]:
    """Every record that can be read. One that a crash left half written is removed."""
    try:
        entries = sorted(folder().iterdir())
    except OSError:
        return
    for entry in entries:
        try:
            fields = json.loads((entry / _RECORD).read_text())
            record = Record(**{**fields, "groups": tuple(fields["groups"])})
        except FileNotFoundError:
            abandoned = entry.name in _left or _age(entry) > 600.0
            if entry.name.startswith(ID_PREFIX) and abandoned and not remove_tree(str(entry), _SHORTLY):
                _forgotten(entry.name)
            continue
        except OSError:  # it exists but cannot be read just now, for want of a descriptor for example
            continue
        except (ValueError, TypeError, KeyError):  # of another version
            continue
        if record.backend == backend and record.id == entry.name:
            yield record


def _age(entry: Path) -> float:
    try:
        return time.time() - entry.lstat().st_mtime
    except OSError:
        return 0.0
