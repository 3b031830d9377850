"""The connection of a run to its pool."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable, Coroutine
from dataclasses import replace
from typing import Any

import aiohttp

from backends import BackendError, BackendUnavailable, SandboxSpec
from backends.owner import this_owner
from backends.spec import sandbox_title
from backends.tasks import finish

from .connection import PoolConnection
from .own import PoolEnded
from .sandbox import ForkablePoolSandbox, PoolSandbox, RestorablePoolSandbox
from .stream import ConnectionRefused, PoolStream, connect
from .wire import CONTROL, TOKEN, message, new_lease, opened, raised, spec_header

_AGAIN = 0.5
"""Seconds until a pool that does not answer is tried again."""
_CLOSE = 5.0
"""Seconds until a connection that is closed is broken off."""


class _Away(BackendUnavailable):
    """The pool does not answer."""


class PoolLink:
    """The connection of an event loop to a pool, made when it is needed, and closed with its last lease."""

    def __init__(self, find: Callable[[], Awaitable[tuple[str, str]]]) -> None:
        """
        Args:
            find: the address and the key of the pool, which another `lachesis pool up` changes.
        """
        self._find = find
        self.url = "?"
        self._reached = False
        self._connecting = asyncio.Lock()
        self._stream: PoolStream | None = None
        self._leases: dict[bytes, PoolConnection] = {}
        self._asked: dict[bytes, asyncio.Future[dict[str, Any]]] = {}

    async def _token(self) -> str:
        try:
            self.url, token = await self._find()
        except PoolEnded:
            raise
        except BackendUnavailable as error:
            raise _Away(str(error)) from None
        return token

    async def ask(self, method: str, path: str, body: object = None) -> Any:
        """The pool's answer to a request. Raises `BackendUnavailable`."""
        headers = {"Authorization": f"Bearer {await self._token()}"}
        try:
            async with (
                aiohttp.ClientSession() as session,
                session.request(
                    method, f"{self.url}/{path}", json=body, headers=headers, timeout=aiohttp.ClientTimeout(30)
                ) as answer,
            ):
                if answer.status != 200:
                    raise BackendUnavailable(f"the pool at {self.url} answers {answer.status}: {await answer.text()}")
                return await answer.json()
        except (aiohttp.ClientError, OSError, TimeoutError) as error:
            raise BackendUnavailable(f"the pool at {self.url} cannot be reached: {error}") from None

    async def _connected(self, run: str) -> PoolStream:
        async with self._connecting:
            if self._stream is None or self._stream.ended.done():
                token = await self._token()
                try:
                    stream = await connect(self.url, "run", token, self._take, run=run)
                except ConnectionRefused as error:
                    if error.status == 401:
                        step = f"set {TOKEN} to its key, or token_file"
                        raise BackendUnavailable(f"the pool at {self.url} has another key. Next step: {step}") from None
                    raise _Away(f"the pool at {self.url} refuses the connection: {error}") from None
                except (OSError, TimeoutError) as error:
                    why, step = str(error) or "no answer in time", "lachesis pool status"
                    raise _Away(f"the pool at {self.url} cannot be reached: {why}. Next step: {step}") from None
                stream.ended.add_done_callback(lambda _: self._broken(stream))
                self._stream, self._reached = stream, True
            return self._stream

    def _broken(self, stream: PoolStream) -> None:
        for connection in [each for each in self._leases.values() if each.stream is stream]:
            connection.fail("the connection to the pool broke, and the pool has ended it")
            connection.released.set()
            asked = self._asked.get(connection.lease)
            if asked is not None and not asked.done():
                asked.set_exception(_Away(f"the connection to the pool at {self.url} broke"))

    async def acquire(
        self,
        spec: SandboxSpec,
        seconds: float,
        profile: str = "",
        parent: PoolConnection | None = None,
        number: int = 0,
    ) -> PoolSandbox:
        """A sandbox in a slot: that of any worker of the profile, or a child of a checkpoint of `parent`, beside it."""
        loop = asyncio.get_running_loop()
        end = loop.time() + seconds
        while True:
            try:
                return await self._acquire(spec, end - loop.time(), profile, parent, number)
            except _Away:  # a pool that was there is started again, most likely
                if parent is not None or not self._reached or loop.time() + _AGAIN > end:
                    raise
                await asyncio.sleep(_AGAIN)

    async def _acquire(
        self, spec: SandboxSpec, seconds: float, profile: str, parent: PoolConnection | None, checkpoint: int
    ) -> PoolSandbox:
        stream = await self._connected(spec.labels.get("run_id", ""))
        lease = new_lease()
        asked = self._asked[lease] = asyncio.get_running_loop().create_future()
        connection = self._leases[lease] = PoolConnection(stream, lease, spec.image or "", self._forget)
        labels = {**spec.labels, "owner": this_owner(), "created": f"{time.time():.3f}"}
        kind_of = repr(replace(spec, labels={}))
        header: dict[str, Any] = {"do": "acquire", "spec": spec_header(spec), "kind": kind_of, "labels": labels,
                                  "profile": profile}  # fmt: skip
        if parent is not None:
            header |= {"beside": parent.lease.hex(), "checkpoint": checkpoint}
        try:
            async with asyncio.timeout(seconds):
                stream.post(message(lease, header))
                facts = await asked
        except BaseException as error:
            asked.cancel()
            if isinstance(error, BackendError):  # it was refused
                await finish(self._forget(lease))
                raise
            await finish(connection.release())
            if isinstance(error, TimeoutError):
                raise BackendError(f"the pool at {self.url} has given no slot within {seconds:.3g} s") from None
            raise
        finally:
            self._asked.pop(lease, None)
        connection.title = sandbox_title(facts["sandbox"], spec.labels)
        connection.home = facts["home"]
        kind = (PoolSandbox, ForkablePoolSandbox, RestorablePoolSandbox)[sum(facts["powers"])]

        def fork(spec: SandboxSpec, parent: PoolConnection, number: int) -> Coroutine[Any, Any, PoolSandbox]:
            return self.acquire(spec, seconds, parent=parent, number=number)

        return kind(connection, spec, facts, fork)

    def _take(self, _: PoolStream, data: bytes) -> None:
        lease = data[: len(CONTROL)]
        header, payload = opened(data)
        connection, asked = self._leases.get(lease), self._asked.get(lease)
        said = header.get("do")
        if said in ("acquired", "refused") or (asked is not None and "lost" in header):
            if said != "acquired" and connection is not None:
                connection.released.set()
            if asked is not None and not asked.done():
                if said == "acquired":
                    asked.set_result(header)
                else:
                    asked.set_exception(raised(header.get("error") or header["lost"]))
        elif connection is not None and said == "released":
            connection.fail("its worker has given it back")  # calls that still wait, if the run did not ask for it
            connection.released.set()
        elif connection is not None and "id" in header:
            connection.take(header, payload)
        elif connection is not None and "bring" in header:
            connection.bring()
        elif connection is not None and "lost" in header:
            connection.fail(str(raised(header["lost"])))
            connection.released.set()

    async def _forget(self, lease: bytes) -> None:
        """A lease is over. The connection is closed with the last one."""
        self._leases.pop(lease, None)
        stream = self._stream
        if not self._leases and stream is not None:
            self._stream = None
            stream.close()
            await asyncio.wait({stream.ended}, timeout=_CLOSE)
            stream.abort()
