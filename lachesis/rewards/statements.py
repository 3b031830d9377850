"""The statements of an environment's own code: which of them an instruction belongs to.

A part of a statement that is not evaluated every time stands for itself: what follows an `and` or an `if`, and what a
comprehension or a lambda makes.
"""

from __future__ import annotations

import ast
import dis
import functools
import inspect
import linecache
from bisect import bisect_right
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from types import CodeType
from typing import Any, NamedTuple

from backends.first_use import in_turn, parse
from lachesis.authors import is_of_an_author

_MOST_CODES = 4096
_SCOPES = {
    "<lambda>": ast.Lambda,
    "<genexpr>": ast.GeneratorExp,
    "<listcomp>": ast.ListComp,
    "<setcomp>": ast.SetComp,
    "<dictcomp>": ast.DictComp,
}
COMPREHENSIONS = frozenset(_SCOPES) - {"<lambda>"}
"""Names of their code."""
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
class SourceFile:
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
        case _ if not isinstance(node, ast.expr) or getattr(
            node, "quoted", False
        ):  # in an f-string, Python 3.11 does not know the places
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
def _parsed(text: str) -> SourceFile | None:
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
    return SourceFile(found, [(node.lineno, node.col_offset) for node in found])


def source_of(frame_file: str, names: dict[str, Any] | None = None) -> SourceFile | None:
    """None where there is no source that can be read, or the stack is full."""
    try:
        return _parsed(_text_of(frame_file, names))
    except RecursionError:
        return None


def _text_of(file: str, names: dict[str, Any] | None) -> str:
    """The source. What `eval` compiles has the name of the program of `python -c`, which has a source from 3.13 on."""
    return "" if file == "<string>" else "".join(linecache.getlines(file, names))


@dataclass(frozen=True, slots=True)
class Table:
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


_tables: dict[int, Table | None] = {}
"""By the id of the code, whose hash takes longer."""


def table_of(code: CodeType, names: dict[str, Any]) -> Table | None:
    try:
        return _tables[id(code)]
    except KeyError:
        pass
    if len(_tables) >= _MOST_CODES:  # code that is compiled again and again
        _tables.clear()
    table = None
    if is_own(code.co_filename):
        try:
            source = _parsed(_text_of(code.co_filename, names))
            table = _made(code, source) if source is not None and source.nodes else None
        except RecursionError:  # the stack of the reward is full
            return None
    _tables[id(code)] = table
    return table if table is None or table.code is code else None


def _made(code: CodeType, source: SourceFile) -> Table | None:
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
    return Table(code, of, parts, tries, before, shared, returns)


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
    """The files next to a reward's file are the environment's own, also where pip has installed them."""
    code = getattr(inspect.unwrap(function), "__code__", None)
    if code is not None and "-packages/" in code.co_filename:
        _homes.add(code.co_filename.rpartition("/")[0] + "/")
        is_own.cache_clear()


@functools.lru_cache(maxsize=4096)
def is_own(file: str) -> bool:
    """Whether an author of environments wrote it, and no package that is installed has it."""
    return is_of_an_author(file) and ("-packages/" not in file or file.startswith(tuple(_homes)))
