"""The backend `pool`: sandboxes of a pool's workers, wherever these run."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import time
import weakref
from collections.abc import Callable, Coroutine, Mapping
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, Literal, TypeVar, cast

import aiohttp

from backends import (
    Availability,
    BackendError,
    BackendUnavailable,
    Sandbox,
    SandboxCheckpoint,
    SandboxInfo,
    SandboxLost,
    SandboxSpec,
)
from backends.connection import PATIENCE, Connection
from backends.executor.framing import CHUNK
from backends.owner import this_owner
from backends.sandbox import ExecutorSandbox
from backends.spec import sandbox_title
from backends.tasks import finish, seen

from .places import known_pool
from .wire import CONTROL, HEARTBEAT, LARGEST, message, new_lease, opened, raised, spec_header

T = TypeVar("T")
_AGAIN = 0.5
"""Seconds until a pool that does not answer is tried again."""
_SLACK = 30.0
"""Seconds, beyond those that a worker waits, after which its answer counts as lost."""


class PoolBackend:
    """Sandboxes of the workers of a pool; see `lachesis pool`.

    The workers' backend and its options decide what a sandbox is. A sandbox whose worker or connection is gone is lost:
    none is continued elsewhere.
    """

    name = "pool"

    def __init__(self, url: str = "", *, token_file: str = "", start_timeout: float = 600.0) -> None:
        """
        Args:
            url: of the pool. Default: LACHESIS_POOL_URL, or the pool that was started on this machine.
            token_file: a file with its key. Default: LACHESIS_POOL_TOKEN, or that of the pool on this machine.
            start_timeout: seconds for a free slot and the start of a sandbox in it, together.
        """
        self._given, self._token_file, self._start_timeout = url, token_file, start_timeout
        self._links: weakref.WeakKeyDictionary[asyncio.AbstractEventLoop, PoolLink] = weakref.WeakKeyDictionary()

    def __repr__(self) -> str:
        return f"PoolBackend({self._given!r})"

    def _link(self) -> PoolLink:
        loop = asyncio.get_running_loop()
        if loop not in self._links:
            self._links[loop] = PoolLink(partial(known_pool, self._given, self._token_file))
        return self._links[loop]

    async def check(self) -> Availability:
        """Ask the pool what it has."""
        try:
            said = await self._link().ask("GET", "status")
        except BackendError as error:
            return Availability.lacking(error, "start one: lachesis pool up")
        slots = sum(said["slots"].values())
        detail = f"pool {said['pool']}: {len(said['workers'])} workers, {slots} slots, {said['waiting']} leases wait"
        return Availability(True, detail, "", "that of its workers", "those of its workers")

    async def create(self, spec: SandboxSpec) -> PoolSandbox:
        """See `Backend.create`."""
        return await self._link().acquire(spec, self._start_timeout)

    async def sandboxes(self) -> list[SandboxInfo]:
        return [info for _, info in await self._list()]

    async def reap(self, *, run_id: str | None = None, everyone: bool = False) -> list[SandboxInfo]:
        """See `Backend.reap`. A lease also ends with the connection of its run."""
        found = [(lease, info) for lease, info in await self._list() if everyone or info.orphan]
        ended = {lease: info for lease, info in found if run_id is None or info.run_id == run_id}
        if ended:
            await self._link().ask("POST", "end", [*ended])
            try:
                await asyncio.wait_for(self._until_gone({*ended}), PATIENCE)
            except TimeoutError:
                raise BackendError(f"leases of the pool do not end: {', '.join(ended)}") from None
        return [*ended.values()]

    async def _until_gone(self, leases: set[str]) -> None:
        while leases & {lease for lease, _ in await self._list()}:  # noqa: ASYNC110  (workers do it)
            await asyncio.sleep(0.05)

    async def _list(self) -> list[tuple[str, SandboxInfo]]:
        found = await self._link().ask("GET", "leases")
        described = ((each["lease"], SandboxInfo.of(self.name, each["sandbox"], each, "in a pool")) for each in found)
        return [(lease, info) for lease, info in described if info.id]


class _Away(BackendUnavailable):
    """The pool does not answer."""


class PoolLink:
    """The connection of an event loop to a pool, made when it is needed, and closed with its last lease."""

    def __init__(self, find: Callable[[], tuple[str, str]]) -> None:
        """
        Args:
            find: the address and the key of the pool, which another `lachesis pool up` changes.
        """
        self._find = find
        self.url = "?"
        self._reached = False
        self._connecting = asyncio.Lock()
        self._session: aiohttp.ClientSession | None = None
        self._socket: aiohttp.ClientWebSocketResponse | None = None
        self._reading: asyncio.Task[None] | None = None
        self._leases: dict[bytes, PoolConnection] = {}
        self._asked: dict[bytes, asyncio.Future[dict[str, Any]]] = {}
        self._tasks: set[asyncio.Task[None]] = set()

    def _headers(self) -> dict[str, str]:
        try:
            self.url, token = self._find()
        except BackendUnavailable as error:
            raise _Away(str(error)) from None
        return {"Authorization": f"Bearer {token}"}

    async def ask(self, method: str, path: str, body: object = None) -> Any:
        """The pool's answer to a request. Raises `BackendUnavailable`."""
        headers = self._headers()
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

    async def _connected(self, run: str) -> aiohttp.ClientWebSocketResponse:
        async with self._connecting:
            if self._socket is None or self._socket.closed or self._reading is None or self._reading.done():
                await self._close()
                headers = self._headers()
                self._session = aiohttp.ClientSession()
                try:
                    self._socket = await self._session.ws_connect(
                        f"{self.url}/run",
                        params={"run": run},
                        headers=headers,
                        heartbeat=HEARTBEAT,
                        max_msg_size=LARGEST,
                    )
                except (aiohttp.ClientError, OSError, TimeoutError) as error:
                    await self._close()
                    raise _Away(
                        f"the pool at {self.url} cannot be reached: {error}. Next step: lachesis pool status"
                    ) from None
                self._reached = True
                self._reading = asyncio.create_task(self._read(self._socket))
                self._reading.add_done_callback(seen)
            return self._socket

    async def _close(self) -> None:
        session, reading = self._session, self._reading
        self._session = self._socket = self._reading = None
        if session is not None:
            await session.close()
        if reading is not None:
            await asyncio.wait({reading})

    async def acquire(
        self, spec: SandboxSpec, seconds: float, parent: PoolConnection | None = None, checkpoint: int = 0
    ) -> PoolSandbox:
        """A sandbox in a slot: that of any worker, or of the worker of `parent`."""
        loop = asyncio.get_running_loop()
        end = loop.time() + seconds
        while True:
            try:
                return await self._acquire(spec, end - loop.time(), parent, checkpoint)
            except _Away:  # a pool that was there is started again, most likely
                if parent is not None or not self._reached or loop.time() + _AGAIN > end:
                    raise
                await asyncio.sleep(_AGAIN)

    async def _acquire(
        self, spec: SandboxSpec, seconds: float, parent: PoolConnection | None, checkpoint: int
    ) -> PoolSandbox:
        socket = await self._connected(spec.labels.get("run_id", ""))
        lease = new_lease()
        asked = self._asked[lease] = asyncio.get_running_loop().create_future()
        connection = self._leases[lease] = PoolConnection(self, socket, lease)
        labels = {**spec.labels, "owner": this_owner(), "created": f"{time.time():.3f}"}
        kind_of = repr(replace(spec, labels={}))
        header: dict[str, Any] = {"do": "acquire", "spec": spec_header(spec), "kind": kind_of, "labels": labels}
        if parent is not None:
            header |= {"beside": parent.lease.hex(), "checkpoint": checkpoint}
        try:
            async with asyncio.timeout(seconds):
                with contextlib.suppress(SandboxLost):  # the end of the connection is an answer to all
                    await self.send(socket, message(lease, header))
                facts = await asked
        except BaseException as error:
            asked.cancel()
            if isinstance(error, BackendError):  # it was refused
                await finish(self.forget(lease))
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
        return kind(connection, spec, facts, seconds)

    async def send(self, socket: aiohttp.ClientWebSocketResponse, data: bytes) -> None:
        """Raises `SandboxLost` if the connection is gone."""
        try:
            await socket.send_bytes(data)
        except (ConnectionError, RuntimeError, aiohttp.ClientError) as error:
            raise SandboxLost(f"the connection to the pool broke: {error}") from None

    def post(self, socket: aiohttp.ClientWebSocketResponse, data: bytes) -> None:
        """Send it soon, if the connection is still there."""
        task = asyncio.ensure_future(self.send(socket, data))
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        task.add_done_callback(seen)

    async def _read(self, socket: aiohttp.ClientWebSocketResponse) -> None:
        try:
            async for arrived in socket:
                if arrived.type is aiohttp.WSMsgType.BINARY:
                    self._take(arrived.data)
        finally:
            with contextlib.suppress(aiohttp.ClientError, RuntimeError, ConnectionError):
                await socket.close()
            for connection in [each for each in self._leases.values() if each.socket is socket]:
                connection.fail("the connection to the pool broke, and the pool has ended it")
                connection.released.set()
                asked = self._asked.get(connection.lease)
                if asked is not None and not asked.done():
                    asked.set_exception(_Away(f"the connection to the pool at {self.url} broke"))

    def _take(self, data: bytes) -> None:
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
            connection.released.set()
        elif connection is not None and "id" in header:
            connection.take(header, payload)
        elif connection is not None and "lost" in header:
            connection.fail(str(raised(header["lost"])))
            connection.released.set()

    async def forget(self, lease: bytes) -> None:
        """A lease is over. The connection is closed with the last one."""
        self._leases.pop(lease, None)
        async with self._connecting:
            if not self._leases:
                await self._close()


class PoolConnection:
    """What `ExecutorSandbox` needs of a connection to its executor, by way of the pool and a worker."""

    interrupted = 0.0
    """A broken connection is a lost one."""

    def __init__(self, link: PoolLink, socket: aiohttp.ClientWebSocketResponse, lease: bytes) -> None:
        self._link, self.socket, self.lease = link, socket, lease
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
                await self._link.send(self.socket, asked)
                found, data = await answer
        except TimeoutError:
            self.fail(f"its worker has not answered {header.get('op', 'it')!r}")
            raise SandboxLost(str(self.lost)) from None
        except asyncio.CancelledError:
            self._link.post(self.socket, message(self.lease, {"cancel": number}))
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

    def post(self, op: str, **fields: Any) -> None:
        """See `Connection.post`."""
        if self.lost is None:
            self._link.post(self.socket, message(self.lease, {"post": op, "fields": fields}))

    def tell(self, header: dict[str, Any]) -> None:
        """Say something that has no answer."""
        if self.lost is None:
            self._link.post(self.socket, message(self.lease, header))

    def fail(self, reason: str, loss: type[SandboxLost] = SandboxLost) -> None:
        """See `Connection.fail`."""
        if self.lost is None:
            self.lost, self._loss = reason, loss
        for pending in self._pending.values():
            if not pending.done():
                pending.set_exception(self._loss(self.lost))

    async def release(self) -> None:
        """Give the slot back, and wait until the sandbox is gone or reset."""
        with contextlib.suppress(SandboxLost):
            await self._link.send(self.socket, message(self.lease, {"do": "release"}))
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(PATIENCE):
                    await self.released.wait()
        await self._link.forget(self.lease)


@dataclass(frozen=True, slots=True, eq=False)
class _PoolCheckpoint(SandboxCheckpoint):
    connection: PoolConnection
    number: int
    kept: object


class _Kept:
    """What makes the worker let go of a checkpoint, once it is garbage."""

    def __init__(self, connection: PoolConnection, number: int) -> None:
        loop = asyncio.get_running_loop()
        weakref.finalize(self, _forget, loop, connection, number).atexit = False


def _forget(loop: asyncio.AbstractEventLoop, connection: PoolConnection, number: int) -> None:
    with contextlib.suppress(RuntimeError):  # the loop has ended
        loop.call_soon_threadsafe(connection.tell, {"forget": number})


class PoolSandbox(ExecutorSandbox):
    """A sandbox of a worker."""

    shared_network: Literal["none", "this machine", "another machine"] = "none"

    def __init__(self, connection: PoolConnection, spec: SandboxSpec, facts: Mapping[str, Any], seconds: float) -> None:
        super().__init__(
            cast(Connection, connection), id=facts["sandbox"], workdir=facts["workdir"], python=facts["python"]
        )
        self._own, self._spec, self._seconds = connection, spec, seconds
        self._closing: asyncio.Task[None] | None = None
        if facts["shared"]:
            self.shared_network = "another machine"

    async def close(self) -> None:
        """See `Sandbox.close`."""
        self._own.lost = self._own.lost or f"{sandbox_title(self.id, self._spec.labels)} was closed"
        self._own.fail(self._own.lost)
        if self._closing is None:
            self._closing = asyncio.create_task(self._own.release())
        await asyncio.shield(self._closing)


class ForkablePoolSandbox(PoolSandbox):
    """One whose worker makes checkpoints."""

    async def checkpoint(self, *, running: Literal["error", "left out"] = "error") -> SandboxCheckpoint:
        """See `SupportsCheckpoint`. It is freed with the lease of this sandbox at the latest."""
        found, _ = await self._connection.guard(finish(self._own.ask({"whole": "checkpoint", "running": running})))
        number = found["number"]
        left = tuple(found["left_out"])
        return _PoolCheckpoint(found["sandbox"], found["cwd"], left, self._own, number, _Kept(self._own, number))

    async def fork(
        self, checkpoint: SandboxCheckpoint | None = None, *, labels: Mapping[str, str] | None = None
    ) -> Sandbox:
        """See `SupportsCheckpoint`. The child takes a slot of the same worker; the sandbox of `checkpoint` must not be
        closed yet."""
        taken = self._own_kind(checkpoint or await self.checkpoint())
        spec = self._spec if labels is None else replace(self._spec, labels=labels)
        acquiring = self._own._link.acquire(spec, self._seconds, taken.connection, taken.number)
        return await self._connection.guard(acquiring)

    def _own_kind(self, checkpoint: SandboxCheckpoint) -> _PoolCheckpoint:
        if not isinstance(checkpoint, _PoolCheckpoint):
            raise BackendUnavailable(f"sandbox {self.id} cannot use a checkpoint of another backend")
        return checkpoint


class RestorablePoolSandbox(ForkablePoolSandbox):
    """One whose worker's sandboxes can go back. They are reset by the worker, between leases."""

    async def restore(self, checkpoint: SandboxCheckpoint) -> None:
        """See `SupportsRestore`: to a checkpoint of this sandbox."""
        taken = self._own_kind(checkpoint)
        if taken.connection is not self._own:
            raise BackendUnavailable(f"sandbox {self.id} goes back to its own checkpoints only")
        await self._connection.guard(finish(self._own.ask({"whole": "restore", "number": taken.number})))
