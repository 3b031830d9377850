"""Copies out of sandboxes onto this machine: size limits, and folders with untrusted members."""

from __future__ import annotations

import contextlib
import errno
import math
import os
import secrets
from typing import BinaryIO

from .base import MAX_DOWNLOAD, MAX_MEMBERS
from .executor.archive import FILE, FOLDER, LINK, Member, Reader, parts_of
from .executor.folders import make_link, write_file
from .executor.framing import LONGEST_PATH
from .executor.trees import DEEPEST, Steps, open_folder, remove_tree

_RESERVE, _RESERVED = 512 << 20, 0.05
"""Downloads leave that many bytes of a file system free, or that part of it if that is less; and that part of its
inodes."""
MODE = 0o1777
"""Bits of modes that may go on into another sandbox. A program with setuid would have rights of the owner of the copy
there, who may be root among other users: what one sandbox made must not have these in another."""
_NAMED = 5
"""Rejected members that are named."""
_REMOVAL = 60.0
"""Seconds for the removal of a failed download, whose size is bounded."""


class Room:
    """The amount that one download may still write on this machine."""

    def __init__(self, max_bytes: int | None = MAX_DOWNLOAD, max_members: int | None = MAX_MEMBERS) -> None:
        """None: only the free space of the disk is a limit."""
        self.max_bytes = math.inf if max_bytes is None else max_bytes
        self.max_members = math.inf if max_members is None else max_members
        self.size = self.members = 0

    def take(self, size: int, fd: int, name: str = "it") -> None:
        """Count `size` bytes that will be written to the file system of `fd`.

        Raises:
            OSError: EFBIG, they are too many; ENOSPC, this machine has not even room for `MAX_DOWNLOAD` bytes.
        """
        self.size += size
        if self.size > self.max_bytes:
            raise OSError(
                errno.EFBIG,
                f"it contains more than {self.max_bytes} bytes (max_bytes): {self.size} with {_shown(name)}",
            )
        facts = os.fstatvfs(fd)
        reserve = min(_RESERVE, int(facts.f_blocks * facts.f_frsize * _RESERVED))
        free = facts.f_bavail * facts.f_frsize
        if facts.f_blocks and size > free - reserve:
            owed = min(self.max_bytes, MAX_DOWNLOAD)  # a machine that has less is short of disk; else this is too large
            raise OSError(
                errno.ENOSPC if free - reserve + self.size - size < owed else errno.EFBIG,
                f"{_shown(name)} needs {size} bytes of this machine's disk, which has {free} left, "
                f"{reserve} of them in reserve",
            )
        if facts.f_files and facts.f_favail < facts.f_files * _RESERVED:
            raise OSError(errno.ENOSPC, f"this machine's disk has {facts.f_favail} of {facts.f_files} inodes left")

    def take_member(self, member: Member, fd: int) -> None:
        """Count a member of an archive. Raises as `take`."""
        self.members += 1
        if self.members > self.max_members:
            raise OSError(errno.EFBIG, f"it contains more than {self.max_members} files and folders (max_members)")
        self.take(member.size + len(member.target), fd, member.name)


def extract(file: BinaryIO, folder: str, room: Room, modes: dict[str, int] | None = None) -> None:
    """Extract an untrusted tar stream below `folder`, which is made if missing.

    Folders are opened without following links, so no member is written elsewhere. A symbolic link is created only if it
    stays below `folder`, through whichever other links it leads. Everything is moved there at the end; after an error
    nothing is left. The owner can read files and change folders; `modes` gets the modes in the archive, by path.

    Raises:
        OSError: as `Room.take`; with EPERM, members were rejected and all others are extracted.
    """
    made = not os.path.isdir(folder)  # noqa: PTH112
    os.makedirs(folder, exist_ok=True)  # noqa: PTH103
    name = f".lachesis-{secrets.token_hex(8)}"
    root = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    rejected = _Rejected()
    staged = -1
    try:
        os.mkdir(name, 0o700, dir_fd=root)
        staged = open_folder(name, root)
        _extract(Reader(file), staged, len(os.path.abspath(folder)), room, rejected, {} if modes is None else modes)  # noqa: PTH100
        _merge(staged, root, rejected)
    except BaseException as error:
        _remove(name, root, staged)
        if made:
            with contextlib.suppress(OSError):
                os.rmdir(folder)  # noqa: PTH106
        if isinstance(error, OSError) and error.filename is None:
            raise OSError(error.errno, error.strerror, folder) from None
        raise
    else:
        _remove(name, root, staged)
    finally:
        if staged >= 0:
            os.close(staged)
        os.close(root)
    if rejected.count:
        raise OSError(errno.EPERM, f"rejected {rejected}; everything else was copied", folder)


class _UnsafeMember(Exception):
    """A member is not extracted."""


class _Rejected:
    def __init__(self) -> None:
        self.count = 0
        self.first: list[str] = []

    def add(self, name: str, reason: object) -> None:
        self.count += 1
        if self.count <= _NAMED:
            self.first.append(f"{_shown(name)} ({reason})")

    def __str__(self) -> str:
        return ", ".join(self.first) + (f" and {self.count - _NAMED} more" if self.count > _NAMED else "")


def _extract(archive: Reader, root: int, prefix: int, room: Room, rejected: _Rejected, modes: dict[str, int]) -> None:
    steps = Steps(root, _enter)
    try:
        while (member := archive.next()) is not None:
            room.take_member(member, root)
            try:
                parts = _parts(member, prefix)
                parent = steps.go(parts[:-1])
                modes["/".join(parts)] = member.mode & MODE
                if member.kind == FOLDER:
                    if parts:
                        with contextlib.suppress(FileExistsError):
                            os.mkdir(parts[-1], 0o700, dir_fd=parent)
                    os.fchmod(steps.go(parts), member.mode & 0o777 | 0o700)
                elif member.kind == LINK:
                    make_link(member.target, parts[-1], parent)
                else:
                    write_file(archive, member, parts[-1], parent, member.mode & 0o777 | 0o400)
            except IsADirectoryError:
                rejected.add(member.name, "a folder has that name")
            except _UnsafeMember as error:
                rejected.add(member.name, error)
    finally:
        steps.leave(0)


def _parts(member: Member, prefix: int) -> list[str]:
    """The names of its path. Raises `_UnsafeMember`, and `OSError` (EFBIG) where it would lie too deep."""
    try:
        parts = parts_of(member.name)
    except ValueError as error:
        raise _UnsafeMember(error) from None
    if member.kind not in (FILE, FOLDER, LINK) or (member.kind != FOLDER and not parts):
        raise _UnsafeMember("it is not a file, folder or symbolic link")
    size = prefix + 1 + len(os.fsencode(member.name))
    if len(parts) > DEEPEST + 1 or size > LONGEST_PATH:
        raise OSError(
            errno.EFBIG,
            f"it has {len(parts)} nested folders and a path of {size} bytes here: at most {DEEPEST} folders "
            f"and {LONGEST_PATH} bytes are copied",
        )
    if member.kind == LINK:
        steps = member.target.split("/")
        ups = sum(step == ".." for step in steps)
        if steps[0] == "" or ups > len(parts) - 1 or ".." in steps[ups:]:
            raise _UnsafeMember(f"it links to {_shown(member.target)}")
    return parts


def _enter(name: str, parent: int) -> int:
    try:
        return open_folder(name, parent)
    except FileNotFoundError:  # made here, it would not be counted
        raise _UnsafeMember("one of its parents did not come before it") from None
    except OSError as error:
        if error.errno in (errno.ELOOP, errno.ENOTDIR):
            raise _UnsafeMember("one of its parents is not a folder") from None
        raise


def _merge(staged: int, root: int, rejected: _Rejected) -> None:
    """Move everything, and replace files."""
    source, target = Steps(staged), Steps(root, _enter)
    left: list[list[str]] = [[]]
    try:
        while left:
            names = left.pop()
            try:
                here, there = source.go(names), target.go(names)
            except _UnsafeMember as error:  # somebody changes the target meanwhile
                rejected.add("/".join(names), error)
                continue
            if names:
                os.fchmod(there, os.fstat(here).st_mode & 0o777)
            for name in os.listdir(here):  # noqa: PTH208
                try:
                    os.rename(name, name, src_dir_fd=here, dst_dir_fd=there)
                except OSError as error:
                    if error.errno in (errno.ENOTEMPTY, errno.EEXIST):
                        left.append([*names, name])
                    elif isinstance(error, NotADirectoryError | IsADirectoryError):
                        kind = "folder" if isinstance(error, IsADirectoryError) else "file or a link"
                        rejected.add("/".join([*names, name]), f"a {kind} has that name")
                    else:
                        raise
    finally:
        source.leave(0)
        target.leave(0)


def _remove(name: str, root: int, staged: int) -> None:
    """Remove what is staged: by its place at the descriptor, since the folder may have been moved."""
    with contextlib.suppress(OSError):
        if staged >= 0:
            os.fchmod(staged, 0o700)
        remove_tree(f"/proc/self/fd/{root}/{name}", _REMOVAL)


def _shown(name: str) -> str:
    """A name from a sandbox, in a message."""
    text = name if name.isprintable() else ascii(name)[1:-1]
    return text if len(text) <= 200 else f"{text[:200]}..."
