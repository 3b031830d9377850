"""Backends by name, as configurations spell them."""

from __future__ import annotations

import importlib
from typing import Any, cast

from .base import Backend

BACKENDS = {"local": "local:LocalBackend"}
"""Name -> module of this package, and class. A module is imported when it is asked for: some need heavy clients."""


def create_backend(name: str, **options: Any) -> Backend:
    """The backend called `name`; `options` are its class' own. Whether it works here is `Backend.check`'s answer.

    Raises:
        ValueError: there is no such backend, or no such option.
    """
    try:
        module, _, attribute = BACKENDS[name].partition(":")
    except KeyError:
        raise ValueError(f"no backend is called {name!r}; there is: {', '.join(sorted(BACKENDS))}") from None
    make = getattr(importlib.import_module(f".{module}", __package__), attribute)
    try:
        return cast(Backend, make(**options))
    except TypeError as error:
        raise ValueError(f"backend {name!r}: {error}") from error
