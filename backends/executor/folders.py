"""A folder as a tar stream. The owner packs with the same code."""

from __future__ import annotations

import contextlib
import errno
import math
import os
import stat
from typing import TYPE_CHECKING

from .archive import BLOCK, END, FILE, FOLDER, LINK, Member, Reader, header, parts_of
from .framing import CHUNK
from .trees import Steps, make_folders, open_folder, walk

if TYPE_CHECKING:
    from collections.abc import Mapping
    from typing import IO


def pack(folder: str, file: IO[bytes], most: float = math.inf, modes: Mapping[str, int] | None = None) -> None:
    """Write the files, folders and symbolic links below `folder`. Members that vanish meanwhile are left out.

    `modes` overrides the modes on disk, by path; with `.`, the folder itself is written too.

    Raises `OSError` for what cannot be read, and for more than `most` members.
    """
    modes = modes or {}
    if "." in modes:
        file.write(header(Member(FOLDER, ".", 0, modes["."], 0)))
    for parent, name, path, status in walk(folder, most):
        mode, mtime = modes.get(path, stat.S_IMODE(status.st_mode)), int(status.st_mtime)
        try:
            if stat.S_ISDIR(status.st_mode):
                file.write(header(Member(FOLDER, path, 0, mode, mtime)))
            elif stat.S_ISLNK(status.st_mode):
                file.write(header(Member(LINK, path, 0, mode, mtime, os.readlink(name, dir_fd=parent))))
            elif stat.S_ISREG(status.st_mode):
                fd = os.open(name, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC, dir_fd=parent)
                try:
                    pack_file(file, fd, path, modes.get(path))
                finally:
                    os.close(fd)
        except BrokenPipeError:
            raise
        except OSError as error:
            if error.errno not in (errno.ENOENT, errno.ELOOP, errno.ENXIO):  # it was replaced
                raise OSError(error.errno, error.strerror, os.path.join(folder, path)) from None
    file.write(END)


def pack_file(file: IO[bytes], fd: int, path: str, mode: int | None = None) -> None:
    """A file of fixed size: padded with zeros if it shrinks meanwhile, cut off if it grows."""
    status = os.fstat(fd)
    if not stat.S_ISREG(status.st_mode):
        return
    left, mode = status.st_size, stat.S_IMODE(status.st_mode) if mode is None else mode
    file.write(header(Member(FILE, path, left, mode, int(status.st_mtime))))
    padding = -left % BLOCK
    while left > 0:
        data = os.read(fd, min(CHUNK, left)) or bytes(min(CHUNK, left))
        file.write(data)
        left -= len(data)
    file.write(bytes(padding))


def unpack(file: IO[bytes], folder: str) -> None:
    """Extract the files, folders and symbolic links of a tar stream below `folder`, replacing existing files.

    Raises `OSError`.
    """
    make_folders(folder)
    archive, modes = Reader(file), []
    root = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    steps = Steps(root, replacing_folder)
    path = folder
    try:
        while True:
            member = archive.next()
            if member is None:
                break
            path = os.path.join(folder, member.name)
            parts = parts_of(member.name)
            parent = steps.go(parts[:-1])
            if member.kind == FOLDER:
                os.fchmod(steps.go(parts), member.mode | 0o700)
                if member.mode & 0o700 != 0o700:
                    modes.append((parts, member.mode))
            elif member.kind == LINK:
                make_link(member.target, parts[-1], parent)
            elif member.kind == FILE:
                write_file(archive, member, parts[-1], parent, member.mode)
        for parts, mode in reversed(modes):  # at the end: a folder may be read-only
            os.fchmod(steps.go(parts), mode)
    except OSError as error:
        raise OSError(error.errno, error.strerror, path) from None
    finally:
        steps.leave(0)
        os.close(root)


def replacing_folder(name: str, parent: int) -> int:
    """Open a folder, made in the place of a link or of nothing."""
    try:
        os.mkdir(name, dir_fd=parent)
    except FileExistsError:
        if stat.S_ISLNK(os.stat(name, dir_fd=parent, follow_symlinks=False).st_mode):
            os.unlink(name, dir_fd=parent)
            os.mkdir(name, dir_fd=parent)
    return open_folder(name, parent)


def make_link(target: str, name: str, parent: int) -> None:
    try:
        os.symlink(target, name, dir_fd=parent)
    except FileExistsError:
        os.unlink(name, dir_fd=parent)
        os.symlink(target, name, dir_fd=parent)


def write_file(archive: Reader, member: Member, name: str, parent: int, mode: int) -> None:
    """Write a member's contents to a new file, in the place of another one."""
    flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC
    try:
        fd = os.open(name, flags, 0o600, dir_fd=parent)
    except FileExistsError:
        os.unlink(name, dir_fd=parent)
        fd = os.open(name, flags, 0o600, dir_fd=parent)
    try:
        while True:
            view = memoryview(archive.read())
            if not view:
                break
            while view:
                view = view[os.write(fd, view) :]
        os.fchmod(fd, mode)
        with contextlib.suppress(OSError, OverflowError):  # out of range for this machine
            os.utime(fd, (member.mtime, member.mtime))
    finally:
        os.close(fd)
