"""From server settings to a router that answers: plain URLs, the embedded model, or the reference policy."""

from __future__ import annotations

import os
from collections.abc import Sequence
from contextlib import AsyncExitStack
from pathlib import Path
from typing import Any, Literal
from urllib.parse import urlsplit

from pydantic import ConfigDict, Field

from environments.atropos import APIServerConfig
from inference import OpenAIServer, Router, ServerSettings
from inference.embedded import EmbeddedServer
from inference.reference_server import Policy, ReferenceServer

KEY_VARIABLES = {"openai.com": "OPENAI_API_KEY", "openrouter.ai": "OPENROUTER_API_KEY"}
"""Where a key comes from when `api_key` is not set."""

EMBEDDED = "embedded"
REFERENCE = "reference"


class ServerConfig(APIServerConfig):
    """Everything that can be set as `--openai.NAME` or under `openai:` in YAML. Unknown names are an error.

    `model_name` may be `embedded` (the small model that comes along), the path of a GGUF file, or `reference` (the
    environment's reference policy, where it has one); such servers are started and stopped with the run.
    """

    model_config = ConfigDict(extra="forbid")

    weight: float = Field(1.0, gt=0, description="Share of the requests, against the other servers' weights.")
    extra_body: dict[str, Any] | None = Field(None, description="Extra fields of every request to this server.")
    max_retries: int = Field(6, ge=0, description="Further attempts after a request that failed for the moment.")
    reasoning_field: Literal["reasoning_content", "reasoning"] | None = Field(
        "reasoning_content", description="Field in which the server takes earlier reasoning back; null sends none."
    )
    threads: int = Field(1, ge=1, description="Threads of a model that runs here (embedded or a GGUF file).")
    parallel: int = Field(4, ge=1, description="Completions at once of a model that runs here.")
    context: int = Field(4096, ge=256, description="Tokens of context per completion of a model that runs here.")


class ServerConfigError(ValueError):
    """The settings name no server."""


class Phase1CannotTrain(RuntimeError):
    """`serve` was asked to send rollouts that have no token ids."""


def is_local_model(config: APIServerConfig) -> bool:
    """Whether the model runs as a child of the run."""
    name: str = config.model_name
    return name == EMBEDDED or name.endswith(".gguf")


def key_for(url: str) -> str:
    """The key that the process' environment holds for a public service; it is sent to that service and nowhere else."""
    host = urlsplit(url).hostname or ""
    for domain, variable in KEY_VARIABLES.items():
        if host == domain or host.endswith(f".{domain}"):
            return os.environ.get(variable, "")
    return ""


def needs_start(config: APIServerConfig) -> bool:
    """Whether the server has to be started before it has a URL."""
    return is_local_model(config) or config.model_name == REFERENCE


def describe(configs: Sequence[APIServerConfig]) -> str:
    """Name of the model for records: what was asked for, without addresses or keys."""
    names = []
    for config in configs:
        name = Path(config.model_name).name if config.model_name.endswith(".gguf") else config.model_name
        name = {EMBEDDED: "SmolLM2-135M-Instruct (embedded)", REFERENCE: "reference policy"}.get(name, name)
        if name not in names:
            names.append(name)
    return ", ".join(names)


def server_of(config: APIServerConfig, *, base_url: str | None = None, tool_call_parser: str | None) -> OpenAIServer:
    """A client for one server. `base_url` overrides the configured one, for servers that were started here."""
    own = config if isinstance(config, ServerConfig) else ServerConfig(**config.model_dump())
    url = base_url or own.base_url
    if not url:
        raise ServerConfigError(
            f"model {own.model_name!r} has no server: set --openai.base_url http://HOST:PORT/v1, "
            f"or --openai.model_name {EMBEDDED} for the model that comes along"
        )
    local = is_local_model(own)
    settings = ServerSettings(
        base_url=url,
        model_name=own.model_name,
        api_key=own.api_key or key_for(url),
        timeout=own.timeout,
        max_concurrency=own.parallel if local else own.num_max_requests_at_once,
        max_eval_concurrency=own.parallel if local else own.num_requests_for_eval,
        weight=own.weight,
        extra_body=own.extra_body or {},
        max_retries=own.max_retries,
        tool_call_parser=tool_call_parser,
        reasoning_field=own.reasoning_field,
    )
    try:
        return OpenAIServer(settings)
    except (LookupError, ValueError) as error:
        raise ServerConfigError(f"tool_call_parser {tool_call_parser!r}: {error}") from error


async def start_servers(
    configs: Sequence[APIServerConfig], *, tool_call_parser: str | None, policy: Policy | None, stack: AsyncExitStack
) -> Router:
    """Start what has to be started and connect to all of them; `stack` ends both."""
    servers = []
    for config in configs:
        url = None
        if is_local_model(config):
            own = config if isinstance(config, ServerConfig) else ServerConfig(**config.model_dump())
            model = "smollm2" if own.model_name == EMBEDDED else Path(own.model_name)
            embedded = EmbeddedServer(model, threads=own.threads, parallel=own.parallel, context=own.context)
            url = (await stack.enter_async_context(embedded)).base_url
        elif config.model_name == REFERENCE:
            if policy is None:
                raise ServerConfigError("this environment has no reference policy; name a model instead")
            url = (await stack.enter_async_context(ReferenceServer(policy))).base_url
        servers.append(server_of(config, base_url=url, tool_call_parser=tool_call_parser))
    return await stack.enter_async_context(Router(servers))
