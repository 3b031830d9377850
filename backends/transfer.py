"""Moving files and folders of any size into a sandbox or out of it, in parts and in constant memory."""

from __future__ import annotations

import asyncio
import contextlib
import errno
import os
import socket
import stat
import tarfile
from collections import deque
from collections.abc import AsyncGenerator, Callable, Iterator
from types import TracebackType
from typing import Any, BinaryIO, cast

from lachesis.tasks import finish, in_own_thread

from .connection import Connection

PART = 1 << 18
"""Bytes of a part, the largest that the executor accepts and sends."""
DEPTH = 8
"""Parts in flight at once."""


class Transfer:
    """A file or a folder that the executor holds open. Entering opens it; leaving before `commit` discards it.

    `kind` is `read` or `write` (a file), `pack` or `unpack` (a folder, as a tar archive).
    """

    def __init__(self, connection: Connection, id: int, kind: str, path: str, mode: int | None = None) -> None:
        self._connection, self._id, self._kind, self._path = connection, id, kind, path
        self._mode: dict[str, Any] = {} if mode is None else {"mode": mode}
        self._moving: deque[asyncio.Task[tuple[dict[str, Any], bytes]]] = deque()

    async def __aenter__(self) -> Transfer:
        try:
            await self._connection.request("open", transfer=self._id, kind=self._kind, path=self._path, **self._mode)
        except BaseException:  # `LeaseOver` too
            self._connection.post("drop", transfer=self._id)
            raise
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        for task in self._moving:
            task.cancel()
        self._moving.clear()
        self._connection.post("drop", transfer=self._id)

    def _request(self, op: str, payload: bytes = b"") -> None:
        self._moving.append(asyncio.create_task(self._connection.request(op, payload, transfer=self._id)))

    async def parts(self) -> AsyncGenerator[bytes]:
        """Its bytes, from beginning to end. Raises `OSError`."""
        while True:
            while len(self._moving) < DEPTH:
                self._request("pull")
            header, data = await self._moving[0]
            self._moving.popleft()
            if data:
                yield data
            if header["end"]:
                return

    async def push(self, data: bytes) -> None:
        """Append to it; returns when there is room for more. Raises `OSError`, also for earlier parts."""
        for begin in range(0, len(data), PART):
            while len(self._moving) >= DEPTH:
                await self._moving[0]
                self._moving.popleft()
            self._request("push", bytes(data[begin : begin + PART]))
            await asyncio.sleep(0)  # keep the order of the parts

    async def commit(self) -> None:
        """Complete the transfer. Raises `OSError`."""
        while self._moving:
            await self._moving[0]
            self._moving.popleft()
        await self._connection.request("commit", transfer=self._id)


async def upload(transfer: Transfer, folder: str) -> None:
    """Pack `folder` into an open `unpack`."""
    from .executor.folders import pack  # both sides pack with the same code

    async with _threaded(lambda file: pack(folder, file)) as (packed, _):
        while data := await packed.read(PART):
            await transfer.push(data)
    await transfer.commit()


async def download(transfer: Transfer, folder: str, max_bytes: int | None) -> None:
    """Unpack an open `pack` into `folder`; see `ExecutorSandbox.download_dir`."""
    async with (
        _threaded(lambda file: extract(file, folder, max_bytes)) as (_, packed),
        contextlib.aclosing(transfer.parts()) as parts,
    ):
        async for part in parts:
            packed.write(part)
            try:
                await packed.drain()
            except ConnectionError:  # it has failed, or needs no more
                break


@contextlib.asynccontextmanager
async def _threaded(
    work: Callable[[BinaryIO], None],
) -> AsyncGenerator[tuple[asyncio.StreamReader, asyncio.StreamWriter]]:
    """The other end of the file on which `work` runs in a new thread, until that has ended.

    Leaving closes this end and raises what `work` raised, unless another exception came first.
    """
    ours, theirs = socket.socketpair()

    def run() -> None:
        with theirs:
            try:
                with theirs.makefile("rwb", PART) as file:
                    work(cast(BinaryIO, file))
            finally:  # a forked copy of this process may hold copies of the descriptors
                with contextlib.suppress(OSError):
                    theirs.shutdown(socket.SHUT_RDWR)

    reader, writer = await asyncio.open_unix_connection(sock=ours, limit=PART)
    running = in_own_thread(run)
    error: BaseException | None = None
    try:
        yield reader, writer
    except BaseException as caught:
        error = caught
    with contextlib.suppress(OSError):
        if error is None:
            writer.write_eof()
        else:
            writer.get_extra_info("socket").shutdown(socket.SHUT_RDWR)
    writer.close()
    try:
        await finish(running)
    except Exception:
        if error is None:
            raise
    if error is not None:
        raise error


# --- a tar archive onto this machine ---------------------------------------------------------------------------------


def extract(file: BinaryIO, folder: str, max_bytes: int | None) -> None:
    """Extract an untrusted tar stream below `folder`.

    Parent folders are opened without following links, so no member is written elsewhere. A symbolic link is created
    only if it stays below `folder`, through whichever other links it leads.

    Raises:
        OSError: the contents exceed `max_bytes`; with EPERM, members were rejected and all others are extracted.
    """
    rejected: list[str] = []
    modes: list[tuple[str, int]] = []
    size = 0
    os.makedirs(folder, exist_ok=True)  # noqa: PTH103
    root = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    try:
        with tarfile.open(fileobj=file, mode="r|", encoding="utf-8", errors="surrogateescape") as archive:
            for member in archive:
                archive.members = []  # type: ignore[attr-defined]  # keep no list of all members
                size += member.size if member.isreg() else 0
                if max_bytes is not None and size > max_bytes:
                    raise OSError(errno.EFBIG, f"it holds more than {max_bytes} bytes", folder)
                try:
                    _extract(archive, member, root)
                except _UnsafeMember as error:
                    rejected.append(f"{member.name} ({error})")
                if member.isdir():
                    modes.append((member.name, member.mode))
        for name, mode in reversed(modes):  # at the end: a folder may be read-only
            with contextlib.suppress(_UnsafeMember), _opened(root, _split(name)) as inner:
                os.fchmod(inner, mode & 0o777 | 0o700)
    except tarfile.TarError as error:
        raise OSError(errno.EIO, f"the archive is damaged: {error}", folder) from None
    finally:
        os.close(root)
    if rejected:
        named = ", ".join(rejected[:5]) + (f" and {len(rejected) - 5} more" if len(rejected) > 5 else "")
        raise OSError(errno.EPERM, f"rejected {named}; everything else was copied", folder)


class _UnsafeMember(Exception):
    """A member is not extracted."""


def _split(name: str) -> list[str]:
    parts = [part for part in name.split("/") if part not in ("", ".")]
    if name.startswith("/") or ".." in parts:
        raise _UnsafeMember("it would be written outside")
    return parts


@contextlib.contextmanager
def _opened(root: int, parts: list[str]) -> Iterator[int]:
    """A descriptor of the folder below `root`, created if missing."""
    fd = os.dup(root)
    try:
        for part in parts:
            with contextlib.suppress(FileExistsError):
                os.mkdir(part, dir_fd=fd)
            try:
                inner = os.open(part, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW, dir_fd=fd)
            except OSError as error:
                if error.errno in (errno.ELOOP, errno.ENOTDIR):
                    raise _UnsafeMember("one of its parents is not a folder") from None
                raise
            os.close(fd)
            fd = inner
        yield fd
    finally:
        os.close(fd)


def _extract(archive: tarfile.TarFile, member: tarfile.TarInfo, root: int) -> None:
    parts = _split(member.name)
    if member.isdir():
        with _opened(root, parts):
            return
    if not parts or not (member.isreg() or member.issym()):
        raise _UnsafeMember("it is no file, folder or symbolic link")
    if member.issym():
        steps = member.linkname.split("/")
        ups = sum(step == ".." for step in steps)
        if steps[0] == "" or ups > len(parts) - 1 or ".." in steps[ups:]:
            raise _UnsafeMember(f"it links to {member.linkname}")
    *folders, name = parts
    with _opened(root, folders) as parent:
        with contextlib.suppress(FileNotFoundError):
            if stat.S_ISDIR(os.lstat(name, dir_fd=parent).st_mode):
                raise _UnsafeMember("a folder has that name")
            os.unlink(name, dir_fd=parent)
        if member.issym():
            os.symlink(member.linkname, name, dir_fd=parent)
            return
        fd = os.open(name, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW, 0o600, dir_fd=parent)
        with os.fdopen(fd, "wb") as target:
            source = archive.extractfile(member)
            while source is not None and (data := source.read(PART)):
                target.write(data)
            target.flush()
            os.fchmod(fd, member.mode & 0o777 | 0o600)
            with contextlib.suppress(OverflowError):  # the time may be out of range for this machine
                os.utime(fd, (member.mtime, member.mtime))
