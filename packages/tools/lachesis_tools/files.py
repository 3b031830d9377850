"""The tools `read_file` and `write_file`, and the error of every tool for an unusable file."""

from __future__ import annotations

import posixpath
import shlex
from typing import Annotated

from pydantic import Field

from backends.base import Sandbox
from lachesis_tools.text import did_you_mean
from lachesis_tools.tool_registry import ToolFailure, tool
from lachesis_tools.tool_session import ToolSession

MAX_LINE_CHARS = 2000
"""The most characters of one line that `read_file` shows."""

PAGE_CHARS = 48_000
"""The most characters of one page. Less than the tool's limit: a page ends at a line and names the next one."""

MAX_SCAN = 1 << 28
"""The most bytes that `read_file` reads to find its lines."""

_CHUNK = 1 << 20
_SNIFF = 8192


async def file_error(sandbox: Sandbox, path: str, error: OSError) -> ToolFailure:
    """The error about `path` for the model, with similar names where it does not exist."""
    if isinstance(error, FileNotFoundError):
        folder, name = posixpath.split(path)
        names = await list_folder(sandbox, folder)
        if names is None:
            return ToolFailure(f"no such file: {path} (the folder {folder} does not exist either)")
        return ToolFailure(f"no such file: {path}{did_you_mean(name, names)}")
    if isinstance(error, IsADirectoryError):
        entries = sorted(await list_folder(sandbox, path) or [])
        shown = ", ".join(entries[:50]) + (f" and {len(entries) - 50} more" if len(entries) > 50 else "")
        return ToolFailure(f"{path} is a directory; it contains: {shown or 'nothing'}")
    if isinstance(error, PermissionError):
        return ToolFailure(f"permission denied: {path}")
    return ToolFailure(f"{path}: {error.strerror or error}")


async def list_folder(sandbox: Sandbox, folder: str) -> list[str] | None:
    """Names in a folder, folders with a slash at the end; None where it is not a folder. Bounded to some thousands."""
    command = f"cd -- {shlex.quote(folder)} && find . -mindepth 1 -maxdepth 1"
    command += r" \( -type d -exec printf '%s/\0' {} \; -o -print0 \)"
    listed = await sandbox.exec(f"( {command} ) 2>/dev/null | head -c 200000", timeout=20, cwd="/", fresh=True)
    if not listed.stdout:
        exists = await sandbox.exec(f"[ -d {shlex.quote(folder)} ]", timeout=20, cwd="/", fresh=True)
        return [] if exists.exit_code == 0 else None
    names = listed.stdout.decode("utf-8", errors="replace").split("\0")[:-1]
    return [name.removeprefix("./") for name in names]


@tool(toolset="file", concurrency_safe=True)
async def read_file(
    session: ToolSession,
    path: str,
    offset: Annotated[int, Field(ge=1)] = 1,
    limit: Annotated[int, Field(ge=1, le=2000)] = 500,
) -> str:
    """Read a text file. Every line is preceded by its number and a tab, which are not part of the file. A note in
    brackets after the last line says what is left to read.

    Args:
        path: The file. A relative path starts at the initial working directory, wherever the terminal has moved to.
        offset: Number of the first line to read.
        limit: How many lines to read.
    """
    sandbox = await session.sandbox()
    absolute = await session.path(path)
    page = _Page(offset, limit)
    position = 0
    try:
        while not page.full:
            data = await sandbox.read_bytes(absolute, offset=position, limit=_CHUNK)
            if position == 0 and b"\0" in data[:_SNIFF]:
                raise ToolFailure(f"{absolute} is a binary file; look at it with the terminal, for example with xxd")
            position += len(data)
            if position > MAX_SCAN:
                raise ToolFailure(
                    f"these lines are beyond the first {MAX_SCAN} bytes of {absolute}; look at it with the terminal, "
                    f"for example with tail or with head -c"
                )
            page.add(data)
            if len(data) < _CHUNK:
                page.end()
                break
    except OSError as error:
        raise await file_error(sandbox, absolute, error) from None
    return page.text(absolute)


class _Page:
    """Collects lines `first` to `first + count - 1` of a stream, without keeping the others."""

    def __init__(self, first: int, count: int) -> None:
        self.first = first
        self.last = first + count - 1
        self.full = False
        self.ended = False
        self._shown: list[str] = []
        self._chars = 0
        self._number = 1
        self._start = b""
        self._length = 0

    def add(self, data: bytes) -> None:
        *whole, rest = data.split(b"\n")
        for piece in whole:
            self._piece(piece)
            self._line()
            if self.full:
                return
        self._piece(rest)

    def end(self) -> None:
        """The end of the stream: text after the last newline is a line."""
        if not self.full and self._length:
            self._line()
        self.ended = not self.full

    def _piece(self, piece: bytes) -> None:
        # A character has at most four bytes: no line needs more than this.
        self._start += piece[: max(0, 4 * MAX_LINE_CHARS + 4 - len(self._start))]
        self._length += len(piece)

    def _line(self) -> None:
        if self._number > self.last or self._chars > PAGE_CHARS:
            self.full = True  # a line follows the page, which its note mentions
            return
        if self._number >= self.first:
            # Until they are counted, bytes that are not UTF-8 are one character each.
            text = self._start.removesuffix(b"\r").decode("utf-8", errors="surrogateescape")
            shown = text[:MAX_LINE_CHARS].encode("utf-8", errors="surrogateescape")
            more = len(text) > MAX_LINE_CHARS
            text = shown.decode("utf-8", errors="replace")
            if more:
                text += f" [... {self._length - len(shown)} bytes of this line not shown ...]"
            self._shown.append(f"{self._number:>6}\t{text}")
            self._chars += len(self._shown[-1]) + 1
        self._number += 1
        self._start, self._length = b"", 0

    def text(self, path: str) -> str:
        total = self._number - 1
        if self.ended and total == 0:
            return f"[{path} is empty]"
        if not self._shown:
            raise ToolFailure(f"{path} has {total} lines; there is no line {self.first}")
        last = self.first + len(self._shown) - 1
        if not self.ended:
            note = f"[lines {self.first}-{last}; more follow, continue with offset={last + 1}]"
        elif self.first > 1:
            note = f"[lines {self.first}-{last}; end of file]"
        else:
            note = f"[end of file, {total} lines]"
        return "\n".join([*self._shown, note])


@tool(toolset="file")
async def write_file(session: ToolSession, path: str, content: str) -> str:
    """Write a text file, replacing it if it exists. Missing folders are made. To change a part of a file use `patch`.

    Args:
        path: The file. A relative path starts at the initial working directory, wherever the terminal has moved to.
        content: The whole new content.
    """
    sandbox = await session.sandbox()
    absolute = await session.path(path)
    data = content.encode()
    try:
        await sandbox.write_bytes(absolute, data)
    except OSError as error:
        raise await file_error(sandbox, absolute, error) from None
    return f"wrote {len(data)} bytes to {absolute}"
