"""First use of what is cached, by any number of threads at once.

`functools.lru_cache` computes a value in every thread that asks before the first one has it. That is waste where the
value is pure, and a fault where making it is not: two temporary folders of which one is removed, two parsers at work.
"""

from __future__ import annotations

import ast
import functools
import threading
from typing import Any, Callable, TypeVar, cast

F = TypeVar("F", bound=Callable[..., Any])

_parsing = threading.RLock()
_ATTEMPTS = 8


def in_turn(function: F) -> F:
    """The function, which one thread at a time runs. Around a cache, one thread computes and the others wait for it."""
    lock = threading.RLock()

    @functools.wraps(function)
    def locked(*args: Any, **kwargs: Any) -> Any:
        with lock:
            return function(*args, **kwargs)

    return cast(F, locked)


def parse(source: str | bytes, mode: str = "exec") -> Any:
    """`ast.parse`, in one thread at a time.

    Python 3.11 raises `SystemError: AST constructor recursion depth mismatch` where another call runs meanwhile: in
    another thread, or in a finalizer that the garbage collector runs. Other libraries do not take this lock, so it is
    tried again.

    Raises:
        SyntaxError, ValueError, RecursionError, MemoryError: as `ast.parse`.
    """
    with _parsing:
        for _ in range(_ATTEMPTS - 1):
            try:
                return ast.parse(source, mode=mode)
            except SystemError:
                pass
        return ast.parse(source, mode=mode)
