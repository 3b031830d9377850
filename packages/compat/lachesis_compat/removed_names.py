"""Names of the removed stack that have no counterpart, with what to use instead."""

from __future__ import annotations

from typing import NoReturn

_INSTEAD = {
    "model_tools": {
        "coerce_tool_args": "handle_function_call and ctx.call_tool convert and check the arguments of a call",
    },
    "run_agent": {
        "_convert_to_trajectory_format": "use agent.trajectory._convert_to_trajectory_format(messages, ...)",
    },
    "atropos.backends": {
        "_ModalSandboxPool": "use ModalToolBackend(ModalSandboxConfig(...)): see docs/pools.md",
        "_ModalMultiProfileManager": "use ModalToolBackend.with_profiles(...): see docs/pools.md",
    },
}


def refuse(module: str, name: str) -> NoReturn:
    """Raises ImportError, which `from ... import` shows, for these names, and AttributeError for all others."""
    if instead := _INSTEAD[module].get(name):
        raise ImportError(f"{module}.{name} is not here: {instead}", name=name)
    raise AttributeError(f"module {module!r} has no attribute {name!r}")
