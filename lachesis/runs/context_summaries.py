"""How the settings of a run compress contexts: the numbers, and who writes the summaries."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import AsyncExitStack
from dataclasses import replace
from functools import partial

from pydantic import ValidationError

from lachesis.agent.context_compression import ContextCompression, NotCompressed
from lachesis.compression.conversation import PREFIX, Conversation
from lachesis.compression.summary import (
    Passage,
    SummaryFailed,
    clean_summary,
    extractive_summary,
    summarised_passages,
    summary_request,
)
from lachesis.inference import Router
from lachesis.inference.parse_thread import LONG_TEXT, parse
from lachesis.runs.model_servers import start_servers
from lachesis.runs.server_settings import EMBEDDED, ServerConfig, ServerConfigError, describe, needs_start
from lachesis.runs.settings import HermesAgentEnvConfig
from lachesis.trajectories import Message

_SECONDS = 120.0
"""For one summary of another server, unless its settings have a timeout."""
_TEMPERATURE = 0.3


async def context_compression(config: HermesAgentEnvConfig, stack: AsyncExitStack) -> ContextCompression | None:
    """How rollouts compress their contexts; None where they do not. `stack` ends the server that writes summaries.

    Raises:
        ServerConfigError: the settings of that server cannot be used.
    """
    if config.compress_context_at is None:
        return None
    policy = ContextCompression(config.compress_context_at, config.compress_context_to, config.compress_context_keep)
    tokens, writer = policy.summary_tokens, config.compress_context_with
    if writer == "policy":
        return policy
    if writer == "extractive":
        return replace(policy, summarise=partial(_extract, tokens), by="extractive")
    assert isinstance(writer, dict)
    try:
        # Its tokens are not trained, so it is asked as a chat, whatever kind of server it is.
        server_config = ServerConfig(**{**writer, "server_type": "openai", "engine": "auto"})
    except ValidationError as error:
        problem = error.errors()[0]
        where = ".".join(map(str, problem["loc"]))
        raise ServerConfigError(
            f"env.compress_context_with: {where}: {problem['msg']}; it takes the settings of openai.*"
        ) from None
    if not server_config.base_url and not needs_start(server_config):
        raise ServerConfigError(
            f"env.compress_context_with: model {server_config.model_name!r} has no server; add base_url, or name the "
            f"model {EMBEDDED}"
        )
    server = await start_servers([server_config], settings=config, policy=None, stack=stack)
    assert isinstance(server, Router)
    timeout = float(writer.get("timeout", _SECONDS))
    return replace(policy, summarise=partial(_ask, server, tokens), by=describe([server_config]), timeout=timeout)


async def _ask(server: Router, tokens: int, messages: Sequence[Message]) -> str:
    asked = [{"role": "user", "content": summary_request(_passages(messages), tokens)}]
    # Twice as many: some models count badly, and some think first.
    response = await server.chat(asked, temperature=_TEMPERATURE, max_tokens=max(2 * tokens, 512))
    return clean_summary(response.message.text)


async def _extract(tokens: int, messages: Sequence[Message]) -> str:
    passages = _passages(messages)
    long = sum(len(passage.text) for passage in passages) > LONG_TEXT
    try:
        return await parse(long, partial(extractive_summary, passages, tokens, _about))
    except SummaryFailed as error:
        raise NotCompressed(str(error)) from error


def _about(text: str) -> int:
    """About as many tokens as a tokenizer makes of it."""
    return len(text.encode("utf-8", "surrogatepass")) // 4 + 1


def _passages(messages: Sequence[Message]) -> list[Passage]:
    shown = Conversation({}, "messages", [message.to_openai("reasoning") for message in messages])
    found: list[Passage] = []
    for role, text in zip(shown.roles, shown.texts, strict=True):
        found += summarised_passages(text.removeprefix(PREFIX)) if text.startswith(PREFIX) else [Passage(role, text)]
    return found
