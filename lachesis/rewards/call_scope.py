"""Tracks the calls of a context during one call of the environment, for example of a reward.

Every call that was handed out is noted, and struck off at its end. One that is left when the environment's code returns
is an error: without its result, the score would be wrong.
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
from typing import Any, NoReturn, TypeVar
from weakref import WeakKeyDictionary

from backends import BackendError
from backends.tasks import seen
from lachesis.rewards.agent_fault import AgentFault, agent_faults
from lachesis.rewards.overtime import OwnWork
from lachesis.rewards.reward import RewardError
from lachesis.rewards.watching import Watch

T = TypeVar("T")
log = logging.getLogger(__name__)
Runs = Callable[[Coroutine[Any, Any, Any]], Coroutine[Any, Any, Any]]
"""Gives a coroutine in the form in which it can make the calls of a class of contexts."""


def as_it_is(coroutine: Coroutine[Any, Any, T]) -> Coroutine[Any, Any, T]:
    return coroutine


class RewardIsOver(RuntimeError):
    """A reward that has ended, ran out of time, or whose rollout was cancelled, still uses its context."""


class NotAwaited(RewardError, AttributeError):
    """A call is used as if it were its result. It is an `AttributeError` too, so that `hasattr` has an answer."""


class _Task(asyncio.Task[Any]):
    """A task of a scope. Knows whether anybody took its error, or waited for it up to a limit."""

    taken = False
    given_up = False
    """`asyncio.wait` and its like remove their callback where they wait no longer; the task itself goes on."""

    def remove_done_callback(self, *args: Any, **options: Any) -> int:
        self.given_up = True
        return super().remove_done_callback(*args, **options)

    def __await__(self) -> Generator[Any, Any, Any]:
        self.taken = True
        return super().__await__()

    def result(self) -> Any:
        self.taken = True
        return super().result()

    def exception(self) -> BaseException | None:
        self.taken = True
        return super().exception()

    def lost(self) -> BaseException | None:
        """The error that it ended with and that nobody took."""
        return super().exception() if self.done() and not self.cancelled() and not self.taken else None


@dataclass(eq=False, slots=True)
class _Open:
    """A call up to its end."""

    what: str
    """The method, the file and the line."""
    begun: bool = False
    task: asyncio.Task[Any] | None = None

    def problem(self, *, broken_off: bool) -> str | None:
        """What is wrong with it at the end of its scope.

        What the agent does must not decide whether there is a score: a call that it keeps from ending is no mistake of
        the environment where that waited for it, or went on after another call had failed (`broken_off`).
        """
        if self.task is not None and self.task.cancelling():
            return None
        if self.begun:
            if broken_off or getattr(self.task, "given_up", False):
                return None
            return f"{self.what} was still running, so its result is lost; await it, or cancel it"
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

    def __getattr__(self, name: str) -> NoReturn:
        if name.startswith("_"):  # what Python itself asks for
            raise AttributeError(name)
        self._not_awaited()

    def _not_awaited(self, *_: Any) -> NoReturn:
        raise NotAwaited(f"{self._open.what} gives its result to `await` only; write `await` before it")

    __getitem__ = __contains__ = __iter__ = __len__ = __bool__ = __int__ = __float__ = _not_awaited

    def runs_in(self, task: asyncio.Task[Any]) -> None:
        self._open.task = task

    def _begin(self) -> Coroutine[Any, Any, T]:
        if self._coroutine is None:
            self._open.begun, self._open.task = True, asyncio.current_task()
            self._coroutine = self._run() if self._scope is not None else self._make()
        return self._coroutine

    async def _run(self) -> T:
        try:
            result = await self._make()
        except GeneratorExit:  # it was thrown away in the middle, which is no end
            raise
        except BaseException as error:
            if self._scope is not None:
                self._scope.broken_off |= isinstance(error, Exception)
                if isinstance(task := asyncio.current_task(), _Task):
                    self._scope.failed.add(task)
            self._drop()
            raise
        self._drop()
        return result

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
            log.error("%s", self._open.problem(broken_off=False))


@dataclass(eq=False, slots=True)
class CallScope:
    """The results of a `ToolContext`'s calls in one call of the environment."""

    name: str
    """The environment and its method, for messages."""
    watch: Watch | None = None
    """Notes which statements are passed."""
    plain: bool = False
    """Whether the method is a plain `def`. No call can be awaited there, so all raise what awaited ones raise."""
    runs: Runs = as_it_is
    """How its coroutines run; the class of the context says so."""
    work: OwnWork = field(default_factory=OwnWork)
    calls: set[_Open] = field(default_factory=set)
    """Those that have not ended."""
    failure: BackendError | None = None
    """The first failure of the infrastructure that a call met."""
    stuck: RewardError | None = None
    """Its event loop waits for a thread that waits for it."""
    over: bool = False
    waiting: set[futures.Future[Any]] = field(default_factory=set)
    """Calls for which threads wait."""
    broken_off: bool = False
    """Whether a call failed: `gather` then returns while others go on."""
    failed: set[_Task] = field(default_factory=set)
    """Those in which a call raised an error. Kept, since nobody else may."""
    faults: list[AgentFault] = field(default_factory=list)
    """Faults of the agent in tasks of which nobody took the error."""
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
        for call in self.calls:
            if call.task is not None:  # it is told below, or no matter; its sandbox ends under it
                call.task.add_done_callback(seen)
        self._left = [problem for call in self.calls if (problem := call.problem(broken_off=self.broken_off))]
        for task in self.failed:
            if (lost := task.lost()) is not None:
                found = agent_faults(lost)
                self.faults += found
                told = (
                    f"the task {task.get_coro()} ended with {lost!r}, and the error was never retrieved; await the task"
                )
                self._left += [] if found else [told]
        self.failed.clear()
        for future in tuple(self.waiting):
            future.cancel()

    def wrapped(self, coroutine: Coroutine[Any, Any, T]) -> Coroutine[Any, Any, T]:
        """A coroutine of the environment as it runs in this scope: watched, and its work counted."""
        watched = coroutine if self.watch is None else self.watch.over(coroutine)
        return self.work.over(self.runs(watched))

    def met(self, error: BaseException) -> None:
        """A call raised `error`."""
        if isinstance(error, BackendError):
            self.failure = self.failure or error

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
    """Let tasks that are started in a scope run as its coroutines do."""
    loop_threads[loop] = threading.get_ident()
    before: Any = loop.get_task_factory()
    if getattr(before, "knows_scopes", False):
        return

    eager = getattr(asyncio, "eager_task_factory", _prepare)  # Python 3.12

    def factory(loop: asyncio.AbstractEventLoop, coroutine: Any, **options: Any) -> Any:
        context = options.get("context")
        scope = _scope.get() if context is None else context.get(_scope)
        inside = scope is not None and not scope.over
        if scope is not None and inside and isinstance(coroutine, CoroutineType):
            coroutine = scope.wrapped(coroutine)
        if inside and before is eager:
            options["eager_start"] = True
        elif before is not None:
            return before(loop, coroutine, **options)
        task = (_Task if inside else asyncio.Task)(coroutine, loop=loop, **options)
        if isinstance(coroutine, ScopedCall):
            coroutine.runs_in(task)
        return task

    factory.knows_scopes = True  # type: ignore[attr-defined]
    loop.set_task_factory(factory)
