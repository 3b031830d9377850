"""What a sandbox of a pool needs of a connection to its executor."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
from collections.abc import Callable, Coroutine
from typing import Any, TypeVar

from backends import BackendError, SandboxLost
from backends.connection import PATIENCE
from backends.executor.framing import CHUNK
from backends.tasks import seen

from .roots import RootSender
from .stream import PoolStream
from .wire import error_header, message, raised

T = TypeVar("T")
_SLACK = 30.0
"""Seconds, beyond those that a worker waits, after which its answer counts as lost."""


class PoolConnection:
    """What `ExecutorSandbox` needs of a connection to its executor, by way of the pool and a worker."""

    interrupted = 0.0
    """A broken connection is a lost one."""

    def __init__(
        self, stream: PoolStream, lease: bytes, image: str, forget: Callable[[bytes], Coroutine[Any, Any, None]]
    ) -> None:
        """
        Args:
            image: which its worker may ask for, if it is a folder.
            forget: is called with the lease when it is over.
        """
        self.stream, self.lease, self._forget = stream, lease, forget
        self._root = RootSender(image)
        self._bringing: asyncio.Task[None] | None = None
        self.home = "/"
        self.title = "a sandbox"
        self.lost: str | None = None
        self.released = asyncio.Event()
        """Nothing is left of it at the worker."""
        self._numbers = itertools.count(1)
        self._pending: dict[int, asyncio.Future[tuple[dict[str, Any], bytes]]] = {}
        self._loss: type[SandboxLost] = SandboxLost

    async def guard(self, call: Coroutine[Any, Any, T]) -> T:
        return await call

    async def request(
        self, op: str, payload: bytes = b"", *, patience: float | None = PATIENCE, room: int = CHUNK, **fields: Any
    ) -> tuple[dict[str, Any], bytes]:
        """See `Connection.request`."""
        header = {"op": op, "patience": patience, "room": room, "fields": fields}
        return await self.ask(header, payload, patience=patience)

    async def ask(
        self, header: dict[str, Any], payload: bytes = b"", *, patience: float | None = None
    ) -> tuple[dict[str, Any], bytes]:
        """The worker's answer."""
        if self.lost is not None:
            raise self._loss(self.lost)
        number = next(self._numbers)
        try:
            asked = message(self.lease, {"id": number, **header}, payload)
        except ValueError as large:
            raise BackendError(f"{self.title}: {large}") from None
        answer = self._pending[number] = asyncio.get_running_loop().create_future()
        try:
            async with asyncio.timeout(None if patience is None else patience + _SLACK):
                self.stream.post(asked)
                found, data = await answer
        except TimeoutError:
            self.fail(f"its worker has not answered {header.get('op', 'it')!r}")
            raise SandboxLost(str(self.lost)) from None
        except asyncio.CancelledError:
            self.stream.post(message(self.lease, {"cancel": number}))
            raise
        finally:
            self._pending.pop(number, None)
            seen(answer)
        error = found.get("error")
        if error is None:
            return found, data
        failure = raised(error, self.title)
        if isinstance(failure, SandboxLost) or "lost" in found:
            self.fail(
                str(found.get("lost", failure)), type(failure) if isinstance(failure, SandboxLost) else SandboxLost
            )
        raise failure

    def take(self, header: dict[str, Any], payload: bytes) -> None:
        """An answer."""
        pending = self._pending.get(header["id"])
        if pending is not None and not pending.done():
            pending.set_result((header, payload))

    def bring(self) -> None:
        """The worker wants the next part of the image."""
        self._bringing = asyncio.ensure_future(self._bring())
        self._bringing.add_done_callback(seen)

    async def _bring(self) -> None:
        try:
            data, last = await self._root.part()
        except (BackendError, OSError) as error:
            self.tell({"brought": error_header(error)})
        else:
            self.stream.post(message(self.lease, {"brought": None, "last": last}, data))

    def post(self, op: str, **fields: Any) -> None:
        """See `Connection.post`."""
        self.tell({"post": op, "fields": fields})

    def tell(self, header: dict[str, Any]) -> None:
        """Say something that has no answer."""
        if self.lost is None:
            self.stream.post(message(self.lease, header))

    def fail(self, reason: str, loss: type[SandboxLost] = SandboxLost) -> None:
        """See `Connection.fail`."""
        if self.lost is None:
            self.lost, self._loss = reason, loss
        for pending in self._pending.values():
            if not pending.done():
                pending.set_exception(self._loss(self.lost))

    async def release(self) -> None:
        """Give the slot back, and wait until the sandbox is gone or reset."""
        self._root.close()
        self.stream.post(message(self.lease, {"do": "release"}))
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(PATIENCE):
                await self.released.wait()
        await self._forget(self.lease)
