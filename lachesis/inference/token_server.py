"""Token engines as one (Phase 2): what a run has one of, and every rollout takes a `ManagedServer` from."""

from __future__ import annotations

from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from lachesis.inference.balancer import Balancer, Split
from lachesis.inference.completion_reader import CompletionReader
from lachesis.inference.engines.base import Generated, TokenEngine
from lachesis.inference.engines.prompt_ids import PromptIds
from lachesis.inference.managed_server import ManagedServer
from lachesis.inference.prompts import PromptBuilder
from lachesis.inference.sampling import LogprobsKind, Sampling, said_of_sampling
from lachesis.trajectories import ChatResponse, TokenPrefix
from tool_call_parsers import ToolCallParser, get_parser

if TYPE_CHECKING:
    from openai.types import Completion
    from openai.types.chat import ChatCompletion

DEFAULT_MAX_TOKENS = 2048
"""Completion tokens where a call names no number: Atropos' default, and never a server's own."""


@dataclass(frozen=True, slots=True)
class Answered:
    """What an engine generated, and which one it was. A dataclass that the balancer can count attempts in."""

    generated: Generated
    engine: TokenEngine
    latency: float
    attempts: int


class SettingsDiffer(ValueError):
    """Servers of one model are told to sample otherwise: a rollout may go from one to another."""


class TokenServer(Balancer[TokenEngine]):
    """Engines that serve one model, with its prompts and its parser; see `Balancer`.

    Args:
        engines: servers of the same model.
        prompts: the model's tokenizer and chat template.
        parser: reads tool calls and reasoning out of a completion; by name, it is made with the same tokenizer.
        max_tokens: completion tokens where a call names no number.

    Raises:
        SettingsDiffer: the engines' `extra_body` name different sampling parameters.
    """

    def __init__(
        self,
        engines: Sequence[TokenEngine],
        prompts: PromptBuilder,
        parser: ToolCallParser | str,
        *,
        max_tokens: int = DEFAULT_MAX_TOKENS,
        **balancing: float,
    ) -> None:
        super().__init__(engines, **balancing)
        self.sampling = _common_sampling(engines)
        """What the settings of the engines say of sampling; the arguments of a call win over it."""
        self.prompts = prompts
        if isinstance(parser, str):
            parser = get_parser(parser, reasoning="auto", tokenizer=prompts.tokenizer)
        self.parser = parser
        self.reader = CompletionReader(prompts.tokenizer, parser)
        self.max_tokens = max_tokens

    @property
    def logprobs(self) -> set[LogprobsKind]:
        """What the logprobs are of, over all engines."""
        return {engine.logprobs for engine in self.servers}

    async def generate(
        self,
        prompt: TokenPrefix,
        sampling: Sampling,
        *,
        n: int = 1,
        split: Split = "train",
        near: TokenEngine | None = None,
    ) -> Answered:
        """`n` completions of the prompt, by `near` while it has room: it has the prompt's beginning in its cache."""

        prompt_ids = PromptIds(prompt)

        async def send(engine: TokenEngine, retries: int | None) -> Answered:
            generated = await engine.generate(prompt_ids, sampling, n=n, max_retries=retries)
            return Answered(generated, engine, generated.latency, generated.attempts)

        return await self._run(send, split, near=near)

    def for_rollout(self) -> ManagedServer:
        """The token tracking of one rollout."""
        return ManagedServer(self)

    @asynccontextmanager
    async def managed_server(self, tokenizer: Any = None, **_: Any) -> AsyncIterator[ManagedServer]:
        """`for_rollout`, as environments written for Atropos open it.

        `tokenizer` is theirs to pass and has to be the server's own: prompts are built with one tokenizer.
        """
        own = self.prompts.tokenizer
        if tokenizer is not None and tokenizer is not own and tokenizer.get_vocab() != own.get_vocab():
            raise ValueError(
                "managed_server(tokenizer=...) is another tokenizer than the server's; set openai.tokenizer_name to "
                "the model's and leave the argument out"
            )
        yield self.for_rollout()

    async def chat(self, messages: Sequence[Mapping[str, Any]], **parameters: Any) -> ChatResponse:
        """One completion of a conversation that nothing is remembered of; see `ManagedServer.chat`."""
        return await self.for_rollout().chat(messages, **parameters)

    async def chat_completion(self, **kwargs: Any) -> ChatCompletion:
        """The same in OpenAI's form; see `ManagedServer.chat_completion`."""
        return await self.for_rollout().chat_completion(**kwargs)

    async def completion(self, **kwargs: Any) -> Completion:
        """Text completion in OpenAI's form; see `ManagedServer.completion`."""
        return await self.for_rollout().completion(**kwargs)


def _common_sampling(engines: Sequence[TokenEngine]) -> dict[str, Any]:
    first, *others = [said_of_sampling(engine.settings.extra_body) for engine in engines]
    for engine, said in zip(engines[1:], others, strict=True):
        for name in first.keys() | said.keys():
            if first.get(name) != said.get(name):
                raise SettingsDiffer(
                    f"openai.extra_body sets {name} to {first.get(name)!r} for {engines[0].base_url} and to "
                    f"{said.get(name)!r} for {engine.base_url}; give all servers of a model the same"
                )
    return first
