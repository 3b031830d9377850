"""Single files: read in chunks, written to a temporary file that then replaces the target."""

from __future__ import annotations

import contextlib
import errno
import os
import stat
from typing import TYPE_CHECKING

from .framing import CHUNK, WHOLE
from .trees import make_folders

if TYPE_CHECKING:
    from collections.abc import Iterator

OWN_FILES = ("auxv", "environ", "maps", "mem", "numa_maps", "pagemap", "smaps", "smaps_rollup", "stack", "syscall")


def is_private(fd: int) -> bool:
    """Whether a file of /proc exposes this process, by whatever path or mount it was opened."""
    status = os.fstat(fd)
    for name in OWN_FILES if status.st_size == 0 else ():
        for folder in ("/proc/self/", "/proc/thread-self/"):
            with contextlib.suppress(OSError):
                if os.path.samestat(status, os.stat(folder + name)):
                    return True
    return False


def open_regular(path: str) -> int:
    # O_NONBLOCK: opening a FIFO would wait for a writer
    fd = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
    mode = os.fstat(fd).st_mode
    private = is_private(fd)
    if stat.S_ISREG(mode) and not private:
        return fd
    os.close(fd)
    if private:
        raise PermissionError(errno.EACCES, os.strerror(errno.EACCES), path)
    if stat.S_ISDIR(mode):
        raise IsADirectoryError(errno.EISDIR, os.strerror(errno.EISDIR), path)
    raise OSError(errno.EINVAL, "not a regular file", path)


def read_file(path: str, offset: int, limit: int | None) -> Iterator[bytes]:
    """The bytes of the file in chunks. Errors are raised with the first."""
    fd = open_regular(path)
    try:
        status = os.fstat(fd)
        end = offset + WHOLE
        while limit is None or limit > 0:
            if limit is None and max(status.st_size, offset) > end:
                raise OSError(errno.EFBIG, "larger than %d bytes, read it in parts" % WHOLE, path)
            data = os.pread(fd, CHUNK if limit is None else min(CHUNK, limit), offset)
            if not data:
                return
            yield data
            offset += len(data)
            limit = None if limit is None else limit - len(data)
    finally:
        os.close(fd)


class Upload:
    """A file that is being written next to its target."""

    def __init__(self, path: str, mode: int | None = None) -> None:
        """`mode` sets the file's mode; None keeps the target's."""
        try:
            self.path = os.path.realpath(path)
        except RecursionError:  # it follows more links than the kernel
            raise OSError(errno.ELOOP, os.strerror(errno.ELOOP), path) from None
        if os.path.isdir(self.path):
            raise IsADirectoryError(errno.EISDIR, os.strerror(errno.EISDIR), path)
        try:
            make_folders(os.path.dirname(self.path))
        except FileExistsError:  # a file is where a folder must be
            raise NotADirectoryError(errno.ENOTDIR, os.strerror(errno.ENOTDIR), path) from None
        self.temporary = os.path.join(os.path.dirname(self.path), ".upload-%s" % os.urandom(8).hex())
        self.fd = os.open(self.temporary, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o666)
        with contextlib.suppress(OSError):
            os.fchmod(self.fd, stat.S_IMODE(os.stat(self.path).st_mode) if mode is None else mode)

    def feed(self, data: bytes) -> None:
        view = memoryview(data)
        while view:
            view = view[os.write(self.fd, view) :]

    def close(self, keep: bool) -> None:
        """Move the file over its target, or remove it, which also works after the former has failed."""
        if self.fd >= 0:
            os.close(self.fd)
            self.fd = -1
        if keep:
            os.replace(self.temporary, self.path)
        else:
            with contextlib.suppress(OSError):
                os.unlink(self.temporary)
