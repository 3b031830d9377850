"""A worker: it connects to the pool, and serves so many sandboxes of its own machine at once.

What it needs of a sandbox is the connection to its executor: requests of a run go there as they are. Everything that it
has made ends with it, since it is the owner, and with its connection to the pool.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import signal
from collections.abc import Callable, Coroutine, Mapping
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

from backends import Backend, BackendError, BackendUnavailable, Lease, SandboxSpec, SupportsRestore, WarmSandboxes
from backends.base import SandboxCheckpoint, SupportsCheckpoint
from backends.connection import PATIENCE
from backends.sandbox import ExecutorSandbox
from backends.tasks import cancel_all, finish, run_all

from .roots import RootFolders
from .stream import ConnectionRefused, PoolStream, connect
from .wire import CONTROL, error_header, is_read, message, opened, raised, spec_of

_LOG = logging.getLogger(__name__)
ROOTS = ("local", "singularity")
"""Backends whose images can be folders."""
_BACKOFF = (0.2, 10.0)
"""Seconds until the pool is tried again: at first, at most."""


@dataclass(eq=False, slots=True)
class _Held:
    """What a lease has here."""

    lease: Lease
    sandbox: ExecutorSandbox
    checkpoints: dict[int, SandboxCheckpoint] = field(default_factory=dict)
    calls: dict[int, asyncio.Task[None]] = field(default_factory=dict)


class PoolWorker:
    """Serves `slots` sandboxes of `backend` to the pool at `url`.

    Args:
        token: the pool's key.
        profile: what it is good for; only rollouts of that profile get its slots.
        defaults: values for what a rollout's specification leaves open.
        warm: sandboxes of these defaults are made before the first lease, and all that come back are reset and
            used again, where the backend can.
        patience: seconds for which a pool that does not answer is tried again.
    """

    def __init__(
        self,
        url: str,
        token: str,
        backend: Backend,
        *,
        name: str,
        slots: int,
        profile: str = "",
        defaults: SandboxSpec | None = None,
        warm: bool = False,
        patience: float = 300.0,
    ) -> None:
        self._url, self._token, self._name, self._slots = url.rstrip("/"), token, name, slots
        self._profile, self._defaults = profile, defaults or SandboxSpec()
        self._backend, self._ahead, self._patience = backend, warm, patience
        self._warm = WarmSandboxes(backend, slots if warm else 0)
        self._held: dict[bytes, _Held] = {}
        self._making: dict[bytes, asyncio.Task[None]] = {}
        self._tasks: set[asyncio.Task[None]] = set()
        self._returning: set[bytes] = set()
        """Leases whose sandboxes are being removed or reset."""
        self._unwanted: set[bytes] = set()
        """Leases that ended while their sandboxes were made."""
        self._roots = RootFolders()
        self._wanted: dict[bytes, asyncio.Future[tuple[dict[str, Any], bytes]]] = {}
        """The next part of an image, by lease."""
        self._draining = asyncio.Event()
        self._drained = False
        """The pool sends no more leases."""
        self._stream: PoolStream | None = None

    def drain(self) -> None:
        """Take no more leases, and end when the last one has ended."""
        self._draining.set()
        self._post(message(CONTROL, {"do": "draining"}))
        self._ends_if_idle()

    async def serve(self) -> None:
        """Until it has drained.

        Raises:
            BackendUnavailable: no sandbox can be made here, or the key is wrong.
            BackendError: the pool has not answered for `patience` seconds.
        """
        probe = await self._warm.lease(self._defaults)
        try:
            answered = await probe.sandbox.exec("echo ready", timeout=60)
            if answered.stdout != b"ready\n":
                raise BackendUnavailable(f"a probe command was answered with {answered!r}")
        finally:
            await probe.release()
        if self._ahead:  # as many as there are slots, which wait for the first leases
            made = await run_all(self._warm.lease(self._defaults) for _ in range(self._slots))
            await run_all(lease.release() for lease in made)
        loop = asyncio.get_running_loop()
        reached, wait = loop.time(), _BACKOFF[0]
        try:
            while not self._draining.is_set():
                try:
                    await self._connected()
                    reached, wait = loop.time(), _BACKOFF[0]
                except ConnectionRefused as error:
                    if error.status == 410:
                        raise BackendError(f"the pool at {self._url} has given this worker up") from None
                    if error.status == 401:
                        raise BackendUnavailable(f"{self._url}: the pool's key is another one") from None
                    _LOG.info("the pool refuses the connection: %s", error)
                except (OSError, TimeoutError) as error:
                    _LOG.info("the pool does not answer: %s", error)
                if loop.time() - reached > self._patience:
                    raise BackendError(f"the pool at {self._url} has not answered for {self._patience:g} s")
                with contextlib.suppress(TimeoutError):
                    await asyncio.wait_for(self._draining.wait(), wait)
                wait = min(_BACKOFF[1], 2 * wait)
        finally:
            await finish(self._end_all())
            await finish(self._warm.close())

    async def _connected(self) -> None:
        facts = {"slots": str(self._slots), "profile": self._profile, "backend": self._backend.name}
        stream = await connect(self._url, "worker", self._token, self._take, name=self._name, **facts)
        _LOG.info("connected to %s", self._url)
        self._stream, self._drained = stream, False
        if self._draining.is_set():
            self.drain()
        try:
            await asyncio.shield(stream.ended)
        finally:
            self._stream = None
            stream.abort()
            await finish(self._end_all())  # a pool that is gone knows none of them any more

    async def _end_all(self) -> None:
        await cancel_all([*self._making.values(), *self._tasks])
        self._unwanted.clear()
        await asyncio.gather(*(self._release(lease) for lease in [*self._held]))

    # messages

    def _take(self, _: PoolStream, data: bytes) -> None:
        lease = data[: len(CONTROL)]
        try:
            header, payload = opened(data)
            if is_read(data):
                self._obey(lease, header)
            else:
                self._pass(lease, header, payload)
        except (ValueError, LookupError, TypeError) as error:  # of one run, which costs the others nothing
            _LOG.warning("a lease is given back, as a message of its run is none: %r", error)
            self._end_lease(lease)

    def _obey(self, lease: bytes, header: dict[str, Any]) -> None:
        """What the pool says."""
        said = header["do"]
        if said == "drain":
            for each in [*self._held, *self._making] if header.get("now") else []:
                self._end_lease(each)
            self.drain()
        elif said == "drained":
            self._drained = True
            self._ends_if_idle()
        elif said == "acquire":
            making = self._making[lease] = self._begin(self._acquire(lease, header))
            making.add_done_callback(lambda _: self._made(lease))
        elif said == "release":
            self._end_lease(lease)

    def _pass(self, lease: bytes, header: dict[str, Any], payload: bytes) -> None:
        """What a run says, which the pool has not read."""
        held = self._held.get(lease)
        if "brought" in header:
            if lease in self._wanted and not self._wanted[lease].done():
                self._wanted[lease].set_result((header, payload))
        elif held is None:
            self._post(message(lease, {"id": header.get("id"), "error": _gone()}))
        elif "cancel" in header:
            if header["cancel"] in held.calls:
                held.calls[header["cancel"]].cancel()
        elif "post" in header:
            held.sandbox._connection.post(header["post"], **header["fields"])
        elif "forget" in header:
            held.checkpoints.pop(header["forget"], None)
        else:
            number = header["id"]
            call = held.calls[number] = self._begin(self._answer(lease, held, header, payload))
            call.add_done_callback(lambda _: held.calls.pop(number, None))

    def _end_lease(self, lease: bytes) -> None:
        if lease in self._making:  # it may not have begun, or be over: what follows is the same
            self._unwanted.add(lease)
            self._making[lease].cancel()
        else:
            self._return(lease)

    def _return(self, lease: bytes) -> None:
        self._returning.add(lease)
        self._begin(self._give_back(lease)).add_done_callback(lambda _: self._returned(lease))

    def _returned(self, lease: bytes) -> None:
        self._returning.discard(lease)
        self._ends_if_idle()

    def _made(self, lease: bytes) -> None:
        """The sandbox of a lease exists, or does not."""
        self._making.pop(lease, None)
        if lease in self._unwanted:
            self._unwanted.discard(lease)
            self._return(lease)
        self._ends_if_idle()

    def _begin(self, work: Coroutine[Any, Any, None]) -> asyncio.Task[None]:
        task = asyncio.ensure_future(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        return task

    def _post(self, data: bytes) -> None:
        if self._stream is not None:
            self._stream.post(data)

    async def _acquire(self, lease: bytes, header: Mapping[str, Any]) -> None:
        try:
            made = await self._sandbox(lease, header)
        except Exception as error:
            if isinstance(error, OSError):  # of this machine, and not of the run's
                error = BackendError(f"worker {self._name}: {error}")
            if lease not in self._unwanted:
                self._post(message(lease, {"do": "refused", "error": error_header(error)}))
            return
        sandbox = made.sandbox
        assert isinstance(sandbox, ExecutorSandbox)
        self._held[lease] = _Held(made, sandbox)
        if lease in self._unwanted:
            return
        facts = {"workdir": sandbox.workdir, "python": sandbox.python, "home": sandbox.home, "sandbox": sandbox.id}
        powers = [isinstance(sandbox, SupportsCheckpoint), isinstance(sandbox, SupportsRestore)]
        shared = sandbox.shared_network != "none"
        self._post(message(lease, {"do": "acquired", **facts, "powers": powers, "shared": shared}))

    def _room(self) -> int:
        """Sandboxes that may be idle: never are there more than slots."""
        return self._slots - len({*self._held, *self._making, *self._returning})

    async def _next_part(self, lease: bytes) -> tuple[bytes, bool]:
        """Of the image that the run of a lease has."""
        wanted = self._wanted[lease] = asyncio.get_running_loop().create_future()
        try:
            self._post(message(lease, {"bring": True}))
            async with asyncio.timeout(PATIENCE):
                header, data = await wanted
        except TimeoutError:
            raise BackendError("the run does not send its image") from None
        finally:
            del self._wanted[lease]
        if header["brought"] is not None:
            raise raised(header["brought"])
        return data, bool(header["last"])

    async def _sandbox(self, lease: bytes, header: Mapping[str, Any]) -> Lease:
        spec = filled(spec_of(header["spec"]), self._defaults)
        if not header.get("beside"):
            if spec.image is not None and self._backend.name in ROOTS:
                spec = replace(spec, image=await self._roots.have(spec.image, partial(self._next_part, lease)))
            await self._warm.make_room(spec, self._room())
            made = await self._warm.lease(spec)
        else:
            parent = self._held.get(bytes.fromhex(header["beside"]))
            checkpoint = parent.checkpoints.get(header["checkpoint"]) if parent is not None else None
            if parent is None or checkpoint is None or not isinstance(parent.sandbox, SupportsCheckpoint):
                raise BackendError("its parent has no such checkpoint: it is closed, or the checkpoint is given up")
            await self._warm.make_room(None, self._room())
            child = await parent.sandbox.fork(checkpoint, labels=spec.labels)
            made = Lease(child, child.close, lifetime=spec.lifetime)
        if not isinstance(made.sandbox, ExecutorSandbox):
            await made.release()
            raise BackendUnavailable(f"backend {self._backend.name!r} has another executor, which a pool cannot serve")
        return made

    async def _give_back(self, lease: bytes) -> None:
        error = await self._release(lease)
        self._post(message(lease, {"do": "released", **({} if error is None else {"error_left": error})}))

    async def _release(self, lease: bytes) -> str | None:
        """Why the sandbox of a lease could not be removed; None if it was."""
        held = self._held.pop(lease, None)
        if held is None:
            return None
        try:
            await finish(_given_back(held))  # also if the connection breaks meanwhile
        except Exception as error:
            _LOG.warning("%s could not be given back: %s", held.sandbox.id, error)
            return str(error)
        return None

    def _ends_if_idle(self) -> None:
        busy = self._held or self._making or self._returning or not self._drained
        if self._draining.is_set() and not busy and self._stream is not None:
            self._stream.close()

    async def _answer(self, lease: bytes, held: _Held, header: Mapping[str, Any], payload: bytes) -> None:
        number = header["id"]
        try:
            if "op" in header:
                options = {"patience": header["patience"], "room": header["room"], **header["fields"]}
                answer, data = await held.sandbox._connection.request(header["op"], payload, **options)
                # An executor must not choose what is said to the pool, or to another request.
                answer = {**{key: value for key, value in answer.items() if key != "do"}, "id": number}
            else:
                answer, data = {"id": number, **await _whole(held, header)}, b""
        except Exception as error:
            answer, data = {"id": number, "error": error_header(error)}, b""
            if held.sandbox._connection.lost is not None:
                answer["lost"] = held.sandbox._connection.lost
        try:
            self._post(message(lease, answer, data))
        except ValueError as error:
            self._post(message(lease, {"id": number, "error": error_header(BackendError(str(error)))}))


async def _given_back(held: _Held) -> None:
    await cancel_all([*held.calls.values()])
    await held.lease.release()


async def _whole(held: _Held, header: Mapping[str, Any]) -> dict[str, Any]:
    """Do something to the sandbox as a whole."""
    sandbox, kind = held.sandbox, header["whole"]
    if kind == "checkpoint" and isinstance(sandbox, SupportsCheckpoint):
        taken = await sandbox.checkpoint(running=header["running"])
        number = max(held.checkpoints, default=0) + 1
        held.checkpoints[number] = taken
        return {"number": number, "sandbox": taken.sandbox, "cwd": taken.cwd, "left_out": list(taken.left_out)}
    if kind == "restore" and isinstance(sandbox, SupportsRestore):
        await sandbox.restore(held.checkpoints[header["number"]])
        return {}
    raise BackendUnavailable(f"{sandbox.id}: the worker's backend cannot do that ({kind})")


def _gone() -> dict[str, Any]:
    return {"kind": "SandboxLost", "message": "its lease is over"}


def filled(spec: SandboxSpec, defaults: SandboxSpec) -> SandboxSpec:
    """`spec` with the values of `defaults` for what it leaves open."""
    names = ("image", "workdir", "cpus", "memory_bytes", "pids", "disk_bytes", "wall_time")
    more = {name: getattr(defaults, name) for name in names if getattr(spec, name) is None}
    return replace(spec, **more, env={**defaults.env, **spec.env})


def drained_by_signals(drain: Callable[[], None]) -> None:
    """SIGTERM and Ctrl-C drain: what runs is finished first, as far as whoever sent it waits."""
    loop = asyncio.get_running_loop()
    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, drain)
