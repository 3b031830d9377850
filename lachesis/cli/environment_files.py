"""The class of an environment that a file or a module defines."""

from __future__ import annotations

import importlib
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from traceback import walk_tb
from types import ModuleType
from typing import Any

from backends.errors import SettingsError, cannot_read
from backends.lazy import after_import
from lachesis.base_env import HermesAgentBaseEnv
from lachesis.other_packages import COMPAT
from lachesis.runs.atropos_base import MODULE


@contextmanager
def prepared_for_atropos() -> Iterator[None]:
    """Inside, an import of Atropos is prepared for. It takes two seconds, five where torch is installed: only for a
    file that imports it."""
    finder = after_import("atroposlib", _prepare_for_atropos)
    try:
        yield
    finally:
        sys.meta_path.remove(finder)


def _prepare_for_atropos(_: ModuleType) -> None:
    COMPAT.load("prepare_imports")()


def load_env(target: str) -> Any:
    """The environment's class, as it is.

    Raises:
        SettingsError: there is no such file, module or class, or it is unclear which class is meant.
    """
    place, _, name = target.partition(":")
    module = _module_of_file(Path(place)) if place.endswith(".py") else _import(place, place)
    classes = _classes(module, lambda cls: issubclass(cls, HermesAgentBaseEnv)) or _classes(module, _is_of_atropos)
    names = ", ".join(cls.__name__ for cls in classes)
    if name:
        found = getattr(module, name, None)
        if not (isinstance(found, type) and (issubclass(found, HermesAgentBaseEnv) or _is_of_atropos(found))):
            what = f"{name} of {place} is not an environment" if found is not None else f"{place} has no {name}"
            raise SettingsError(f"{what}; it defines {names or 'none'}")
        return found
    if len(classes) != 1:
        raise SettingsError(
            f"{place} defines {names}; write {place}:CLASS"
            if classes
            else f"{place} defines no environment, that is, no subclass of HermesAgentBaseEnv or of Atropos' BaseEnv; "
            "`lachesis new NAME` writes one to begin with"
        )
    return classes[0]


def _is_of_atropos(cls: type) -> bool:
    base = sys.modules.get(MODULE)  # what has not imported it has no class of it
    return base is not None and issubclass(cls, base.BaseEnv)


def _module_of_file(path: Path) -> ModuleType:
    """The module of a file, with its own folder and the root of its package on the path, as both ways to start it have.

    A file within a folder `environments`, as in Atropos' repository, is a module of that package.
    """
    if not path.is_file():
        raise SettingsError(cannot_read(path))
    path = path.resolve()
    root = path.parent
    while (root / "__init__.py").exists():
        root = root.parent
    if "environments" in path.parts[:-1]:
        last = len(path.parts) - 1 - path.parts[::-1].index("environments")
        root = Path(*path.parts[:last])
    for folder in (root, path.parent):
        sys.path.insert(0, str(folder))
    name = ".".join(path.relative_to(root).with_suffix("").parts)
    module = _import(name, str(path))
    if Path(module.__file__ or "").resolve() != path:
        raise SettingsError(f"{path} has the name of another module, {module.__file__ or name}: rename the file")
    return module


def _import(name: str, shown: str) -> ModuleType:
    if name.split(".")[0] in sys.builtin_module_names:
        raise SettingsError(f"{shown} has the name of a module of Python")
    try:
        return importlib.import_module(name)
    except ModuleNotFoundError as error:
        if error.name is not None and name.startswith(error.name):
            raise SettingsError(f"there is no module {shown}") from error
        missing = "'lachesis-rl[atropos]'" if error.name == "atroposlib" else error.name
        lines = [at for frame, at in walk_tb(error.__traceback__) if frame.f_code.co_filename == shown]
        where = f"{shown}, line {lines[-1]}," if lines else shown
        from lachesis.likely_causes import near_module

        near = near_module(error.name or "")
        next_step = (
            f"; did you mean {near}? Else: pip install {missing}" if near else f". Next step: pip install {missing}"
        )
        raise SettingsError(f"{where} needs the package {error.name!r}, which is not installed{next_step}") from error


def _classes(module: ModuleType, suits: Callable[[type], bool]) -> list[Any]:
    """The classes that a module defines or, where it defines none, that its `__all__` passes on."""
    found = {value: name for name, value in vars(module).items() if isinstance(value, type) and suits(value)}
    own = [cls for cls in found if cls.__module__ == module.__name__]
    return own or [cls for cls, name in found.items() if name in getattr(module, "__all__", ())]
