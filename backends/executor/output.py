"""How output is kept while it is read: its two ends and its size, its last bytes, or the whole in a file."""

from __future__ import annotations

import contextlib
import ctypes
import os
import struct
from typing import TYPE_CHECKING

from .framing import CHUNK
from .kernel import libc

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from typing import BinaryIO

RING = 1 << 20
"""Bytes of output kept of a background process."""
SPILL = 1 << 28
"""Bytes kept of each stream of a truncated result."""
TMPFS_MAGIC = 0x01021994


class Spill:
    """The whole of a truncated stream in a nameless file, as far as there is room."""

    def __init__(self, folders: list[str], memory: int | None) -> None:
        self.file, scarce = nameless(folders)
        status = os.fstatvfs(self.file.fileno())
        self.room = min(SPILL, status.f_bavail * status.f_frsize // 4 if status.f_blocks else SPILL // 4)
        if scarce and memory is not None:
            self.room = min(self.room, memory // 8)
        self.size = 0
        self.full = False

    def feed(self, data: bytes | bytearray) -> None:
        if self.full:
            return
        view = memoryview(data)[: self.room - self.size]
        self.full = len(view) < len(data)
        try:
            while view:
                written = os.write(self.file.fileno(), view)
                self.size += written
                view = view[written:]
        except OSError:  # the disk is full: leave the room to commands
            self.full, self.size = True, 0
            os.ftruncate(self.file.fileno(), 0)

    def read(self, offset: int, limit: int) -> Iterator[bytes]:
        while limit > 0:
            data = os.pread(self.file.fileno(), min(CHUNK, limit, max(0, self.size - offset)), offset)
            if not data:
                return
            yield data
            offset += len(data)
            limit -= len(data)


def nameless(folders: list[str]) -> tuple[BinaryIO, bool]:
    """A file without a name, on a disk if possible, and whether it is in memory instead."""
    fallback = None
    for number, folder in enumerate(folders):
        with contextlib.suppress(OSError):
            try:
                fd = os.open(folder, os.O_TMPFILE | os.O_RDWR | os.O_CLOEXEC, 0o600)
            except OSError:  # not every file system can do that
                path = os.path.join(folder, ".output-%d-%d" % (os.getpid(), number))
                fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
                os.unlink(path)
            file = open(fd, "r+b", buffering=0)
            statfs = ctypes.create_string_buffer(256)
            libc.fstatfs(fd, statfs)
            if struct.unpack_from("l", statfs)[0] != TMPFS_MAGIC:
                return file, False
            fallback = fallback or file
    return fallback or open(os.memfd_create("output"), "r+b", buffering=0), True


class Capped:
    """The first `limit // 2` bytes of a stream, its last ones up to `limit` together, and the count of all."""

    def __init__(self, limit: int, spilling: Callable[[], Spill | None]) -> None:
        self.limit = limit
        self.head_limit = limit // 2
        self.tail_limit = limit - self.head_limit
        self.head = bytearray()
        self.tail = bytearray()
        self.total = 0
        self.spilling = spilling
        self.spill: Spill | None = None

    def feed(self, data: bytes) -> None:
        if self.total <= self.limit < self.total + len(data):  # until here, nothing has been dropped
            self.spill = self.spilling()
            if self.spill is not None:
                self.spill.feed(self.head + self.tail)
        self.total += len(data)
        if self.spill is not None:
            self.spill.feed(data)
        room = self.head_limit - len(self.head)
        if room > 0:
            self.head += data[:room]
            data = data[room:]
        self.tail += data
        if len(self.tail) > 2 * self.tail_limit + CHUNK:
            del self.tail[: len(self.tail) - self.tail_limit]

    def result(self) -> bytes:
        return bytes(self.head + self.tail[max(0, len(self.tail) - self.tail_limit) :])


class Ring:
    """The last `RING` bytes of a stream; offsets count from the stream's beginning."""

    def __init__(self) -> None:
        self.data = bytearray()
        self.total = 0

    def feed(self, data: bytes) -> None:
        self.total += len(data)
        self.data += data
        if len(self.data) > 2 * RING:
            del self.data[: len(self.data) - RING]

    def drop(self) -> None:
        self.data = bytearray()

    def read(self, offset: int, limit: int) -> tuple[int, bytes]:
        kept = min(len(self.data), RING)
        offset = min(max(offset, self.total - kept), self.total)
        begin = len(self.data) - (self.total - offset)
        return offset, bytes(self.data[begin : begin + limit])
