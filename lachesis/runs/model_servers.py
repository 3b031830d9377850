"""From server settings to a router that answers: plain URLs, the embedded model, or the reference policy."""

from __future__ import annotations

import asyncio
import os
from collections.abc import Sequence
from contextlib import AsyncExitStack
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal
from urllib.parse import urlsplit

from pydantic import ConfigDict, Field, field_validator

from lachesis.inference import OpenAIServer, Router, ServerSettings, TokenServer
from lachesis.inference.chat_template import TemplateError
from lachesis.inference.embedded import HERMES_TEMPLATE, EmbeddedServer
from lachesis.inference.engines import ENGINES, TokenEngine, create_engine
from lachesis.inference.prompts import PromptBuilder
from lachesis.inference.token_server import SettingsDiffer
from lachesis.runs.atropos import APIServerConfig
from lachesis.testing.reference_server import Policy, ReferenceServer

if TYPE_CHECKING:
    from lachesis.runs.settings import HermesAgentEnvConfig

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
    engine: str = Field(
        "auto",
        description=f"API that reports tokens (Phase 2): {', '.join(ENGINES.names())}, or package.module:Class; auto: "
        "vllm or sglang by server_type, and llama.cpp for a model that `serve` runs here.",
    )
    logprobs_mode: Literal["raw", "temperature", "processed"] | None = Field(
        None,
        description="What the server's logprobs are of, where it was told (vLLM: --logprobs-mode processed_logprobs); "
        "null is what its engine does by itself.",
    )
    threads: int = Field(1, ge=1, description="Threads of a model that runs here (embedded or a GGUF file).")
    parallel: int = Field(4, ge=1, description="Completions at once of a model that runs here.")
    context: int = Field(4096, ge=256, description="Tokens of context per completion of a model that runs here.")

    @field_validator("engine")
    @classmethod
    def _engine_exists(cls, name: str) -> str:
        if name != "auto":
            ENGINES.load(name)
        return name


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


def own_config(config: APIServerConfig) -> ServerConfig:
    """The configuration with our fields, whatever class it came in."""
    return config if isinstance(config, ServerConfig) else ServerConfig(**config.model_dump())


def token_engine(config: APIServerConfig, *, training: bool = False) -> str | None:
    """The engine that reports this server's tokens (Phase 2); None where the server is used for chat (Phase 1)."""
    own = own_config(config)
    if own.engine != "auto":
        return own.engine
    if own.server_type in ("vllm", "sglang"):
        return str(own.server_type)
    return "llama.cpp" if training and is_local_model(own) else None


def settings_of(config: APIServerConfig, *, base_url: str | None, tool_call_parser: str | None) -> ServerSettings:
    """How to talk to one server. `base_url` overrides the configured one, for servers that were started here."""
    own = own_config(config)
    url = base_url or own.base_url
    if not url:
        raise ServerConfigError(
            f"model {own.model_name!r} has no server: set --openai.base_url http://HOST:PORT/v1, "
            f"or --openai.model_name {EMBEDDED} for the model that comes along"
        )
    local = is_local_model(own)
    return ServerSettings(
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
        logprobs_mode=own.logprobs_mode,
    )


def server_of(config: APIServerConfig, *, base_url: str | None = None, tool_call_parser: str | None) -> OpenAIServer:
    """A client for one server (Phase 1)."""
    settings = settings_of(config, base_url=base_url, tool_call_parser=tool_call_parser)
    try:
        return OpenAIServer(settings)
    except (LookupError, ValueError) as error:
        raise ServerConfigError(f"tool_call_parser {tool_call_parser!r}: {error}") from error


async def start_servers(
    configs: Sequence[APIServerConfig],
    *,
    settings: HermesAgentEnvConfig,
    policy: Policy | None,
    stack: AsyncExitStack,
    training: bool = False,
) -> Router | TokenServer:
    """Start what has to be started and connect to all of them; `stack` ends both.

    Raises:
        ServerConfigError: no server, servers of both phases, or a tokenizer, template or parser that cannot be used.
    """
    kinds = [token_engine(config, training=training) for config in configs]
    if None in kinds and any(kinds):
        told = ", ".join(f"{config.model_name}: {kind or 'chat'}" for config, kind in zip(configs, kinds, strict=True))
        raise ServerConfigError(
            f"some servers report tokens and some do not ({told}); set server_type or engine alike for all of them"
        )
    urls, files = [], []
    for config in configs:
        url, file = None, None
        if is_local_model(config):
            own = own_config(config)
            model = "smollm2" if own.model_name == EMBEDDED else Path(own.model_name)
            embedded = EmbeddedServer(model, threads=own.threads, parallel=own.parallel, context=own.context)
            url = (await stack.enter_async_context(embedded)).base_url
            file = embedded.model_file
        elif config.model_name == REFERENCE:
            if policy is None:
                raise ServerConfigError("this environment has no reference policy; name a model instead")
            url = (await stack.enter_async_context(ReferenceServer(policy))).base_url
        urls.append(url)
        files.append(file)
    if not any(kinds):
        parser = settings.tool_call_parser
        servers = [
            server_of(config, base_url=url, tool_call_parser=parser) for config, url in zip(configs, urls, strict=True)
        ]
        return await stack.enter_async_context(Router(servers))
    try:
        engines = [
            create_engine(str(kind), settings_of(config, base_url=url, tool_call_parser=None))
            for kind, config, url in zip(kinds, configs, urls, strict=True)
        ]
    except ServerConfigError:
        raise
    except ValueError as error:
        raise ServerConfigError(str(error)) from error
    server = await asyncio.to_thread(token_server, engines, own_config(configs[0]), settings, files[0])
    return await stack.enter_async_context(server)


def token_server(
    engines: Sequence[TokenEngine], config: ServerConfig, settings: HermesAgentEnvConfig, model_file: Path | None = None
) -> TokenServer:
    """The engines with the model's tokenizer, chat template and parser. Loads the tokenizer: not for the event loop."""
    tokenizer = load_tokenizer(config, settings, model_file)
    template = None
    try:
        if settings.chat_template is not None:
            template = Path(settings.chat_template).read_text(encoding="utf-8")
        prompts = PromptBuilder(
            tokenizer,
            chat_template=template,
            template_kwargs=settings.chat_template_kwargs,
            when_unextendable=settings.when_unextendable,
        )
    except (OSError, ValueError, TemplateError) as error:
        told = str(error) if settings.chat_template is None else f"{settings.chat_template}: {error}"
        raise ServerConfigError(f"{told}; set --env.chat_template FILE.jinja") from error
    try:
        return TokenServer(engines, prompts, settings.tool_call_parser, max_tokens=settings.max_token_length)
    except SettingsDiffer as error:
        raise ServerConfigError(str(error)) from error
    except (LookupError, ValueError) as error:
        raise ServerConfigError(f"tool_call_parser {settings.tool_call_parser!r}: {error}") from error


def load_tokenizer(config: ServerConfig, settings: HermesAgentEnvConfig, model_file: Path | None) -> Any:
    """The model's tokenizer: that of its own file, or the one that is named.

    Names, in this order: `openai.tokenizer_name`, `env.tokenizer_name` where it was set, `openai.model_name`.
    """
    if model_file is not None and config.tokenizer_name == "none":
        from lachesis.inference.gguf_tokenizer import tokenizer_from_gguf

        tokenizer = tokenizer_from_gguf(model_file)
        if "tools" not in (tokenizer.chat_template or ""):
            tokenizer.chat_template = HERMES_TEMPLATE.read_text(encoding="utf-8")
        return tokenizer
    named = settings.tokenizer_name if "tokenizer_name" in settings.model_fields_set else config.model_name
    name = config.tokenizer_name if config.tokenizer_name != "none" else named
    from transformers import AutoTokenizer

    try:
        return AutoTokenizer.from_pretrained(name)
    except (OSError, ValueError) as error:
        reason = str(error).strip().splitlines()[0]
        raise ServerConfigError(
            f"tokenizer {name!r} cannot be loaded ({reason}); set --openai.tokenizer_name to the model's folder or name"
        ) from error
