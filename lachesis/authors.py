"""The code that authors of environments wrote: where it is, what of it a run calls, and what it must not return."""

from __future__ import annotations

import inspect
import os
import traceback
from pathlib import Path
from types import CodeType
from typing import Any

from backends.errors import LachesisError
from lachesis import ours

_LIBRARY = Path(os.__file__).parent
ENVIRONMENTS = ours.folders("lachesis_envs")  # which authors wrote
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


def is_of_an_author(file: str) -> bool:
    of_python = file.startswith(f"{_LIBRARY}/") and "-packages/" not in file
    return not (of_python or leads_there(file))


def leads_there(file: str) -> bool:
    return file.startswith(_BETWEEN) and not file.startswith(ENVIRONMENTS)
