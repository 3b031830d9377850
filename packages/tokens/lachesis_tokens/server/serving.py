"""Requirements of a run with tokens: the tokenizer, the chat template and the parser, and their checks."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Collection, Iterable, Sequence
from contextlib import AsyncExitStack
from pathlib import Path
from typing import Any, TypeVar

from backends.hugging_face import why_offline
from backends.lazy import quiet_imports
from lachesis.runs.environment import Environment
from lachesis.runs.prose import print_prose
from lachesis.settings.chosen import is_chosen
from lachesis.settings.class_settings import source_of
from lachesis.settings.server_settings import EMBEDDED, ServerConfig, ServerConfigError
from lachesis.settings.settings import HermesAgentEnvConfig
from lachesis_client import ServerSettings
from lachesis_client.errors import TemplateError
from lachesis_client.sampling import LogprobsKind, read_sampling
from lachesis_messages.records.sampling_record import HARMLESS_FIELDS, sampling_problem
from lachesis_tokens.engines import TokenEngine, create_engine
from lachesis_tokens.prompts.prompts import PromptBuilder
from lachesis_tokens.server.token_server import TokenServer
from lachesis_tokens.server.token_source import SettingsDiffer
from lachesis_tokens.templates.chat_template import read_template
from lachesis_tokens.templates.parser_match import match_parser

Prompts = TypeVar("Prompts", bound=PromptBuilder)


def naming_tokenizer(configs: Sequence[ServerConfig]) -> ServerConfig:
    """The settings that name the tokenizer of all servers, which may be written for any of them."""
    naming = {config.tokenizer_name: config for config in reversed(configs) if config.tokenizer_name != "none"}
    if len(naming) > 1:
        raise ServerConfigError(
            f"openai.tokenizer_name names {len(naming)} tokenizers ({', '.join(naming)}), but all servers of a run "
            "serve one model; name one"
        )
    return next(iter(naming.values()), configs[0])


async def start_token_server(
    engines: Sequence[tuple[str, ServerSettings]],
    configs: Sequence[ServerConfig],
    *,
    settings: HermesAgentEnvConfig,
    model_file: Path | None,
    stack: AsyncExitStack,
    check: Callable[[Sequence[Any]], Awaitable[None]],
) -> TokenServer:
    """The server of a run with tokens; `stack` closes its engines.

    Args:
        engines: the kind of each engine and its settings.
        check: gets the engines before a tokenizer is loaded, which takes a minute where a wrong name makes it fail.

    Raises:
        ServerConfigError: an engine, the tokenizer, the template or the parser cannot be used.
    """
    try:
        made = [create_engine(kind, each) for kind, each in engines]
    except ServerConfigError:
        raise
    except ValueError as error:
        raise ServerConfigError(str(error)) from error
    for engine in made:
        stack.push_async_callback(engine.close)
    naming = naming_tokenizer(configs)
    await check(made)
    return await asyncio.to_thread(token_server, made, naming, settings, model_file)


def token_server(
    engines: Sequence[TokenEngine], config: ServerConfig, settings: HermesAgentEnvConfig, model_file: Path | None = None
) -> TokenServer:
    """The engines with the model's tokenizer, chat template and parser. Loads the tokenizer: not for the event loop."""
    tokenizer, name, source = load_tokenizer(config, settings, model_file)
    prompts = prompts_of(PromptBuilder, tokenizer, settings)
    try:
        return TokenServer(
            engines,
            prompts,
            settings.tool_call_parser,
            max_tokens=settings.max_token_length,
            tokenizer=(name, source),
        )
    except SettingsDiffer as error:
        raise ServerConfigError(str(error)) from error
    except (LookupError, ValueError) as error:
        raise ServerConfigError(f"tool_call_parser {settings.tool_call_parser!r}: {error}") from error


def prompts_of(
    kind: type[Prompts], tokenizer: Any, settings: HermesAgentEnvConfig, end_of_turn: Sequence[int] = ()
) -> Prompts:
    """Prompts with the chat template of an environment. Raises ServerConfigError for a template that is of no use."""
    try:
        return kind(
            tokenizer,
            chat_template=None if settings.chat_template is None else read_template(settings.chat_template),
            template_kwargs=settings.chat_template_kwargs,
            when_unextendable=settings.when_unextendable,
            end_of_turn=end_of_turn,
            special_tokens_in_text=settings.special_tokens_in_text,
        )
    except (OSError, ValueError, TemplateError) as error:
        reason = str(error) if settings.chat_template is None else f"{settings.chat_template}: {error}"
        raise ServerConfigError(f"{reason}; set --env.chat_template FILE.jinja") from error


def load_tokenizer(
    config: ServerConfig, settings: HermesAgentEnvConfig, model_file: Path | None
) -> tuple[Any, str, str]:
    """The model's tokenizer, from the model file or by name; its name; and the setting that named it.

    Names, in this order: `openai.tokenizer_name`, `env.tokenizer_name` where it was set, `openai.model_name`.
    """
    if model_file is not None and config.tokenizer_name == "none":
        return _tokenizer_of_file(model_file), model_file.name, "openai.model_name"
    if config.tokenizer_name not in ("none", config.model_name):
        name, source = config.tokenizer_name, "openai.tokenizer_name"
    elif config.tokenizer_name == "none" and is_chosen(settings, "tokenizer_name"):
        name, source = settings.tokenizer_name, "env.tokenizer_name"
    else:
        name, source = config.model_name, "openai.model_name"
    return named_tokenizer(name, "openai.tokenizer_name"), name, source


def named_tokenizer(name: str, setting: str, *, trust_remote_code: bool = False) -> Any:
    """The tokenizer with this name: a folder, a GGUF file, a name of the hub, or `embedded`. Blocks.

    Raises:
        ServerConfigError: it cannot be loaded; `setting` names another one.
    """
    if name == EMBEDDED or name.endswith(".gguf"):
        from lachesis_tokens.engines.embedded import EmbeddedServer

        return _tokenizer_of_file(EmbeddedServer("smollm2" if name == EMBEDDED else name).model_file)
    with quiet_imports():
        from transformers import AutoTokenizer

    from lachesis_tokens.prompts.model_folders import tokenizer_of

    place = tokenizer_of(name)
    offline = "" if Path(place).exists() else why_offline()
    try:
        own = {"local_files_only": bool(offline), "trust_remote_code": trust_remote_code}
        return AutoTokenizer.from_pretrained(place, **own)
    except (OSError, ValueError) as error:
        reason = f"it is not in the cache, and {offline}" if offline else str(error).strip().splitlines()[0]
        raise ServerConfigError(
            f"tokenizer {name!r} cannot be loaded ({reason}); set --{setting} to the model's folder or name"
        ) from error


def _tokenizer_of_file(path: Path) -> Any:
    from lachesis_tokens.prompts.gguf_tokenizer import tokenizer_from_gguf

    tokenizer = tokenizer_from_gguf(path)
    if "tools" not in (tokenizer.chat_template or ""):
        tokenizer.chat_template = read_template("hermes")
    return tokenizer


def settings_problem(
    engines: Iterable[tuple[ServerSettings, LogprobsKind]],
    config: HermesAgentEnvConfig,
    *,
    temperature: float,
    named: Collection[str] = (),
    masks: bool = True,
) -> str | None:
    """Why what is sampled with these settings has other logprobs than a trainer computes; see `sampling_problem`.

    Args:
        engines: the settings of each, and its kind of logprobs.
        named: parameters that each request sets, whatever the settings say.
        masks: the trainer gets the sampling masks, where the engine reports them.
    """
    for settings, logprobs in engines:
        fields = {**settings.extra_body, **(config.extra_body or {})}
        sent = {name: value for name, value in fields.items() if name not in named}
        given = {"temperature": temperature, "extra_body": sent}
        record = read_sampling(given, default_max_tokens=config.max_token_length).record(logprobs)
        facts = {HARMLESS_FIELDS: settings.harmless_fields, "sampling_mask": masks and settings.sampling_mask}
        if problem := sampling_problem({**record, **facts}):
            return problem
    return None


async def check_tokens(env: Environment, server: TokenServer, tools: Sequence[dict[str, Any]]) -> None:
    """Compare the tokenizer with the servers' tokenizers, the chat template with the tools, and the parser with it.

    Raises:
        ServerConfigError: one of them cannot be used.
    """
    if not env.testing:
        await _prove_tokenizer(env, server)
    await _check_template(env, server)
    await _check_parser(env, server, tools)


async def _prove_tokenizer(env: Environment, server: TokenServer) -> None:
    """Print which tokenizer is used, and compare it with that of each server."""
    proof = server.tokenizer_proof
    unproven = [engine.base_url for engine in server.servers if not await proof.prove(engine)]
    compared = f"compared with {len(server.servers) - len(unproven)} of {len(server.servers)} servers"
    print_prose(env.console, f"exact tokens: tokenizer {proof.described}, {compared}", style="dim")
    if unproven:
        print_prose(
            env.console,
            f"warning: {', '.join(unproven)}: nothing there says how it splits text and special tokens, so a wrong "
            "tokenizer would go unnoticed, with plausible tokens and rewards. Make sure that it serves "
            f"{proof.described}",
            style="bold yellow",
        )


async def _check_template(env: Environment, server: TokenServer) -> None:
    """Print where the chat template does not continue conversations; one that hides the tools is an error."""
    report = await asyncio.to_thread(lambda: server.prompts.template_report)
    if said := report.summary():
        print_prose(env.console, said, style="dim")
    if env.tool_definitions() and not report.shows_tools:
        raise ServerConfigError(
            "the model's chat template does not show it the tools; set --env.chat_template to one that does "
            "(packages/tokens/lachesis_tokens/templates/files/hermes.jinja fits models that speak ChatML), or "
            "--env.enabled_toolsets '[]'"
        )


async def _check_parser(env: Environment, server: TokenServer, tools: Sequence[dict[str, Any]]) -> None:
    """Compare the tool-call parser with the chat template. One that loses the template's own calls is an error."""
    if not tools:
        return
    setting = env.config.tool_call_parser
    match = await asyncio.to_thread(match_parser, server.prompts, server.parser, setting)
    if match.lost is not None:
        where = source_of(env, "tool_call_parser") if is_chosen(env.config, "tool_call_parser") else "the default"
        detected = match.detection.tool_parser
        raise ServerConfigError(
            f"tool_call_parser {setting!r} ({where}): {match.lost}; "
            + (
                f"set --env.tool_call_parser {detected}, which reads them"
                if detected is not None
                else "no known format reads them: set --env.chat_template to another template, or register a parser"
            )
        )
    if match.note is not None:
        print_prose(env.console, match.note)
