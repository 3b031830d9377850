"""The session of a rollout's tools: its sandbox, created at first use, and the state of tools between calls.

Two sessions share nothing. Closing a session removes everything in it; afterwards every use raises `SessionClosed`.
"""

from __future__ import annotations

import asyncio
import contextlib
import contextvars
import dataclasses
import posixpath
import uuid
from collections.abc import Awaitable, Callable, Coroutine, Iterator, Mapping
from types import TracebackType
from typing import Any, TypeAlias, TypeVar

from backends.base import (
    Backend,
    Sandbox,
    SandboxCheckpoint,
    SupportsCheckpoint,
    SupportsRestore,
    SupportsWaited,
)
from backends.errors import BackendError, BackendUnavailable, LachesisError
from backends.lease import Lessor, SandboxPerLease
from backends.spec import SandboxSpec

DEFAULT_TERMINAL_TIMEOUT = 120.0
"""The default time limit of a command in seconds."""

State = TypeVar("State")
Waiting: TypeAlias = Callable[[], contextlib.AbstractContextManager[None]]
waiting_of: contextvars.ContextVar[Waiting] = contextvars.ContextVar("waiting_of", default=contextlib.nullcontext)
"""`ToolSession.waiting` of the rollout that this call belongs to."""


def waiting() -> contextlib.AbstractContextManager[None]:
    """Around what is no time of the agent's."""
    return waiting_of.get()()


class SessionClosed(LachesisError, RuntimeError):
    """The rollout of the session has ended."""


class StateNotCopied(LachesisError):
    """A tool keeps something that no other session can go on with."""


class UnusablePath(ValueError):
    """A path of the model that names no file. The model reads the message."""


class ToolSession:
    """The tools' side of one rollout."""

    def __init__(
        self,
        task_id: str,
        create: Callable[[], Awaitable[Sandbox]],
        *,
        terminal_timeout: float = DEFAULT_TERMINAL_TIMEOUT,
        cpus: float | None = None,
    ) -> None:
        """
        Args:
            task_id: The name of the rollout.
            create: Creates the sandbox. It is called once, and again only after a failure.
            terminal_timeout: The default time limit of a command in seconds.
            cpus: CPUs that the sandbox may use; None means no limit.
        """
        self.task_id = task_id
        self.cpus = cpus
        self.terminal_timeout = terminal_timeout
        self.internal_processes: set[str] = set()
        """Ids of background processes of the tools, which the model does not see."""
        self.start_ended = float("-inf")
        """When the last start of the sandbox ended, on the clock of the event loop. Time limits begin then."""
        self.rollout_session: Any = None
        """What the environment's `session(item)` yielded for this rollout."""
        self.session_host: asyncio.Future[None] | None = None
        """The task that keeps it open, and that ends before only where the session broke."""
        self.before_close: list[Callable[[], Awaitable[None]]] = []
        """Called in reverse order when the session is closed, before its sandbox is removed. They raise nothing."""
        self._create = create
        self._start_began: float | None = None
        self._waits, self._waits_began, self._waits_took = 0, 0.0, 0.0
        self._starting_took = 0.0
        self._starting: asyncio.Task[Sandbox] | None = None
        self._closing: asyncio.Task[None] | None = None
        self._state: dict[type[Any], Any] = {}
        self._others: list[ToolSession] = []

    def another(self, create: Callable[[], Awaitable[Sandbox]] | None = None) -> ToolSession:
        """A session like this one, with its own sandbox, from `create` if that is given. Closing this one closes it
        too."""
        self.require_open()
        name = f"{self.task_id}-{len(self._others) + 2}"
        other = ToolSession(name, create or self._create, terminal_timeout=self.terminal_timeout, cpus=self.cpus)
        self._others.append(other)
        return other

    @property
    def closed(self) -> bool:
        return self._closing is not None

    @property
    def started(self) -> bool:
        """Whether there is a sandbox."""
        task = self._starting
        return task is not None and task.done() and not task.cancelled() and task.exception() is None

    def require_open(self) -> None:
        """Raises `SessionClosed` after `close`."""
        if self.closed:
            raise SessionClosed(f"the session of task {self.task_id!r} is closed")

    @property
    def waited(self) -> float:
        """Seconds so far of waiting for the infrastructure: starts of its sandbox, restored connections, and pauses of
        services."""
        waited = self._starting_took + self._waits_took
        if self._waits:
            waited += asyncio.get_running_loop().time() - self._waits_began
        if self._start_began is not None:
            waited += asyncio.get_running_loop().time() - self._start_began
        if self.started and self._starting is not None:
            waited += getattr(self._starting.result(), "interrupted", 0.0)
        return waited

    @contextlib.contextmanager
    def waiting(self) -> Iterator[None]:
        """The time inside is waiting for the infrastructure. Several calls may wait at once."""
        clock = asyncio.get_running_loop().time
        if not self._waits:
            self._waits_began = clock()
        self._waits += 1
        try:
            yield
        finally:
            self._waits -= 1
            if not self._waits:
                self._waits_took += clock() - self._waits_began

    async def waited_for_cpu(self) -> float | None:
        """Seconds so far in which others had the CPUs that its `fresh` commands could have used, including those of
        `another`; None if unknown."""
        waited: float | None = 0.0
        if self.started and self._starting is not None:
            sandbox = self._starting.result()
            waited = await sandbox.waited() if isinstance(sandbox, SupportsWaited) else None
        for other in self._others:
            more = await other.waited_for_cpu()
            waited = None if waited is None or more is None else waited + more
        return waited

    async def sandbox(self) -> Sandbox:
        """The sandbox of the rollout, created at first use.

        Raises:
            SessionClosed: after `close`.
            BackendError: it cannot be created; the next call tries again.
        """
        self.require_open()
        failed = self._starting is not None and self._starting.done() and not self.started
        if self._starting is None or failed:
            self._starting = asyncio.create_task(self._start(), name=f"sandbox of {self.task_id}")
        try:
            # Shielded: a cancelled caller must not cancel the start for other callers.
            sandbox = await asyncio.shield(self._starting)
        except asyncio.CancelledError:
            if self._starting.cancelled():
                self.require_open()
            raise
        self.require_open()
        return sandbox

    async def wait_start_ended(self) -> None:
        """Wait until the start of the sandbox has succeeded or failed."""
        if self._starting is not None:
            await asyncio.wait({self._starting})

    async def _start(self) -> Sandbox:
        self._start_began = began = asyncio.get_running_loop().time()
        try:
            return await self._create()
        except LachesisError:
            raise
        except Exception as error:  # the agent had no part in it, so no tool may report it as a failed call
            what = f"the sandbox of task {self.task_id!r} cannot be created"
            raise BackendError(f"{what}: {type(error).__name__}: {error}") from error
        finally:
            self.start_ended = asyncio.get_running_loop().time()
            self._start_began = None
            self._starting_took += self.start_ended - began

    async def path(self, path: str) -> str:
        """`path` as an absolute path in the sandbox. A relative path starts at the working folder of the sandbox.

        `~` and `~/...` mean the home folder, as in the shell.
        """
        sandbox = await self.sandbox()
        if "\0" in path:
            raise UnusablePath("a path cannot contain a NUL character")
        if path == "~" or path.startswith("~/"):
            path = sandbox.home + path[1:]  # not what the agent's shell says: it may have been replaced
        return posixpath.normpath("/" + posixpath.join(sandbox.workdir, path).lstrip("/"))

    def state(self, kind: type[State]) -> State:
        """The session's instance of `kind`, created without arguments at first use: the state of a tool."""
        self.require_open()
        if kind not in self._state:
            self._state[kind] = kind()
        found: State = self._state[kind]
        return found

    def copied_state(self) -> dict[type[Any], Any]:
        """Copies of the states of the tools, for `put_state` of another session.

        Raises:
            StateNotCopied: a tool has something that cannot be copied, such as a process or a connection.
        """
        for kind in self._state:
            if not hasattr(kind, "copied"):
                raise StateNotCopied(f"the state of a tool ({kind.__name__}) cannot be copied")
        return {kind: state.copied() for kind, state in self._state.items()}

    def put_state(self, state: Mapping[type[Any], Any]) -> None:
        """Go on with states of another session, which are copied once more."""
        self._state |= {kind: each.copied() for kind, each in state.items()}

    async def checkpoint(self) -> SandboxCheckpoint | None:
        """What is in the sandbox now; None if it has not been needed so far.

        Raises:
            ProcessesRunning: something runs.
            BackendUnavailable: the backend makes no checkpoints.
        """
        return None if self._starting is None else await with_checkpoints(await self.sandbox()).checkpoint()

    async def close(self) -> None:
        """Remove the sandbox with its processes and files. Idempotent; completes even if the caller is cancelled.

        Raises:
            BackendError: the sandbox could not be removed; the next call tries again.
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
        while self.before_close:
            await self.before_close.pop()()
        self._state.clear()
        ended = await asyncio.gather(*(other.close() for other in self._others), return_exceptions=True)
        if self._starting is not None:
            self._starting.cancel()  # no effect once it is ready
            await asyncio.wait({self._starting})
            if self.started:
                await self._starting.result().close()
        for error in ended:
            if isinstance(error, BaseException):
                raise error


def with_checkpoints(sandbox: Sandbox) -> SupportsCheckpoint:
    """The same. Raises `BackendUnavailable` if it makes none."""
    if not isinstance(sandbox, SupportsCheckpoint):
        raise BackendUnavailable(
            f"sandbox {sandbox.id}: its backend makes no checkpoints. Next step: use 'local', 'docker' or 'modal'"
        )
    return sandbox


async def _gone_on(sandbox: Sandbox, checkpoint: SandboxCheckpoint, labels: Mapping[str, str]) -> Sandbox:
    """A sandbox that goes on from a checkpoint, this one or another of its backend. This one is closed if not used."""
    try:
        if isinstance(sandbox, SupportsRestore):
            await sandbox.restore(checkpoint)
            return sandbox
        child = await with_checkpoints(sandbox).fork(checkpoint, labels=labels)
    except BaseException:
        await asyncio.shield(sandbox.close())
        raise
    await sandbox.close()
    return child


class ToolSessions:
    """The sessions of a run, by task id. `async with` closes them all at the end."""

    def __init__(
        self,
        backend: Backend | Lessor,
        spec: SandboxSpec | None = None,
        *,
        run_id: str | None = None,
        terminal_timeout: float = DEFAULT_TERMINAL_TIMEOUT,
    ) -> None:
        """`backend` creates a sandbox for every session; a pool leases a ready one."""
        self.lessor: Lessor = backend if isinstance(backend, Lessor) else SandboxPerLease(backend)
        self.spec = spec or SandboxSpec()
        self.run_id = run_id or uuid.uuid4().hex[:12]
        self._terminal_timeout = terminal_timeout
        self._sessions: dict[str, ToolSession] = {}
        self._ending: dict[ToolSession, None] = {}

    def open(
        self, task_id: str, *, spec: SandboxSpec | None = None, checkpoint: SandboxCheckpoint | None = None
    ) -> ToolSession:
        """A new session. Its sandbox starts at first use.

        Args:
            task_id: Unique among open sessions; that of a session which was closed may be used again.
            spec: The specification of this sandbox, if different from that of the run.
            checkpoint: Where its sandbox goes on from: of one with the same specification.

        Raises:
            ValueError: the task has an open session: two rollouts must never share one.
        """
        if (before := self._sessions.get(task_id)) is not None and before.closed:
            self._ending[self._sessions.pop(task_id)] = None
        if task_id in self._sessions:
            raise ValueError(f"task {task_id!r} has an open session; every rollout needs its own task_id")
        wanted = spec or self.spec
        labels = {**wanted.labels, "run_id": self.run_id, "task_id": task_id}
        labelled = dataclasses.replace(wanted, labels=labels)

        async def lease() -> Sandbox:
            sandbox = (await self.lessor.lease(labelled)).sandbox
            return sandbox if checkpoint is None else await _gone_on(sandbox, checkpoint, labels)

        session = ToolSession(task_id, lease, terminal_timeout=self._terminal_timeout, cpus=wanted.cpus)
        self._sessions[task_id] = session
        return session

    def get(self, task_id: str) -> ToolSession:
        """The open session of a task. Raises `KeyError` if there is none."""
        if task_id not in self._sessions:
            raise KeyError(f"no open session for task {task_id!r}")
        return self._sessions[task_id]

    def close(self, task_id: str) -> Coroutine[Any, Any, None]:
        """Close the session of a task, if any. Its id may be used again from this call on, before it is awaited."""
        session = self._sessions.pop(task_id, None)
        if session is not None:
            self._ending[session] = None
        return self._end(session)

    async def _end(self, session: ToolSession | None) -> None:
        if session is not None:
            await session.close()
            self._ending.pop(session, None)  # one that could not be closed stays, so that close_all can try again

    async def close_all(self) -> None:
        """Close every session, also those opened meanwhile, then raise the first failure."""
        failures: list[BaseException] = []
        tried: set[ToolSession] = set()
        while remaining := [session for session in (*self._ending, *self._sessions.values()) if session not in tried]:
            tried.update(remaining)
            self._ending.update(dict.fromkeys(remaining))
            self._sessions.clear()
            results = await asyncio.gather(*map(self._end, remaining), return_exceptions=True)
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
        with contextlib.suppress(BackendError):  # the first error is more useful
            await self.close_all()
