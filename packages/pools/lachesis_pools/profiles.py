"""What `lachesis pool up` is told about its workers: by its options, and by a file of profiles."""

from __future__ import annotations

import json
import logging
import math
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, fields, replace
from pathlib import Path
from typing import Any

import yaml

from backends import SandboxSpec, SettingsError

from .engines.engine import ENGINES, WorkerCommand
from .pool import Profile
from .slots import Scale
from .wire import DEFAULT

_LOG = logging.getLogger(__name__)
_OLD_NAMES = {
    "slots_per_sandbox": "slots",
    "slots_per_container": "slots",
    "min_sandboxes": "least",
    "min_containers": "least",
    "max_sandboxes": "most",
    "max_containers": "most",
    "idle_timeout": "idle",
}
_OF_SPEC = {"image": "image", "cpu": "cpus", "memory": "memory_bytes", "env_vars": "env"}
_NO_MORE = {"max_lifetime", "acquire_timeout_s", "execution_timeout_s", "workspace_base", "name"}
"""Of the file `modal_profiles.yaml` of Hermes: the environment's settings have these, and slots are sandboxes."""


@dataclass(frozen=True, slots=True)
class ProfileSettings:
    """Workers of one profile."""

    engine: str = "processes"
    engine_options: Mapping[str, Any] = field(default_factory=dict)
    slots: int = 1
    """Sandboxes of a worker at once."""
    least: int = 0
    most: int = 1
    starting: int = 8
    idle: float = 300.0
    failures: float = 0.5
    lifetime: float = math.inf
    backend: str = "local"
    options: Mapping[str, Any] = field(default_factory=dict)
    """Of that backend."""
    spec: Mapping[str, Any] = field(default_factory=dict)
    """Fields of `SandboxSpec` for what a rollout leaves open."""
    warm: bool = False

    def __post_init__(self) -> None:
        least = {"slots": 1, "least": 0, "most": 1, "starting": 1, "idle": 0, "failures": 0, "lifetime": 1}
        for name, value in least.items():
            given = getattr(self, name)
            whole = name in ("slots", "least", "most", "starting")
            if isinstance(given, bool) or not isinstance(given, int if whole else int | float) or not given >= value:
                raise SettingsError(f"{name} of a pool is a number, at least {value}, not {given!r}")
        for name in ("engine_options", "options", "spec"):
            if not isinstance(getattr(self, name), Mapping):
                raise SettingsError(f"{name} of a pool maps names to values, not {getattr(self, name)!r}")

    def profile(self, name: str, url: str, token: str) -> Profile:
        """Raises `SettingsError` for options that the engine does not have."""
        scale = Scale(
            self.least, self.most, self.slots, self.starting, self.idle, self.failures, lifetime=self.lifetime
        )
        if self.engine == "none":
            return Profile(scale, None)
        try:
            SandboxSpec(**self.spec)
        except (TypeError, ValueError) as error:
            raise SettingsError(f"spec of a pool: {error}") from None
        options, spec = json.dumps(dict(self.options)), json.dumps(dict(self.spec))
        worker = WorkerCommand(url, token, self.slots, self.backend, options, self.warm, name, spec)
        try:
            engine = ENGINES.load(self.engine)(worker, **self.engine_options)
            return Profile(scale, engine, "modal" if self.engine == "modal" else self.backend)
        except TypeError as error:
            raise SettingsError(f"engine {self.engine!r}: {error}") from None

    def changed(self, name: str, given: Mapping[str, Any]) -> ProfileSettings:
        """With what the profile `name` of a file says.

        Raises:
            SettingsError: it says something unknown.
        """
        found: dict[str, Any] = {}
        same = given.get("engine", self.engine) == self.engine
        engine, spec = dict(self.engine_options if same else {}), dict(self.spec)
        for key, value in given.items():
            key = _OLD_NAMES.get(key, key)
            if key in ("engine_options", "spec"):
                if not isinstance(value, Mapping):
                    raise SettingsError(f"profile {name!r}: {key} maps names to values, and is {value!r}")
                (engine if key == "engine_options" else spec).update(value)
            elif key == "memory" and not isinstance(value, int):
                raise SettingsError(f"profile {name!r}: memory is a number of MiB, and is {value!r}")
            elif key in _OF_SPEC:
                spec[_OF_SPEC[key]] = value << 20 if key == "memory" else value
            elif key in asdict(self):
                found[key] = value
            elif key in ("gpu", "app_name", "secrets", "region", "cloud"):
                engine[key] = value
            elif key in _NO_MORE:
                _LOG.warning("profile %r: %s has no effect; the settings of the environment have it", name, key)
            else:
                known = ", ".join(sorted(each.name for each in fields(self)))
                raise SettingsError(f"profile {name!r} has no {key!r}, but {known}")
        return replace(self, **found, engine_options=engine, spec=spec)


def read_profiles(path: str, base: ProfileSettings) -> dict[str, ProfileSettings]:
    """The profiles of a YAML file, `profiles: {NAME: {...}}`; `base` has what they leave open. `default` is "" here.

    Raises:
        SettingsError: it cannot be read.
    """
    if not path:
        return {"": base}
    try:
        read = yaml.safe_load(Path(path).expanduser().read_text())
        named = {str(name): dict(given or {}) for name, given in read["profiles"].items()}
    except (OSError, yaml.YAMLError, LookupError, TypeError, ValueError, AttributeError) as error:
        raise SettingsError(f"{path}: {error!r}. Next step: write `profiles: {{NAME: {{slots: 4}}}}`") from None
    return {"" if name == DEFAULT else name: base.changed(name, given) for name, given in named.items()}
