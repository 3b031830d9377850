"""The statements of an environment's own code: which of them an instruction belongs to, and which others stopped there.

A call of a reward is watched while it runs. Only code of its author is looked at; of other code, Python tells the calls
alone.
"""

from __future__ import annotations

import ast
import dis
import functools
import inspect
import linecache
import sys
import time
from asyncio import BaseEventLoop
from bisect import bisect_right
from collections.abc import Callable, Coroutine, Generator, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from types import CodeType, FrameType
from typing import Any, NamedTuple, TypeVar

from backends.first_use import in_turn, parse
from lachesis.tracebacks import is_of_an_author

T = TypeVar("T")

MOST_EVENTS = 20_000
"""Lines of one call of a function that are watched: what goes on longer repeats itself."""
_MOST_CODES = 4096
_IN_THREAD = BaseEventLoop.run_in_executor.__code__


class Statement(NamedTuple):
    """The place where a statement begins."""

    file: str
    line: int
    column: int
    """In bytes, from 0."""


@dataclass(frozen=True, slots=True)
class Source:
    """A file of the environment, parsed."""

    nodes: list[ast.stmt]
    """All statements, in their order. Every node below has its `parent`."""
    starts: list[tuple[int, int]]

    def at(self, line: int, column: int) -> ast.stmt | None:
        """The innermost statement there. Of one with a body, that is its head."""
        place = bisect_right(self.starts, (line, column)) - 1
        node: Any = self.nodes[place] if place >= 0 else None
        while node is not None and not (
            isinstance(node, ast.stmt) and (line, column) < (node.end_lineno or 0, node.end_col_offset or 0)
        ):
            node = getattr(node, "parent", None)
        return node


@in_turn
@functools.lru_cache(maxsize=64)
def _parsed(text: str) -> Source | None:
    try:
        tree: ast.Module = parse(text)
    except (SyntaxError, ValueError, RecursionError):
        return None
    found: list[ast.stmt] = []
    for node in ast.walk(tree):
        if isinstance(node, ast.stmt):
            found.append(node)
        for child in ast.iter_child_nodes(node):
            child.parent = node  # type: ignore[attr-defined]
    # Of two that begin together, the inner one is the later: `@decorator` lines are no beginning.
    found.sort(key=lambda node: (node.lineno, node.col_offset))
    return Source(found, [(node.lineno, node.col_offset) for node in found])


def source_of(frame_file: str, names: dict[str, Any] | None = None) -> Source | None:
    """None where there is no source that can be read."""
    return _parsed("".join(linecache.getlines(frame_file, names)))


@dataclass(frozen=True, slots=True)
class _Table:
    """The statements of one function."""

    code: CodeType  # kept, so that its id is nobody else's
    of: list[Statement | None]
    """By half the offset of the instruction."""
    shared: bool
    """Whether two of them are on one line."""
    returns: frozenset[int]
    """Offsets at which the function is left with a value."""


_tables: dict[int, _Table | None] = {}
"""By the id of the code, whose hash takes longer."""


def _table(code: CodeType, names: dict[str, Any]) -> _Table | None:
    try:
        return _tables[id(code)]
    except KeyError:
        pass
    if len(_tables) >= _MOST_CODES:  # code that is compiled again and again
        _tables.clear()
    source = source_of(code.co_filename, names) if is_own(code.co_filename) and code.co_name[0] != "<" else None
    table = None
    if source is not None:
        found: dict[Any, Statement | None] = {}
        own: dict[Statement, Statement] = {}  # one object for each: they are compared at every line
        of = []
        for line, _, column, _ in code.co_positions():
            if (line, column) not in found:
                node = source.at(line, column) if line is not None and column is not None else None
                if node is None or isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
                    found[line, column] = None
                else:
                    place = Statement(code.co_filename, node.lineno, node.col_offset)
                    found[line, column] = own.setdefault(place, place)
            of.append(found[line, column])
        steps = dis.get_instructions(code)
        table = _Table(
            code,
            of,
            len({each.line for each in own}) < len(own),
            frozenset(each.offset for each in steps if each.opname in ("RETURN_VALUE", "RETURN_CONST")),
        )
    _tables[id(code)] = table
    return table if table is None or table.code is code else None


_homes: set[str] = set()
"""Folders of installed packages that are environments."""


def add_home(function: Callable[..., Any]) -> None:
    """The files beside that of a reward are the environment's own, also where pip has installed them."""
    code = getattr(inspect.unwrap(function), "__code__", None)
    if code is not None and "-packages/" in code.co_filename:
        _homes.add(code.co_filename.rpartition("/")[0] + "/")
        is_own.cache_clear()


@functools.lru_cache(maxsize=4096)
def is_own(file: str) -> bool:
    """Whether an author of environments wrote it, and no package that is installed has it."""
    return is_of_an_author(file) and ("-packages/" not in file or file.startswith(tuple(_homes)))


@dataclass(slots=True)
class Watch:
    """Which statements one call of a reward passed: those that it left for another one, or by returning a value."""

    passed: set[Statement] = field(default_factory=set)
    returned: set[Statement] = field(default_factory=set)
    """Those of calls that went on to their end and returned a value."""
    seconds: float = 0.0
    """Of processor time, watching included."""

    def call(self, function: Callable[..., T], *args: Any) -> T:
        """The value of a function that runs watched in this thread, unless a debugger watches it already."""
        if sys.gettrace() is not None:
            return function(*args)
        begun = time.thread_time()
        sys.settrace(self._trace)
        try:
            return function(*args)
        finally:
            sys.settrace(None)
            self.seconds += time.thread_time() - begun

    def over(self, coroutine: Coroutine[Any, Any, T]) -> Coroutine[Any, Any, T]:
        return _Watched(coroutine, self)

    def _trace(self, frame: FrameType, event: str, _: Any) -> Any:
        if not is_own(frame.f_code.co_filename):
            if frame.f_code is _IN_THREAD and isinstance(frame.f_locals["executor"], ThreadPoolExecutor | None):
                frame.f_locals["func"] = functools.partial(self.call, frame.f_locals["func"])  # `asyncio.to_thread` too
            return None
        if frame.f_trace is not None:  # a coroutine goes on
            return frame.f_trace
        table = _table(frame.f_code, frame.f_globals)
        if table is None:
            return None
        frame.f_trace_opcodes = table.shared
        return _Call(table, self)


class _Call:
    """One call of a function of the environment's."""

    __slots__ = ("_at", "_events", "_passed", "_raised", "_table", "_watch")

    def __init__(self, table: _Table, watch: Watch) -> None:
        self._table = table
        self._watch = watch
        self._passed: set[Statement] = set()
        self._at: Statement | None = None
        self._raised = False
        self._events = 0

    def __call__(self, frame: FrameType, event: str, given: Any) -> _Call:
        if event == "line" or event == "opcode":
            self._events += 1
            if self._events > MOST_EVENTS:
                frame.f_trace_lines = frame.f_trace_opcodes = False
                self._at = None
                return self
            at = self._table.of[frame.f_lasti // 2]
            if at is not self._at and at is not None:
                self._leave()
                self._at = at
        elif event == "exception":
            # The two tell that an iterator or a coroutine is at its end.
            self._raised = self._raised or not issubclass(given[0], StopIteration | StopAsyncIteration)
        elif event == "return" and frame.f_lasti in self._table.returns:
            self._leave()
            self._watch.returned |= self._passed
        return self

    def _leave(self) -> None:
        if not self._raised and self._at is not None:
            self._passed.add(self._at)
            self._watch.passed.add(self._at)
        self._raised = False


class _Watched(Coroutine[Any, Any, T]):
    """A coroutine of which each step is watched."""

    __slots__ = ("_coroutine", "_watch")

    def __init__(self, coroutine: Coroutine[Any, Any, T], watch: Watch) -> None:
        self._coroutine = coroutine
        self._watch = watch

    def __getattr__(self, name: str) -> Any:
        return getattr(self._coroutine, name)

    def __await__(self) -> Generator[Any, Any, T]:
        return self  # type: ignore[return-value]

    def __iter__(self) -> Iterator[Any]:
        return self

    def __next__(self) -> Any:
        return self.send(None)

    def send(self, value: Any) -> Any:
        return self._watch.call(self._coroutine.send, value)

    def throw(self, *error: Any) -> Any:
        return self._watch.call(self._coroutine.throw, *error)

    def close(self) -> None:
        self._coroutine.close()


class unwatched:
    """Around what other greenlets of this thread do meanwhile."""

    __slots__ = ("_trace",)

    def __enter__(self) -> None:
        self._trace = sys.gettrace()
        if self._trace is not None:
            sys.settrace(None)

    def __exit__(self, *error: object) -> None:
        if self._trace is not None:
            sys.settrace(self._trace)
