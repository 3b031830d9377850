"""Files between this machine and a sandbox."""

from __future__ import annotations

import errno
import os
import stat
import threading
import time
from collections.abc import AsyncIterator
from pathlib import Path

from backends import MAX_DOWNLOAD, BackendError
from backends.executor.trees import walk
from backends.tasks import in_own_thread
from lachesis.tool_context.context_results import DictReply, Replies

_CHUNK = 1 << 20

NO_FILES = (errno.EMFILE, errno.ENFILE)
"""Errors of this machine in every method."""


class HostDiskFull(BackendError):
    """This machine has no room for what rewards may copy out. It concerns every rollout: the run stops and says so."""


def files_below(folder: Path) -> Replies:
    """A reply for each file, and for each link to one."""
    replies = Replies()
    for parent, name, _, facts in walk(str(folder)):
        if stat.S_ISLNK(facts.st_mode):
            try:
                facts = os.stat(name, dir_fd=parent)
            except OSError:  # it leads nowhere
                continue
        if stat.S_ISREG(facts.st_mode):
            replies.append(DictReply.written(facts.st_size))
    return replies


def remove_dead_links(folder: Path) -> None:
    """Remove links that lead to nothing, and to folders around them: who follows these does not come to an end."""
    found = [
        (Path(f"/proc/self/fd/{parent}").readlink(), name)
        for parent, name, _, facts in walk(str(folder))
        if stat.S_ISLNK(facts.st_mode)
    ]
    for place, name in found:
        try:
            dead = place.is_relative_to((place / name).resolve(strict=True))
        except (OSError, RuntimeError):  # the second for a loop
            dead = True
        if dead:
            (place / name).unlink()


def members(folder: Path, inside: str) -> list[tuple[str, str]]:
    """The folders (d) and the files (f) of `folder`, below the path `inside` of a sandbox."""
    found = [("d", inside)]
    for path in sorted(folder.rglob("*")):
        is_folder = path.is_dir() and not path.is_symlink()
        found.append(("d" if is_folder else "f", f"{inside}/{path.relative_to(folder).as_posix()}"))
    return found


async def chunks(path: Path) -> AsyncIterator[bytes]:
    file = await in_own_thread(lambda: path.open("rb"))
    try:
        while data := await in_own_thread(file.read, _CHUNK):
            yield data
    finally:
        file.close()


async def write_local(path: Path, chunks: AsyncIterator[bytes], max_bytes: int | None = MAX_DOWNLOAD) -> int:
    """Write next to `path`, then move over it; returns the number of bytes.

    Raises:
        OSError: there are more than `max_bytes` (EFBIG), or this machine has no room for them (ENOSPC).
    """
    from backends.extraction import Room  # late: few rollouts copy files out

    await in_own_thread(path.parent.mkdir, parents=True, exist_ok=True)
    temporary = path.with_name(f".{path.name}.part-{threading.get_ident():x}-{time.monotonic_ns():x}")
    try:
        with temporary.open("wb") as file:  # in no thread: cancelled, it would make the file after it was removed
            room = Room(max_bytes)
            async for chunk in chunks:
                room.take(len(chunk), file.fileno())
                await in_own_thread(file.write, chunk)
        await in_own_thread(temporary.replace, path)
    except BaseException:
        temporary.unlink(missing_ok=True)
        raise
    return room.size


def size(path: Path) -> int:
    if path.is_dir():
        return sum(facts.st_size for _, _, _, facts in walk(str(path)))
    return path.stat().st_size
