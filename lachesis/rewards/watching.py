"""Records the course of one call of a reward: its statements, and the expressions in which it calls a service.

Only code of its author is looked at while it runs; of other code, Python tells the calls alone.
"""

from __future__ import annotations

import functools
import sys
import threading
import time
from collections.abc import Callable, Coroutine, Iterator
from concurrent.futures import ThreadPoolExecutor
from concurrent.futures.thread import _worker
from dataclasses import dataclass, field
from types import FrameType
from typing import Any, TypeVar

from lachesis import ours
from lachesis.rewards.overtime import OwnWork, Stepped
from lachesis.rewards.statements import Span, Statement, Table, is_own, spanned, table_of

T = TypeVar("T")
OF_VALUE = (0, -1)
"""The end of what stands for the value that a reward returns: no part of a statement ends there."""

TRACING = threading.Lock()
"""Python 3.11 lets no two threads set what they trace at once: where an audit hook runs meanwhile, one fails."""
MOST_EVENTS = 20_000
"""Lines of one call of a function that are watched, and calls in one call of a reward: longer calls repeat
themselves."""
_SUBMIT, _START = ThreadPoolExecutor.submit.__code__, threading.Thread.start.__code__
_SERVICES = tuple(
    """aiohttp anthropic asyncpg botocore cohere docker elastic_transport elasticsearch google grpc httpcore httpx
    huggingface_hub litellm mistralai ollama openai psycopg psycopg2 pymongo pymysql redis requests smtplib sqlalchemy
    urllib3 websockets""".split()  # noqa: SIM905
)
"""Packages that ask a service."""
SERVICES = frozenset((*_SERVICES, "asyncssh", "http", "socket", "ssl", "urllib"))
_OF_LIBRARY = ("/urllib/request.py", "/http/client.py", "/socket.py", "/asyncio/streams.py")
_SERVICE_FILES = (*(f"/{name}/" for name in _SERVICES), *_OF_LIBRARY)


@dataclass(slots=True)
class Watch:
    """Which statements one call of a reward passed: those that it left for another one, or by returning a value."""

    passed: set[Statement] = field(default_factory=set)
    returned: set[Statement] = field(default_factory=set)
    """Those of calls that went on to their end and returned a value."""
    asked: set[tuple[str, Span]] = field(default_factory=set)
    """By file, the expressions during which a service was asked."""
    work: OwnWork | None = None
    """Of which what runs in other threads is a part too."""
    seconds: float = 0.0
    """Of processor time, watching included."""
    given_by: Statement | None = None
    """Where the value that was returned last came from, however many calls handed it on."""
    _value: Any = None
    _calls: int = 0

    def call(self, function: Callable[..., T], *args: Any) -> T:
        """The value of a function that runs watched in this thread, unless a debugger watches it already."""
        if sys.gettrace() is not None:
            return function(*args)
        begun = time.thread_time()
        with TRACING:
            sys.settrace(self._trace)
        try:
            return function(*args)
        finally:
            with TRACING:
                sys.settrace(None)
            self.seconds += time.thread_time() - begun

    def over(self, coroutine: Coroutine[Any, Any, T]) -> Coroutine[Any, Any, T]:
        return Stepped(coroutine, self.call)

    def gives(self, value: Any, place: Statement) -> None:
        if value is not self._value or self.given_by is None:
            self._value, self.given_by = value, place

    def _trace(self, frame: FrameType, event: str, _: Any) -> Any:
        code = frame.f_code
        if not is_own(code.co_filename):
            if _asks(code.co_filename):
                back = frame.f_back
                if back is not None and not _asks(back.f_code.co_filename):
                    self.asked.update(_calls_of(frame))
            elif code is _SUBMIT:  # `asyncio.to_thread` too
                frame.f_locals["fn"] = self._elsewhere(frame, frame.f_locals["fn"])
            elif code is _START and getattr(frame.f_locals["self"], "_target", None) is not _worker:
                thread = frame.f_locals["self"]
                own = not ours.is_ours(getattr(getattr(thread, "_target", None), "__module__", None) or "")
                thread.run = self._elsewhere(frame, thread.run, work=own)
            return None
        if frame.f_trace is not None:  # a coroutine goes on
            return frame.f_trace
        self._calls += 1
        table = table_of(code, frame.f_globals) if self._calls <= MOST_EVENTS else None
        if table is None:
            return None
        return _Call(table, self)

    def _elsewhere(self, frame: FrameType, function: Callable[..., T], *, work: bool = True) -> Callable[..., T]:
        """The function for another thread. `work`: it is the author's, and can be ended."""
        calls = list(_calls_of(frame.f_back))

        def watched(*args: Any, **options: Any) -> T:
            before = len(self.asked)
            try:
                call = functools.partial(function, *args, **options)
                return self.call(call) if self.work is None or not work else self.work.run(self.call, call)
            finally:
                if len(self.asked) > before:
                    self.asked.update(calls)

        return watched


def _calls_of(frame: FrameType | None) -> Iterator[tuple[str, Span]]:
    """Where the environment's own code waits for this one; nowhere where a call of a `ToolContext` does."""
    found = []
    while frame is not None and frame.f_code is not Watch.call.__code__:
        file = frame.f_code.co_filename
        if frame.f_code.co_name == "__del__" or file.endswith("/weakref.py"):  # what is collected meanwhile
            return
        if is_own(file):
            found.append((file, spanned(*list(frame.f_code.co_positions())[frame.f_lasti // 2])))
        elif file.startswith(ours.folders()):
            break
        frame = frame.f_back
    yield from found


@functools.lru_cache(maxsize=4096)
def _asks(file: str) -> bool:
    return any(each in file for each in _SERVICE_FILES)


class _Call:
    """One call of a function of the environment's."""

    __slots__ = ("_at", "_events", "_passed", "_raised", "_table", "_watch")

    def __init__(self, table: Table, watch: Watch) -> None:
        self._table = table
        self._watch = watch
        self._passed: set[Statement] = set()
        self._at: Statement | None = None
        self._raised = False
        self._events = 0

    def __call__(self, frame: FrameType, event: str, given: Any) -> _Call:
        if event == "opcode" or event == "line":
            self._events += 1
            if self._events > MOST_EVENTS:
                frame.f_trace_lines = frame.f_trace_opcodes = False
                self._at = None
                return self
            if event == "line":
                frame.f_trace_opcodes = frame.f_lineno in self._table.shared
            at = self._table.of[frame.f_lasti // 2]
            if at is not self._at and at is not None:
                try:
                    self._leave(at)
                except RecursionError:  # the stack of the reward is full: what it does next raises the same
                    self._raised = True
                self._at = at
        elif event == "exception":
            # The two tell that an iterator or a coroutine is at its end.
            self._raised = self._raised or not issubclass(given[0], StopIteration | StopAsyncIteration)
        elif event == "return" and frame.f_lasti in self._table.returns:
            at = self._table.of[frame.f_lasti // 2]
            if self._events > MOST_EVENTS and at is not None:
                self._pass(at, *self._table.before.get(at, ()))
            else:
                self._leave(None)
            self._watch.returned |= self._passed
            if at is not None:
                self._watch.gives(given, at)
        return self

    def _leave(self, to: Statement | None) -> None:
        """A statement is passed when no part of it follows."""
        at, around = self._at, self._table.around
        if at is None or (to is not None and at in around.get(to, ())):
            return
        if not self._raised:
            kept = (to, *around.get(to, ())) if to is not None else ()
            self._pass(at, *(each for each in around.get(at, ()) if each not in kept))
        self._raised = False

    def _pass(self, *places: Statement) -> None:
        for each in places:
            found = each, *self._table.tries.get(each, ())
            self._passed.update(found)
            self._watch.passed.update(found)


def passed_by(watch: Watch | None, source: str) -> set[tuple[Statement, bool]]:
    """The places that a call passed: a statement, and whether it went on to its end."""
    found = {(each, False) for each in watch.passed} if watch is not None else set()
    found |= {(each, True) for each in watch.returned} if watch is not None else set()
    return found | ({(each, False) for each in value_places(source, watch)} if source else set())


def value_places(source: str, watch: Watch | None) -> list[Statement]:
    """They stand for the value that a reward returns: of all its values, and of those from the same statement."""
    at = watch.given_by if watch is not None else None
    given = [at._replace(end=OF_VALUE)] if at is not None else []
    return [Statement(source, 0, 0, OF_VALUE), *given]
