"""Targets such as `verifiers:my_env?difficulty=hard`: a framework, its environment, and the arguments of that."""

from __future__ import annotations

import importlib
from collections.abc import Mapping
from typing import TYPE_CHECKING, Final
from urllib.parse import parse_qsl

import yaml

from backends.errors import SettingsError

if TYPE_CHECKING:
    from lachesis_compat.guests.guest_env import GuestEnv

GUESTS: Final[Mapping[str, tuple[str, str]]] = {
    "verifiers": ("lachesis_compat.guests.verifiers:VerifiersEnv", "module"),
    "inspect": ("lachesis_compat.guests.inspect_tasks:InspectEnv", "task"),
}
"""By framework: the class, and the setting that names the environment; `NAME_args` are its arguments."""


def guest(target: str) -> type[GuestEnv] | None:
    """The class that plays `target`, which is the default of its settings; None if no framework has this name.

    Raises:
        SettingsError: the target names no environment.
    """
    framework, colon, rest = target.partition(":")
    if not colon or framework not in GUESTS:
        return None
    name, _, query = rest.partition("?")
    if not name:
        raise SettingsError(f"{target!r} names no environment; write {framework}:NAME")
    (module, _, attribute), setting = GUESTS[framework][0].partition(":"), GUESTS[framework][1]
    base: type[GuestEnv] = getattr(importlib.import_module(module), attribute)
    arguments = {key: yaml.safe_load(value) for key, value in parse_qsl(query, keep_blank_values=True)}
    settings = {setting: name, f"{setting}_args": arguments}
    return type(base.__name__, (base,), {"__module__": base.__module__, "__doc__": base.__doc__, **settings})
