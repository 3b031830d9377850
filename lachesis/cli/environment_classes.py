"""From the name or the place of an environment to its class, for every command that plays one.

A target is what `verb_parser.ENVIRONMENT` says; `SCHEME:NAME` is `textarena:Sudoku-v0` or `harbor:tasks`, for example.
The class may be one of Atropos.
"""

from __future__ import annotations

import importlib.util
from collections.abc import Callable
from pathlib import Path
from typing import Any

from backends.errors import SettingsError, cannot_read
from backends.plugins import Registry
from lachesis.other_packages import COMPAT
from lachesis.settings.flags import close_names

ENVIRONMENTS: Registry[type] = Registry("environment", "lachesis.environments", {}, package="lachesis-envs")
"""Those that packages name in this group of entry points; Lachesis' own are in the package lachesis-envs."""


SCHEMES: Registry[Callable[[str], Any]] = Registry("scheme", "lachesis.schemes", {})
"""Environments of other frameworks and standards, `SCHEME:NAME`: functions from such a target to the class."""

_PACKAGES = {
    "harbor": "lachesis-envs",
    **dict.fromkeys(("atropos", "inspect", "verifiers"), "lachesis-compat"),
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
        if Path(target).exists():
            raise SettingsError(f"{target} is not a Python file; name an env.py, or one of `lachesis envs`")
        raise SettingsError(f"there is no environment {target!r}; {hint} (or write path.py:Class)")
    if (place := target.partition(":")[0]).endswith(".py") and not Path(place).is_file():
        near = close_names(Path(place).name, (found.name for found in Path(place).parent.glob("*.py")), cutoff=0.6)
        meant = " or ".join(str(Path(place).with_name(name)) for name in near)
        hint = f"; did you mean {meant}?" if near else "; `lachesis new NAME` writes an environment to begin with"
        raise SettingsError(f"{cannot_read(place)}{hint}")
    from lachesis.base_env import HermesAgentBaseEnv

    if (scheme := place) in (schemes := SCHEMES.names()):
        return SCHEMES.load(scheme)(target)
    if scheme in _PACKAGES:
        package = _PACKAGES[scheme]
        raise SettingsError(f"{scheme}:NAME is played by the package {package}. Next step: pip install {package}")
    if not place.endswith(".py") and not _is_module(place):
        near = close_names(scheme, schemes)
        hint = f"did you mean {near[0]}:NAME?" if near else f"schemes are {', '.join(schemes) or 'not installed'}"
        raise SettingsError(f"{target}: there is no scheme and no module {place!r}; {hint} (or write path.py:Class)")
    from lachesis.cli.environment_files import load_env, prepared_for_atropos

    with prepared_for_atropos():
        found = load_env(target)
    return found if issubclass(found, HermesAgentBaseEnv) else COMPAT.load("player_for")(found)


def read_target(target: str) -> tuple[str, str, dict[str, Any]]:
    """Scheme, name and arguments of `SCHEME:NAME?argument=value&...`; values are read as YAML.

    Raises:
        SettingsError: the target names no environment, or a value is not YAML.
    """
    from urllib.parse import parse_qsl

    import yaml

    scheme, _, rest = target.partition(":")
    name, _, query = rest.partition("?")
    if not name:
        raise SettingsError(f"{target!r} names no environment; write {scheme}:NAME")
    arguments = {}
    for key, value in parse_qsl(query, keep_blank_values=True):
        try:
            arguments[key] = yaml.safe_load(value)
        except yaml.YAMLError:
            raise SettingsError(f"{target}: {key}={value} is not YAML; write a text in quotes, {key}='...'") from None
    return scheme, name, arguments


def _is_module(name: str) -> bool:
    top = name.partition(".")[0]
    return top.isidentifier() and importlib.util.find_spec(top) is not None
