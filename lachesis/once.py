"""A property that is computed at first use, by one thread."""

from __future__ import annotations

import functools
import threading
from collections.abc import Callable
from typing import Any, TypeVar

T = TypeVar("T")


class once_property(functools.cached_property[T]):  # it is used as the builtin one is
    """`functools.cached_property` that one thread computes while the others wait, as it was before Python 3.12."""

    def __init__(self, compute: Callable[[Any], T]) -> None:
        super().__init__(compute)
        self._once = threading.RLock()

    def __get__(self, instance: Any, owner: Any = None) -> T:  # type: ignore[override]  # of instances only
        with self._once:
            return super().__get__(instance, owner)  # type: ignore[no-any-return]
