"""Folders of one user: private ones, cached ones, and the removal of a sandbox' folder with everything around it."""

from __future__ import annotations

import contextlib
import errno
import functools
import os
import signal
import stat
import tempfile
import time
from pathlib import Path
from typing import TYPE_CHECKING

from backends.errors import BackendError
from backends.executor.trees import remove_tree
from backends.first_use import in_turn

from .cgroups import Cgroup

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

MARK = "LACHESIS_SANDBOX"
"""Variable with a sandbox' id: finds the processes of one without a PID namespace."""
SHORTAGES = (errno.EMFILE, errno.ENFILE, errno.EAGAIN, errno.ENOMEM)
"""Errors that say nothing about what was tried: the next attempt may succeed."""
REMOVAL = 10.0
"""Seconds for the removal of a folder. An agent can make one that takes minutes: then somebody goes on later."""
_MOST_LINKS = 40
_BUILDING = "building-"
_UNUSED = 30 * 86_400.0
"""Seconds after which a cached folder that nobody has used is removed: longer than any sandbox lives."""
_ABANDONED = 3_600.0
"""Seconds after which an unfinished folder belongs to a process that was killed."""


def private_folder(path: Path, otherwise: str) -> Path:
    """Make a folder that only this user can enter, or find it so. `otherwise` says how to choose another one.

    Raises:
        BackendError: it belongs to somebody else, others can enter it, or it cannot be made.
    """
    try:
        facts = None
        facts = _made(path)
    except OSError as error:
        raise BackendError(f"{path} cannot be made: {error}. Next step: {otherwise} to a folder that exists") from error
    if not stat.S_ISDIR(facts.st_mode) or facts.st_uid != os.geteuid() or facts.st_mode & 0o077:
        raise BackendError(f"{path} is not a folder of this user alone. Next step: remove it, or {otherwise}")
    return path


def _made(path: Path) -> os.stat_result:
    for _ in range(10):
        with contextlib.suppress(FileExistsError):  # it may be no folder
            path.mkdir(mode=0o700)
        with contextlib.suppress(FileNotFoundError):  # somebody else has removed it, as it was empty
            return path.lstat()
    return path.lstat()


def inside(root: str, path: str, last: bool = True) -> str:
    """The absolute path in `root` that `path` means to a process whose root that is: without links, so that nothing
    that follows it leaves `root`. It need not exist; `last`: follow a link there.

    Raises:
        OSError: ELOOP, it has more than 40 links.
    """
    done: list[str] = []
    left = path.split("/")[::-1]
    links = 0
    while left:
        part = left.pop()
        if part in ("", "."):
            continue
        if part == "..":
            del done[-1:]
            continue
        place = os.path.join(root, *done, part)
        if os.path.islink(place) and (last or any(each not in ("", ".") for each in left)):
            links += 1
            if links > _MOST_LINKS:
                raise OSError(errno.ELOOP, os.strerror(errno.ELOOP), path)
            target = os.readlink(place)
            if target.startswith("/"):
                done = []
            left += target.split("/")[::-1]
        else:
            done.append(part)
    return "/" + "/".join(done)


def remove_sandbox(folder: Path, groups: Iterable[str | Path], id: str = "", seconds: float | None = None) -> str:
    """Remove what is left of a sandbox whose first process has ended: processes, cgroups, folder.

    `id` is given where its processes do not end with the first one. They are then also found by `MARK`. Returns what
    is left of the folder after `seconds` (`REMOVAL`), and why; empty when nothing is.
    """
    group = Cgroup(tuple(Path(each) for each in groups))
    group.kill()
    group.remove()
    if id:
        _kill_marked(f"{MARK}={id}".encode())
    return remove_tree(str(folder), REMOVAL if seconds is None else seconds)


def _kill_marked(mark: bytes) -> None:
    end = time.monotonic() + 2.0
    left = True
    while left and time.monotonic() < end:
        left = False
        for entry in Path("/proc").iterdir():
            if entry.name.isdigit():
                with contextlib.suppress(OSError):
                    if mark in (entry / "environ").read_bytes().split(b"\0"):
                        os.kill(int(entry.name), signal.SIGKILL)
                        left = True


def cached(name: str, make: Callable[[Path], None]) -> Path:
    """The folder `name` in the user's cache (`$XDG_CACHE_HOME/lachesis`), which `make` fills if it does not exist.

    It appears in one step, complete, even if several processes make it at once. Folders of the same kind (the part of
    the name before the first "-") that nobody has used in 30 days are removed. Without a usable cache, the folder
    belongs to this process and ends with it.

    Raises:
        BackendError: it cannot be written; and what `make` raises.
    """
    try:
        root = cache_folder()
    except OSError as error:
        raise BackendError(f"the cache folder cannot be used: {error}") from error
    target = root / name
    try:
        os.utime(target)
        return target
    except OSError:
        pass  # it does not exist
    building = None
    try:
        building = Path(tempfile.mkdtemp(prefix=_BUILDING, dir=root))
        folder = building / name
        folder.mkdir(mode=0o755)
        make(folder)
        try:
            folder.rename(target)
        except OSError:
            if not target.is_dir():
                raise
        _remove_old(root, name)
    except OSError as error:
        raise BackendError(f"the cache folder {target} cannot be made: {error}") from error
    finally:
        if building is not None:
            remove_tree(str(building), REMOVAL)
    return target


def user_cache() -> Path:
    """`$XDG_CACHE_HOME/lachesis`, or `~/.cache/lachesis` where that is no absolute path. It need not exist."""
    chosen = Path(os.environ.get("XDG_CACHE_HOME", ""))
    return (chosen if chosen.is_absolute() else Path.home() / ".cache") / "lachesis"


def cache_folder() -> Path:
    """The user's cache folder, or a folder of this process if that cannot be used. Raises `OSError` for a shortage."""
    try:
        root = user_cache()
        root.mkdir(mode=0o755, parents=True, exist_ok=True)
        facts = root.stat()
        # Sandboxes run what is in it, so nobody else may write to it.
        if facts.st_uid == os.geteuid() and not facts.st_mode & 0o022:
            tempfile.TemporaryFile(dir=root).close()
            return root
    except (OSError, RuntimeError) as error:
        if isinstance(error, OSError) and error.errno in SHORTAGES:
            raise
    return Path(_own_cache().name)


@in_turn
@functools.lru_cache(maxsize=None)
def _own_cache() -> tempfile.TemporaryDirectory[str]:
    return tempfile.TemporaryDirectory(prefix="lachesis-cache-")


def _remove_old(root: Path, current: str) -> None:
    """Remove folders that have not been used for long or were never completed. Other processes may do the same."""
    kind = current.partition("-")[0] + "-"
    now = time.time()
    for entry in root.iterdir():
        if entry.name == current or not entry.name.startswith((kind, _BUILDING)):
            continue
        try:
            unused = now - entry.lstat().st_mtime
            if unused > (_ABANDONED if entry.name.startswith(_BUILDING) else _UNUSED):
                doomed = Path(tempfile.mkdtemp(prefix=_BUILDING, dir=root))
                entry.rename(doomed / "old")  # in one step: nobody finds half of it
                remove_tree(str(doomed), REMOVAL)
        except OSError:
            continue
