"""The tool backends of Nomad and Modal, and what they are made of."""

from __future__ import annotations

import dataclasses
import os
import shlex
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import yaml

from backends import SettingsError
from lachesis.settings.old_pools import variables_of
from lachesis.settings.pool_settings import PoolSettings

from .pool import PoolToolBackend, TrajectorySlot


class NomadBackendConfig(PoolSettings):
    """The settings of a pool of Nomad."""

    @classmethod
    def from_agent_env_config(cls, config: Any) -> NomadBackendConfig:
        names = [name for name in cls.model_fields if hasattr(config, name)]
        return cls(**{name: getattr(config, name) for name in names} | {"tool_pool_mode": "nomad"})


class NomadToolBackend(PoolToolBackend):
    """A pool whose workers are jobs of Nomad."""

    def __init__(self, config: NomadBackendConfig) -> None:
        settings = config.model_copy(update={"tool_pool_mode": "nomad"}).of_pool()
        super().__init__(settings["terminal_options"]["up"], network=config.allow_network)
        self.config = config


@dataclass(frozen=True)
class ModalSandboxConfig:
    """A profile of sandboxes at Modal. `memory` is in MiB; a pool has `max_sandboxes * slots_per_sandbox` sandboxes."""

    name: str = "default"
    app_name: str | None = None
    image: str = "python:3.11"
    gpu: str | None = None
    cpu: float = 1.0
    memory: int = 2048
    slots_per_sandbox: int = 10
    min_sandboxes: int = 1
    max_sandboxes: int = 5
    idle_timeout: int = 120
    max_lifetime: int = 3600
    acquire_timeout_s: float = 60.0
    execution_timeout_s: float = 30.0
    secrets: Mapping[str, Sequence[str]] = field(default_factory=dict)
    """By name, the variables that commands get."""
    env_vars: Mapping[str, str] = field(default_factory=dict)
    workspace_base: str = "/data"

    def with_app_name(self, base_app: str) -> ModalSandboxConfig:
        return dataclasses.replace(self, app_name=f"{base_app}-{self.name}")

    @classmethod
    def from_dict(cls, name: str, data: Mapping[str, Any]) -> ModalSandboxConfig:
        """Raises `SettingsError` for fields that do not exist."""
        unknown = {*data} - {each.name for each in dataclasses.fields(cls)}
        if unknown:
            raise SettingsError(f"profile {name!r} has no {', '.join(sorted(unknown))}")
        return cls(**{**data, "name": name})

    @classmethod
    def from_env(cls, profile_name: str = "default") -> ModalSandboxConfig:
        """From ATROPOS_MODAL_PROFILE_NAME_FIELD, else ATROPOS_MODAL_FIELD."""
        prefix = f"ATROPOS_MODAL_PROFILE_{profile_name.upper().replace('-', '_')}_"
        kinds: dict[str, Any] = {"cpu": float, "acquire_timeout_s": float, "execution_timeout_s": float}
        kinds |= {"image": str, "gpu": str, "app_name": str, "workspace_base": str}
        found: dict[str, Any] = {}
        for each in dataclasses.fields(cls):
            key = each.name.removesuffix("_s").upper()
            given = os.environ.get(prefix + key, os.environ.get(f"ATROPOS_MODAL_{key}", ""))
            if given and each.name == "env_vars":
                found[each.name] = variables_of(given)
            elif given and each.name not in ("name", "secrets"):
                found[each.name] = kinds.get(each.name, int)(given)
        return cls(name=profile_name, **found)

    @classmethod
    def load_profiles(cls, config_file: str | None = None) -> dict[str, ModalSandboxConfig]:
        """Of a YAML file (`profiles: {NAME: {...}}`), else of ATROPOS_MODAL_PROFILES_FILE, else of variables."""
        path = config_file or os.environ.get("ATROPOS_MODAL_PROFILES_FILE")
        if path:
            try:
                read = dict(yaml.safe_load(Path(path).read_text())["profiles"])
            except (OSError, yaml.YAMLError, LookupError, TypeError, ValueError) as error:
                raise SettingsError(f"{path}: no profiles can be read: {error!r}") from None
            return {str(name): cls.from_dict(str(name), data or {}) for name, data in read.items()}
        names = [each.strip() for each in os.environ.get("ATROPOS_MODAL_PROFILES", "default").split(",")]
        return {name: cls.from_env(name) for name in dict.fromkeys([*filter(None, names), "default"])}


class ModalToolBackend(PoolToolBackend):
    """A pool whose sandboxes are at Modal, of one profile or of several."""

    def __init__(self, config: ModalSandboxConfig | None = None, *, allow_network: bool = True) -> None:
        self._use(config or ModalSandboxConfig(), {}, "default", allow_network)

    @classmethod
    def with_profiles(
        cls,
        app_name: str = "atropos-sandbox",
        profiles: Mapping[str, ModalSandboxConfig] | None = None,
        default_profile: str = "default",
        profiles_file: str | None = None,
        *,
        allow_network: bool = True,
    ) -> ModalToolBackend:
        """Raises `SettingsError` without the default profile."""
        found = dict(profiles or ModalSandboxConfig.load_profiles(profiles_file))
        if default_profile not in found:
            raise SettingsError(f"there is no profile {default_profile!r}, but {', '.join(sorted(found))}")
        named = {name: each if each.app_name else each.with_app_name(app_name) for name, each in found.items()}
        backend = cls.__new__(cls)
        backend._use(named.pop(default_profile), named, default_profile, allow_network)
        return backend

    def _use(
        self, default: ModalSandboxConfig, others: Mapping[str, ModalSandboxConfig], name: str, network: bool
    ) -> None:
        self.config, self._names = default, (name, *others)
        self._folder = tempfile.TemporaryDirectory(prefix="lachesis-profiles-")
        path = Path(self._folder.name, "profiles.yaml")
        named = {"default": default, **others}
        path.write_text(yaml.safe_dump({"profiles": {name: _described(each) for name, each in named.items()}}))
        up = shlex.join(["--engine", "modal", "--profiles", str(path)])
        seconds = {"default_timeout_s": default.execution_timeout_s, "acquire_timeout_s": default.acquire_timeout_s}
        super().__init__(up, network=network, **seconds)
        self._env = {"" if profile == "default" else profile: each.env_vars for profile, each in named.items()}

    def list_profiles(self) -> list[str]:
        return [*self._names]

    async def acquire(self, trajectory_id: str | None = None, profile: str = "") -> TrajectorySlot:
        """See `PoolToolBackend.acquire`."""
        return await super().acquire(trajectory_id, "" if profile == self._names[0] else profile)


def _described(config: ModalSandboxConfig) -> dict[str, Any]:
    """As `lachesis pool up --profiles` reads it: without variables, which may be secret, and what it has no use for."""
    kept = ("app_name", "image", "gpu", "cpu", "memory", "slots_per_sandbox", "min_sandboxes", "max_sandboxes")
    found = {name: getattr(config, name) for name in (*kept, "idle_timeout", "secrets")}
    return {name: value for name, value in found.items() if value is not None}


def create_tool_backend(config: Any) -> PoolToolBackend:
    """The backend that the setting `tool_pool_mode` names.

    Raises:
        ValueError: it names none.
    """
    mode = str(getattr(config, "tool_pool_mode", "nomad")).strip().lower()
    if mode == "nomad":
        return NomadToolBackend(NomadBackendConfig.from_agent_env_config(config))
    if mode == "modal":
        names = {each.name: f"modal_{each.name.removesuffix('_s')}" for each in dataclasses.fields(ModalSandboxConfig)}
        given = {name: getattr(config, old) for name, old in names.items() if getattr(config, old, None)}
        if "env_vars" in given:
            given["env_vars"] = variables_of(given["env_vars"])
        return ModalToolBackend(ModalSandboxConfig(**given), allow_network=getattr(config, "allow_network", True))
    raise ValueError(f"tool_pool_mode is nomad or modal, not {mode!r}")
