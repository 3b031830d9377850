"""How output is kept while it is read: its two ends and its size, its last bytes, or the whole in a file in memory."""

from __future__ import annotations

import errno
import os
from typing import TYPE_CHECKING

from .framing import CHUNK

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator
    from typing import BinaryIO

RING = 1 << 20
"""Bytes of output kept of a background process."""
SPILL = 1 << 28
"""Bytes that are kept of all truncated results together."""
SPILLS = 4
"""How many truncated results keep their whole output."""


class Spill:
    """The whole of a truncated stream in memory of this process, as far as there is room: the agent's disk is its own,
    and this works when it is full."""

    def __init__(self, room: Callable[[int], int]) -> None:
        """`room` says how much of a number of bytes can be kept."""
        self.file: BinaryIO | None = open(os.memfd_create("output"), "r+b", buffering=0)
        self.room = room
        self.size = 0
        self.full = False

    def feed(self, data: bytes | bytearray) -> None:
        if self.full or self.file is None:
            return
        view = memoryview(data)[: self.room(len(data))]
        self.full = len(view) < len(data)
        try:
            while view:
                written = os.write(self.file.fileno(), view)
                self.size += written
                view = view[written:]
        except OSError:  # there is no memory: leave it to commands
            self.full, self.size = True, 0
            os.ftruncate(self.file.fileno(), 0)

    def drop(self) -> None:
        """Make room, so that its readers go on."""
        self.file, self.size = None, 0

    def read(self, offset: int, limit: int) -> Iterator[bytes]:
        file, end = self.file, min(self.size, offset + limit)
        while file is not None and offset < end:
            data = os.pread(file.fileno(), min(CHUNK, end - offset), offset)
            if not data:
                return
            yield data
            offset += len(data)


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


class Spills:
    """The whole outputs of the last truncated results, and of commands that run."""

    def __init__(self, running: Callable[[], Iterable[Capped]]) -> None:
        """`running` gives the outputs of the commands that run now."""
        self.running = running
        self.limit = SPILL
        self.kept: dict[str, dict[str, Capped]] = {}

    def new(self) -> Spill | None:
        try:
            return Spill(self.room)
        except OSError:
            return None

    def room(self, size: int) -> int:
        """How much of `size` more bytes of truncated results can be kept. The oldest results make room."""
        kept = [output.spill for outputs in self.kept.values() for output in outputs.values()]
        running = [output.spill for output in self.running()]
        free = self.limit - sum(spill.size for spill in [*kept, *running] if spill is not None)
        for spill in kept:
            if spill is not None and free < size:
                free += spill.size
                spill.drop()
        return max(0, min(free, size))

    def keep(self, execution: str, outputs: dict[str, Capped]) -> None:
        for output in outputs.values():
            output.head, output.tail = bytearray(), bytearray()
        self.kept[execution] = outputs
        while len(self.kept) > SPILLS:
            del self.kept[next(iter(self.kept))]

    def read(self, execution: str, stream: str, offset: int, limit: int) -> Iterator[bytes]:
        """A part of an output. Raises OSError where it is not kept."""
        try:
            output = self.kept[execution][stream]
        except KeyError:
            message = "the whole of this output is no longer kept"
            raise FileNotFoundError(errno.ENOENT, message, execution) from None
        if output.spill is not None and output.spill.file is None:
            raise FileNotFoundError(errno.ENOENT, "newer outputs took the room of this one", execution)
        kept = output.spill.size if output.spill is not None else 0
        if output.spill is None or offset >= kept < output.total:
            message = "only the first %d bytes of this output of %d bytes could be kept" % (kept, output.total)
            raise OSError(errno.ENOSPC, message, execution)
        return output.spill.read(offset, limit)


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
