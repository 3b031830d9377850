"""Calls of coroutine functions without `await`, in coroutines and in threads.

The interface of the removed Hermes stack is synchronous, and its environments call it inside `async def`. Such a call
stops a coroutine that runs through `Driven`, and the event loop waits for the result as if the coroutine had awaited
it: everything else goes on meanwhile, and time limits and cancellation reach the coroutine at the call. The coroutine
runs on a greenlet, which can be left in the middle of a plain function; so do the tasks that it starts. In another
thread a call blocks that thread.

`CallScope` holds what happens in one call of the environment, a reward for example. A call that was handed out to be
awaited and never was is an error at its end: without its result, the score would be wrong.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import sys
import threading
from collections.abc import Callable, Coroutine, Generator, Iterator
from concurrent import futures
from contextvars import ContextVar
from dataclasses import dataclass, field
from types import CoroutineType, FrameType
from typing import Any, NoReturn, TypeVar
from weakref import WeakKeyDictionary

from greenlet import getcurrent, greenlet

from backends import BackendError
from lachesis.agent.blocked_loop import BlockedLoop, Watch
from lachesis.agent.call_sites import is_awaited
from lachesis.agent.reward import RewardError

T = TypeVar("T")
log = logging.getLogger(__name__)

_LOOK = 0.25
"""Seconds between looks at whether the event loop can still answer a thread."""


class RewardIsOver(RuntimeError):
    """A reward that has ended, ran out of time, or whose rollout was cancelled, still uses its context."""


class _Runner(greenlet):  # type: ignore[misc]
    """Runs the steps of a coroutine. One for all of them: a new one takes as long as ten steps."""


def _steps(method: Callable[[Any], Any], given: Any) -> NoReturn:
    while True:
        waits_for = method(given)  # an exception is the end, and reaches the parent
        method, given = getcurrent().parent.switch((None, waits_for))


class Driven(Coroutine[Any, Any, T]):
    """A coroutine in which `result_of` may stop.

    `asyncio.current_task()`, context variables and tracebacks are those of the task that awaits it.
    """

    __slots__ = ("__weakref__", "_call", "_caller", "_coroutine", "_runner")

    def __init__(self, coroutine: Coroutine[Any, Any, T]) -> None:
        self._coroutine = coroutine
        self._runner: greenlet | None = None
        self._caller: greenlet | None = None
        """Where the coroutine waits for `_call`: the runner, or a greenlet that the coroutine started itself."""
        self._call: Generator[Any, Any, Any] | None = None

    def __getattr__(self, name: str) -> Any:
        return getattr(self._coroutine, name)  # `cr_frame` and others, for those who print tasks

    def __await__(self) -> Any:
        return self

    def __iter__(self) -> Driven[T]:
        return self

    def __next__(self) -> Any:
        return self.send(None)

    def send(self, value: Any) -> Any:
        return self._step(self._coroutine.send, value) if self._call is None else self._go_on(self._call.send, value)

    def throw(self, kind: Any, value: Any = None, trace: Any = None) -> Any:
        error = kind if isinstance(kind, BaseException) else value if isinstance(value, BaseException) else kind()
        return self._step(self._coroutine.throw, error) if self._call is None else self._go_on(self._call.throw, error)

    def close(self) -> None:
        if self._call is None:
            self._coroutine.close()
            return
        with contextlib.suppress(GeneratorExit, StopIteration):
            self.throw(GeneratorExit())
            raise RuntimeError("the coroutine ignored GeneratorExit")

    def __del__(self) -> None:
        if self._call is not None:  # its frames hold the greenlet that holds them
            self.close()

    def _step(self, method: Callable[[Any], Any], given: Any) -> Any:
        """Run the coroutine until it waits for something."""
        here, runner = getcurrent(), self._runner
        if runner is None:
            runner = self._runner = _Runner(_steps)
        runner.parent = here
        runner.gr_context = here.gr_context  # shared, so that what the coroutine sets stays set
        self._caller, waits_for = runner.switch(method, given)
        if self._caller is None:
            return waits_for
        self._call = waits_for.__await__()
        return self._go_on(self._call.send, None)

    def _go_on(self, method: Callable[[Any], Any], given: Any) -> Any:
        """Run the call at which the coroutine stopped, then the coroutine, until either waits for something."""
        while True:
            try:
                return method(given)
            except StopIteration as stop:
                outcome: Any = stop.value, None
            except BaseException as error:
                outcome = None, error.with_traceback(error.__traceback__.tb_next if error.__traceback__ else None)
            assert self._runner is not None and self._caller is not None
            self._call = None
            self._runner.parent = getcurrent()
            self._caller, waits_for = self._caller.switch(outcome)
            if self._caller is None:
                return waits_for
            self._call = waits_for.__await__()
            method, given = self._call.send, None


def _current_runner() -> greenlet | None:
    """The runner of the coroutine in which this code runs; None where nothing can stop."""
    current: greenlet | None = getcurrent()
    while current is not None and not isinstance(current, _Runner):
        current = current.parent
    return current


def _stop_for(call: Coroutine[Any, Any, T], runner: greenlet) -> T:
    """Stop the coroutine around until `call` has its result."""
    assert runner.parent is not None
    value: T
    value, error = runner.parent.switch((getcurrent(), call))
    try:
        if error is not None:
            raise error
        return value
    finally:
        del error


class _Task(asyncio.Task[Any]):
    """A task of a scope. Knows whether anybody ever waited for it."""

    wanted = False

    def add_done_callback(self, *args: Any, **options: Any) -> None:
        self.wanted = True  # `await`, `gather`, `wait`, a group of tasks: all of them come here
        super().add_done_callback(*args, **options)


@dataclass(eq=False, slots=True)
class _Open:
    """A call that is to be awaited, up to its end."""

    what: str
    """The method, the file and the line."""
    begun: bool = False
    task: asyncio.Task[Any] | None = None

    def problem(self) -> str | None:
        if not self.begun:
            return f"{self.what} was never awaited, so nothing ran and nobody has its result; write `await` before it"
        if isinstance(self.task, _Task) and not self.task.wanted:
            return f"{self.what} was still running, in a task that nobody waited for; await the task, or cancel it"
        return None


class Call(Coroutine[Any, Any, T]):
    """A call that was handed out to be awaited. It begins when it is."""

    __slots__ = ("_coroutine", "_make", "_open", "_scope")

    def __init__(self, make: Callable[[], Coroutine[Any, Any, T]], what: str, scope: CallScope | None) -> None:
        self._make = make
        self._coroutine: Coroutine[Any, Any, T] | None = None
        self._open = _Open(what)
        self._scope = scope
        if scope is not None:
            scope.calls.add(self._open)

    def _begin(self) -> Coroutine[Any, Any, T]:
        if self._coroutine is None:
            self._open.begun = True
            self._coroutine = self._run() if self._scope is not None else self._make()
        return self._coroutine

    async def _run(self) -> T:
        self._open.task = asyncio.current_task()
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
    """What the calls of a `ToolContext` in one call of the environment came to."""

    name: str
    """The environment and its method, for messages."""
    plain: bool = False
    """Whether the method is a plain `def`. No call can be awaited there, so all raise what awaited ones raise."""
    calls: set[_Open] = field(default_factory=set)
    failure: BackendError | None = None
    """The first failure of the infrastructure that a call met."""
    stuck: BlockedLoop | None = None
    over: bool = False
    waiting: set[futures.Future[Any]] = field(default_factory=set)
    """Calls for which threads wait."""

    @contextlib.contextmanager
    def entered(self) -> Iterator[None]:
        """The scope of the code inside, of the tasks that it starts and the threads that copy its context."""
        _prepare(asyncio.get_running_loop())
        token = _scope.set(self)
        try:
            yield
        finally:
            self.end()
            _scope.reset(token)

    def end(self) -> None:
        """Every later call is `RewardIsOver`, and so are those that threads wait for: the threads then end."""
        self.over = True
        for future in tuple(self.waiting):
            future.cancel()

    def problem(self) -> RewardError | None:
        """What keeps the result of the environment's code from being one."""
        if self.stuck is not None:
            return self.stuck
        found = sorted(problem for call in self.calls if (problem := call.problem()) is not None)
        return RewardError(f"{self.name}: " + "; ".join(found)) if found else None


_scope: ContextVar[CallScope | None] = ContextVar("call_scope", default=None)
_threads: WeakKeyDictionary[asyncio.AbstractEventLoop, int] = WeakKeyDictionary()
"""The thread of each event loop."""


def current_scope() -> CallScope | None:
    return _scope.get()


class outside_scopes:
    """What our own code inside starts belongs to no scope."""

    __slots__ = ("_token",)

    def __enter__(self) -> None:
        self._token = _scope.set(None)

    def __exit__(self, *error: object) -> None:
        with contextlib.suppress(ValueError):  # a coroutine that is thrown away may end anywhere
            _scope.reset(self._token)


async def with_blocking_calls(coroutine: Coroutine[Any, Any, T], *, name: str = "the environment") -> T:
    """The result of a coroutine of the environment, which may call `ToolContext` with and without `await`.

    Args:
        name: what runs, for messages: "my-env: evaluate".

    Raises:
        BackendError: a sandbox failed in one of its calls, even if the coroutine caught that.
        RewardError: a call was never awaited, or is left to itself.
    """
    scope = CallScope(name)
    with scope.entered():
        try:
            result: T = await Driven(coroutine)
        except Exception as error:
            if scope.failure is not None and error is not scope.failure:
                raise scope.failure from error
            raise
        if (wrong := scope.failure or scope.problem()) is not None:
            raise wrong
        return result


def result_of(
    method: str,
    make: Callable[[], Coroutine[Any, Any, T]],
    loop: asyncio.AbstractEventLoop | None,
    scope: CallScope | None,
) -> T | Call[T]:
    """The result of `make()`, or what the caller's caller awaits for it.

    Args:
        method: its name, as the environment calls it.
        loop: where it has to run; None is the running one.
        scope: what the call belongs to.

    Raises:
        RewardIsOver: the scope has ended.
    """
    frame = sys._getframe(2)
    if scope is not None and scope.over:
        raise RewardIsOver(f"{scope.name} is over; its result is no longer wanted ({_where(method, frame)})")
    running = running_loop()
    if running is None or (loop is not None and running is not loop):
        if loop is None:
            raise RuntimeError(f"{_where(method, frame)}: no event loop has used this context yet; use it in one first")
        return _wait_in_thread(method, make, loop, scope, frame)
    runner = _current_runner()
    if runner is None or is_awaited(frame, method):
        return Call(make, _where(method, frame), scope)
    return _stop_for(make(), runner)


def _where(method: str, frame: FrameType) -> str:
    return f"ctx.{method}() at {frame.f_code.co_filename}:{frame.f_lineno}"


def running_loop() -> asyncio.AbstractEventLoop | None:
    """The event loop of this thread."""
    try:
        return asyncio.get_running_loop()
    except RuntimeError:
        return None


def _prepare(loop: asyncio.AbstractEventLoop) -> None:
    """Let tasks that are started in a scope be driven too."""
    _threads[loop] = threading.get_ident()
    before: Any = loop.get_task_factory()
    if getattr(before, "drives", False):
        return

    def factory(loop: asyncio.AbstractEventLoop, coroutine: Any, **options: Any) -> Any:
        context = options.get("context")
        scope = _scope.get() if context is None else context.get(_scope)
        inside = scope is not None and not scope.over
        if inside and isinstance(coroutine, CoroutineType):
            coroutine = Driven(coroutine)
        if before is not None:
            return before(loop, coroutine, **options)
        return (_Task if inside else asyncio.Task)(coroutine, loop=loop, **options)

    factory.drives = True  # type: ignore[attr-defined]
    loop.set_task_factory(factory)


def _wait_in_thread(
    method: str,
    make: Callable[[], Coroutine[Any, Any, T]],
    loop: asyncio.AbstractEventLoop,
    scope: CallScope | None,
    frame: FrameType,
) -> T:
    over = f"{scope.name if scope else 'the run'} is over; its result is no longer wanted ({_where(method, frame)})"
    coroutine = make()
    try:
        future = asyncio.run_coroutine_threadsafe(coroutine, loop)
    except RuntimeError as error:  # the loop is closed
        coroutine.close()
        raise RewardIsOver(over) from error
    waiting = scope.waiting if scope is not None else set()
    waiting.add(future)
    if scope is not None and scope.over:  # in between
        future.cancel()
    blocked = Watch(_threads.get(loop))
    try:
        while not futures.wait([future], _LOOK).done:
            if loop.is_closed():
                raise RewardIsOver(over)
            if (place := blocked.look()) is not None:
                problem = BlockedLoop(
                    f"{_where(method, frame)} waits in a thread for the event loop, and the event loop waits for that "
                    f"thread at {place}; await the thread there: `await asyncio.to_thread(...)`, or "
                    "`await loop.run_in_executor(...)`"
                )
                if scope is not None:
                    scope.stuck = problem
                future.cancel()
                raise problem
        result: T = future.result()
        return result
    except futures.CancelledError:
        raise RewardIsOver(over) from None
    finally:
        waiting.discard(future)
