"""How the settings of a run compress contexts: the numbers, and who writes the summaries."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import AsyncExitStack
from dataclasses import replace
from functools import partial

from lachesis.runs.model_servers import start_another
from lachesis.runs.silence import SilenceWatch
from lachesis.settings.server_settings import describe
from lachesis.settings.settings import HermesAgentEnvConfig
from lachesis_client import Router
from lachesis_client.parse_thread import LONG_TEXT, parse
from lachesis_data.compression.conversation import PREFIX, Conversation
from lachesis_data.compression.live import ContextCompression, NotCompressed
from lachesis_data.compression.summary import (
    Passage,
    SummaryFailed,
    clean_summary,
    extractive_summary,
    summarised_passages,
    summary_request,
)
from lachesis_messages.messages import Message

_TEMPERATURE = 0.3


async def context_compression(
    config: HermesAgentEnvConfig, stack: AsyncExitStack, watch: SilenceWatch
) -> ContextCompression:
    """How rollouts compress their contexts. `stack` ends the server that writes summaries.

    Raises:
        ServerConfigError: the settings of that server cannot be used.
    """
    assert config.compress_context_at is not None
    policy = ContextCompression(config.compress_context_at, config.compress_context_to, config.compress_context_keep)
    tokens, writer = policy.summary_tokens, config.compress_context_with
    if writer == "policy":
        return policy
    if writer == "extractive":
        return replace(policy, summarise=partial(_extract, tokens), by="extractive")
    assert isinstance(writer, dict)
    server, server_config = await start_another(
        writer, "compress_context_with", settings=config, stack=stack, watch=watch
    )
    asked, by = partial(_ask, server, tokens), describe([server_config])
    return replace(policy, summarise=asked, by=by, timeout=float(server_config.timeout))


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
