"""Copies of programs and libraries that find each other in one folder, in any root file system.

The copy of a 64-bit little-endian ELF file has its loaded segments, but neither symbols nor search paths.
The copy of a program also names the dynamic loader and the folder of its libraries. Their text is in an additional
segment, whose entry in the table replaces that of a note.
"""

from __future__ import annotations

import os
import struct
from typing import NamedTuple

_HEADER = struct.Struct("<16sHHIQQQIHHHHHH")
_SEGMENT = struct.Struct("<IIQQQQQQ")
_DYNAMIC = struct.Struct("<qQ")
_PT_LOAD, _PT_DYNAMIC, _PT_INTERP, _PT_NOTE, _PT_PROPERTY = 1, 2, 3, 4, 0x6474E553
_DT_NULL, _DT_STRTAB, _DT_STRSZ, _DT_SONAME, _DT_RPATH, _DT_RUNPATH = 0, 5, 10, 14, 15, 29
_READ_WRITE = 6
_PAGE = 1 << 16
"""The largest page size in use: segments that are aligned to it can be mapped everywhere."""
_HIGHEST = 1 << 62


class NotPortable(Exception):
    """The file cannot be copied; the message says why."""


class _Segment(NamedTuple):
    kind: int
    flags: int
    offset: int
    address: int
    physical: int
    file_size: int
    memory_size: int
    alignment: int


class Elf:
    """The parts of a file that the dynamic loader reads."""

    def __init__(self, data: bytes) -> None:
        """Raises `NotPortable` when `data` is not a dynamically linked 64-bit little-endian ELF file."""
        self.data = data
        try:
            self._parse(data)
        except (struct.error, KeyError, ValueError, OverflowError) as error:
            raise NotPortable("it is damaged") from error

    def _parse(self, data: bytes) -> None:
        if data[:6] != b"\x7fELF\x02\x01" or len(data) < _HEADER.size:
            raise NotPortable("it is not a 64-bit little-endian ELF file")
        header = _HEADER.unpack_from(data)
        self._table, entry_size, count = header[5], header[9], header[10]
        if entry_size != _SEGMENT.size:
            raise NotPortable("its table of segments has an unknown format")
        places = range(self._table, self._table + count * entry_size, entry_size)
        self.segments = [_Segment(*_SEGMENT.unpack_from(data, place)) for place in places]
        for segment in self.segments:
            if segment.offset + segment.file_size > len(data) or segment.address + segment.memory_size > _HIGHEST:
                raise NotPortable("it is damaged: a segment is outside the file")
        dynamic = next((segment for segment in self.segments if segment.kind == _PT_DYNAMIC), None)
        if dynamic is None:
            raise NotPortable("it is statically linked")
        self._dynamic = dynamic
        entries = _DYNAMIC.iter_unpack(data[dynamic.offset : dynamic.offset + dynamic.file_size // 16 * 16])
        self.dynamic: list[tuple[int, int]] = []
        for tag, value in entries:
            if tag == _DT_NULL:
                break
            self.dynamic.append((tag, value))
        values = dict(self.dynamic)
        start = self._file_offset(values[_DT_STRTAB])
        self._strings = data[start : start + values[_DT_STRSZ]]
        name = values.get(_DT_SONAME)
        self.soname = None if name is None else os.fsdecode(self._strings[name : self._strings.index(b"\0", name)])
        """The name by which other files ask for a library."""

    def _file_offset(self, address: int) -> int:
        for segment in self.segments:
            if segment.kind == _PT_LOAD and segment.address <= address < segment.address + segment.file_size:
                return address - segment.address + segment.offset
        raise NotPortable("its dynamic section points outside the file")

    @property
    def interpreter(self) -> str | None:
        """The dynamic loader that a program asks for, None in a library."""
        for segment in self.segments:
            if segment.kind == _PT_INTERP:
                return os.fsdecode(self.data[segment.offset : segment.offset + segment.file_size].rstrip(b"\0"))
        return None

    def library(self) -> bytes:
        """A copy without search paths: its libraries are found where the program says."""
        kept = [(tag, value) for tag, value in self.dynamic if tag not in (_DT_RPATH, _DT_RUNPATH)]
        removed = len(self.dynamic) - len(kept)
        data = bytearray(self._loaded())
        packed = b"".join(_DYNAMIC.pack(*entry) for entry in kept) + bytes(_DYNAMIC.size * removed)
        data[self._dynamic.offset : self._dynamic.offset + len(packed)] = packed
        return bytes(data)

    def program(self, *, interpreter: str, library_path: str) -> bytes:
        """A copy that the loader `interpreter` starts, and that looks for libraries in `library_path` first.

        Raises:
            NotPortable: it asks for no loader, or its table of segments has no entry to spare.
        """
        if self.interpreter is None:
            raise NotPortable("it is a library, not a program")
        properties = {segment.offset for segment in self.segments if segment.kind == _PT_PROPERTY}
        notes = [segment for segment in self.segments if segment.kind == _PT_NOTE and segment.offset not in properties]
        if not notes:
            raise NotPortable("its table of segments has no note that could be left out")
        data = bytearray(self._loaded())
        data += bytes(-len(data) % _PAGE)
        offset = len(data)
        loads = [segment for segment in self.segments if segment.kind == _PT_LOAD]
        address = -(-max(segment.address + segment.memory_size for segment in loads) // _PAGE) * _PAGE

        strings = self._strings + library_path.encode() + b"\0"
        # Unlike DT_RUNPATH, DT_RPATH precedes LD_LIBRARY_PATH and holds for the libraries of libraries.
        entries = [(_DT_RPATH, len(self._strings))]
        for tag, value in self.dynamic:
            if tag == _DT_STRTAB:
                entries.append((tag, address))
            elif tag == _DT_STRSZ:
                entries.append((tag, len(strings)))
            elif tag not in (_DT_RPATH, _DT_RUNPATH):
                entries.append((tag, value))
        dynamic = b"".join(_DYNAMIC.pack(*entry) for entry in [*entries, (_DT_NULL, 0)])
        dynamic_at = -(-len(strings) // 16) * 16
        name_at = dynamic_at + len(dynamic)
        name = interpreter.encode() + b"\0"
        added = strings.ljust(dynamic_at, b"\0") + dynamic + name
        data += added

        def part(kind: int, at: int, size: int, alignment: int) -> _Segment:
            return _Segment(kind, _READ_WRITE, offset + at, address + at, address + at, size, size, alignment)

        table = []
        for segment in self.segments:
            if segment is notes[-1]:
                continue
            if segment.kind == _PT_DYNAMIC:
                segment = part(_PT_DYNAMIC, dynamic_at, len(dynamic), 8)
            elif segment.kind == _PT_INTERP:
                segment = part(_PT_INTERP, name_at, len(name), 1)
            table.append(segment)
        # Loaded segments have to be in the order of their addresses.
        last = max(i for i, segment in enumerate(table) if segment.kind == _PT_LOAD)
        table.insert(last + 1, part(_PT_LOAD, 0, len(added), _PAGE))
        for i, segment in enumerate(table):
            _SEGMENT.pack_into(data, self._table + i * _SEGMENT.size, *segment)
        return bytes(data)

    def _loaded(self) -> bytes:
        """The file up to the end of its segments, without the table of sections, which is not needed to run it."""
        end = max(segment.offset + segment.file_size for segment in self.segments)
        end = max(end, self._table + len(self.segments) * _SEGMENT.size)
        fields = list(_HEADER.unpack_from(self.data))
        fields[6] = fields[12] = fields[13] = 0  # e_shoff, e_shnum, e_shstrndx
        return _HEADER.pack(*fields) + self.data[_HEADER.size : end]
