"""The near end of the executor's protocol: requests with numbers go out, answers with those numbers come back.

Once a connection is lost it stays lost, and every request, waiting or new, raises `SandboxLost` with the same reason.
The protocol itself is described in `executor.py`.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import struct
from dataclasses import dataclass, field
from typing import Any

from .base import BackendError, SandboxLost

PROTOCOL = 1
PATIENCE = 60.0
"""Seconds beyond what a request may take by itself until a silent executor is given up."""
_FRAME = struct.Struct("!II")
_CHUNK = 1 << 18


@dataclass(slots=True)
class _Pending:
    answer: asyncio.Future[tuple[dict[str, Any], bytes]]
    parts: list[bytes] = field(default_factory=list)


class Connection:
    """One executor's byte stream. It belongs to the event loop that made it."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._reader, self._writer = reader, writer
        self._pending: dict[int, _Pending] = {}
        self._last = 0
        self._lost: str | None = None
        self.hello: asyncio.Future[dict[str, Any]] = asyncio.get_running_loop().create_future()
        """The executor's greeting."""
        self.ended: asyncio.Future[str | None] = asyncio.get_running_loop().create_future()
        """Done at the end of the stream, with the reason that the executor gave, if it gave one."""
        self._task = asyncio.create_task(self._read())

    @property
    def lost(self) -> str | None:
        """Why nothing more can be asked, None as long as something can."""
        return self._lost

    async def request(
        self, op: str, payload: bytes = b"", *, patience: float | None = PATIENCE, **fields: Any
    ) -> tuple[dict[str, Any], bytes]:
        """Ask and wait. A request that is cancelled is cancelled inside, too.

        Raises:
            SandboxLost: the connection is gone, or no answer came for `patience` seconds (None: waits for ever).
            OSError: what the file system, or the process table, said.
            BackendError: the executor failed.
        """
        if self._lost is not None:
            raise SandboxLost(self._lost)
        self._last += 1
        number = self._last
        pending = self._pending[number] = _Pending(asyncio.get_running_loop().create_future())
        try:
            async with asyncio.timeout(patience):
                with contextlib.suppress(OSError):  # the reader finds out why, and ends this request
                    await self._send({"id": number, "op": op, **fields}, payload)
                header, data = await pending.answer
        except TimeoutError:
            reason = f"its executor has not answered {op!r} for {patience:g} s"
            self.fail(reason)
            raise SandboxLost(self._lost or reason) from None
        except asyncio.CancelledError:
            if self._lost is None:
                self._write({"op": "cancel", "target": number})
            raise
        finally:
            self._pending.pop(number, None)
            if pending.answer.done() and not pending.answer.cancelled():
                pending.answer.exception()  # seen: a request that was cancelled does not look at it
        error = header.get("error")
        if error is None:
            return header, data
        if error["errno"] is None:
            raise BackendError(f"the executor failed at {op!r}: {error['message']}")
        raise OSError(error["errno"], error["message"], error["path"])

    async def _send(self, header: dict[str, Any], payload: bytes) -> None:
        """Write a request; a file goes in parts, so that other requests pass between them."""
        view = memoryview(payload)
        while header["op"] == "write" and len(view) > _CHUNK:
            self._write({**header, "more": True}, view[:_CHUNK])
            view = view[_CHUNK:]
            await self._writer.drain()
        self._write(header, view)
        await self._writer.drain()

    def _write(self, header: dict[str, Any], payload: bytes | memoryview = b"") -> None:
        encoded = json.dumps(header).encode()
        self._writer.writelines((_FRAME.pack(len(encoded), len(payload)), encoded, payload))

    async def _read(self) -> None:
        goodbye: str | None = None
        try:
            while True:
                header_size, payload_size = _FRAME.unpack(await self._reader.readexactly(_FRAME.size))
                header = json.loads(await self._reader.readexactly(header_size))
                payload = await self._reader.readexactly(payload_size) if payload_size else b""
                if header["id"] == 0:
                    goodbye = header.get("bye", goodbye)
                    if "hello" in header and not self.hello.done():
                        self.hello.set_result(header)
                    continue
                pending = self._pending.get(header["id"])
                if pending is None or pending.answer.done():
                    continue  # whoever asked has gone
                pending.parts.append(payload)
                if not header.get("more"):
                    pending.answer.set_result((header, b"".join(pending.parts)))
        except (asyncio.IncompleteReadError, OSError):
            pass
        except ValueError as error:
            goodbye = f"its stream is damaged ({error})"
        finally:
            if not self.ended.done():
                self.ended.set_result(goodbye)

    def fail(self, reason: str) -> None:
        """Declare the connection lost: every request ends with `reason`, which should read on after `sandbox X: `."""
        if self._lost is None:
            self._lost = reason
        for pending in self._pending.values():
            if not pending.answer.done():
                pending.answer.set_exception(SandboxLost(self._lost))
        self._writer.transport.abort()
