"""Settings of the removed Hermes stack's pools of sandboxes.

With `tool_pool_mode` nomad or modal, a run has a pool of its own (the backend `pool`), made of what these settings say.
"""

from __future__ import annotations

import json
import shlex
from collections.abc import Mapping
from typing import Annotated, Any, Literal

from pydantic import BaseModel

from lachesis.settings.setting_facts import REMOVED

_SHARED = {"tool_pool_mode", "allow_network"}
_READ = {
    "nomad": {"nomad_address", "sandbox_image", "slots_per_container", "min_containers", "max_containers", "privileged"}
    | {"driver", "singularity_image"},
    "modal": {"modal_app_name", "modal_image", "modal_gpu", "modal_cpu", "modal_memory", "modal_slots_per_sandbox"}
    | {"modal_min_sandboxes", "modal_max_sandboxes", "modal_idle_timeout", "modal_max_lifetime", "modal_env_vars"}
    | {"modal_execution_timeout"},
}


def read_settings(mode: object) -> set[str]:
    """Those that have an effect with this `tool_pool_mode`."""
    return _SHARED | _READ[str(mode)] if str(mode) in _READ else set()


class OldPoolSettings(BaseModel):
    """Read only with `tool_pool_mode` nomad or modal, and by the environment's own code."""

    tool_pool_mode: Annotated[Literal["default", "nomad", "modal"], REMOVED] = "default"
    allow_network: Annotated[bool, REMOVED] = True
    require_sandbox: Annotated[bool, REMOVED] = False
    purge_job_on_start: Annotated[bool, REMOVED] = False
    purge_job_on_shutdown: Annotated[bool, REMOVED] = True
    acquire_timeout_s: Annotated[float, REMOVED] = 30.0

    nomad_address: Annotated[str, REMOVED] = "http://localhost:4646"
    sandbox_job_id: Annotated[str, REMOVED] = "atropos-sandbox"
    sandbox_image: Annotated[str, REMOVED] = "atropos-sandbox:local"
    slots_per_container: Annotated[int, REMOVED] = 10
    min_containers: Annotated[int, REMOVED] = 1
    max_containers: Annotated[int, REMOVED] = 10
    privileged: Annotated[bool, REMOVED] = False
    driver: Annotated[str, REMOVED] = "docker"
    singularity_image: Annotated[str | None, REMOVED] = None

    modal_app_name: Annotated[str, REMOVED] = "atropos-sandbox"
    modal_image: Annotated[str, REMOVED] = "python:3.11"
    modal_gpu: Annotated[str | None, REMOVED] = None
    modal_cpu: Annotated[float, REMOVED] = 1.0
    modal_memory: Annotated[int, REMOVED] = 2048
    modal_slots_per_sandbox: Annotated[int, REMOVED] = 10
    modal_min_sandboxes: Annotated[int, REMOVED] = 1
    modal_max_sandboxes: Annotated[int, REMOVED] = 5
    modal_idle_timeout: Annotated[int, REMOVED] = 120
    modal_max_lifetime: Annotated[int, REMOVED] = 3600
    modal_acquire_timeout: Annotated[float, REMOVED] = 60.0
    modal_execution_timeout: Annotated[float, REMOVED] = 30.0
    modal_secrets: Annotated[Any, REMOVED] = None
    modal_env_vars: Annotated[Any, REMOVED] = None
    modal_workspace_base: Annotated[str, REMOVED] = "/data"

    def of_pool(self) -> dict[str, Any]:
        """The settings of today that these are; none with `tool_pool_mode` default.

        Raises:
            ValueError: a setting cannot be kept.
        """
        if self.tool_pool_mode == "default":
            return {}
        given = self.model_fields_set
        found: dict[str, Any] = {"terminal_network": self.allow_network} if "allow_network" in given else {}
        if self.tool_pool_mode == "nomad":
            image = self.singularity_image if self.driver == "singularity" else self.sandbox_image
            options = {"address": self.nomad_address, "driver": self.driver, "image": image or ""}
            options |= {"privileged": "true"} if self.privileged else {}
            scale = (self.slots_per_container, self.min_containers, self.max_containers)
            more = []
        else:
            if self.modal_secrets:
                raise ValueError(
                    "modal_secrets names secrets without their variables. Next step: terminal_backend pool, and "
                    "terminal_options {up: --engine modal --options '{\"secrets\": {NAME: [VARIABLE]}}'}"
                )
            options = {"app_name": self.modal_app_name, **({"gpu": self.modal_gpu} if self.modal_gpu else {})}
            scale = (self.modal_slots_per_sandbox, self.modal_min_sandboxes, self.modal_max_sandboxes)
            spec: dict[str, Any] = {"image": self.modal_image, "cpus": self.modal_cpu}
            spec |= {"memory_bytes": self.modal_memory << 20, "env": variables_of(self.modal_env_vars)}
            more = ["--idle", str(self.modal_idle_timeout), "--spec", json.dumps(spec)]
            found |= {"terminal_lifetime": self.modal_max_lifetime} if "modal_max_lifetime" in given else {}
            if "modal_execution_timeout" in given:
                found["terminal_timeout"] = max(1, round(self.modal_execution_timeout))
        words = ["--engine", self.tool_pool_mode, "--slots", str(scale[0]), "--least", str(scale[1])]
        words += ["--most", str(scale[2]), *more]
        for name, value in options.items():
            words += ["--engine-option", f"{name}={value}"]
        return {**found, "terminal_backend": "pool", "terminal_options": {"up": shlex.join(words)}}


def variables_of(given: Any) -> dict[str, str]:
    """Of `modal_env_vars`: `A=1;B=2`, or a mapping."""
    if isinstance(given, Mapping):
        return {str(name): str(value) for name, value in given.items()}
    pairs = (pair.partition("=") for pair in str(given or "").split(";"))
    return {name.strip(): value.strip() for name, equals, value in pairs if equals}
