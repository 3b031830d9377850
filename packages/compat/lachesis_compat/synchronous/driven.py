"""A coroutine that stops in the middle of a plain function.

A plain function cannot wait for the event loop, but it can leave the greenlet on which it runs. `Driven` runs a
coroutine on one. A function that the coroutine calls, however deep, hands a call over by `stop_for`; the task waits for
its result, as if the coroutine had awaited it, and continues in the function.
"""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Callable, Coroutine, Generator
from typing import Any, NoReturn, TypeVar

from greenlet import getcurrent, greenlet

from lachesis.rewards.watching import TRACING

T = TypeVar("T")


class _Runner(greenlet):  # type: ignore[misc]
    """Runs the steps of a coroutine. One for all of them: a new one takes as long as ten steps."""


def _steps(method: Callable[[Any], Any], given: Any) -> NoReturn:
    while True:
        waits_for = method(given)  # an exception is the end, and reaches the parent
        method, given = getcurrent().parent.switch((None, waits_for))


class Driven(Coroutine[Any, Any, T]):
    """A coroutine in which `stop_for` may be called.

    `asyncio.current_task()`, context variables and tracebacks are those of the task that awaits it.
    """

    __slots__ = ("__weakref__", "_call", "_caller", "_coroutine", "_runner")

    def __init__(self, coroutine: Coroutine[Any, Any, T]) -> None:
        self._coroutine = coroutine
        self._runner: greenlet | None = None
        self._caller: greenlet | None = None
        """Where the coroutine waits for `_call`: the runner, or a greenlet that the coroutine started itself."""
        self._call: Generator[Any, Any, Any] | None = None

    def __repr__(self) -> str:
        code = getattr(self._coroutine, "cr_code", None)
        place = f" at {code.co_filename}:{code.co_firstlineno}" if code is not None else ""
        return f"{getattr(self._coroutine, '__qualname__', self._coroutine)}(){place}"

    def __getattr__(self, name: str) -> Any:
        return getattr(self._coroutine, name)  # `cr_frame` and others, for those who print tasks

    def __await__(self) -> Any:
        return self

    def __iter__(self) -> Driven[T]:
        return self

    def __next__(self) -> Any:
        return self.send(None)

    def send(self, value: Any) -> Any:
        call = self._call
        return self._step(self._coroutine.send, value) if call is None else self._go_on(call.send, value)

    def throw(self, kind: Any, value: Any = None, trace: Any = None) -> Any:
        error = kind if isinstance(kind, BaseException) else value if isinstance(value, BaseException) else kind()
        call = self._call
        return self._step(self._coroutine.throw, error) if call is None else self._go_on(call.throw, error)

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


def current_runner() -> greenlet | None:
    """The runner of the coroutine in which this code runs; None where nothing can stop."""
    current: greenlet | None = getcurrent()
    while current is not None and not isinstance(current, _Runner):
        current = current.parent
    return current


def stop_for(call: Coroutine[Any, Any, T], runner: greenlet) -> T:
    """Stop the coroutine around until `call` has its result."""
    assert runner.parent is not None
    value: T
    trace = sys.gettrace()  # of this coroutine, not of what others do meanwhile
    if trace is not None:
        with TRACING:
            sys.settrace(None)
    try:
        value, error = runner.parent.switch((getcurrent(), call))
    finally:
        if trace is not None:
            with TRACING:
                sys.settrace(trace)
    try:
        if error is not None:
            raise error
        return value
    finally:
        del error
