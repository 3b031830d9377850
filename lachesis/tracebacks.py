"""Exceptions of an environment's own code, for its author: a headline with the likely cause, then the author's lines
that it went through, without frames of this project. What the headline says is not said again below it."""

from __future__ import annotations

import inspect
import linecache
import os
import pkgutil
import re
import sys
import traceback
from collections.abc import Iterator, Mapping, Sequence
from difflib import get_close_matches
from functools import cache
from pathlib import Path
from types import CodeType, TracebackType
from typing import Any

from backends.errors import LachesisError, os_error_hint
from lachesis import ours

_LIBRARY = Path(os.__file__).parent
_ENVIRONMENTS = ours.folders("lachesis_envs")  # which authors wrote
_LONGEST = 20_000
"""Characters of a traceback, which may quote an agent's files."""
_BETWEEN = (
    *ours.folders(),
    *(
        f"{_LIBRARY}/{name}"
        for name in ("asyncio/", "concurrent/", "contextlib.py", "functools.py", "importlib/", "threading.py")
    ),
    "<frozen ",
)
"""Beginnings of the names of files whose frames lead from the command to the author's code."""
_HOOKS = {
    "(self)": "setup teardown get_next_item reference_policy get_eval_items evaluate tool_definitions",
    "(self, item)": "format_prompt sandbox_files initial_messages collect_trajectory collect_trajectories",
    "(self, item, result, ctx)": "compute_reward",
    "(self, item, results, ctxs)": "compute_group_reward",
    "(self, item, ctx)": "setup_sandbox",
    "(self, item, spec)": "sandbox_for",
    "(self, item, messages)": "follow_up",
    "(self, item, history)": "branch_at",
    "(self, item, result, reward)": "rollout_metrics",
    "(cls)": "config_init",
    "(self, trajectories)": "postprocess_histories",
    "(self, wandb_metrics)": "wandb_log",
}
CALLED = {name: arguments for arguments, names in _HOOKS.items() for name in names.split()}
"""Methods of an environment that a run calls, and with what."""


class AuthorError(LachesisError, TypeError):
    """A method of an environment returned what it must not. The message names the method and its place."""


def wrong_result(env: Any, method: Any, given: Any, instead: str) -> AuthorError:
    """The error about what a method of `env` returned; `instead`: what to do."""
    name = getattr(_plain(method), "__name__", str(method))
    name = f"{name}()" if env is None else f"{type(env).__name__}.{name}"
    shown = repr(given)
    if inspect.iscoroutine(given):
        given.close()  # or Python warns of it, in a line of ours
        shown = "a coroutine: a call in it lacks `await`, or it is an `async def`"
    elif " at 0x" in shown:
        shown = f"a value of the type {type(given).__name__}"
    return AuthorError(f"{name}{defined_at(method)} returned {shown:.90}; {instead}")


def explained(error: BaseException) -> str:
    """The headline, then the author's lines; several lines."""
    trace = traceback.TracebackException.from_exception(error, compact=True)
    refused = _is_refusal(error)
    if refused and not _has_own_lines(error.__cause__ or error.__context__):
        trace.__cause__ = trace.__context__ = None
    chain = _chain(trace)
    expected = refused or _is_ours(error) or (isinstance(error, OSError | TypeError) and bool(guess(error)))
    if expected or place(error):  # otherwise the mistake is ours
        for each in chain:
            _remove_ours(each, expected=expected)
        _cut_packages(chain)
    said = headline(error)
    framed = [each for each in chain if each.stack]
    if len(framed) > 1 or not all(_is_told(each, said) for each in chain[1:]):
        return _shown(f"{said}\n{''.join(trace.format())}")
    rest = "".join(trace.format_exception_only()).splitlines()
    rest = rest[:-1] if isinstance(error, SyntaxError) else rest[1:]  # its line, and the place there
    title = ["Traceback (most recent call last):"] if framed and len(framed[0].stack) > 1 else []
    shown = "".join(framed[0].stack.format()).splitlines() if framed else []
    return _shown("\n".join([said, *title, *shown, *rest]) + "\n")


def headline(error: BaseException) -> str:
    """The error and, if there is one, a guess at its cause, in one line. For a group, the first one."""
    while isinstance(error, BaseExceptionGroup):
        error = error.exceptions[0]
    said = (_text(error).splitlines() or [""])[0]
    if not (isinstance(error, AuthorError) or _is_refusal(error)):  # their texts name the thing
        said = f"{type(error).__name__}: {said}".removesuffix(": ")
    return "; ".join(filter(None, [said, guess(error)]))


def defined_at(function: Any) -> str:
    """` (env.py, line 12)` where an author wrote it, or nothing."""
    code = getattr(_plain(function), "__code__", None)
    if not isinstance(code, CodeType) or not is_of_an_author(code.co_filename):
        return ""
    return f" ({Path(code.co_filename).name}, line {code.co_firstlineno})"


def _plain(function: Any) -> Any:
    """The function that a method, a partial or a decorator's wrapper calls."""
    for name in ("__wrapped__", "__func__", "func"):
        if (inner := getattr(function, name, None)) is not None:
            return _plain(inner)
    return function


def in_one_line(trace: str) -> str:
    """The result of `explained`, shortened: the headline, and the line of the author's code that failed."""
    said, line = trace.partition("\n")[0], last_line(trace)
    return f"{said} ({line})" if line else said


def last_line(trace: str) -> str:
    """The line of the author's code that failed, as `env.py, line 12`; empty where the trace names none."""
    found = re.findall(r'^  File "([^"]+)", line (\d+)', trace.partition("\n")[2], re.MULTILINE)
    found = [each for each in found if is_of_an_author(each[0]) and "-packages/" not in each[0]] or found
    return f"{Path(found[-1][0]).name}, line {found[-1][1]}" if found else ""


def lines_of(trace: str) -> str:
    """Of the result of `explained`, what it shares with others of one mistake, whose texts name other items: the type
    and the lines of code. Empty where it has no lines."""
    lines = re.findall(r'^\s*File "[^"]+", line \d+.*', trace, re.MULTILINE)
    return "\n".join([trace.partition(":")[0], *lines]) if lines else ""


def place(error: BaseException | None) -> str:
    """The author's outermost function (`SortWords.setup`) or file that the error went through; empty without one."""
    while error is not None:
        for frame, _ in traceback.walk_tb(error.__traceback__):
            code = frame.f_code
            if is_of_an_author(code.co_filename):
                return _short(code.co_filename) if code.co_name == "<module>" else code.co_qualname
        if isinstance(error, SyntaxError) and error.filename and is_of_an_author(error.filename):
            return _short(error.filename)
        within = error.exceptions[0] if isinstance(error, BaseExceptionGroup) else None
        error = within or error.__cause__ or error.__context__
    return ""


def _short(file: str) -> str:
    """As seen from the folder of the command."""
    return os.path.relpath(file) if file.startswith(f"{Path.cwd()}/") else file


def _is_told(trace: traceback.TracebackException, said: str) -> bool:
    """Whether the headline says what an exception that led to it says."""
    return trace.exceptions is None and "".join(trace.format_exception_only()).strip() in said


def _is_refusal(error: BaseException) -> bool:
    """Whether our code refuses what an author's code gave it: the message says why, and the lines that raised nothing.

    Such a place is a `raise` of ours; where our code fails by mistake it is another statement.
    """
    if not isinstance(error, TypeError | ValueError) or error.__traceback__ is None:
        return False
    *_, (frame, number) = traceback.walk_tb(error.__traceback__)
    file = frame.f_code.co_filename
    of_ours = file.startswith(ours.folders()) and not file.startswith(_ENVIRONMENTS)
    return of_ours and linecache.getline(file, number).lstrip().startswith("raise ") and bool(place(error))


def _has_own_lines(error: BaseException | None) -> bool:
    """Whether a file of the author's, and of no library, is among the places that an exception went through."""
    frames = traceback.walk_tb(None if error is None else error.__traceback__)
    files = {frame.f_code.co_filename for frame, _ in frames}
    return any(is_of_an_author(file) and "-packages/" not in file and file[:1] != "<" for file in files)


def _text(error: BaseException) -> str:
    try:
        return _shown(str(error))
    except Exception:  # an author wrote it
        return "its text cannot be shown"


def _shown(text: str) -> str:
    """The text as every file and console takes it: halves of characters escaped, and the middle of a long one left
    out."""
    if len(text) > _LONGEST:
        left_out = len(text) - _LONGEST
        text = f"{text[: _LONGEST // 2]} ... {left_out} characters left out ... {text[-_LONGEST // 2 :]}"
    return text.encode(errors="backslashreplace").decode()


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
    for value in _of_authors():
        for name in ("setup", "teardown", "get_next_item", "get_eval_items") if hasattr(value, "get_next_item") else ():
            function = vars(value).get(name)
            if inspect.isfunction(function) and not inspect.iscoroutinefunction(function):
                yield f"{value.__name__}.{name}{defined_at(function)}"


def _of_authors() -> Iterator[type]:
    """Classes in the modules of authors."""
    for module in [*sys.modules.values()]:
        if isinstance(file := getattr(module, "__file__", None), str) and is_of_an_author(file):
            yield from (value for value in [*vars(module).values()] if isinstance(value, type))


def _named(path: str) -> Any:
    """The function of an author with this qualified name, such as `SortWords.setup`; None unless there is one."""
    found: dict[int, Any] = {}
    for module in [*sys.modules.values()]:
        if isinstance(file := getattr(module, "__file__", None), str) and is_of_an_author(file):
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


def _chain(trace: traceback.TracebackException) -> list[traceback.TracebackException]:
    others = (trace.__cause__, trace.__context__, *(trace.exceptions or ()))
    return [trace, *(each for other in others if other is not None for each in _chain(other))]


def _remove_ours(trace: traceback.TracebackException, *, expected: bool) -> None:
    """Remove the frames that lead to the author's code, and between its parts.

    Ours stay at the end, where something failed that the author's code called, unless the error is `expected` to be
    read without them.
    """
    frames = list(trace.stack)
    first = next((at for at, frame in enumerate(frames) if is_of_an_author(frame.filename)), len(frames))
    last = max((at for at, frame in enumerate(frames) if not _leads_there(frame.filename)), default=0)
    theirs = [frame for frame in frames[first : last + 1] if not _leads_there(frame.filename)]
    end = frames[last + 1 :] if theirs and not expected else []
    trace.stack = traceback.StackSummary.from_list([*theirs, *end])
    if not trace.stack:
        trace.stack = None  # type: ignore[assignment]  # no "Traceback" above nothing


def _cut_packages(chain: Sequence[traceback.TracebackException]) -> None:
    """Of the frames within installed packages leave the one where each exception was raised, unless the author's code
    is such a package."""
    if not any(not _is_installed(frame) for each in chain for frame in each.stack or ()):
        return
    for each in chain:
        if each.stack:
            *before, last = each.stack
            each.stack = traceback.StackSummary.from_list([*(f for f in before if not _is_installed(f)), last])


def _is_installed(frame: traceback.FrameSummary) -> bool:
    return "-packages/" in frame.filename


def _leads_there(file: str) -> bool:
    return file.startswith(_BETWEEN) and not file.startswith(_ENVIRONMENTS)


def is_of_an_author(file: str) -> bool:
    of_python = file.startswith(f"{_LIBRARY}/") and "-packages/" not in file
    return not (of_python or _leads_there(file))


def _is_ours(error: BaseException) -> bool:
    return ours.is_ours(type(error).__module__)
