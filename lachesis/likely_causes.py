"""The likely causes of exceptions in an environment's own code: loaded where one is shown."""

from __future__ import annotations

import inspect
import pkgutil
import re
import sys
import traceback
from collections.abc import Iterator, Mapping
from difflib import get_close_matches
from functools import cache
from types import ModuleType, TracebackType
from typing import Any

from backends.errors import os_error_hint
from lachesis.authors import CALLED, AuthorError, defined_at, is_of_an_author, place


def guess(error: BaseException) -> str:
    """The likely cause, and what to do about it; empty if nothing is known."""
    try:
        return _guess(error)
    except Exception:  # the author's own mappings and texts are looked at
        return ""


def _guess(error: BaseException) -> str:
    said = str(error)
    if isinstance(error, AuthorError):
        return ""
    if isinstance(error, OSError):
        return os_error_hint(error)
    if isinstance(error, KeyError) and error.args:
        return _about_key(error.args[0], error.__traceback__)
    if isinstance(error, AttributeError) and hasattr(type(error.obj), "get_next_item"):
        return f"neither the class nor setup() has set self.{error.name}"
    if isinstance(error, ModuleNotFoundError):
        near = near_module(error.name or "")
        return f"{f'did you mean {near}? Else ' if near else ''}install the package that has it, for {sys.executable}"
    if isinstance(error, RuntimeError) and said == "coroutine raised StopIteration":
        return "next() found no more items: next(items, None) returns None, which ends the run"
    if isinstance(error, TypeError | AttributeError) and re.search(r"\bcoroutine\b", said):
        return "a coroutine was not awaited: write `await` before the call"
    if isinstance(error, TypeError) and "can't be used in 'await' expression" in said:
        if place(error):
            return "this call is not a coroutine: leave `await` out"
        return f"a run awaits {' and '.join(_not_awaitable()) or 'the hooks of an environment'}: write `async def`"
    called = re.match(r"((?:[\w<>]+\.)*([\w<>]+))\(\) (?:takes|missing|got) ", said)
    if isinstance(error, TypeError) and called and called[2] in CALLED:
        return f"it is called as {called[2]}{CALLED[called[2]]}{defined_at(_named(called[1]))}"
    if isinstance(error, TypeError) and called and "reference_policy.<locals>." in called[1]:
        return "the policy is called as policy(messages, tools)"
    if isinstance(error, TypeError) and called and called[1] == "tool":
        return "it is written @tool(toolset='...')"
    return ""


def _not_awaitable() -> Iterator[str]:
    """The hooks of authors' environments that a run awaits and that are plain functions, each with its place."""
    for module in _of_authors():
        for value in [*vars(module).values()]:
            if isinstance(value, type) and _is_environment(value):
                for name in ("setup", "teardown", "get_next_item", "get_eval_items"):
                    function = vars(value).get(name)
                    if inspect.isfunction(function) and not inspect.iscoroutinefunction(function):
                        yield f"{value.__name__}.{name}{defined_at(function)}"


def _is_environment(cls: type) -> bool:
    """Whether it has `get_next_item`. With `hasattr`, classes that stand in for missing packages raise ImportError."""
    of = type.__getattribute__
    return any("get_next_item" in of(base, "__dict__") for base in of(cls, "__mro__"))


def _of_authors() -> Iterator[ModuleType]:
    """The modules of authors."""
    for module in [*sys.modules.values()]:
        if isinstance(file := getattr(module, "__dict__", {}).get("__file__"), str) and is_of_an_author(file):
            yield module


def _named(path: str) -> Any:
    """The function of an author with this qualified name, such as `SortWords.setup`; None unless there is one."""
    found: dict[int, Any] = {}
    for module in _of_authors():
        value: Any = module
        for name in path.split("."):
            value = getattr(value, "__dict__", {}).get(name)
        if value is not None:
            found[id(value)] = value
    return found.popitem()[1] if len(found) == 1 else None


def near_module(name: str) -> str:
    """The module that can be imported and has nearly this name; empty without one."""
    parent, _, last = name.rpartition(".")
    return f"{parent}.{near[0]}".lstrip(".") if (near := get_close_matches(last, _modules_in(parent), 1, 0.85)) else ""


@cache
def _modules_in(parent: str) -> frozenset[str]:
    places = getattr(sys.modules.get(parent), "__path__", ()) if parent else None
    found = frozenset(each.name for each in pkgutil.iter_modules(places))
    return found if parent else found | sys.stdlib_module_names


def _about_key(key: object, trace: TracebackType | None) -> str:
    """The keys of the mapping that lacks one, where the line names it."""
    *_, (frame, number) = traceback.walk_tb(trace) if trace is not None else [(None, 0)]
    if frame is None:
        return ""
    found = traceback.FrameSummary(frame.f_code.co_filename, number, "").line or ""
    for name in re.findall(r"\b(\w+)\[", found):
        value = frame.f_locals.get(name)
        if isinstance(value, Mapping) and key not in value:
            keys = [str(each) for each in value]
            return f"{name} has the fields {', '.join(keys[:12]) or 'none'}" + (", ..." if len(keys) > 12 else "")
    return ""
