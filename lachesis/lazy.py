"""Packages whose names are imported when they are first used, and imports that log no warnings."""

from __future__ import annotations

import importlib
import logging
import sys
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from difflib import get_close_matches
from typing import Any

_quiet = threading.RLock()


@contextmanager
def quiet_imports() -> Iterator[None]:
    """Imports inside log no warnings, transformers' that there is no PyTorch for example. One thread at a time: the
    second one would restore the level of the first."""
    with _quiet:
        level = logging.root.manager.disable
        logging.disable(logging.WARNING)
        try:
            yield
        finally:
            logging.disable(level)


def lazy_names(package: str, modules: Mapping[str, Sequence[str]]) -> Callable[[str], Any]:
    """The `__getattr__` of a package that offers the names of these modules (module -> names).

    A type checker does not understand it: repeat the imports in the package under `if TYPE_CHECKING:`.
    """
    home = {name: module for module, names in modules.items() for name in names}

    def __getattr__(name: str) -> Any:
        if name not in home:
            near = get_close_matches(name, home, n=1) if not name.startswith("_") else []
            hint = f"; did you mean {near[0]!r}?" if near else ""
            raise AttributeError(f"module {package!r} has no attribute {name!r}{hint}")
        try:
            module = importlib.import_module(home[name])
        except AttributeError as error:  # `from package import name` would report that there is no such name
            raise ImportError(f"{home[name]} cannot be imported: {error}") from error
        value = getattr(module, name)
        setattr(sys.modules[package], name, value)
        return value

    return __getattr__
