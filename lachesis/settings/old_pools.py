"""What the removed stack's settings of pools are today."""

from __future__ import annotations

import json
import shlex
from collections.abc import Mapping
from typing import Any

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


def of_pool(settings: Any) -> dict[str, Any]:
    """The settings of today that those of `PoolSettings` are.

    Raises:
        ValueError: a setting cannot be kept.
    """
    given = settings.model_fields_set
    found: dict[str, Any] = {"terminal_network": settings.allow_network} if "allow_network" in given else {}
    if settings.tool_pool_mode == "nomad":
        image = settings.singularity_image if settings.driver == "singularity" else settings.sandbox_image
        options = {"address": settings.nomad_address, "driver": settings.driver, "image": image or ""}
        options |= {"privileged": "true"} if settings.privileged else {}
        scale = (settings.slots_per_container, settings.min_containers, settings.max_containers)
        more = ["--listen", "0.0.0.0:0"]  # other machines and containers connect to it
    else:
        if settings.modal_secrets:
            raise ValueError(
                "modal_secrets names secrets without their variables. Next step: terminal_backend pool, and "
                "terminal_options {up: --engine modal --options '{\"secrets\": {NAME: [VARIABLE]}}'}"
            )
        options = {"app_name": settings.modal_app_name, **({"gpu": settings.modal_gpu} if settings.modal_gpu else {})}
        scale = (settings.modal_slots_per_sandbox, settings.modal_min_sandboxes, settings.modal_max_sandboxes)
        memory = settings.modal_memory << 20
        spec = {"image": settings.modal_image, "cpus": settings.modal_cpu, "memory_bytes": memory}
        if settings.modal_env_vars:  # they may be secret: not among the arguments of processes
            found["terminal_env"] = variables_of(settings.modal_env_vars)
        more = ["--idle", str(settings.modal_idle_timeout), "--spec", json.dumps(spec)]
        found |= {"terminal_lifetime": settings.modal_max_lifetime} if "modal_max_lifetime" in given else {}
        if "modal_execution_timeout" in given:
            found["terminal_timeout"] = max(1, round(settings.modal_execution_timeout))
    words = ["--engine", settings.tool_pool_mode, "--slots", str(scale[0]), "--least", str(scale[1])]
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
