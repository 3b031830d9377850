"""The executor at Modal: its command line, the relay to it, and the streams of the relay as one."""

from __future__ import annotations

import asyncio
import base64
import zlib
from collections import deque
from functools import cache
from typing import Any

from backends import executor_code

from .calls import text_of

_BUFFER = 1 << 20
"""Buffered bytes above which the writer, or the reader, of a stream waits."""
_SOCKET = "@lachesis"
_SILENCE = 75
"""Seconds of silence (five pings of the connection) after which a relay takes the owner for dead."""

# Modal may keep an exec whose client has died. The executor's `--relay` would live on then, and the executor would not
# notice that its owner is gone. This relay also starts faster than the whole executor compiles. Blocking writes are
# safe, as neither side stops reading.
RELAY = """
import ctypes, os, select, socket, sys, time
ctypes.CDLL(None).prctl(4, 0, 0, 0, 0)
silence = float(sys.argv[2])
far = socket.socket(socket.AF_UNIX)
for _ in range(500):
    if far.connect_ex("\\0" + sys.argv[1]) == 0:
        break
    time.sleep(0.02)
end = time.monotonic() + silence
while time.monotonic() < end:
    ready, _, _ = select.select([0, far], [], [], max(0.0, end - time.monotonic()))
    if 0 in ready:
        data = os.read(0, 1 << 18)
        if not data:
            break
        far.sendall(data)
        end = time.monotonic() + silence
    if far in ready:
        data = far.recv(1 << 18)
        if not data:
            break
        while data:
            data = data[os.write(1, data):]
"""


@cache
def _program() -> str:
    packed = base64.b64encode(zlib.compress(executor_code.source(), 9)).decode()
    return f"import base64,zlib;exec(compile(zlib.decompress(base64.b64decode({packed!r})),'executor.py','exec'))"


def entrypoint() -> list[str]:
    """The command line of the executor."""
    # Only the command line can carry a file into every image at Modal. It is packed, as the SDK takes 64 KiB of
    # arguments. Everyone inside can read it; it holds no secret.
    return ["python3", "-I", "-S", "-c", _program(), "--listen", _SOCKET]


def relay() -> list[str]:
    """The command line of a relay to the executor."""
    return ["python3", "-I", "-S", "-c", RELAY, _SOCKET[1:], str(_SILENCE)]


class ExecStream:
    """The standard streams of a Modal exec as a `ByteStream`.

    The SDK's writer accepts one task at a time, and drops what is written while it sends. Therefore each direction has
    a buffer and a task.
    """

    def __init__(self, process: Any) -> None:
        self._process = process
        self._incoming: deque[bytes] = deque()
        self._incoming_bytes = 0
        self._outgoing = bytearray()
        self._error: BaseException | None = None
        self._ended = self._aborted = False
        self._readable, self._writable, self._roomy = asyncio.Event(), asyncio.Event(), asyncio.Event()
        self._tasks = [asyncio.create_task(self._receive()), asyncio.create_task(self._send())]
        for task in self._tasks:
            task.add_done_callback(self._on_end)

    async def read(self, n: int) -> bytes:
        while not self._incoming:
            if self._ended:
                if self._error is not None:
                    raise ConnectionError(f"Modal's stream broke: {text_of(self._error)}") from None
                return b""
            self._readable.clear()
            await self._readable.wait()
        data = self._incoming.popleft()
        if len(data) > n:
            self._incoming.appendleft(data[n:])
            data = data[:n]
        self._incoming_bytes -= len(data)
        self._roomy.set()
        return data

    def write(self, data: bytes) -> None:
        if not self._ended:
            self._outgoing += data
            self._writable.set()

    async def drain(self) -> None:
        while len(self._outgoing) > _BUFFER and not self._ended:
            self._roomy.clear()
            await self._roomy.wait()

    def abort(self) -> None:
        if not self._aborted:  # a second cancellation would interrupt the SDK's clean-up
            self._aborted = True
            for task in self._tasks:
                task.cancel()

    async def _receive(self) -> None:
        async for data in self._process.stdout:
            self._incoming.append(data)
            self._incoming_bytes += len(data)
            self._readable.set()
            while self._incoming_bytes > _BUFFER:
                self._roomy.clear()
                await self._roomy.wait()

    async def _send(self) -> None:
        while True:
            self._writable.clear()
            while self._outgoing:
                part = bytes(self._outgoing[:_BUFFER])
                self._process.stdin.write(part)
                await self._process.stdin.drain.aio()
                del self._outgoing[: len(part)]
                self._roomy.set()
            await self._writable.wait()

    def _on_end(self, task: asyncio.Task[None]) -> None:
        if not task.cancelled() and task.exception() is not None:
            self._error = self._error or task.exception()
        self._ended = True
        self._outgoing.clear()
        for event in (self._readable, self._writable, self._roomy):
            event.set()
        self.abort()
