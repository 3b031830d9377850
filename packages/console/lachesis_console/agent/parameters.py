"""The parameters of `AIAgent`, and the settings that they make together with `cli-config.yaml`."""

from __future__ import annotations

import difflib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final, TypedDict

from pydantic import ValidationError

from backends.errors import SettingsError
from lachesis import HermesAgentEnvConfig, ServerConfig
from lachesis_console.agent.cli_config import environment_settings, load_cli_config


class AgentParameters(TypedDict, total=False):
    """What `AIAgent` takes, all by name. What is not given, or None, comes from the variables of the process, from
    `cli-config.yaml`, or is the default."""

    base_url: str | None
    api_key: str | None
    model: str | None
    max_iterations: int | None
    """Requests of one conversation (90)."""
    tool_delay: float | None
    """Seconds between the tool calls of two turns (0)."""
    enabled_toolsets: Sequence[str] | None
    disabled_toolsets: Sequence[str] | None
    save_trajectories: bool | None
    """Append every conversation to `trajectory_samples.jsonl` or `failed_trajectories.jsonl`."""
    verbose_logging: bool | None
    """Show arguments and results in full length."""
    quiet_mode: bool
    """Print nothing."""
    ephemeral_system_prompt: str | None
    """Sent at the end of the system message, and never recorded."""
    log_prefix_chars: int
    """Characters of arguments and results that are printed (100)."""
    log_prefix: str
    session_id: str | None
    max_tokens: int | None
    reasoning_config: Mapping[str, Any] | None
    """OpenRouter's `reasoning`: `{"effort": "high"}`, `{"enabled": False}`."""
    prefill_messages: Sequence[Mapping[str, Any]] | None
    """Sent after the system message, and never recorded."""
    iteration_budget: int | None
    """Requests of all conversations of the agent together."""
    fallback_model: str | Mapping[str, Any] | None
    """Another model of the server, or `{"model", "base_url", "api_key"}`, for a server that does not answer."""
    skip_context_files: bool
    """No effect: no context files are read."""
    skip_memory: bool
    """No effect: no memory lasts longer than a conversation."""
    providers_allowed: Sequence[str] | None
    providers_ignored: Sequence[str] | None
    providers_order: Sequence[str] | None
    provider_sort: str | None
    tool_progress_callback: Callable[[str, str, Mapping[str, Any]], object] | None
    """`(name, preview of the arguments, arguments)`, before a call."""
    tool_start_callback: Callable[[str, str, Mapping[str, Any]], object] | None
    """`(id, name, arguments)`"""
    tool_complete_callback: Callable[[str, str, Mapping[str, Any], str], object] | None
    """`(id, name, arguments, result)`"""
    thinking_callback: Callable[[str], object] | None
    """"thinking" when a request begins, and "" when its answer does."""
    reasoning_callback: Callable[[str], object] | None
    """Pieces of the reasoning."""
    clarify_callback: Callable[[str, Sequence[str]], str] | None
    """`(question, choices)`; its answer is the result of the tool `clarify`, which the model has with it."""
    step_callback: Callable[[int], object] | None
    """The number of the request that begins."""
    stream_delta_callback: Callable[[str], object] | None
    """Pieces of the answer."""
    tool_gen_callback: Callable[[str], object] | None
    """The name of a tool whose call the model begins to write."""
    status_callback: Callable[[str], object] | None


_PROVIDERS: Final = {
    "providers_allowed": "only",
    "providers_ignored": "ignore",
    "providers_order": "order",
    "provider_sort": "sort",
}
"""Parameters, and the fields of OpenRouter's `provider` that they are."""


@dataclass(frozen=True, slots=True)
class AgentSettings:
    """Everything that an agent runs with."""

    server: ServerConfig
    fallback: ServerConfig | None
    environment: HermesAgentEnvConfig
    given: AgentParameters
    max_iterations: int
    save_trajectories: bool
    system_prompt: str | None
    verbose: bool


def read_parameters(given: Mapping[str, Any]) -> AgentSettings:
    """
    Raises:
        TypeError: a parameter does not exist.
        SettingsError: a value, or one of `cli-config.yaml` or of a variable, cannot be used.
    """
    for name in given:
        if name not in AgentParameters.__annotations__:
            near = difflib.get_close_matches(name, AgentParameters.__annotations__, n=1, cutoff=0.0)
            raise TypeError(f"AIAgent() has no parameter {name!r}; the nearest is {near[0]!r}")
    known = AgentParameters(**{name: value for name, value in given.items() if value is not None})  # type: ignore[typeddict-item]
    config = load_cli_config()
    agent, model = config["agent"], config["model"]
    toolsets = {"enabled_toolsets": config["toolsets"]} | {
        name: list(known[name]) for name in ("enabled_toolsets", "disabled_toolsets") if name in known
    }
    try:
        environment = HermesAgentEnvConfig(**{**environment_settings(config), **toolsets})
        server = ServerConfig(
            base_url=known.get("base_url") or model["base_url"],
            api_key=known.get("api_key") or model["api_key"],
            model_name=known.get("model") or model["default"],
            extra_body=_extra_body(known, agent["reasoning_effort"]),
        )
        return AgentSettings(
            server=server,
            fallback=other_model(server, known["fallback_model"]) if "fallback_model" in known else None,
            environment=environment,
            given=known,
            max_iterations=int(known.get("max_iterations") or agent["max_turns"]),
            save_trajectories=known.get("save_trajectories", bool(agent["save_trajectories"])),
            system_prompt=agent["system_prompt"],
            verbose=known.get("verbose_logging", bool(agent["verbose"])),
        )
    except ValidationError as error:
        problem = error.errors()[0]
        where = ".".join(map(str, problem["loc"]))
        raise SettingsError(f"the agent's setting {where or error.title}: {problem['msg']}; correct it") from None


def other_model(server: ServerConfig, other: str | Mapping[str, Any]) -> ServerConfig:
    """`server` with another model, or another address too."""
    changes = {"model": other} if isinstance(other, str) else dict(other)
    names = {"model": "model_name", "base_url": "base_url", "api_key": "api_key"}
    if changes.get("base_url") and changes.get("api_key") is None:
        changes["api_key"] = ""  # a key is sent to no other server
    return ServerConfig(
        **server.model_dump(exclude_unset=True)
        | {names[name]: value for name, value in changes.items() if name in names and value is not None}
    )


def _extra_body(given: AgentParameters, effort: str | None) -> dict[str, Any] | None:
    reasoning = given.get("reasoning_config") or ({"effort": effort} if effort else None)
    provider = {field: given[name] for name, field in _PROVIDERS.items() if name in given}  # type: ignore[literal-required]
    body = ({"reasoning": dict(reasoning)} if reasoning else {}) | ({"provider": provider} if provider else {})
    return body or None
