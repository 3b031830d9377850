"""From the name or the place of an environment to its class, for every command that plays one.

A target is a name of `ENVIRONMENTS`, `path.py`, `path.py:Class`, `package.module:Class`, or one of another framework or
standard, such as `textarena:Sudoku-v0`. The class may be one of Atropos.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

from backends.errors import SettingsError
from backends.plugins import Registry
from lachesis.other_packages import COMPAT
from lachesis.settings.flags import close_names

ENVIRONMENTS: Registry[type] = Registry("environment", "lachesis.environments", {}, package="lachesis-envs")
"""Those that packages name in this group of entry points; Lachesis' own are in the package lachesis-envs."""


SCHEMES: Registry[Callable[[str], Any]] = Registry("scheme", "lachesis.schemes", {})
"""Environments of other frameworks and standards, `SCHEME:NAME`: functions from such a target to the class."""

_PACKAGES = {
    **dict.fromkeys(("inspect", "verifiers"), "lachesis-compat"),
    **dict.fromkeys(
        ("bfcl", "gymnasium", "mcp", "nemogym", "openenv", "ors", "skyrl", "tau2", "textarena"), "lachesis-doors"
    ),
}
"""Of the schemes of other packages of ours."""


def environment_class(target: str) -> Any:
    """The class of an environment; one of Atropos is wrapped.

    Raises:
        SettingsError: there is no such environment, or it is unclear which class is meant.
    """
    if ":" not in target and not target.endswith(".py"):
        if target in (names := ENVIRONMENTS.names()):
            return ENVIRONMENTS.load(target)
        near = close_names(target, names)
        hint = f"did you mean {near[0]}?" if near else f"`lachesis envs` lists {', '.join(names)}"
        if not names:
            hint = "none are installed; Lachesis' own are in the package lachesis-envs"
        raise SettingsError(f"there is no environment {target!r}; {hint} (or write path.py:Class)")
    if (place := target.partition(":")[0]).endswith(".py") and not Path(place).is_file():
        raise SettingsError(f"there is no file {place}")
    from lachesis.base_env import HermesAgentBaseEnv

    if (scheme := target.partition(":")[0]) in SCHEMES.names():
        return SCHEMES.load(scheme)(target)
    if scheme in _PACKAGES:
        package = _PACKAGES[scheme]
        raise SettingsError(f"{scheme}:NAME is played by the package {package}. Next step: pip install {package}")
    from lachesis.cli.environment_files import load_env, prepared_for_atropos

    with prepared_for_atropos():
        found = load_env(target)
    return found if issubclass(found, HermesAgentBaseEnv) else COMPAT.load("player_for")(found)
