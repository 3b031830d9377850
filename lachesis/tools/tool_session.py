"""What the tools of one rollout hold: its sandbox, made on first use, and whatever state they keep between calls.

Two sessions share nothing. A session is closed once, with everything in it; a closed one answers nothing but that.
"""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import posixpath
import shlex
import uuid
from collections.abc import Awaitable, Callable, Iterator
from types import TracebackType
from typing import Any, TypeVar

from backends.base import Backend, BackendError, Sandbox, SandboxSpec
from backends.lease import Lessor, SandboxPerLease
from lachesis.errors import LachesisError

DEFAULT_TERMINAL_TIMEOUT = 120.0
"""Seconds that a command may take unless the call says otherwise."""

State = TypeVar("State")


class SessionClosed(LachesisError, RuntimeError):
    """The rollout that the session belonged to is over."""


class ToolSession:
    """The tools' side of one rollout."""

    def __init__(
        self,
        task_id: str,
        create: Callable[[], Awaitable[Sandbox]],
        *,
        terminal_timeout: float = DEFAULT_TERMINAL_TIMEOUT,
        workdir: str | None = None,
    ) -> None:
        """
        Args:
            task_id: Names the rollout.
            create: Makes the sandbox. Called at most once at a time, and again only if it failed.
            terminal_timeout: Seconds that a command may take unless the call says otherwise.
            workdir: Where the shell and relative paths start; made if missing. By default the sandbox's own.
        """
        self.task_id = task_id
        self.terminal_timeout = terminal_timeout
        self.internal_processes: set[str] = set()
        """Ids of background processes that are the tools' own and no business of the model's."""
        self.start_ended = float("-inf")
        """When the last attempt to make the sandbox ended, on the event loop's clock. Limits of tools count from it."""
        self._create = create
        self._workdir = workdir
        self._home: str | None = None
        self._starting: asyncio.Task[Sandbox] | None = None
        self._closing: asyncio.Task[None] | None = None
        self._state: dict[type[Any], Any] = {}

    @property
    def closed(self) -> bool:
        return self._closing is not None

    @property
    def started(self) -> bool:
        """Whether there is a sandbox: nothing in it can have changed before."""
        task = self._starting
        return task is not None and task.done() and not task.cancelled() and task.exception() is None

    def require_open(self) -> None:
        """Raises `SessionClosed` after `close`."""
        if self.closed:
            raise SessionClosed(f"the session of task {self.task_id!r} is closed")

    async def sandbox(self) -> Sandbox:
        """The rollout's sandbox, made now if this is the first use.

        Raises:
            SessionClosed: after `close`.
            BackendError: it cannot be made; the next call tries again.
        """
        self.require_open()
        failed = self._starting is not None and self._starting.done() and not self.started
        if self._starting is None or failed:
            self._starting = asyncio.create_task(self._start(), name=f"sandbox of {self.task_id}")
        try:
            # Shielded: a caller that is cancelled must not take the sandbox from the others that wait for it.
            sandbox = await asyncio.shield(self._starting)
        except asyncio.CancelledError:
            if self._starting.cancelled():
                self.require_open()
            raise
        self.require_open()
        return sandbox

    async def wait_start_ended(self) -> None:
        """Wait while the sandbox is being made, whatever comes of it."""
        if self._starting is not None:
            await asyncio.wait({self._starting})

    async def _start(self) -> Sandbox:
        try:
            return await self._make()
        finally:
            self.start_ended = asyncio.get_running_loop().time()

    async def _make(self) -> Sandbox:
        try:
            sandbox = await self._create()
        except OSError as error:  # of this machine: for a tool's own, the model would be told, and trained on it
            raise BackendError(f"the sandbox of task {self.task_id!r} cannot be made: {error}") from error
        if self._workdir is None:
            return sandbox
        try:
            where = shlex.quote(posixpath.join(sandbox.workdir, self._workdir))
            entered = await sandbox.exec(f"mkdir -p -- {where} && cd -- {where}", timeout=30)
            if entered.exit_code != 0:
                reason = entered.stderr.decode(errors="replace").strip()
                raise BackendError(f"task {self.task_id!r}: the working folder {where} cannot be used: {reason}")
        except BaseException:
            await sandbox.close()
            raise
        return sandbox

    async def path(self, path: str) -> str:
        """`path` as an absolute path in the sandbox. A relative one starts at the session's working folder.

        `~` and `~/...` mean the home folder, as in the shell: nobody who writes them means a folder called `~`.
        """
        sandbox = await self.sandbox()
        if "\0" in path:
            raise ValueError("a path cannot contain a NUL character")
        if path == "~" or path.startswith("~/"):
            if self._home is None:
                told = await sandbox.exec('printf %s "$HOME"', timeout=30, fresh=True)  # not what the agent exported
                self._home = told.stdout.decode()
            path = self._home + path[1:]
        base = posixpath.join(sandbox.workdir, self._workdir or "")
        return posixpath.normpath(posixpath.join(base, path))

    def state(self, kind: type[State]) -> State:
        """This session's one instance of `kind`, made without arguments on first use: where a tool keeps its memory."""
        self.require_open()
        if kind not in self._state:
            self._state[kind] = kind()
        found: State = self._state[kind]
        return found

    async def close(self) -> None:
        """Remove the sandbox with all its processes and files. Idempotent; finishes even if the caller is cancelled.

        Raises:
            BackendError: the sandbox could not be removed; calling again tries again.
        """
        failed = (
            self._closing is not None
            and self._closing.done()
            and (self._closing.cancelled() or self._closing.exception() is not None)
        )
        if self._closing is None or failed:
            self._closing = asyncio.create_task(self._close(), name=f"close {self.task_id}")
        await asyncio.shield(self._closing)

    async def _close(self) -> None:
        self._state.clear()
        if self._starting is None:
            return
        self._starting.cancel()  # no effect on one that is ready
        await asyncio.wait({self._starting})
        if self.started:
            await self._starting.result().close()


class ToolSessions:
    """The sessions of a run, by task id. `async with` closes them all at the end."""

    def __init__(
        self,
        backend: Backend | Lessor,
        spec: SandboxSpec | None = None,
        *,
        run_id: str | None = None,
        terminal_timeout: float = DEFAULT_TERMINAL_TIMEOUT,
        workdir: str | None = None,
    ) -> None:
        """`backend` makes a sandbox for every session; a pool leases one that is ready."""
        self.lessor: Lessor = backend if isinstance(backend, Lessor) else SandboxPerLease(backend)
        self.spec = spec or SandboxSpec()
        self.run_id = run_id or uuid.uuid4().hex[:12]
        self._terminal_timeout = terminal_timeout
        self._workdir = workdir
        self._sessions: dict[str, ToolSession] = {}

    def open(self, task_id: str, *, spec: SandboxSpec | None = None) -> ToolSession:
        """A new session. Its sandbox starts when a tool first needs it.

        Args:
            task_id: Not in use by another open session.
            spec: What this rollout's sandbox is to be, if other than the run's.

        Raises:
            ValueError: the task has a session already: two rollouts must never share one.
        """
        if task_id in self._sessions:
            raise ValueError(f"task {task_id!r} has an open session; every rollout needs a task_id of its own")
        wanted = spec or self.spec
        labels = {**wanted.labels, "run_id": self.run_id, "task_id": task_id}
        labelled = dataclasses.replace(wanted, labels=labels)

        async def lease() -> Sandbox:
            return (await self.lessor.lease(labelled)).sandbox

        session = ToolSession(
            task_id,
            lease,
            terminal_timeout=self._terminal_timeout,
            workdir=self._workdir,
        )
        self._sessions[task_id] = session
        return session

    def get(self, task_id: str) -> ToolSession:
        """Raises `KeyError` when there is no open session of that task."""
        if task_id not in self._sessions:
            raise KeyError(f"no open session for task {task_id!r}")
        return self._sessions[task_id]

    async def close(self, task_id: str) -> None:
        """Close one session; a task that has none is no error. Its id may be used again afterwards."""
        session = self._sessions.get(task_id)
        if session is None:
            return
        await session.close()
        # Only now: a session that could not be closed stays listed, so that close_all can try again.
        if self._sessions.get(task_id) is session:
            del self._sessions[task_id]

    async def close_all(self) -> None:
        """Close every session, also those opened meanwhile; the first failure is raised when all were tried."""
        failures: list[BaseException] = []
        tried: set[str] = set()
        while remaining := [task_id for task_id in self._sessions if task_id not in tried]:
            tried.update(remaining)
            results = await asyncio.gather(*(self.close(task_id) for task_id in remaining), return_exceptions=True)
            failures += [result for result in results if isinstance(result, BaseException)]
        if failures:
            raise failures[0]

    def __len__(self) -> int:
        return len(self._sessions)

    def __iter__(self) -> Iterator[str]:
        return iter(tuple(self._sessions))

    async def __aenter__(self) -> ToolSessions:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        if error is None:
            await self.close_all()
            return
        with contextlib.suppress(BackendError):  # the error that brought us here says more
            await self.close_all()
