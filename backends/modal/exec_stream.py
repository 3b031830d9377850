"""The executor at Modal: its command line, the relay to it, and the streams of the relay as one."""

from __future__ import annotations

import base64
import contextlib
import inspect
import zlib
from collections.abc import AsyncGenerator, Iterator
from functools import cache
from typing import Any

from backends import executor_code
from backends.byte_stream import ByteStream, PumpedStream
from backends.executor import relay as executor_relay
from backends.first_use import in_turn

from .calls import text_of

_SOCKET = "@lachesis"
_SILENCE = 75
"""Seconds of silence (five pings of the connection) after which a relay takes the owner for dead."""

# Modal may keep an exec whose client has died. Without a limit of silence, the relay would live on, and the executor
# would not notice that its owner is gone. The function alone starts faster than the whole executor compiles.
RELAY = (
    f"import sys\n{inspect.getsource(executor_relay.relay)}\n"
    "relay(chr(0) + sys.argv[1], float(sys.argv[2]), patience=10)\n"
)


@in_turn
@cache
def _program() -> str:
    packed = base64.b64encode(zlib.compress(executor_code.executor_source(), 9)).decode()
    return f"import base64,zlib;exec(compile(zlib.decompress(base64.b64decode({packed!r})),'executor.py','exec'))"


def entrypoint() -> list[str]:
    """The command line of the executor."""
    # Only the command line can carry a file into every image at Modal. It is packed, as the SDK takes 64 KiB of
    # arguments. Everyone inside can read it; it holds no secret.
    return ["python3", "-I", "-S", "-c", _program(), "--listen", _SOCKET]


def relay() -> list[str]:
    """The command line of a relay to the executor."""
    return ["python3", "-I", "-S", "-c", RELAY, _SOCKET[1:], str(_SILENCE)]


def exec_stream(process: Any) -> ByteStream:
    """The standard streams of a Modal exec as one stream."""

    async def received() -> AsyncGenerator[bytes]:
        with _explained():
            async for data in process.stdout:
                yield data

    async def send(data: bytes) -> None:  # the SDK drops what is written while it sends
        with _explained():
            process.stdin.write(data)
            await process.stdin.drain.aio()

    return PumpedStream(received(), send)


@contextlib.contextmanager
def _explained() -> Iterator[None]:
    try:
        yield
    except Exception as error:
        raise ConnectionError(f"Modal's stream broke: {text_of(error)}") from None
