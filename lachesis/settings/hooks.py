"""Methods of an environment that a run calls, and methods of a class that were probably meant as such."""

from __future__ import annotations

import asyncio
import sys
from collections.abc import Awaitable, Iterator
from contextlib import contextmanager
from difflib import SequenceMatcher
from types import CodeType
from typing import Any, TypeVar

from backends.errors import SettingsError
from backends.tasks import cancel_requests
from lachesis.authors import CALLED, defined_at

NEAR, NEAR_MISSING = 0.8, 0.6
"""How much of two names is the same: of one that nobody calls and an optional hook; where a hook is missing, less."""

_REWARDS = ("score", "reward", "grade", "evaluate_answer", "get_reward", "reward_fn", "score_answer", "verify")
"""What other frameworks call the method that scores."""

T = TypeVar("T")


class HookEnded(Exception):
    """An environment's own code raised what ends programs, and not only the call."""


async def of_hook(call: Awaitable[T]) -> T:
    """The result of a method of an environment. Raises as `hook_errors`."""
    with hook_errors():
        return await call


@contextmanager
def hook_errors() -> Iterator[None]:
    """Around a method of an environment: whatever it raises is its own error, and not the end of the program.

    Raises:
        HookEnded: for SystemExit and the like: a run ends with its exit code, not with theirs, which may be 0. Also for
            a CancelledError where nobody cancelled this task.
    """
    before = cancel_requests()
    try:
        yield
    except (Exception, KeyboardInterrupt, GeneratorExit):
        raise
    except BaseException as error:
        if isinstance(error, asyncio.CancelledError) and cancel_requests() > before:
            raise
        said = f"{type(error).__name__}: {error}".removesuffix(": ")
        raise HookEnded(f"{said}; an environment's method does not end the run").with_traceback(
            error.__traceback__
        ) from None


def require_hooks(env_cls: Any) -> None:
    """Raises SettingsError if the class lacks a required method, with a suggestion."""
    lacking = getattr(env_cls, "__abstractmethods__", ())
    missing = [hook for hook in CALLED if hook in lacking]
    if others := sorted({*lacking} - {*missing}):  # of a base class of the author's own
        first = f"{env_cls.__name__} is abstract: it lacks {', '.join(others)}"
        place = defined_at(getattr(env_cls, others[0]))
        raise SettingsError(f"{first}, which a base class asks for{place}; write it, or name a class that has it")
    if not missing:
        return
    found, own = [], {name: cls for name, cls in _own_methods(env_cls).items() if name not in CALLED}
    for hook in missing:
        said = f"{env_cls.__name__} has no method {hook}{CALLED[hook]}"
        near = max(own, key=lambda name: _likeness(name, hook), default="")
        likeness = _likeness(near, hook)
        if likeness < NEAR and callable(getattr(sys.modules.get(env_cls.__module__), hook, None)):
            said += f": the function {hook} of {env_cls.__module__} is outside of the class; indent it"
        elif hook == "compute_reward" and (others := [name for name in own if name in _REWARDS]):
            said = f"{env_cls.__name__} has {others[0]}, and needs {hook}{CALLED[hook]}: rename it"
        elif likeness >= NEAR_MISSING:
            said = f"{env_cls.__name__} has {near}, and needs {hook}{CALLED[hook]}: rename it"
        elif hook == "compute_reward":
            said += "; write it, or methods with @reward, or compute_group_reward"
        else:
            said += "; write it"
        found.append(said)
    raise SettingsError("\n       ".join(found))


def misspelt_hooks(env_cls: Any) -> list[str]:
    """A line for each method that nothing calls and that has nearly the name of an optional hook."""
    own = _own_methods(env_cls)
    known = [base for base in env_cls.__mro__ if base.__module__.startswith("lachesis.")]
    used = used_names(env_cls)
    lines = []
    for name, cls in own.items():
        if name in used or name in env_cls._reward_weights or any(name in vars(base) for base in known):
            continue
        near = max(CALLED, key=lambda hook: _likeness(name, hook))
        if near not in own and _likeness(name, near) >= NEAR:
            lines.append(f"{cls.__name__}.{name} is never called; did you mean {near}{CALLED[near]}?")
    return lines


def used_names(env_cls: type) -> set[str]:
    """Attributes and functions that the methods of an environment's own classes use."""
    return {name for cls in _own_classes(env_cls) for value in vars(cls).values() for name in _names_used(value)}


def _own_classes(env_cls: type) -> Iterator[type]:
    """Those that somebody wrote for this environment, the latest first."""
    for cls in env_cls.__mro__:
        if cls.__module__.partition(".")[0] not in ("lachesis", "builtins", "abc", "atroposlib"):
            yield cls


def _own_methods(env_cls: type) -> dict[str, type]:
    """Public methods, each with the class that has it."""
    return {
        name: cls
        for cls in reversed([*_own_classes(env_cls)])
        for name, value in vars(cls).items()
        if not name.startswith("_") and (callable(value) or isinstance(value, classmethod | staticmethod))
        if not isinstance(value, type)
    }


def _names_used(value: Any) -> Iterator[str]:
    """Attributes and functions that a method uses."""
    value = getattr(value, "__func__", getattr(value, "fget", value))
    todo = [getattr(value, "__code__", None)]
    while todo:
        if isinstance(code := todo.pop(), CodeType):
            yield from code.co_names
            todo.extend(code.co_consts)


def _likeness(name: str, hook: str) -> float:
    return SequenceMatcher(None, _squashed(name), _squashed(hook)).ratio()


def _squashed(name: str) -> str:
    return name.lower().replace("_", "")
