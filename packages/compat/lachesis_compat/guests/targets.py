"""Targets such as `verifiers:my_env?difficulty=hard`: a framework, its environment, and the arguments of that."""

from __future__ import annotations

import importlib
import importlib.util
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, Final

from backends.errors import SettingsError
from lachesis.cli.environment_classes import environment_class, read_target

if TYPE_CHECKING:
    from lachesis_compat.guests.guest_env import GuestEnv

GUESTS: Final[Mapping[str, tuple[str, str]]] = {
    "verifiers": ("lachesis_compat.guests.verifiers:VerifiersEnv", "module"),
    "inspect": ("lachesis_compat.guests.inspect_tasks:InspectEnv", "task"),
}
"""By framework: the class, and the setting that names the environment; `NAME_args` are its arguments."""


def guest(target: str) -> type[GuestEnv] | None:
    """The class that runs `target`, which is the default of its settings; None if no framework has this name.

    Raises:
        SettingsError: the target names no environment.
    """
    framework, colon, _ = target.partition(":")
    if not colon or framework not in GUESTS:
        return None
    _, name, arguments = read_target(target)
    (module, _, attribute), setting = GUESTS[framework][0].partition(":"), GUESTS[framework][1]
    base: type[GuestEnv] = getattr(importlib.import_module(module), attribute)
    settings = {setting: name, f"{setting}_args": arguments}
    return type(base.__name__, (base,), {"__module__": base.__module__, "__doc__": base.__doc__, **settings})


def atropos(target: str) -> Any:
    """The class that runs `atropos:FILE.py:CLASS` or `atropos:package.module:CLASS`. Raises SettingsError."""
    scheme, place, arguments = read_target(target)
    if arguments:
        raise SettingsError(f"{target}: {scheme}:FILE:CLASS takes no arguments; give its settings as --env.NAME VALUE")
    if importlib.util.find_spec("atroposlib") is None:
        raise SettingsError(f"{target} needs atroposlib. Next step: pip install 'lachesis-rl[atropos]'")
    try:
        found = environment_class(place)
    except SettingsError as error:
        raise SettingsError(f"{scheme}: {error}") from error
    if getattr(found, "stock_cls", None) is None:
        raise SettingsError(f"{target}: {found.__name__} is no environment of Atropos; write {place}")
    return found
