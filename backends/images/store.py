"""Layers in the user's cache: one folder each, complete or not there.

    images/layers/KEY/root        a root folder; files are shared with other layers by hard links
    images/layers/KEY/layer.json  what made it; its time of change is the last use
    images/building/KEY-NAME/     being made or removed
    images/locks/KEY              held by the one that makes or removes a layer; the kernel drops it with the process

Only the owner can enter `images`: roots have setuid programs, and what an untrusted RUN wrote.
"""

from __future__ import annotations

import asyncio
import contextlib
import errno
import fcntl
import json
import os
import re
import shutil
import tempfile
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from backends.executor.trees import remove_tree
from backends.host.folders import cache_folder, private_folder

from .errors import ImageError

_REMOVAL = 600.0
_WAIT = 0.2


@dataclass(frozen=True)
class Layer:
    key: str
    parent: str
    instruction: str
    used: float
    """Unix time of the last use, in seconds."""
    size: int
    """Bytes that its removal frees, as far as no other layer has the files."""


def _folder(name: str = "") -> Path:
    root = private_folder(cache_folder() / "images", "set XDG_CACHE_HOME")
    if name:
        (root / name).mkdir(exist_ok=True)
    return root / name


def root_of(key: str) -> Path:
    return _folder("layers") / key / "root"


def known(key: str) -> bool:
    """Whether the layer exists; it counts as used then."""
    try:
        os.utime(_folder("layers") / key / "layer.json")
    except OSError:
        return False
    return True


@contextlib.contextmanager
def _locked(path: Path) -> Iterator[bool]:
    """Whether this process got the lock, which it holds for the block."""
    descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    mine = False
    try:
        with contextlib.suppress(BlockingIOError, FileNotFoundError):
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            mine = path.stat().st_ino == os.fstat(descriptor).st_ino  # else its last holder has removed it
        yield mine
    finally:
        os.close(descriptor)


@contextlib.asynccontextmanager
async def _turn(key: str) -> AsyncIterator[None]:
    """The right to make a layer: one process, and in it one task, has it."""
    path = _folder("locks") / key
    while True:
        with _locked(path) as mine:
            if mine:
                try:
                    yield
                finally:
                    path.unlink(missing_ok=True)
                return
        await asyncio.sleep(_WAIT)


async def layer(key: str, facts: Mapping[str, Any], make: Callable[[Path], Awaitable[None]]) -> bool:
    """Have the layer `key`, which `make` makes in the given folder (as `root`) if it is new. Returns whether it was.

    Of any number of processes that want it at once, one makes it.

    Raises:
        ImageError: there is no room for it, or `make` raised it. The partial image is removed.
        OSError: it cannot be written for another reason.
    """
    if known(key):
        return False
    async with _turn(key):
        if known(key):
            return False
        await asyncio.to_thread(sweep)
        folder = _building(key)
        try:
            await make(folder)
            (folder / "layer.json").write_text(json.dumps(facts))
            for each in list(folder.iterdir()):
                if each.name not in ("root", "layer.json"):
                    await asyncio.to_thread(_remove, each)
            folder.rename(_folder("layers") / key)
        except OSError as error:
            if error.errno not in (errno.ENOSPC, errno.EDQUOT):
                raise
            where = facts.get("instruction", key)
            step = f"make room below {_folder()} (lachesis images prune), or set XDG_CACHE_HOME to a larger disk"
            raise ImageError(f"{where}: its layer cannot be written: {error}. Next step: {step}") from error
        finally:
            if folder.exists():
                await asyncio.shield(asyncio.to_thread(_remove, folder))
    return True


def _remove(folder: Path) -> None:
    if folder.is_dir() and not folder.is_symlink():
        remove_tree(str(folder), _REMOVAL)
    else:
        folder.unlink(missing_ok=True)


def _building(key: str) -> Path:
    """A new folder, for the one that holds the lock of `key`."""
    return Path(tempfile.mkdtemp(prefix=f"{key}-", dir=_folder("building")))


def sweep() -> None:
    """Remove what killed processes left half made."""
    left = {path.name.partition("-")[0] for name in ("locks", "building") for path in _folder(name).iterdir()}
    for key in left:
        path = _folder("locks") / key
        with contextlib.suppress(OSError), _locked(path) as mine:
            if mine:
                for folder in _folder("building").glob(f"{key}-*"):
                    _remove(folder)
                path.unlink()


def listed() -> list[Layer]:
    """All layers, the last used ones first."""
    found = []
    for folder in _folder("layers").iterdir():
        with contextlib.suppress(OSError, ValueError):
            facts = json.loads((folder / "layer.json").read_text())
            used = (folder / "layer.json").stat().st_mtime
            found.append(Layer(folder.name, facts["parent"], facts["instruction"], used, _size(folder / "root")))
    return sorted(found, key=lambda each: -each.used)


def _size(root: Path) -> int:
    total = 0
    for folder, _, files in os.walk(root):
        total += os.lstat(folder).st_blocks * 512
        for name in files:
            facts = os.lstat(f"{folder}/{name}")
            total += facts.st_blocks * 512 if facts.st_nlink == 1 else 0
    return total


def prune(unused: float) -> list[Layer]:
    """Remove layers that no build has used for `unused` seconds, and that no sandbox on this machine runs in."""
    sweep()
    removed = []
    mounted = _mounted()
    for each in listed():
        if time.time() - each.used >= unused and each.key not in mounted:
            lock = _folder("locks") / each.key
            with contextlib.suppress(OSError), _locked(lock) as mine:
                if mine:
                    doomed = _building(each.key)
                    (_folder("layers") / each.key).rename(doomed / "old")  # in one step: nobody finds half of it
                    removed.append(each)
                    _remove(doomed)
                    lock.unlink()
    return removed


def _mounted() -> set[str]:
    """Layers that are mounted for some process of this machine."""
    found: set[str] = set()
    for path in Path("/proc").glob("[0-9]*/mountinfo"):
        with contextlib.suppress(OSError):  # the process has ended
            found.update(re.findall(r"/images/layers/([0-9a-f]+)/root", path.read_text(errors="replace")))
    return found


def room() -> int:
    """Bytes that are free where layers are."""
    return shutil.disk_usage(_folder()).free
