"""`lachesis play`: an environment written for Atropos' BaseEnv, unmodified, with exact tokens.

    lachesis play PATH/TO/env.py:Class serve|process|evaluate [--env.NAME VALUE ...] [--openai.NAME VALUE ...]

`package.module:Class` works as well, and `:Class` may be left out where the file defines one environment.
Environments of other frameworks are `verifiers:MODULE[?args]` or `inspect:FILE.py@TASK[?args]`.
`--drift` prints where the tokens that the environment returned differ from the sampled ones; `--json` prints that as
JSON lines.
"""

from __future__ import annotations

import importlib
import sys
from collections.abc import Sequence
from pathlib import Path
from types import ModuleType
from typing import Any

from lachesis.errors import SettingsError


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command of an environment of Atropos or of a guest; the exit code."""
    arguments = list(argv or ())
    if not arguments or arguments[0] in ("-h", "--help"):
        print((__doc__ or "").strip())
        return 0 if arguments else 2
    target, *rest = arguments
    drift = "json" if "--json" in rest else "text" if "--drift" in rest else None
    from lachesis.guests import guest
    from lachesis.runs import command_line

    if (env_cls := guest(target)) is not None:
        return command_line.main(env_cls, rest)
    from lachesis.environments.atropos_player import player_for, prepare_imports

    prepare_imports()
    player = player_for(load_env(target))
    player.drift = drift
    return command_line.main(player, [argument for argument in rest if argument not in ("--drift", "--json")])


def load_env(target: str) -> Any:
    """The environment's class.

    Raises:
        SettingsError: there is no such file, module or class, or it is unclear which class is meant.
    """
    from lachesis.runs.atropos import BaseEnv

    place, _, name = target.partition(":")
    module = _module_of_file(Path(place)) if place.endswith(".py") else _import(place, place)
    if name:
        found = getattr(module, name, None)
        if found is None:
            raise SettingsError(f"{place} has no {name}; it defines {_names(module, BaseEnv) or 'no environment'}")
        return found
    classes = _classes(module, BaseEnv)
    if len(classes) != 1:
        raise SettingsError(
            f"{place} defines {_names(module, BaseEnv) or 'no environment'}; write {place}:CLASS"
            if classes
            else f"{place} defines no subclass of atroposlib's BaseEnv"
        )
    return classes[0]


def _module_of_file(path: Path) -> ModuleType:
    """The module of a file, with its own folder and the root of its package on the path, as both ways to start it have.

    A file within a folder `environments`, as in Atropos' repository, is a module of that package.
    """
    if not path.is_file():
        raise SettingsError(f"there is no file {path}")
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
    return _import(name, str(path))


def _import(name: str, shown: str) -> ModuleType:
    if name.split(".")[0] in sys.builtin_module_names:
        raise SettingsError(f"{shown} has the name of a module of Python")
    try:
        return importlib.import_module(name)
    except ModuleNotFoundError as error:
        if error.name is not None and name.startswith(error.name):
            raise SettingsError(f"there is no module {shown}") from error
        raise SettingsError(f"{shown} needs the package {error.name!r}, which is not installed: {error}") from error


def _classes(module: ModuleType, base: Any) -> list[Any]:
    own = [value for value in vars(module).values() if isinstance(value, type) and issubclass(value, base)]
    return [cls for cls in dict.fromkeys(own) if cls.__module__ == module.__name__]


def _names(module: ModuleType, base: Any) -> str:
    return ", ".join(cls.__name__ for cls in _classes(module, base))
