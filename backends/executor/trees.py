"""Trees of folders that others have made, and may change meanwhile: by descriptors, without recursion.

No step follows a link, and no path is longer than one name. So nothing outside is reached, at any depth.
"""

from __future__ import annotations

import contextlib
import errno
import math
import os
import stat
import time
from typing import TYPE_CHECKING

from .framing import LONGEST_PATH

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence
    from typing import Tuple

    Found = Tuple[int, str, str, os.stat_result]

DEEPEST = 256
"""Folders in each other that are copied."""
OPEN = 16
"""Folders that are kept open on the way to a deep one."""
LIFTED = 32
"""Folders in each other that are removed where they are. What lies deeper is first moved up."""
BATCH = 10_000
"""Folders of one folder that are remembered at once while they are removed."""


def open_folder(name: str, parent: int | None = None) -> int:
    return os.open(name, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC, dir_fd=parent)


def make_folders(path: str) -> None:
    """`os.makedirs(path, exist_ok=True)`, which recurses."""
    missing = []
    while True:
        try:
            os.mkdir(path)
        except FileNotFoundError:
            missing.append(path)
            path = os.path.dirname(path.rstrip("/"))
            if path:
                continue
            raise
        except FileExistsError:
            if not os.path.isdir(path):
                raise
        if not missing:
            return
        path = missing.pop()


class Steps:
    """The way from a folder to one below, name by name. Few folders of it are open."""

    def __init__(self, root: int, enter: Callable[[str, int], int] = open_folder) -> None:
        """`enter` opens the folder of a name in an open one."""
        self.root, self.enter = root, enter
        self.names: list[str] = []
        self.fds: list[int] = []
        """The folders of `names`; -1: closed again."""

    def go(self, names: Sequence[str]) -> int:
        """The descriptor of the folder `names`, which is closed later."""
        shared = 0
        for mine, theirs in zip(self.names, names):
            if mine != theirs:
                break
            shared += 1
        self.leave(shared)
        if self.fds and self.fds[-1] < 0:
            self.leave(0)
        for name in names[len(self.names) :]:
            self.fds.append(self.enter(name, self.fds[-1] if self.fds else self.root))
            self.names.append(name)
            if len(self.fds) > OPEN:
                os.close(self.fds[-OPEN - 1])
                self.fds[-OPEN - 1] = -1
        return self.fds[-1] if self.fds else self.root

    def leave(self, count: int) -> None:
        """Close all but the first `count` folders."""
        del self.names[count:]
        while len(self.fds) > count:
            fd = self.fds.pop()
            if fd >= 0:
                os.close(fd)


def walk(folder: str, most: float = math.inf) -> Iterator[Found]:
    """All that is below `folder`: `(parent's descriptor, name, path below folder, lstat)`, sorted, folders first.

    What vanishes meanwhile is left out.

    Raises:
        OSError: a folder cannot be read; with EFBIG, there is more than `most` of it, or it is too deep.
    """
    root = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    steps = Steps(root)
    names: list[str] = []
    path = folder
    seen = 0

    def listed(fd: int) -> list[str]:
        nonlocal seen
        found = []
        with os.scandir(fd) as entries:
            for entry in entries:
                found.append(entry.name)
                seen += 1
                if seen > most:
                    raise OSError(errno.EFBIG, "it contains more than %d files and folders" % most, folder)
        return sorted(found, reverse=True)

    try:
        left = [listed(root)]
        while left:
            if not left[-1]:
                left.pop()
                del names[-1:]
                continue
            name = left[-1].pop()
            below = "/".join([*names, name])
            path = os.path.join(folder, below)
            try:
                parent = steps.go(names)
                status = os.stat(name, dir_fd=parent, follow_symlinks=False)
                if len(below) > LONGEST_PATH // 4 and len(os.fsencode(below)) > LONGEST_PATH:
                    raise OSError(errno.EFBIG, "it has a path of more than %d bytes" % LONGEST_PATH)
                yield parent, name, below, status
                if stat.S_ISDIR(status.st_mode):
                    if len(names) == DEEPEST:
                        raise OSError(errno.EFBIG, "it has more than %d nested folders" % DEEPEST)
                    inner = listed(steps.go([*names, name]))
                    names.append(name)
                    left.append(inner)
            except OSError as error:
                if error.errno not in (errno.ENOENT, errno.ELOOP, errno.ENOTDIR):  # it was replaced
                    raise
    except OSError as error:
        if error.errno == errno.EFBIG:
            path = folder
        raise OSError(error.errno, error.strerror, path) from None
    finally:
        steps.leave(0)
        os.close(root)


def remove_tree(path: str, seconds: float) -> str:
    """Remove a folder with everything below it; returns what is left and why, empty when nothing is.

    Permissions do not hinder it, nor does what is still being written. It crosses no mount, and files that lie in the
    folder itself go last: owners keep their records there. A later call goes on where this one ended.
    """
    return Removal(path, seconds).run()


class Removal:
    def __init__(self, path: str, seconds: float) -> None:
        self.path, self.seconds = path, seconds
        self.end = time.monotonic() + seconds
        self.removed = 0
        self.progress = False
        self.late = False
        self.problem = ""

    def run(self) -> str:
        root = -1
        try:
            while True:
                try:
                    os.rmdir(self.path)
                    return ""
                except OSError as error:
                    if error.errno == errno.ENOENT:
                        return ""
                    if error.errno == errno.ENOTDIR:
                        os.unlink(self.path)
                        return ""
                    if error.errno not in (errno.ENOTEMPTY, errno.EEXIST):
                        self.note(error, "it")
                    if self.late or (root >= 0 and not self.progress) or error.errno == errno.EBUSY:
                        break
                if root < 0:
                    root = self.enter(self.path, None)
                self.progress, self.problem = False, ""
                self.sweep(root)
        except OSError as error:
            self.note(error, "it")
        finally:
            if root >= 0:
                os.close(root)
        if self.late:
            return "more is left after %.1f s, which removed %d files and folders" % (
                self.seconds,
                self.removed,
            )
        return self.problem or "something writes into it"

    def sweep(self, root: int) -> None:
        """Go once through everything below a folder."""
        files, folders = self.listed(root, keep=True)
        levels = [(root, "", folders)]
        try:
            while levels:
                fd, name, folders = levels[-1]
                if folders and not self.is_late():
                    child = folders.pop()
                    try:
                        inner = self.descend(root, fd, child, len(levels))
                        if inner >= 0:
                            levels.append((inner, child, self.listed(inner)[1]))
                    except OSError as error:
                        self.note(error, child)
                    continue
                levels.pop()
                if levels:
                    os.close(fd)
                    self.remove(os.rmdir, name, levels[-1][0])
        finally:
            for fd, _, _ in levels[1:]:
                os.close(fd)
        if not self.problem and not self.late and not self.listed(root, keep=True)[1]:
            for name in files:
                self.remove(os.unlink, name, root)

    def descend(self, root: int, fd: int, child: str, depth: int) -> int:
        """The descriptor of a folder that has to be emptied; -1: it is gone from there."""
        try:
            os.rmdir(child, dir_fd=fd)  # the kernel says which is empty, and which is a mount
        except OSError as error:
            if error.errno not in (errno.ENOTEMPTY, errno.EEXIST):
                raise
        else:
            self.removed += 1
            self.progress = True
            return -1
        inner = self.enter(child, fd)
        if depth <= LIFTED:
            return inner
        os.close(inner)
        os.rename(child, ".deep-%s" % os.urandom(8).hex(), src_dir_fd=fd, dst_dir_fd=root)
        self.progress = True
        return -1

    def enter(self, name: str, parent: int | None) -> int:
        """Open a folder, and let its owner change it."""
        try:
            fd = open_folder(name, parent)
        except PermissionError:
            handle = os.open(name, os.O_PATH | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC, dir_fd=parent)
            try:
                os.chmod("/proc/self/fd/%d" % handle, 0o700)  # by its name, a link could take its place
            finally:
                os.close(handle)
            fd = open_folder(name, parent)
        if os.fstat(fd).st_mode & 0o700 != 0o700:
            with contextlib.suppress(OSError):
                os.fchmod(fd, 0o700)
        return fd

    def listed(self, fd: int, keep: bool = False) -> tuple[list[str], list[str]]:
        """Files, which are removed at once without `keep`; and folders."""
        files: list[str] = []
        folders: list[str] = []
        with os.scandir(fd) as entries:
            for entry in entries:
                if entry.is_dir(follow_symlinks=False):
                    folders.append(entry.name)
                elif keep:
                    files.append(entry.name)
                else:
                    self.remove(os.unlink, entry.name, fd)
                if len(folders) >= BATCH or len(files) >= BATCH or self.is_late():
                    break
        return files, folders

    def remove(self, how: Callable[..., None], name: str, fd: int) -> None:
        try:
            how(name, dir_fd=fd)
        except OSError as error:
            if error.errno not in (errno.ENOENT, errno.ENOTEMPTY, errno.EEXIST):
                self.note(error, name)
        else:
            self.removed += 1
            self.progress = True

    def is_late(self) -> bool:
        self.late = self.late or time.monotonic() > self.end
        return self.late

    def note(self, error: OSError, name: str) -> None:
        self.problem = self.problem or "%s: %s" % (ascii(name)[1:-1], error.strerror)
