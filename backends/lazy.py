"""Names, modules and values that are made when they are first used, and hooks after an import."""

from __future__ import annotations

import functools
import importlib
import logging
import sys
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from difflib import get_close_matches
from importlib.abc import MetaPathFinder
from importlib.machinery import ModuleSpec, PathFinder, SourceFileLoader
from types import ModuleType
from typing import Any, TypeVar

T = TypeVar("T")


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


class _Loader(SourceFileLoader):
    def __init__(self, loader: SourceFileLoader, act: Callable[[ModuleType], None]) -> None:
        super().__init__(loader.name, loader.path)
        self._act = act

    def exec_module(self, module: ModuleType) -> None:
        super().exec_module(module)
        self._act(module)


class _Finder(MetaPathFinder):
    """Finds one module as usual, and has something done once it is loaded."""

    def __init__(self, name: str, act: Callable[[ModuleType], None]) -> None:
        self._name, self._act = name, act

    def find_spec(self, name: str, path: Any = None, target: Any = None) -> ModuleSpec | None:
        if name != self._name:
            return None
        spec = PathFinder.find_spec(name, path, target)
        if spec is not None and type(spec.loader) is SourceFileLoader:
            spec.loader = _Loader(spec.loader, self._act)
        return spec


def after_import(name: str, act: Callable[[ModuleType], None]) -> MetaPathFinder:
    """Call `act` with a module of this name: now if it is loaded, else once a program imports it.

    Returns:
        The finder in `sys.meta_path` that waits for the import.
    """
    finder = _Finder(name, act)
    sys.meta_path.insert(0, finder)
    if name in sys.modules:
        act(importlib.import_module(name))  # waits for a thread that is importing it
    return finder


class once_property(functools.cached_property[T]):  # it is used as the builtin one is
    """`functools.cached_property` that one thread computes while the others wait, as it was before Python 3.12."""

    def __init__(self, compute: Callable[[Any], T]) -> None:
        super().__init__(compute)
        self._once = threading.RLock()

    def __get__(self, instance: Any, owner: Any = None) -> T:  # type: ignore[override]  # of instances only
        with self._once:
            return super().__get__(instance, owner)  # type: ignore[no-any-return]
