"""Moving files and folders of any size into a sandbox or out of it, in parts and in constant memory."""

from __future__ import annotations

import asyncio
import contextlib
import socket
from collections import deque
from collections.abc import AsyncGenerator, Callable, Mapping
from types import TracebackType
from typing import Any, BinaryIO, cast

from backends.tasks import finish, in_own_thread

from .connection import Connection
from .executor.folders import pack
from .executor.framing import CHUNK
from .extraction import Room, extract

DEPTH = 8
"""Parts in flight at once."""


class Transfer:
    """A file or a folder that the executor holds open. Entering opens it; leaving before `commit` discards it.

    `kind` is `read` or `write` (a file), `pack` or `unpack` (a folder, as a tar archive).
    """

    def __init__(self, connection: Connection, id: int, kind: str, path: str, **options: int | None) -> None:
        self._connection, self._id = connection, id
        self._fields: dict[str, Any] = {"kind": kind, "path": path, **options}
        self._moving: deque[asyncio.Task[tuple[dict[str, Any], bytes]]] = deque()

    async def __aenter__(self) -> Transfer:
        try:
            await self._connection.request("open", transfer=self._id, **self._fields)
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
        for begin in range(0, len(data), CHUNK):
            while len(self._moving) >= DEPTH:
                await self._moving[0]
                self._moving.popleft()
            self._request("push", bytes(data[begin : begin + CHUNK]))
            await asyncio.sleep(0)  # keep the order of the parts

    async def commit(self) -> None:
        """Complete the transfer. Raises `OSError`."""
        while self._moving:
            await self._moving[0]
            self._moving.popleft()
        await self._connection.request("commit", transfer=self._id)


async def upload(transfer: Transfer, folder: str, modes: Mapping[str, int] | None = None) -> None:
    """Pack `folder` into an open `unpack`."""
    async with _threaded(lambda file: pack(folder, file, modes=modes)) as (packed, _):
        while data := await packed.read(CHUNK):
            await transfer.push(data)
    await transfer.commit()


async def download(transfer: Transfer, folder: str, room: Room, modes: dict[str, int] | None = None) -> None:
    """Unpack an open `pack` into `folder`; see `ExecutorSandbox.download_dir`."""
    async with (
        _threaded(lambda file: extract(file, folder, room, modes)) as (_, packed),
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
                with theirs.makefile("rwb", CHUNK) as file:
                    work(cast(BinaryIO, file))
            finally:  # a forked copy of this process may hold copies of the descriptors
                with contextlib.suppress(OSError):
                    theirs.shutdown(socket.SHUT_RDWR)

    reader, writer = await asyncio.open_unix_connection(sock=ours, limit=CHUNK)
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
