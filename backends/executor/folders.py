"""A folder as a tar stream. The owner packs with the same code."""

from __future__ import annotations

import errno
import os
import stat
from typing import TYPE_CHECKING

from .framing import CHUNK

if TYPE_CHECKING:
    from typing import IO


class Exactly:
    """A file of fixed size: padded with zeros if it shrinks, cut off if it grows."""

    def __init__(self, fd: int) -> None:
        self.fd = fd

    def read(self, size: int = CHUNK) -> bytes:
        data = b""
        while len(data) < size:
            part = os.read(self.fd, size - len(data))
            if not part:
                return data.ljust(size, b"\0")
            data += part
        return data


def pack(folder: str, file: IO[bytes]) -> None:
    """Write the files, folders and symbolic links below `folder`. Members that vanish meanwhile are left out.

    Raises `OSError` for what cannot be read.
    """
    import tarfile

    with tarfile.open(
        fileobj=file,
        mode="w|",
        bufsize=CHUNK,
        format=tarfile.GNU_FORMAT,
        encoding="utf-8",
        errors="surrogateescape",
    ) as archive:
        archive.copybufsize = CHUNK  # type: ignore[attr-defined]
        left = [("", sorted(os.listdir(folder), reverse=True))]
        while left:
            parent, names = left[-1]
            if not names:
                left.pop()
                continue
            name = parent + names.pop()
            path = os.path.join(folder, name)
            fd = -1
            try:
                status = os.lstat(path)
                member = tarfile.TarInfo(name)
                if stat.S_ISLNK(status.st_mode):
                    member.type, member.linkname = tarfile.SYMTYPE, os.readlink(path)
                elif stat.S_ISDIR(status.st_mode):
                    member.type = tarfile.DIRTYPE
                    left.append((name + "/", sorted(os.listdir(path), reverse=True)))
                elif stat.S_ISREG(status.st_mode):
                    fd = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
                    status = os.fstat(fd)
                    member.size = status.st_size if stat.S_ISREG(status.st_mode) else 0
                else:
                    continue
                member.mode, member.mtime = stat.S_IMODE(status.st_mode), int(status.st_mtime)
                archive.addfile(member, Exactly(fd) if member.size else None)
                archive.members = []  # type: ignore[attr-defined]  # keep no list of all members
            except OSError as error:
                if error.errno not in (errno.ENOENT, errno.ELOOP, errno.ENXIO):  # it was replaced
                    raise
            finally:
                if fd >= 0:
                    os.close(fd)


def unpack(file: IO[bytes], folder: str) -> None:
    """Extract the files, folders and symbolic links of a tar stream below `folder`, replacing existing files.

    Raises `OSError`.
    """
    import tarfile

    os.makedirs(folder, exist_ok=True)
    modes = []
    with tarfile.open(fileobj=file, mode="r|", bufsize=CHUNK, encoding="utf-8", errors="surrogateescape") as archive:
        while True:
            member = archive.next()
            archive.members = []  # type: ignore[attr-defined]
            if member is None:
                break
            path = os.path.join(folder, member.name)
            if member.isdir():
                os.makedirs(path, exist_ok=True)
                os.chmod(path, member.mode | 0o700)
                modes.append((path, member.mode))
                continue
            if os.path.islink(path) or (os.path.exists(path) and not os.path.isdir(path)):
                os.unlink(path)
            if member.issym():
                os.symlink(member.linkname, path)
            elif member.isreg():
                source = archive.extractfile(member)
                with open(path, "wb") as target:
                    while True:
                        data = source.read(CHUNK) if source is not None else b""
                        if not data:
                            break
                        target.write(data)
                    target.flush()
                    os.fchmod(target.fileno(), member.mode)
                    os.utime(target.fileno(), (member.mtime, member.mtime))
        for path, mode in reversed(modes):  # at the end: a folder may be read-only
            os.chmod(path, mode)
