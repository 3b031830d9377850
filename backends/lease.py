"""The right of one rollout to use one sandbox, which ends: released, cancelled or run out, it never works again.

Whoever holds a lease works through `Lease.sandbox`, which asks the lease before every call. A call that comes late,
from a task that somebody forgot, is refused; one that is under way when the lease ends is cut off first. So it can
never run in whatever the sandbox, or its place in a pool, is used for next.
"""

from __future__ import annotations

import asyncio
import itertools
import os
from collections.abc import AsyncIterable, AsyncIterator, Awaitable, Callable, Coroutine, Mapping
from typing import Any, Literal, Protocol, TypeVar, runtime_checkable

from .base import (
    MAX_OUTPUT,
    Backend,
    ExecResult,
    OutputChunk,
    Process,
    ProcessStatus,
    Sandbox,
    SandboxLost,
    SandboxSpec,
    SupportsPty,
    SupportsSnapshot,
)
from .tasks import has_failed

T = TypeVar("T")

_tokens = itertools.count(1)


class LeaseOver(SandboxLost):
    """A call through a lease that was released: the rollout it belonged to is over."""


class Lease:
    """One rollout's hold on one sandbox, from now until `release`, or until its lifetime is over."""

    def __init__(self, sandbox: Sandbox, give_back: Callable[[], Awaitable[None]], *, lifetime: float) -> None:
        """`give_back` is called once, when nothing that came through the lease is running any more."""
        self.token = next(_tokens)
        """Fencing token: of two leases in one process, the later one has the higher number."""
        self.sandbox: Sandbox = _face(self, sandbox)
        """The sandbox, for as long as the lease holds. Its `close` releases the lease."""
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
        """The result of `call`, which is cut off when the lease ends."""
        try:
            self.require()
        except BaseException:
            call.close()
            raise
        task = asyncio.ensure_future(call)
        self._calls.add(task)
        try:
            return await task
        except asyncio.CancelledError:
            if self._over and task.cancelled() and not _asked_to_stop():
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


def _asked_to_stop() -> bool:
    task = asyncio.current_task()
    return task is not None and task.cancelling() > 0


@runtime_checkable
class Lessor(Protocol):
    """Where leases come from: a backend that makes a sandbox for each, or a pool that has some ready."""

    async def lease(self, spec: SandboxSpec) -> Lease:
        """
        Raises:
            BackendUnavailable: this machine cannot give one.
            BackendError: it failed this time.
        """
        ...


class SandboxPerLease:
    """A new sandbox for every lease, removed when the lease is released."""

    def __init__(self, backend: Backend) -> None:
        self.backend = backend

    async def lease(self, spec: SandboxSpec) -> Lease:
        sandbox = await self.backend.create(spec)
        return Lease(sandbox, sandbox.close, lifetime=spec.lifetime)


class LeasedProcess:
    """A `Process` for as long as the lease holds."""

    def __init__(self, lease: Lease, process: Process) -> None:
        self._lease, self._process = lease, process

    def __repr__(self) -> str:
        return repr(self._process)

    @property
    def id(self) -> str:
        return self._process.id

    @property
    def command(self) -> str:
        return self._process.command

    async def status(self) -> ProcessStatus:
        return await self._lease.run(self._process.status())

    async def read(self, offset: int = 0, *, wait: float = 0.0, limit: int = 65_536) -> OutputChunk:
        return await self._lease.run(self._process.read(offset, wait=wait, limit=limit))

    async def write(self, data: bytes) -> None:
        await self._lease.run(self._process.write(data))

    async def close_stdin(self) -> None:
        await self._lease.run(self._process.close_stdin())

    async def kill(self) -> None:
        await self._lease.run(self._process.kill())


class LeasedSandbox:
    """A `Sandbox` for as long as the lease holds."""

    def __init__(self, lease: Lease, sandbox: Sandbox) -> None:
        self._lease, self._sandbox = lease, sandbox

    def __repr__(self) -> str:
        return f"<{type(self).__name__} {self._sandbox!r} of {self._lease!r}>"

    @property
    def id(self) -> str:
        return self._sandbox.id

    @property
    def workdir(self) -> str:
        return self._sandbox.workdir

    @property
    def python(self) -> str | None:
        return self._sandbox.python

    async def exec(
        self,
        command: str,
        *,
        timeout: float,
        cwd: str | None = None,
        env: Mapping[str, str] | None = None,
        stdin: bytes | None = None,
        max_output: int = MAX_OUTPUT,
        fresh: bool = False,
    ) -> ExecResult:
        return await self._lease.run(
            self._sandbox.exec(
                command, timeout=timeout, cwd=cwd, env=env, stdin=stdin, max_output=max_output, fresh=fresh
            )
        )

    async def read_output(
        self, result: ExecResult, stream: Literal["stdout", "stderr"] = "stdout", *, offset: int = 0, limit: int
    ) -> bytes:
        return await self._lease.run(self._sandbox.read_output(result, stream, offset=offset, limit=limit))

    async def start(self, command: str, *, cwd: str | None = None, env: Mapping[str, str] | None = None) -> Process:
        return LeasedProcess(self._lease, await self._lease.run(self._sandbox.start(command, cwd=cwd, env=env)))

    async def processes(self) -> list[Process]:
        return [LeasedProcess(self._lease, process) for process in await self._lease.run(self._sandbox.processes())]

    async def stop_processes(self) -> None:
        await self._lease.run(self._sandbox.stop_processes())

    async def read_bytes(self, path: str, *, offset: int = 0, limit: int | None = None) -> bytes:
        return await self._lease.run(self._sandbox.read_bytes(path, offset=offset, limit=limit))

    async def write_bytes(self, path: str, data: bytes) -> None:
        await self._lease.run(self._sandbox.write_bytes(path, data))

    async def read_chunks(self, path: str) -> AsyncIterator[bytes]:
        chunks = self._sandbox.read_chunks(path)
        while (chunk := await self._lease.run(_next(chunks))) is not None:
            yield chunk

    async def write_chunks(self, path: str, chunks: AsyncIterable[bytes]) -> None:
        await self._lease.run(self._sandbox.write_chunks(path, chunks))

    async def upload_dir(self, local: str | os.PathLike[str], remote: str) -> None:
        await self._lease.run(self._sandbox.upload_dir(local, remote))

    async def download_dir(self, remote: str, local: str | os.PathLike[str], *, max_bytes: int | None = None) -> None:
        await self._lease.run(self._sandbox.download_dir(remote, local, max_bytes=max_bytes))

    async def close(self) -> None:
        await self._lease.release()


class _WithPty(LeasedSandbox):
    async def open_pty(
        self,
        command: str,
        *,
        rows: int = 24,
        columns: int = 80,
        cwd: str | None = None,
        env: Mapping[str, str] | None = None,
    ) -> Process:
        assert isinstance(self._sandbox, SupportsPty)
        opened = self._sandbox.open_pty(command, rows=rows, columns=columns, cwd=cwd, env=env)
        return LeasedProcess(self._lease, await self._lease.run(_coroutine(opened)))


class _WithSnapshot(LeasedSandbox):
    async def snapshot(self) -> str:
        assert isinstance(self._sandbox, SupportsSnapshot)
        return await self._lease.run(_coroutine(self._sandbox.snapshot()))


class _WithBoth(_WithPty, _WithSnapshot):
    pass


def _face(lease: Lease, sandbox: Sandbox) -> Sandbox:
    """With the optional powers that the sandbox has, and no others: they are asked for by `isinstance`."""
    kinds = {
        (True, True): _WithBoth,
        (True, False): _WithPty,
        (False, True): _WithSnapshot,
        (False, False): LeasedSandbox,
    }
    return kinds[isinstance(sandbox, SupportsPty), isinstance(sandbox, SupportsSnapshot)](lease, sandbox)


async def _next(chunks: AsyncIterator[bytes]) -> bytes | None:
    return await anext(chunks, None)


async def _coroutine(call: Awaitable[T]) -> T:
    return await call
