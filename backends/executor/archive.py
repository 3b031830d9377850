"""Tar archives of files, folders and symbolic links, in GNU format.

The standard library's reader holds headers of any size in memory and recurses from one to the next. The archives that
are read here may come from an attacker, so this one knows what `header` makes and refuses everything else.
"""

from __future__ import annotations

import errno
import os
import struct
from typing import TYPE_CHECKING

from .framing import CHUNK, LONGEST_PATH

if TYPE_CHECKING:
    from typing import IO

FILE, LINK, FOLDER = b"0", b"2", b"5"
BLOCK = 512
FIELDS = struct.Struct("100s8s8s8s12s12s8s1s100s8s247x")  # name mode uid gid size mtime checksum kind target magic
END = bytes(2 * BLOCK)


class Member:
    """A file, folder or link of an archive."""

    __slots__ = ("kind", "mode", "mtime", "name", "size", "target")

    def __init__(self, kind: bytes, name: str, size: int, mode: int, mtime: int, target: str = "") -> None:
        """`kind` is FILE, LINK, FOLDER, or the mark of something else; `mtime` is in seconds, `target` a link's."""
        self.kind, self.name, self.size = kind, name, size
        self.mode, self.mtime, self.target = mode, mtime, target


def header(member: Member) -> bytes:
    """The header before its contents, which are padded to a multiple of `BLOCK`."""
    name, target = os.fsencode(member.name), os.fsencode(member.target)
    long = b""
    for mark, text in ((b"K", target), (b"L", name)):
        if len(text) > 100:
            long += block(b"././@LongLink", mark, len(text) + 1, 0, 0, b"")
            long += text + bytes(1 + -(len(text) + 1) % BLOCK)
    return long + block(name[:100], member.kind, member.size, member.mode, member.mtime, target[:100])


def block(name: bytes, kind: bytes, size: int, mode: int, mtime: int, target: bytes) -> bytes:
    fields = [b"%07o\0" % (mode & 0o7777), b"%07o\0" % 0, b"%07o\0" % 0, number_field(size), number_field(mtime)]
    unsigned = FIELDS.pack(name, *fields, b" " * 8, kind, target, b"ustar  \0")
    return unsigned[:148] + b"%06o\0 " % sum(unsigned) + unsigned[156:]


def number_field(value: int) -> bytes:
    if 0 <= value < 8**11:
        return b"%011o\0" % value
    return b"\x80" + value.to_bytes(11, "big") if value > 0 else value.to_bytes(12, "big", signed=True)


def number_of(field: bytes) -> int:
    if field[0] in (0x80, 0xFF):
        return int.from_bytes(field[1:] if field[0] == 0x80 else field, "big", signed=field[0] == 0xFF)
    return int(field.strip(b" \0") or b"0", 8)


class Reader:
    """The members of an archive, one after the other. What is wrong with it is an `OSError`."""

    def __init__(self, file: IO[bytes]) -> None:
        self.file = file
        self.left = self.padding = 0
        """Bytes of the member's contents, and of what follows them, that have not been read."""

    def exactly(self, size: int) -> bytes:
        data = self.file.read(size)
        if len(data) < size:
            raise damaged("it ends too early")
        return data

    def next(self) -> Member | None:
        """The next member, None at the end."""
        while self.read():
            pass
        long: dict[bytes, bytes] = {}
        while True:
            data = self.exactly(BLOCK)
            if data == bytes(BLOCK):
                return None
            name, mode, _, _, size_field, mtime, checksum, kind, target, magic = FIELDS.unpack(data)
            try:
                size, right = number_of(size_field), number_of(checksum)
                facts = number_of(mode), number_of(mtime)
            except ValueError:
                raise damaged("a header has an invalid number") from None
            if right != sum(data) - sum(checksum) + 8 * 32 or magic != b"ustar  \0":
                raise damaged("a header is wrong")
            if kind not in (b"L", b"K"):
                break
            if kind in long or not 0 < size <= LONGEST_PATH + 1:
                raise damaged("a name has %d bytes" % size)
            long[kind] = self.exactly(size + -size % BLOCK)[:size]
        if size < 0 or (size and kind != FILE):
            raise damaged("a member has a size of %d bytes" % size)
        self.left, self.padding = size, -size % BLOCK
        path, link = (long.get(mark, short).partition(b"\0")[0] for mark, short in ((b"L", name), (b"K", target)))
        return Member(kind, os.fsdecode(path), size, facts[0], facts[1], os.fsdecode(link))

    def read(self, limit: int = CHUNK) -> bytes:
        """Contents of the last member, empty at their end."""
        data = self.exactly(min(limit, self.left))
        self.left -= len(data)
        if not self.left:
            self.exactly(self.padding)
            self.padding = 0
        return data


def damaged(reason: str) -> OSError:
    return OSError(errno.EIO, "the archive is damaged: %s" % reason)


def parts_of(name: str) -> list[str]:
    """The names of a path of an archive. Raises `ValueError` when it leads out of its folder."""
    parts = [part for part in name.split("/") if part not in ("", ".")]
    if name.startswith("/") or ".." in parts:
        raise ValueError("it would be written outside")
    return parts
