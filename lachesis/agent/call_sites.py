"""Whether the place in the source that makes a call awaits what it returns.

A call is awaited if its value goes straight to `await`, or to something of asyncio that takes coroutines (`gather`,
`wait_for`, `create_task` and the like), also by way of a list or a variable that is used for nothing else. The bytecode
after the call shows the first case, the syntax tree of the source the others. Each place is looked at once.
"""

from __future__ import annotations

import ast
import dis
import functools
import inspect
import linecache
from types import CodeType, FrameType
from typing import Any

_TAKERS = frozenset(
    (
        *("Task", "as_completed", "create_task", "ensure_future", "gather", "run_coroutine_threadsafe"),
        *("run_until_complete", "shield", "wait", "wait_for"),
    )
)
"""Functions and methods of asyncio that take coroutines."""
_MOST = 4096
_known: dict[tuple[int, int], tuple[CodeType, bool]] = {}
"""By the id of the code, whose hash takes longer than the rest, and the instruction."""


def is_awaited(frame: FrameType, method: str) -> bool:
    """Whether the call of `method` that `frame` is making is awaited; False where that cannot be seen."""
    place = id(frame.f_code), frame.f_lasti
    known = _known.get(place)
    if known is None:
        if len(_known) >= _MOST:  # code that is compiled again and again
            _known.clear()
        known = _known[place] = frame.f_code, _look(frame, method)  # the code stays, so its id is nobody else's
    return known[1]


def _look(frame: FrameType, method: str) -> bool:
    code, at = frame.f_code, frame.f_lasti
    if next((each.opname for each in dis.get_instructions(code) if each.offset > at), "") == "GET_AWAITABLE":
        return True
    _, line, _, column = list(code.co_positions())[at // 2]
    source = "".join(linecache.getlines(code.co_filename, frame.f_globals))
    # Two calls never end at the same place. Where they begin depends on the version of Python.
    call = _calls(source).get((line, column))
    return call is not None and _is_of(call, method, frame) and _reaches_await(call, frame, set())


@functools.lru_cache(maxsize=32)
def _calls(source: str) -> dict[tuple[int | None, int | None], ast.Call]:
    """The calls in a file by line and column, in bytes, of their end. Every node has its `parent`."""
    try:
        tree = ast.parse(source)
    except (SyntaxError, ValueError):
        return {}
    for node in ast.walk(tree):
        for child in ast.iter_child_nodes(node):
            child.parent = node  # type: ignore[attr-defined]
    calls = (node for node in ast.walk(tree) if isinstance(node, ast.Call))
    return {(call.end_lineno, call.end_col_offset): call for call in calls}


def _is_of(call: ast.Call, method: str, frame: FrameType) -> bool:
    """Whether it is the call itself, and no other function that made it: `list(map(ctx.read_file, paths))`."""
    if isinstance(call.func, ast.Attribute):
        return call.func.attr == method
    return getattr(_value(call.func, frame), "__name__", None) == method


def _reaches_await(node: ast.AST, frame: FrameType, seen: set[str]) -> bool:
    while True:
        child, node = node, node.parent  # type: ignore[attr-defined]
        match node:
            case ast.Await():
                return True
            case ast.Call(func=func) if func is not child:
                if isinstance(func, ast.Attribute) and func.attr == "append" and isinstance(func.value, ast.Name):
                    return _name_reaches_await(func.value, frame, seen)
                return _takes_coroutines(func, frame)
            case ast.Assign(targets=[ast.Name() as name]) | ast.For(target=ast.Name() as name):
                return _name_reaches_await(name, frame, seen)
            case ast.comprehension(target=ast.Name() as name) if node.iter is child:
                return _name_reaches_await(name, frame, seen)
            case ast.ListComp() | ast.GeneratorExp() | ast.SetComp() if node.elt is child:
                pass
            case ast.List() | ast.Tuple() | ast.Set() | ast.Starred() | ast.NamedExpr():
                pass
            case ast.IfExp() if node.test is not child:
                pass
            case _:
                return False


def _name_reaches_await(name: ast.Name, frame: FrameType, seen: set[str]) -> bool:
    """Whether all uses of a variable, and at least one, are awaited."""
    if name.id in seen:
        return True
    seen.add(name.id)
    function: Any = name
    while not isinstance(function, ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda | ast.Module):
        function = function.parent
    uses = [
        node
        for node in ast.walk(function)
        if isinstance(node, ast.Name) and node.id == name.id and isinstance(node.ctx, ast.Load) and not _appends(node)
    ]
    return bool(uses) and all(_reaches_await(use, frame, seen) for use in uses)


def _appends(node: Any) -> bool:
    return isinstance(node.parent, ast.Attribute) and node.parent.attr == "append"


def _takes_coroutines(function: ast.expr, frame: FrameType) -> bool:
    name = function.attr if isinstance(function, ast.Attribute) else getattr(function, "id", "")
    value = _value(function, frame)
    name = getattr(value, "__name__", name)  # `from asyncio import gather as together`
    if name not in _TAKERS:
        return False
    return value is None or str(getattr(value, "__module__", None)).startswith(("asyncio", "_asyncio"))


def _value(node: ast.expr, frame: FrameType | None) -> Any:
    """What a name, or an attribute of one, means where `frame` is; None where that takes more than a look."""
    if isinstance(node, ast.Attribute):
        owner = _value(node.value, frame)
        return None if owner is None else inspect.getattr_static(owner, node.attr, None)
    if not isinstance(node, ast.Name) or frame is None:
        return None
    inside: FrameType | None = frame
    while inside is not None:
        if node.id in inside.f_locals:
            return inside.f_locals[node.id]
        # A comprehension is a function of its own before Python 3.12, and a generator's always.
        inside = inside.f_back if inside.f_code.co_name.startswith("<") else None
    return frame.f_globals.get(node.id)
