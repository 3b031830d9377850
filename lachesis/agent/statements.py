"""The statements of an environment's own code: which of them an instruction belongs to, and which a call passed.

A part of a statement that is not evaluated every time stands for itself: what follows an `and` or an `if`, and what a
comprehension or a lambda makes.

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
import threading
import time
from bisect import bisect_right
from collections.abc import Callable, Coroutine, Generator, Iterator
from concurrent.futures import ThreadPoolExecutor
from concurrent.futures.thread import _worker
from dataclasses import dataclass, field
from types import CodeType, FrameType
from typing import Any, NamedTuple, TypeVar

from backends.first_use import in_turn, parse
from lachesis.tracebacks import is_of_an_author

T = TypeVar("T")

MOST_EVENTS = 20_000
"""Lines of one call of a function that are watched, and calls in one call of a reward: what goes on longer repeats
itself."""
_MOST_CODES = 4096
_SUBMIT, _START = ThreadPoolExecutor.submit.__code__, threading.Thread.start.__code__
_SERVICES = (
    *("aiohttp", "anthropic", "asyncpg", "botocore", "cohere", "docker", "elastic_transport", "elasticsearch", "google"),
    *("grpc", "httpcore", "httpx", "huggingface_hub", "litellm", "mistralai", "ollama", "openai", "psycopg", "psycopg2"),
    *("pymongo", "pymysql", "redis", "requests", "smtplib", "sqlalchemy", "urllib3", "websockets"),
)
"""Packages that ask a service."""
SERVICES = frozenset((*_SERVICES, "asyncssh", "http", "socket", "ssl", "urllib"))
_SERVICE_FILES = (
    *(f"/{name}/" for name in _SERVICES),
    *("/urllib/request.py", "/http/client.py", "/socket.py", "/asyncio/streams.py"),
)
_OURS = tuple(f"/{name}/" for name in ("lachesis", "backends"))
_SCOPES = {
    "<lambda>": ast.Lambda,
    "<genexpr>": ast.GeneratorExp,
    "<listcomp>": ast.ListComp,
    "<setcomp>": ast.SetComp,
    "<dictcomp>": ast.DictComp,
}
Span = tuple[int, int, int, int]
"""Line and column in bytes of a beginning, and of an end."""


class Statement(NamedTuple):
    """The place where a statement begins, or of a part of one."""

    file: str
    line: int
    column: int
    """In bytes, from 0."""
    end: tuple[int, int] = (0, 0)
    """Of a part."""

    @classmethod
    def of(cls, file: str, node: ast.stmt | ast.expr) -> Statement:
        end = (node.end_lineno or 0, node.end_col_offset or 0) if isinstance(node, ast.expr) else (0, 0)
        return cls(file, node.lineno, node.col_offset, end)


@dataclass(frozen=True, slots=True)
class Source:
    """A file of the environment, parsed."""

    nodes: list[ast.stmt | ast.expr]
    """All statements and parts, in their order. Every node below has its `parent`."""
    starts: list[tuple[int, int]]

    def at(self, span: Span) -> ast.stmt | ast.expr | None:
        """The innermost one around it. Of a statement with a body, that is its head."""
        place = bisect_right(self.starts, span[:2]) - 1
        node: Any = self.nodes[place] if place >= 0 else None
        while node is not None and not (
            is_part(node)
            and (node.lineno, node.col_offset) <= span[:2]
            and span[2:] <= (node.end_lineno or 0, node.end_col_offset or 0)
        ):
            node = getattr(node, "parent", None)
        return node  # type: ignore[no-any-return]


def spanned(line: int | None, end_line: int | None, column: int | None, end_column: int | None) -> Span:
    """What Python says of an instruction, where it does."""
    if line is None or column is None:
        return 0, 0, 0, 0
    return line, column, end_line or line, end_column or column


def is_part(node: ast.AST) -> bool:
    """Whether it is a statement, or a part of one that is not evaluated every time."""
    around: Any = getattr(node, "parent", None)
    match around:
        case _ if isinstance(node, ast.stmt):
            return True
        case _ if not isinstance(node, ast.expr) or getattr(node, "quoted", False):  # in an f-string, Python 3.11 does not know the places
            return False
        case ast.IfExp():
            return node is not around.test
        case ast.BoolOp():
            return node is not around.values[0]
        case ast.Compare():
            return node in around.comparators[1:]
        case ast.Lambda():
            return node is around.body
        case ast.ListComp() | ast.SetComp() | ast.GeneratorExp():
            return node is around.elt
        case ast.DictComp():
            return node is around.key or node is around.value
        case ast.comprehension():
            inner = around is not around.parent.generators[0]  # type: ignore[attr-defined]
            return node in around.ifs or (inner and node is around.iter)
    return False


def enclosing(node: Any) -> Iterator[Any]:
    """The nodes around it, from the inside, up to the function."""
    node = getattr(node, "parent", None)
    while node is not None and not isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
        yield node
        node = getattr(node, "parent", None)


@in_turn
@functools.lru_cache(maxsize=64)
def _parsed(text: str) -> Source | None:
    try:
        tree: ast.Module = parse(text)
    except (SyntaxError, ValueError):
        return None
    found: list[Any] = []
    for node in ast.walk(tree):
        if is_part(node):
            found.append(node)
        for child in ast.iter_child_nodes(node):
            child.parent = None if isinstance(node, ast.Module) else node  # type: ignore[attr-defined]
            child.quoted = isinstance(node, ast.JoinedStr) or getattr(node, "quoted", False)  # type: ignore[attr-defined]
    # Of two that begin together, the inner one is the later: `@decorator` lines are no beginning.
    found.sort(key=lambda node: (node.lineno, node.col_offset))
    return Source(found, [(node.lineno, node.col_offset) for node in found])


def source_of(frame_file: str, names: dict[str, Any] | None = None) -> Source | None:
    """None where there is no source that can be read, or the stack is full."""
    try:
        return _parsed("".join(linecache.getlines(frame_file, names)))
    except RecursionError:
        return None


@dataclass(frozen=True, slots=True)
class _Table:
    """The statements of one function."""

    code: CodeType  # kept, so that its id is nobody else's
    of: list[Statement | None]
    """By half the offset of the instruction."""
    around: dict[Statement, tuple[Statement, ...]]
    """The parts, and the statement, in which a part is."""
    tries: dict[Statement, tuple[Statement, ...]]
    """The `try` around one, which has no instruction where it shares a line."""
    before: dict[Statement, tuple[Statement, ...]]
    """Those that have to be passed on the way to one."""
    shared: frozenset[int]
    """Lines on which there are several."""
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
    table = None
    if is_own(code.co_filename):
        try:
            source = _parsed("".join(linecache.getlines(code.co_filename, names)))
            table = _table_of(code, source) if source is not None and source.nodes else None
        except RecursionError:  # the stack of the reward is full
            return None
    _tables[id(code)] = table
    return table if table is None or table.code is code else None


def _table_of(code: CodeType, source: Source) -> _Table | None:
    scope = _SCOPES.get(code.co_name)
    if scope is None and code.co_name.startswith("<"):
        return None
    found: dict[Span, Statement | None] = {}
    nodes: dict[Statement, Any] = {}
    own: dict[Statement, Statement] = {}  # one object for each: they are compared at every line
    of = []
    spans = [spanned(*each) for each in code.co_positions()]
    for span in spans:
        if span not in found:
            node = source.at(span) if span[0] else None
            around = None if node is None or isinstance(node, ast.stmt) else _scope_of(node)
            if node is None or isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
                found[span] = None
            elif scope is not None and not isinstance(around, scope):
                found[span] = None  # where a comprehension begins: the code around it tells
            else:
                place = Statement.of(code.co_filename, node)
                found[span] = place = own.setdefault(place, place)
                nodes[place] = node
        of.append(found[span])
    parts = {place: tuple(_wholes(node, code)) for place, node in nodes.items() if isinstance(node, ast.expr)}
    tries = {place: tuple(_tries(node, code)) for place, node in nodes.items()}
    before = {place: tuple(_before(node, code)) for place, node in nodes.items()} if scope is None else {}
    steps = dis.get_instructions(code)
    returns = frozenset(each.offset for each in steps if each.opname in ("RETURN_VALUE", "RETURN_CONST"))
    on_lines: dict[int, set[Statement | None]] = {}
    for (line, *_), there in zip(spans, of, strict=True):
        if there is not None or scope is not None:
            on_lines.setdefault(line, set()).add(there)
    shared = frozenset(line for line, places in on_lines.items() if len(places) > 1)
    return _Table(code, of, parts, tries, before, shared, returns)


def _scope_of(node: Any) -> Any:
    """The lambda or comprehension around a part, or its function."""
    return next((each for each in enclosing(node) if isinstance(each, tuple(_SCOPES.values()))), None)


def _wholes(node: Any, code: CodeType) -> Iterator[Statement]:
    for each in enclosing(node):
        if isinstance(each, _SCOPES.get(code.co_name, ())):
            return
        if is_part(each):
            yield Statement.of(code.co_filename, each)
        if isinstance(each, ast.stmt):
            return


def _tries(node: Any, code: CodeType) -> Iterator[Statement]:
    return (Statement.of(code.co_filename, each) for each in enclosing(node) if isinstance(each, ast.Try | ast.TryStar))


def _before(node: Any, code: CodeType) -> Iterator[Statement]:
    for each in (node, *enclosing(node)):
        around = getattr(each, "parent", None)
        bodies = [getattr(around, name, None) for name in ("body", "orelse", "finalbody")]
        for body in bodies:
            if isinstance(each, ast.stmt) and isinstance(body, list) and each in body:
                yield from (Statement.of(code.co_filename, other) for other in body[: body.index(each)])
                yield from [] if isinstance(each, ast.Try) else [Statement.of(code.co_filename, each)]


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
    asked: set[tuple[str, Span]] = field(default_factory=set)
    """By file, the expressions during which a service was asked."""
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
        sys.settrace(self._trace)
        try:
            return function(*args)
        finally:
            sys.settrace(None)
            self.seconds += time.thread_time() - begun

    def over(self, coroutine: Coroutine[Any, Any, T]) -> Coroutine[Any, Any, T]:
        return _Watched(coroutine, self)

    def gives(self, value: Any, place: Statement) -> None:
        if value is not self._value or self.given_by is None:
            self._value, self.given_by = value, place

    def _trace(self, frame: FrameType, event: str, _: Any) -> Any:
        code = frame.f_code
        if not is_own(code.co_filename):
            if _asks(code.co_filename):
                back = frame.f_back
                if back is not None and not _asks(back.f_code.co_filename):
                    self.asked.update(_calls_of(back))
            elif code is _SUBMIT:  # `asyncio.to_thread` too
                frame.f_locals["fn"] = self._elsewhere(frame, frame.f_locals["fn"])
            elif code is _START and getattr(frame.f_locals["self"], "_target", None) is not _worker:
                thread = frame.f_locals["self"]
                thread.run = self._elsewhere(frame, thread.run)
            return None
        if frame.f_trace is not None:  # a coroutine goes on
            return frame.f_trace
        self._calls += 1
        table = _table(code, frame.f_globals) if self._calls <= MOST_EVENTS else None
        if table is None:
            return None
        return _Call(table, self)

    def _elsewhere(self, frame: FrameType, function: Callable[..., T]) -> Callable[..., T]:
        """The function for another thread."""
        calls = list(_calls_of(frame.f_back))

        def watched(*args: Any, **options: Any) -> T:
            before = len(self.asked)
            try:
                return self.call(functools.partial(function, *args, **options))
            finally:
                if len(self.asked) > before:
                    self.asked.update(calls)

        return watched


def _calls_of(frame: FrameType | None) -> Iterator[tuple[str, Span]]:
    """Where the environment's own code waits for this one; nowhere where a call of a `ToolContext` does."""
    found = []
    while frame is not None and frame.f_code is not Watch.call.__code__:
        file = frame.f_code.co_filename
        if is_own(file):
            found.append((file, spanned(*list(frame.f_code.co_positions())[frame.f_lasti // 2])))
        elif any(each in file for each in _OURS):
            break
        frame = frame.f_back
    yield from found


@functools.lru_cache(maxsize=4096)
def _asks(file: str) -> bool:
    return any(each in file for each in _SERVICE_FILES)


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
