"""Targets of Atropos: `atropos:FILE.py:CLASS`, `atropos:package.module:CLASS`; the class may be left out."""

from __future__ import annotations

import importlib.util
from typing import Any

from backends.errors import SettingsError
from lachesis.base_env import HermesAgentBaseEnv
from lachesis.cli.environment_classes import read_target
from lachesis.cli.environment_files import load_env, prepared_for_atropos


def target_class(target: str) -> Any:
    """The class that plays `target`.

    Raises:
        SettingsError: it names no environment of Atropos, or Atropos is not installed.
    """
    scheme, place, arguments = read_target(target)
    if arguments:
        raise SettingsError(f"{target}: {scheme}:FILE:CLASS takes no arguments; give its settings as --env.NAME VALUE")
    if importlib.util.find_spec("atroposlib") is None:
        raise SettingsError(
            f"{target}: the package atroposlib is not installed here. Next step: pip install 'lachesis-compat[atropos]'"
        )
    try:
        with prepared_for_atropos():
            found = load_env(place)
    except SettingsError as error:
        raise SettingsError(f"{scheme}: {error}") from error
    if issubclass(found, HermesAgentBaseEnv):
        raise SettingsError(f"{target}: {found.__name__} is no environment of Atropos but of Lachesis; write {place}")
    from lachesis_compat.atropos.player import player_for  # imports atroposlib, which takes seconds

    return player_for(found)
