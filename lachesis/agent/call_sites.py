"""Whether the source code that makes a call awaits its result.

A call is awaited if its value goes straight to `await`, or to something of asyncio that takes coroutines (`gather`,
`wait_for`, `create_task` and the like), also by way of a list, a variable that is used for nothing else, a parameter of
a function that is read likewise, or what a plain function returns. The bytecode after the call shows the first case,
the syntax tree of the source the others. Each place is looked at once.
"""

from __future__ import annotations

import ast
import dis
import functools
import inspect
import linecache
from collections import ChainMap
from collections.abc import Mapping
from types import CodeType, FrameType, FunctionType, ModuleType
from typing import Any

from backends.first_use import in_turn, parse

_TAKERS = frozenset(
    (
        *("Task", "as_completed", "create_task", "ensure_future", "gather", "run_coroutine_threadsafe"),
        *("run_until_complete", "shield", "wait", "wait_for"),
    )
)
"""Functions and methods of asyncio that take coroutines."""
_BEGINNERS = frozenset(("gather", "shield"))
"""Those of them that begin the calls at once, whether or not what they return is awaited."""
_MOST = 4096
_known: dict[tuple[int, int], tuple[CodeType, bool | None]] = {}
"""By the id of the code, whose hash takes longer than the rest, and the instruction."""


def is_awaited(called: FrameType) -> bool:
    """Whether the call that began `called` is awaited; False where that cannot be seen."""
    inside = called.f_back
    while inside is not None:
        place = id(inside.f_code), inside.f_lasti
        known = _known.get(place)
        if known is None:
            if len(_known) >= _MOST:  # code that is compiled again and again
                _known.clear()
            known = _known[place] = (
                inside.f_code,
                _look(inside, called.f_code),
            )  # the code stays, so its id is nobody else's
        if known[1] is not None:
            return known[1]
        called, inside = inside, inside.f_back  # which decides what becomes of the value that is returned to it
    return False


def _look(frame: FrameType, called: CodeType) -> bool | None:
    """None where the call is what a plain function returns."""
    code, at = frame.f_code, frame.f_lasti
    steps = {each.offset: each.opname for each in dis.get_instructions(code)}
    after = next((name for offset, name in steps.items() if offset > at), "")
    iterates = steps.get(at) == "CALL_FUNCTION_EX"  # `gather(*map(ctx.read_file, paths))`
    if after == "GET_AWAITABLE" and not iterates:
        return True
    _, line, _, column = list(code.co_positions())[at // 2]
    # Two calls never end at the same place. Where they begin depends on the version of Python.
    call = _calls("".join(linecache.getlines(code.co_filename, frame.f_globals))).get((line, column))
    if call is None:
        return False
    names = _names(frame)
    value = _value(call.func, names)
    if isinstance(value, type) or inspect.isbuiltin(value):
        return False  # `list(map(ctx.read_file, paths))`
    if iterates and getattr(value, "__code__", called) is not called and _taker(call.func, names) is None:
        return False
    verdict = _reaches_await(call, names, set())
    returns = not code.co_flags & (inspect.CO_COROUTINE | inspect.CO_GENERATOR | inspect.CO_ASYNC_GENERATOR)
    return verdict if verdict is not None or (returns and code.co_name not in _INLINE) else False


_INLINE = ("<listcomp>", "<setcomp>", "<dictcomp>")


@in_turn
@functools.lru_cache(maxsize=32)
def _tree(source: str) -> ast.Module | None:
    """Every node has its `parent`."""
    try:
        tree: ast.Module = parse(source)
    except (SyntaxError, ValueError, RecursionError):
        return None
    for node in ast.walk(tree):
        for child in ast.iter_child_nodes(node):
            child.parent = node  # type: ignore[attr-defined]
    return tree


@in_turn
@functools.lru_cache(maxsize=32)
def _calls(source: str) -> dict[tuple[int | None, int | None], ast.Call]:
    """The calls in a file by line and column, in bytes, of their end."""
    tree = _tree(source)
    calls = (node for node in ast.walk(tree) if isinstance(node, ast.Call)) if tree is not None else ()
    return {(call.end_lineno, call.end_col_offset): call for call in calls}


def _reaches_await(node: ast.AST, names: Mapping[str, Any], seen: set[str]) -> bool | None:
    """None where it is what the function returns."""
    while True:
        child, node = node, node.parent  # type: ignore[attr-defined]
        match node:
            case ast.Await():
                return True
            case ast.Return() | ast.Lambda():
                return None
            case ast.Call(func=func) if func is not child:
                if isinstance(func, ast.Attribute) and func.attr == "append" and isinstance(func.value, ast.Name):
                    return _name_reaches_await(func.value, names, seen)
                taker = _taker(func, names)
                if taker not in _BEGINNERS:
                    return taker is not None or _parameter_reaches_await(node, child, names)
            case ast.Assign(targets=[ast.Name() as name]) | ast.For(target=ast.Name() as name):
                return _name_reaches_await(name, names, seen)
            case ast.comprehension(target=ast.Name() as name) if node.iter is child:
                return _name_reaches_await(name, names, seen)
            case ast.ListComp() | ast.GeneratorExp() | ast.SetComp() if node.elt is child:
                pass
            case ast.List() | ast.Tuple() | ast.Set() | ast.Starred() | ast.NamedExpr() | ast.keyword():
                pass
            case ast.IfExp() if node.test is not child:
                pass
            case _:
                return False


def _name_reaches_await(name: ast.Name, names: Mapping[str, Any], seen: set[str]) -> bool | None:
    """Whether all uses of a variable, and at least one, are awaited."""
    function: Any = name
    while not isinstance(function, ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda | ast.Module):
        function = function.parent
    return _uses_reach_await(name.id, function, names, seen)


def _uses_reach_await(name: str, function: ast.AST, names: Mapping[str, Any], seen: set[str]) -> bool | None:
    if name in seen:
        return True
    seen.add(name)
    verdicts = {
        _reaches_await(node, names, seen)
        for node in ast.walk(function)
        if isinstance(node, ast.Name) and node.id == name and isinstance(node.ctx, ast.Load) and not _appends(node)
    }
    return False if not verdicts or False in verdicts else None if None in verdicts else True


def _appends(node: Any) -> bool:
    return isinstance(node.parent, ast.Attribute) and node.parent.attr == "append"


def _parameter_reaches_await(call: ast.Call, argument: ast.AST, names: Mapping[str, Any]) -> bool:
    """Whether a function of the environment awaits an argument: `await within(ctx.terminal("make"), seconds=5)`."""
    function: Any = _value(call.func, names)
    if not isinstance(function, FunctionType) or hasattr(function, "__wrapped__"):
        return False
    tree = _tree("".join(linecache.getlines(function.__code__.co_filename, function.__globals__)))
    first = function.__code__.co_firstlineno
    found = (
        node
        for node in (ast.walk(tree) if tree is not None else ())
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)
        and min(each.lineno for each in (node, *node.decorator_list)) == first
    )
    definition = next(found, None)
    if definition is None or any(isinstance(each, ast.Starred) for each in call.args):
        return False
    if isinstance(argument, ast.keyword):
        name = argument.arg
    else:
        of_self = isinstance(call.func, ast.Attribute) and not isinstance(
            _value(call.func.value, names), ModuleType | type
        )
        parameters = [each.arg for each in (*definition.args.posonlyargs, *definition.args.args)][of_self:]
        name = dict(enumerate(parameters)).get(call.args.index(argument))  # type: ignore[arg-type]
    return name is not None and _uses_reach_await(name, definition, function.__globals__, set()) is True


def _taker(function: ast.expr, names: Mapping[str, Any]) -> str | None:
    """The name of a function of asyncio that takes coroutines."""
    name = function.attr if isinstance(function, ast.Attribute) else getattr(function, "id", "")
    value = _value(function, names)
    name = getattr(value, "__name__", name)  # `from asyncio import gather as together`
    known = value is None or str(getattr(value, "__module__", None)).startswith(("asyncio", "_asyncio"))
    return name if name in _TAKERS and known else None


def _names(frame: FrameType) -> Mapping[str, Any]:
    """What names mean where `frame` is."""
    scopes = [frame.f_locals]
    inside: FrameType | None = frame
    # A comprehension is a function of its own before Python 3.12, and a generator's always.
    while inside is not None and inside.f_code.co_name.startswith("<"):
        inside = inside.f_back
        scopes += [inside.f_locals] if inside is not None else []
    return ChainMap(*scopes, frame.f_globals)


def _value(node: ast.expr, names: Mapping[str, Any]) -> Any:
    """What a name, or an attribute of one, means; None where that takes more than a look."""
    if isinstance(node, ast.Attribute):
        owner = _value(node.value, names)
        return None if owner is None else inspect.getattr_static(owner, node.attr, None)
    return names.get(node.id) if isinstance(node, ast.Name) else None
