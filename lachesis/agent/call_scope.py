"""Tracks the calls of a context during one call of the environment, for example of a reward.

A call that was handed out to be awaited and never was is an error at its end: without its result, the score would be
wrong.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import threading
from collections.abc import Callable, Coroutine, Generator, Iterator
from concurrent import futures
from contextvars import ContextVar
from dataclasses import dataclass, field
from types import CoroutineType
from typing import Any, TypeVar
from weakref import WeakKeyDictionary, WeakSet

from backends import BackendError
from lachesis.agent.agent_fault import AgentFault, agent_faults
from lachesis.agent.blocked_loop import BlockedLoop
from lachesis.agent.driven import Driven
from lachesis.agent.overtime import OwnWork
from lachesis.agent.reward import RewardError
from lachesis.agent.watching import Watch
from lachesis.ours import is_ours

T = TypeVar("T")
log = logging.getLogger(__name__)


class RewardIsOver(RuntimeError):
    """A reward that has ended, ran out of time, or whose rollout was cancelled, still uses its context."""


class _Task(asyncio.Task[Any]):
    """A task of a scope. Knows whether anybody ever waited for it."""

    uses_context = False
    _waited_for = False
    _outer: Callable[..., Any] | None = None
    """The callback by which `gather` or `shield` hands a result on, perhaps to nobody."""

    @property
    def forgotten(self) -> bool:
        """Whether nobody waited for its end, or took its error."""
        waiting: Any = self
        if self._outer is not None:
            names = self._outer.__code__.co_freevars
            waiting = (self._outer.__closure__ or ())[names.index("outer")].cell_contents
            if waiting._callbacks:
                return False
        if self._waited_for or self.cancelling():
            return False
        return waiting._log_traceback if waiting.done() else True

    def add_done_callback(self, callback: Any, **options: Any) -> None:
        function = getattr(callback, "func", callback)  # `await`, `wait`, a group of tasks: all of them come here
        module = getattr(function, "__module__", None) or type(getattr(function, "__self__", None)).__module__
        if "outer" in getattr(getattr(function, "__code__", None), "co_freevars", ()) and module == "asyncio.tasks":
            self._outer = function
        elif module.partition(".")[0] in ("asyncio", "_asyncio") or is_ours(module):
            self._waited_for = True
        super().add_done_callback(callback, **options)

    def problem(self) -> str:
        if self.done():
            return (
                f"the task {self.get_coro()} ended with {self.exception()!r}, and nobody waited for it; await the task"
            )
        return (
            f"the task {self.get_coro()}, which uses the context, was still running, and nobody waited for it; await "
            "the task, or cancel it"
        )


@dataclass(eq=False, slots=True)
class _Open:
    """A call that is to be awaited, up to its end."""

    what: str
    """The method, the file and the line."""
    begun: bool = False
    task: asyncio.Task[Any] | None = None

    def problem(self) -> str | None:
        if self.begun or isinstance(self.task, _Task):
            return None
        return f"{self.what} was never awaited, so it did not run; write `await` before it"


class ScopedCall(Coroutine[Any, Any, T]):
    """A call that was handed out to be awaited. It begins when it is."""

    __slots__ = ("_coroutine", "_make", "_open", "_scope")

    def __init__(self, make: Callable[[], Coroutine[Any, Any, T]], what: str, scope: CallScope | None) -> None:
        self._make = make
        self._coroutine: Coroutine[Any, Any, T] | None = None
        self._open = _Open(what)
        self._scope = scope
        if scope is not None:
            scope.calls.add(self._open)

    def __repr__(self) -> str:
        return self._open.what

    def runs_in(self, task: _Task) -> None:
        task.uses_context = True
        self._open.task = task

    def _begin(self) -> Coroutine[Any, Any, T]:
        if self._coroutine is None:
            self._open.begun = True
            self._coroutine = self._run() if self._scope is not None else self._make()
        return self._coroutine

    async def _run(self) -> T:
        try:
            return await self._make()
        finally:
            self._drop()

    def _drop(self) -> None:
        self._open.begun = True
        if self._scope is not None:
            self._scope.calls.discard(self._open)

    def __await__(self) -> Generator[Any, Any, T]:
        return self._begin().__await__()

    def send(self, value: Any) -> Any:
        return self._begin().send(value)

    def throw(self, *error: Any) -> Any:
        self._drop()  # a task that is cancelled before it begins
        return self._begin().throw(*error)

    def close(self) -> None:
        self._drop()
        if self._coroutine is not None:
            self._coroutine.close()

    def __del__(self) -> None:
        if self._scope is None and not self._open.begun:
            log.error("%s", self._open.problem())


@dataclass(eq=False, slots=True)
class CallScope:
    """The results of a `ToolContext`'s calls in one call of the environment."""

    name: str
    """The environment and its method, for messages."""
    watch: Watch | None = None
    """Notes which statements are passed."""
    plain: bool = False
    """Whether the method is a plain `def`. No call can be awaited there, so all raise what awaited ones raise."""
    work: OwnWork = field(default_factory=OwnWork)
    calls: set[_Open] = field(default_factory=set)
    failure: BackendError | None = None
    """The first failure of the infrastructure that a call met."""
    stuck: BlockedLoop | None = None
    over: bool = False
    waiting: set[futures.Future[Any]] = field(default_factory=set)
    """Calls for which threads wait."""
    contexts: WeakSet[Any] = field(default_factory=WeakSet)
    tasks: WeakSet[_Task] = field(default_factory=WeakSet)
    """Those that began inside."""
    failed: set[_Task] = field(default_factory=set)
    """Those in which a call raised an error. Kept, since nobody else may."""
    faults: list[AgentFault] = field(default_factory=list)
    """Faults of the agent in tasks that nobody waited for."""
    _left: list[str] = field(default_factory=list)

    def __post_init__(self) -> None:
        if self.watch is not None:
            self.watch.work = self.work

    @contextlib.contextmanager
    def entered(self) -> Iterator[None]:
        """The scope of the code inside, of the tasks that it starts and the threads that copy its context."""
        _prepare(asyncio.get_running_loop())
        token = _scope.set(self)
        _entered.add(self)
        try:
            yield
        finally:
            _entered.discard(self)
            self.end()
            _scope.reset(token)

    def end(self) -> None:
        """Every later call is `RewardIsOver`, and so are those that threads wait for: the threads then end."""
        self.over = True
        self._left = [problem for call in self.calls if (problem := call.problem()) is not None]
        for task in {*self.tasks, *self.failed}:
            if task.forgotten and (task.uses_context or self._has_context(task)):
                faults = agent_faults(task.exception()) if task.done() and not task.cancelled() else []
                self.faults += faults
                self._left += [] if faults else [task.problem()]
        self.failed.clear()
        for future in tuple(self.waiting):
            future.cancel()

    def _has_context(self, task: _Task) -> bool:
        """Whether it would use the context: a variable of its coroutine holds it, or an attribute of one does."""
        frame = getattr(task.get_coro(), "cr_frame", None)
        if frame is None:
            return False
        variables = list(frame.f_locals.values())
        reachable = [*variables, *(value for each in variables for value in getattr(each, "__dict__", {}).values())]
        return any(value is context for value in reachable for context in self.contexts)

    def used(self) -> None:
        """A call begins in this task."""
        if isinstance(task := asyncio.current_task(), _Task):
            task.uses_context = True

    def met(self, error: BaseException) -> None:
        """A call in this task raised `error`."""
        if isinstance(error, BackendError):
            self.failure = self.failure or error
        if isinstance(task := asyncio.current_task(), _Task):
            self.failed.add(task)

    def problem(self) -> RewardError | None:
        """What, at its end, keeps the result of the environment's code from being one."""
        if self.stuck is not None:
            return self.stuck
        return RewardError(f"{self.name}: " + "; ".join(sorted(self._left))) if self._left else None


_scope: ContextVar[CallScope | None] = ContextVar("call_scope", default=None)
loop_threads: WeakKeyDictionary[asyncio.AbstractEventLoop, int] = WeakKeyDictionary()
"""The thread of each event loop that had a scope."""


_entered: set[CallScope] = set()


def current_scope() -> CallScope | None:
    return _scope.get()


def scopes_of_a_thread() -> tuple[CallScope, ...]:
    """What a call in a thread may belong to of which nothing is known."""
    return tuple(_entered)


class outside_scopes:
    """What our own code inside starts belongs to no scope."""

    __slots__ = ("_token",)

    def __enter__(self) -> None:
        self._token = _scope.set(None)

    def __exit__(self, *error: object) -> None:
        try:  # noqa: SIM105  # this is in the way of every call
            _scope.reset(self._token)
        except ValueError:  # a coroutine that is thrown away may end anywhere
            pass


def _prepare(loop: asyncio.AbstractEventLoop) -> None:
    """Let tasks that are started in a scope be driven too."""
    loop_threads[loop] = threading.get_ident()
    before: Any = loop.get_task_factory()
    if getattr(before, "drives", False):
        return
    eager = getattr(asyncio, "eager_task_factory", _prepare)  # Python 3.12

    def factory(loop: asyncio.AbstractEventLoop, coroutine: Any, **options: Any) -> Any:
        context = options.get("context")
        scope = _scope.get() if context is None else context.get(_scope)
        inside = scope is not None and not scope.over
        if inside and isinstance(coroutine, CoroutineType):
            watch = scope.watch if scope is not None else None
            coroutine = Driven(coroutine if watch is None else watch.over(coroutine), scope.work if scope else None)
        if inside and before is eager:
            options["eager_start"] = True
        elif before is not None:
            return before(loop, coroutine, **options)
        if scope is None or not inside:
            return asyncio.Task(coroutine, loop=loop, **options)
        task = _Task(coroutine, loop=loop, **options)
        scope.tasks.add(task)
        if isinstance(coroutine, ScopedCall):
            coroutine.runs_in(task)
        return task

    factory.drives = True  # type: ignore[attr-defined]
    loop.set_task_factory(factory)
