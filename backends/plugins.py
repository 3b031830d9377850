"""Registries of plug-ins: backends, token engines and exports are found by name, without an edit of this project.

A name is, in this order, one of the project's own, one that a program registered, or an entry point of an installed
package. `package.module:attribute` works without any registration.
"""

from __future__ import annotations

import importlib
import sys
from collections.abc import Collection, Mapping
from difflib import get_close_matches
from functools import cache
from importlib.metadata import EntryPoint, entry_points
from typing import Any, Generic, TypeVar, cast

from backends.errors import ExitCode, LachesisError

T = TypeVar("T")


class UnknownPlugin(LachesisError, ValueError):
    """No plug-in has this name, or `module:attribute` leads nowhere."""

    exit_code = ExitCode.SETTINGS


class PluginBroken(LachesisError):
    """A plug-in that exists and cannot be loaded or made. The cause has the traceback for its author."""

    exit_code = ExitCode.SETTINGS


class Registry(Generic[T]):
    """Plug-ins of one kind: classes or functions.

    Args:
        kind: what error messages call one, such as "backend".
        group: the entry point group that other packages use, such as "lachesis.backends".
        own: name -> "module:attribute" of the project's own. A module is imported when it is asked for.
        reserved: names with another meaning in settings, which no plug-in can have.
        package: the distribution of ours that has such plug-ins, named where none is installed.
    """

    def __init__(
        self, kind: str, group: str, own: Mapping[str, str], reserved: Collection[str] = (), package: str = ""
    ) -> None:
        self.kind = kind
        self.group = group
        self._own = dict(own)
        self._reserved = frozenset(reserved)
        self.package = package
        self._registered: dict[str, T | str] = {}

    def register(self, name: str, plugin: T | str) -> None:
        """Add a plug-in, or the "module:attribute" where it is found. Raises `ValueError` for a name that is taken."""
        if name in self._reserved:
            raise ValueError(f"{name!r} has another meaning; register your {self.kind} under another name")
        if name in self._own or self._registered.get(name, plugin) != plugin:
            raise ValueError(f"the {self.kind} {name!r} exists already; register yours under another name")
        self._registered[name] = plugin

    def names(self) -> list[str]:
        """Every known name: the project's own, then the others by name. Loads no plug-in."""
        others = {*self._registered, *_entry_points(self.group, *sys.path)}
        return [*self._own, *sorted(others - self._own.keys() - self._reserved)]

    def load(self, name: str) -> T:
        """The plug-in called `name`, or at `package.module:attribute`.

        Raises:
            UnknownPlugin: there is none; the message lists the names, nearest first.
            PluginBroken: its module fails, or it is nothing that can be called.
            ModuleNotFoundError: a package that it needs is not installed.
        """
        if ":" in name:
            return self._at(name)
        if name in self._own:
            return self._at(self._own[name])
        if name in self._registered:
            plugin = self._registered[name]
            return self._at(plugin) if isinstance(plugin, str) else plugin
        point = _entry_points(self.group, *sys.path).get(name)
        if point is not None and name not in self._reserved:
            return self._at(f"{point.module}:{point.attr}", f"{self.kind} {name!r} at {point.value}")
        names = self.names()
        if self.package and not names:
            raise UnknownPlugin(
                f"the {self.kind} {name!r} is in the package {self.package}. Next step: pip install {self.package}"
            )
        near = get_close_matches(name, names, n=1)
        hint = f" Did you mean {near[0]!r}?" if near else ""
        raise UnknownPlugin(
            f"there is no {self.kind} called {name!r}.{hint} Known are: {', '.join(names)}. Name one of your own "
            f"as 'package.module:attribute', or by an entry point in the group {self.group!r}"
        )

    def broken(self, name: str, error: Exception) -> PluginBroken:
        """The error of a plug-in that fails while it is made; raise it from `error`."""
        missing = error.name if isinstance(error, ModuleNotFoundError) else None
        hint = f"; install the package that has {missing.partition('.')[0]!r}" if missing else ""
        return PluginBroken(f"{self.kind} {name}: {type(error).__name__}: {error}{hint}")

    def _at(self, target: str, said: str | None = None) -> T:
        said = said or f"{self.kind} {target!r}"
        module_name, _, path = target.partition(":")
        if not all(part.isidentifier() for part in [*module_name.split("."), *path.split(".")]):
            raise UnknownPlugin(f"{said}: must be written as 'package.module:attribute'")
        try:
            found: Any = importlib.import_module(module_name)
        except ModuleNotFoundError as error:
            # A module that the plug-in needs is another matter: the caller may know the package that has it.
            if error.name is None or not f"{module_name}.".startswith(f"{error.name}."):
                raise
            raise UnknownPlugin(
                f"{said}: there is no module {error.name!r}. Next step: install the package that has it, or run "
                "this in the folder that has it"
            ) from error
        except Exception as error:
            raise PluginBroken(f"{said}: {type(error).__name__}: {error}") from error
        for attribute in path.split("."):
            try:
                found = getattr(found, attribute)
            except ModuleNotFoundError:  # of a module that imports its names late
                raise
            except AttributeError as error:
                raise UnknownPlugin(f"{said}: {module_name} has no {path!r}") from error
            except Exception as error:
                raise PluginBroken(f"{said}: {type(error).__name__}: {error}") from error
        if not callable(found):
            raise PluginBroken(f"{said}: is a {type(found).__name__}, not a class or a function")
        return cast(T, found)


@cache
def _entry_points(group: str, *path: str) -> Mapping[str, EntryPoint]:
    """By name, the first of each in the packages on `path`, which is `sys.path`. Finding them reads a file of every
    package, and every command line and every rollout asks for some."""
    return {point.name: point for point in reversed(tuple(entry_points(group=group)))}
