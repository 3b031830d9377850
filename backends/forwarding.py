"""One address that programs inside a sandbox without a network can reach: connections to a port inside, carried here.

The executor listens on the loopback address inside and passes on bytes as the owner asks for them (`listen`, `accept`,
`pull`, `push`), so a slow reader on either side stops the writer on the other, and broken streams lose nothing.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import logging
import resource
import weakref
from collections.abc import AsyncIterator, Coroutine
from typing import TYPE_CHECKING, Any

from backends.tasks import run_all

from .errors import BackendError
from .executor.carried import CARRIED

if TYPE_CHECKING:
    from .connection import Connection

log = logging.getLogger(__name__)

_ACCEPTING = 4
"""Requests for a connection at once: over a slow stream, programs that connect together wait less."""
_ALWAYS = 8
"""Connections of one sandbox that are carried however many the others have."""
_carried: weakref.WeakSet[asyncio.Task[None]] = weakref.WeakSet()
"""Connections of all sandboxes."""


class Forward:
    """An open way from a sandbox to one address of this machine or its network."""

    def __init__(self, port: int, host: str = "127.0.0.1") -> None:
        self.host = host
        """The address inside."""
        self.port = port
        """The port inside."""
        self.failure: str | None = None
        """Why a connection could not be made here, the first time that it happened."""
        self.refused = 0
        """Connections that were reset, because too many were open at once."""


@contextlib.asynccontextmanager
async def forwarded(
    connection: Connection, numbers: itertools.count[int], host: str, port: int, *, title: str
) -> AsyncIterator[Forward]:
    """Listen inside and connect to `host` and `port` here for every connection; at the end close all of them.

    Args:
        numbers: gives numbers of transfers.
        title: the sandbox in messages.
    """
    listening = next(numbers)
    try:
        header, _ = await connection.request("listen", transfer=listening)
    except BaseException as error:
        connection.post("drop", transfer=listening)
        if isinstance(error, OSError):
            raise BackendError(f"{title} cannot listen on its loopback address: {error}") from error
        raise
    forward = Forward(header["port"])
    running: set[asyncio.Task[None]] = set()
    reset_here = 0

    def start(work: Coroutine[Any, Any, None]) -> asyncio.Task[None]:
        task = asyncio.create_task(work)
        running.add(task)
        task.add_done_callback(running.discard)
        return task

    async def accept() -> None:
        nonlocal reset_here
        while True:
            number = next(numbers)
            try:
                accepted, _ = await connection.request("accept", transfer=number, listener=listening, patience=None)
            except BaseException as error:
                connection.post("drop", transfer=number)
                if isinstance(error, BackendError | OSError):
                    return  # the sandbox is gone, which its next user finds out
                raise
            crowded = len(running) - _ACCEPTING >= _ALWAYS and len(_carried) >= _most_carried()
            reset_here += crowded
            if (accepted["refused"] or crowded) and not forward.refused:
                log.warning("%s: its programs opened too many connections at once; some were reset", title)
            forward.refused = max(forward.refused, accepted["refused"] + reset_here)
            if crowded:
                connection.post("drop", transfer=number)
            else:
                carrying = start(carry(number))
                _carried.add(carrying)
                carrying.add_done_callback(_carried.discard)

    async def carry(number: int) -> None:
        try:
            reader, writer = await asyncio.open_connection(host, port, limit=CARRIED)
        except OSError as error:
            forward.failure = forward.failure or f"{title}: {host}:{port} cannot be reached from here: {error}"
            connection.post("drop", transfer=number)
            return
        except BaseException:
            connection.post("drop", transfer=number)
            raise
        try:
            await run_all([_outwards(connection, number, writer), _inwards(connection, number, reader)])
            writer.close()
        except (OSError, BackendError):
            pass  # either end has broken it; the other one learns that below
        finally:
            connection.post("drop", transfer=number)
            if not writer.is_closing():
                writer.transport.abort()

    for _ in range(_ACCEPTING):
        start(accept())
    try:
        yield forward
    finally:
        connection.post("drop", transfer=listening)
        left = list(running)
        for task in left:
            task.cancel()
        await asyncio.gather(*left, return_exceptions=True)


def _most_carried() -> int:
    """So many that other things of this process, which may serve them as well, are left half of its descriptors."""
    return resource.getrlimit(resource.RLIMIT_NOFILE)[0] // 4


async def _outwards(connection: Connection, number: int, writer: asyncio.StreamWriter) -> None:
    while True:
        header, data = await connection.request("pull", transfer=number, patience=None)
        if data:
            writer.write(data)
            await writer.drain()
        if header["end"]:
            if not writer.is_closing():
                writer.write_eof()
            return


async def _inwards(connection: Connection, number: int, reader: asyncio.StreamReader) -> None:
    while data := await reader.read(CARRIED):
        await connection.request("push", data, transfer=number, patience=None)
    await connection.request("commit", transfer=number, patience=None)
