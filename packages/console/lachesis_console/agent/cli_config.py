"""`cli-config.yaml` and the variables of the environment, as settings of an agent. Nothing is written to os.environ."""

from __future__ import annotations

import copy
import difflib
import logging
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Final

from backends.errors import SettingsError, cannot_read

log = logging.getLogger(__name__)

FILE: Final = "cli-config.yaml"
_DEFAULTS: Final[Mapping[str, Any]] = {
    "model": {"default": "anthropic/claude-sonnet-4.6", "base_url": "https://openrouter.ai/api/v1", "api_key": ""},
    "terminal": {"env_type": "local", "timeout": 180},
    "agent": {
        "max_turns": 90,
        "save_trajectories": False,
        "system_prompt": None,
        "reasoning_effort": None,
        "verbose": False,
    },
    "toolsets": None,
    "env": {},
}
_TERMINAL: Final = {
    "env_type": "terminal_backend",
    "cwd": "terminal_workdir",
    "timeout": "terminal_timeout",
    "lifetime_seconds": "terminal_lifetime",
    "container_cpu": "terminal_cpus",
    "container_memory": "terminal_memory",
    "container_disk": "terminal_disk",
}
"""Names in the section `terminal`, and the settings of environments that they are."""
_SSH: Final = {"ssh_host": "host", "ssh_user": "username", "ssh_port": "port", "ssh_key": "client_keys"}
_IMAGES: Final = frozenset({"docker_image", "singularity_image", "modal_image", "daytona_image"})
_VARIABLES: Final = {
    "OPENAI_BASE_URL": ("model", "base_url"),
    "LLM_MODEL": ("model", "default"),
    "TERMINAL_ENV": ("terminal", "env_type"),
    **{f"TERMINAL_{name.upper()}": ("terminal", name) for name in (*_TERMINAL, *_SSH, *_IMAGES) if name != "env_type"},
}


def load_cli_config(path: str | os.PathLike[str] | None = None) -> dict[str, Any]:
    """The settings in sections: defaults, over them `cli-config.yaml` in the working folder (or `path`), over them the
    variables of this process. The section `env` has settings of environments, such as `compress_context_at`.

    Raises:
        SettingsError: the file cannot be read, or a section is not what it has to be.
    """
    config = copy.deepcopy(dict(_DEFAULTS))
    for section, given in _read(Path(path or FILE), must_exist=path is not None).items():
        if section not in config:
            log.warning("%s: the section %r is not known and has no effect%s", FILE, section, _near(section, config))
        elif not isinstance(config[section], dict):
            config[section] = given
        elif section == "model" and isinstance(given, str):
            config[section]["default"] = given
        elif isinstance(given, Mapping):
            config[section] |= given
        elif given is not None:
            raise SettingsError(f"{FILE}: {section} is a section with names and values, not {given!r}")
    for variable, (section, name) in _VARIABLES.items():
        if value := os.environ.get(variable):
            config[section][name] = value
    return config


def environment_settings(config: Mapping[str, Any]) -> dict[str, Any]:
    """The settings of `HermesAgentEnvConfig` that the sections `terminal` and `env` give."""
    terminal = dict(config["terminal"])
    if "backend" in terminal:
        terminal["env_type"] = terminal.pop("backend")
    backend = terminal["env_type"]
    settings: dict[str, Any] = {}
    options: dict[str, Any] = {}
    for name, value in terminal.items():
        if value is None or (name == "cwd" and not str(value).startswith("/")):
            continue  # "." was the folder of the person; a sandbox has its own
        if name in _TERMINAL:
            settings[_TERMINAL[name]] = value
        elif name in _SSH and backend == "ssh":
            key = _SSH[name]
            options[key] = int(value) if key == "port" else [value] if key == "client_keys" else value
        elif name == f"{backend}_image":
            settings["terminal_image"] = value
        elif name not in _SSH and name not in _IMAGES:
            log.warning("%s: terminal.%s is not known and has no effect%s", FILE, name, _near(name, _TERMINAL))
    if options:
        settings["terminal_options"] = options
    return {**settings, **config["env"]}


def _read(path: Path, *, must_exist: bool) -> Mapping[str, Any]:
    import yaml

    try:
        found = yaml.safe_load(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        if must_exist:
            raise SettingsError(f"{cannot_read(path)}; give the path of a file like {FILE}") from None
        return {}
    except (OSError, ValueError, yaml.YAMLError) as error:
        raise SettingsError(f"{path} cannot be read: {error}; correct it, or remove it") from error
    if found is not None and not isinstance(found, Mapping):
        raise SettingsError(f"{path} has no sections; it begins with one such as `model:`")
    return found or {}


def _near(name: str, known: Mapping[str, Any]) -> str:
    near = difflib.get_close_matches(str(name), known, n=1)
    return f"; did you mean {near[0]!r}?" if near else ""
