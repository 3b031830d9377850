"""The right of one rollout to use one sandbox. After the lease has ended, no call through it reaches the sandbox.

A rollout works through `Lease.sandbox`, which asks the lease before every request. A late request, from a task that
nobody awaited, is refused; a request in flight is cancelled before the sandbox is given back. Neither can therefore run
in the next rollout that uses the sandbox.
"""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import Awaitable, Callable, Coroutine
from typing import Any, Protocol, TypeVar, runtime_checkable

from backends.tasks import cancel_requests, has_failed

from .base import Backend, Sandbox
from .errors import SandboxLost
from .spec import SandboxSpec

T = TypeVar("T")

_tokens = itertools.count(1)


class LeaseOver(SandboxLost):
    """A call through a lease that was released: its rollout is over."""


class Lease:
    """One rollout's use of one sandbox, from now until `release` or the end of its lifetime."""

    def __init__(self, sandbox: Sandbox, give_back: Callable[[], Awaitable[None]], *, lifetime: float) -> None:
        """`give_back` is called once, after the last request through the lease has ended."""
        self.token = next(_tokens)
        """Fencing token: of two leases in one process, the later one has the higher number."""
        self.sandbox = sandbox.leased(self)
        """The sandbox, usable until the lease ends. Its `close` releases the lease."""
        self._id = sandbox.id
        self._give_back = give_back
        self._loop = asyncio.get_running_loop()
        self._deadline = self._loop.time() + lifetime
        self._lifetime = lifetime
        self._calls: set[asyncio.Task[Any]] = set()
        self._over = False
        self._release: asyncio.Task[None] | None = None

    def __repr__(self) -> str:
        return f"<Lease {self.token} of {self._id}{' (over)' if self._over else ''}>"

    def require(self) -> None:
        """
        Raises:
            LeaseOver: it was released.
            SandboxLost: its lifetime is over.
        """
        if self._over:
            raise LeaseOver(f"lease {self.token} of sandbox {self._id} is over: its rollout has ended")
        if self._loop.time() >= self._deadline:
            raise SandboxLost(f"sandbox {self._id} is gone: its lifetime of {self._lifetime:g} s is over")

    async def run(self, call: Coroutine[Any, Any, T]) -> T:
        """The result of `call`, which is cancelled when the lease ends. Raises as `require`."""
        try:
            self.require()
        except BaseException:
            call.close()
            raise
        task = asyncio.ensure_future(call)
        self._calls.add(task)
        before = cancel_requests()
        try:
            return await task
        except asyncio.CancelledError:
            if self._over and task.cancelled() and cancel_requests() == before:
                raise LeaseOver(f"lease {self.token} of sandbox {self._id} ended under this call") from None
            raise
        finally:
            self._calls.discard(task)

    async def release(self) -> None:
        """End the lease and give the sandbox back. Idempotent; finishes even if the caller is cancelled.

        Raises:
            BackendError: the sandbox could not be given back; calling again tries again.
        """
        self._over = True
        done = self._release
        if done is None or has_failed(done):
            self._release = asyncio.create_task(self._end(), name=f"release {self._id}")
        assert self._release is not None
        await asyncio.shield(self._release)

    async def _end(self) -> None:
        for task in tuple(self._calls):
            task.cancel()
        if self._calls:
            await asyncio.wait(tuple(self._calls), timeout=10.0)
        await self._give_back()


@runtime_checkable
class Lessor(Protocol):
    """A source of leases: a backend that makes a sandbox for each, or a pool of warm ones."""

    async def lease(self, spec: SandboxSpec) -> Lease:
        """
        Raises:
            BackendUnavailable: this machine cannot provide a sandbox.
            BackendError: it failed this time; trying again may help.
        """
        ...


class SandboxPerLease:
    """A new sandbox for every lease, removed when the lease is released."""

    def __init__(self, backend: Backend) -> None:
        self.backend = backend

    async def lease(self, spec: SandboxSpec) -> Lease:
        sandbox = await self.backend.create(spec)
        return Lease(sandbox, sandbox.close, lifetime=spec.lifetime)
