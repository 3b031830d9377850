"""From server settings to a router that answers: plain URLs, or the embedded model."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Mapping, Sequence
from contextlib import AsyncExitStack
from pathlib import Path
from typing import TYPE_CHECKING, Any

from pydantic import ValidationError

from lachesis.other_packages import TOKENS
from lachesis.runs.prose import print_prose
from lachesis.settings.flags import close_names
from lachesis.settings.server_settings import (
    CHAT,
    EMBEDDED,
    REFERENCE,
    ServerConfig,
    ServerConfigError,
    is_local_model,
    key_for,
    needs_start,
    token_engine,
)
from lachesis.settings.settings import HermesAgentEnvConfig
from lachesis_client import OpenAIServer, Router, ServerSettings, ServerUnavailable

if TYPE_CHECKING:
    from lachesis.runs.environment import Environment
    from lachesis.runs.silence import SilenceWatch
    from lachesis_client.model_server import ModelServer
    from lachesis_client.token_tracker import TokenTracker


def settings_of(config: ServerConfig, *, base_url: str | None, tool_call_parser: str | None) -> ServerSettings:
    """Settings of a server's client. `base_url` replaces the configured one, for servers that the run started."""
    url = base_url or config.base_url
    if not url:
        near = close_names(config.model_name, (EMBEDDED, REFERENCE))
        raise ServerConfigError(
            f"model {config.model_name!r} has no server: {f'did you mean {near[0]}? Else ' if near else ''}set "
            f"--openai.base_url http://HOST:PORT/v1 (-b), or -m {EMBEDDED} for the small model of "
            f"`lachesis demo`, or {REFERENCE} for the environment's reference policy"
        )
    local = is_local_model(config)
    return ServerSettings(
        base_url=url,
        model_name=config.model_name,
        api_key=config.api_key or key_for(url),
        timeout=config.timeout,
        max_concurrency=config.parallel if local else config.num_max_requests_at_once,
        max_eval_concurrency=config.parallel if local else config.num_requests_for_eval,
        weight=config.weight,
        extra_body=config.extra_body or {},
        harmless_fields=tuple(config.harmless_fields),
        max_retries=config.max_retries,
        tool_call_parser=tool_call_parser,
        reasoning_field=config.reasoning_field,
        logprobs_mode=config.logprobs_mode,
        session_header=config.session_header,
        headers=config.headers,
        data_parallel_size=config.data_parallel_size,
        routed_experts=config.routed_experts,
        sampling_mask=config.sampling_mask,
        echo_limit=config.echo_limit,
    )


def server_of(config: ServerConfig, *, base_url: str | None = None, tool_call_parser: str | None) -> OpenAIServer:
    """A client for one server (Phase 1)."""
    settings = settings_of(config, base_url=base_url, tool_call_parser=tool_call_parser)
    try:
        return OpenAIServer(settings)
    except (LookupError, ValueError) as error:
        where = f"tool_call_parser {tool_call_parser!r}: " if isinstance(error, LookupError) else ""
        raise ServerConfigError(f"{where}{error}") from error


async def start_servers(
    configs: Sequence[ServerConfig],
    *,
    settings: HermesAgentEnvConfig,
    stack: AsyncExitStack,
    check: Callable[[Sequence[Any]], Awaitable[None]],
) -> ModelServer:
    """Start servers that need to be started and connect to all of them; `stack` ends both.

    `check` gets their clients before a tokenizer is loaded, which takes a minute where a wrong name makes it fail.

    Raises:
        ServerConfigError: no server, servers of both phases, or a tokenizer, template or parser that cannot be used.
    """
    if any(config.model_name == REFERENCE for config in configs):
        raise ServerConfigError(
            f"model {REFERENCE}: the reference policy is this environment's only model and reports no tokens: give no "
            "other server, server_type or engine with it; or name a model instead"
        )
    kinds = list(map(token_engine, configs))
    if None in kinds and any(kinds):
        found = ", ".join(f"{config.model_name}: {kind or 'chat'}" for config, kind in zip(configs, kinds, strict=True))
        raise ServerConfigError(
            f"some servers report tokens and some do not ({found}); set server_type or engine alike for all of them"
        )
    urls, files, configs = [], [], list(configs)
    for number, config in enumerate(configs):
        url, file = None, None
        if is_local_model(config):
            embedded = _embedded(config)
            url = (await stack.enter_async_context(embedded)).base_url
            file = embedded.model_file
            configs[number] = config.model_copy(update={"api_key": embedded.api_key})
        urls.append(url)
        files.append(file)
    if not any(kinds):
        parser = settings.tool_call_parser
        servers = [
            server_of(config, base_url=url, tool_call_parser=parser) for config, url in zip(configs, urls, strict=True)
        ]
        router = await stack.enter_async_context(Router(servers))
        await check(router.servers)
        return router
    given = [
        settings_of(config, base_url=url, tool_call_parser=None) for config, url in zip(configs, urls, strict=True)
    ]
    engines = list(zip(map(str, kinds), given, strict=True))
    server: TokenTracker[Any] = await TOKENS.load("start")(
        engines, configs, settings=settings, model_file=files[0], stack=stack, check=check
    )
    return server


async def start_another(
    given: Mapping[str, Any],
    setting: str,
    *,
    settings: HermesAgentEnvConfig,
    stack: AsyncExitStack,
    watch: SilenceWatch,
) -> tuple[Router, ServerConfig]:
    """A server in addition to the policy's, described by a setting of the environment, with 120 s per request.

    Raises:
        ServerConfigError: it cannot be used.
    """
    try:
        # Its tokens are not trained, so it is asked as a chat, whatever kind of server it is.
        config = ServerConfig(**{"timeout": 120, **given, "server_type": "openai", "engine": CHAT})
    except ValidationError as error:
        problem = error.errors()[0]
        where, said = ".".join(map(str, problem["loc"])), problem["msg"].removeprefix("Value error, ")
        raise ServerConfigError(f"env.{setting}: {where}: {said}; it takes the settings of openai.*") from None
    if not config.base_url and not needs_start(config):
        raise ServerConfigError(
            f"env.{setting}: model {config.model_name!r} has no server; add base_url, or name the model {EMBEDDED}"
        )

    async def watched(clients: Sequence[Any]) -> None:
        watch.add([config], clients)

    server = await start_servers([config], settings=settings, stack=stack, check=watched)
    assert isinstance(server, Router)
    return server, config


def _embedded(config: ServerConfig) -> Any:
    model = "smollm2" if config.model_name == EMBEDDED else Path(config.model_name)
    return TOKENS.load("embedded_server")(
        model, threads=config.threads, parallel=config.parallel, context=config.context
    )


def model_files(configs: Sequence[ServerConfig]) -> list[Path]:
    """The files of the models that the run starts itself."""
    return [file for config in configs if is_local_model(config) for file in _embedded(config).files]


async def check_models(env: Environment, clients: Sequence[Any], *, wait: bool) -> None:
    """Ask each server for its models, and compare their names with those of the settings; see `_check_model_names`.

    `wait`: for servers that do not answer yet, as a trainer that loads its model.
    """
    said = False
    while True:
        try:
            listed = await asyncio.gather(*(client.check() for client in clients))
            break
        except ServerUnavailable as error:
            if not wait:
                raise
            if not said:
                said = True
                env.console.print(
                    f"waiting for the model server: {error}", markup=False, highlight=False, soft_wrap=True
                )
        await asyncio.sleep(1.0)
    _check_model_names(env, clients, listed)


def _check_model_names(env: Environment, clients: Sequence[Any], listed: Sequence[Sequence[str]]) -> None:
    """Compare the models' names with those that the servers list.

    vLLM answers 404 for any name that it does not list, so there a missing name is an error. Elsewhere it is a warning:
    llama.cpp and SGLang accept any name, and hosted services accept aliases and adapters that they do not list.
    """
    for config, client, names in zip(env.server_configs, clients, listed, strict=False):
        if needs_start(config) or not names or config.model_name in names:
            continue
        near = close_names(config.model_name, names)
        known = f"did you mean {' or '.join(near)}?" if near else f"it lists {', '.join(names[:8])}"
        more = f" and {len(names) - 8} others" if not near and len(names) > 8 else ""
        problem = f"openai.model_name {config.model_name!r} is not in the list of {client.base_url}; {known}{more}"
        if token_engine(config) == "vllm":
            raise ServerConfigError(problem)
        text = f"warning: {problem} (a server may know more names than it lists)"
        print_prose(env.console, text, style="yellow")
