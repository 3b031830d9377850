"""The server of a run with tokens (Phase 2). Each rollout takes a `ManagedServer` from the run's `TokenServer`."""

from __future__ import annotations

from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import asynccontextmanager
from typing import TYPE_CHECKING, Any, Unpack

from backends.errors import LachesisError
from lachesis_client.affinity import Demand, Route
from lachesis_client.chat_options import ChatOptions, Split, check_arguments
from lachesis_messages.responses import ChatResponse
from lachesis_tokens.engines.base import PromptLogprobs, PromptScorer, TokenEngine
from lachesis_tokens.server.managed_server import ManagedServer
from lachesis_tokens.server.token_source import TokenSource

if TYPE_CHECKING:
    from openai.types import Completion
    from openai.types.chat import ChatCompletion


class PromptsNotScored(LachesisError, NotImplementedError):
    """The server samples, and does not report how likely given tokens are."""


class TokenServer(TokenSource):
    """Engines that serve one model, with its prompts and its parser; see `TokenSource` for its arguments."""

    def for_rollout(self, *, group: str | None = None, session: str | None = None) -> ManagedServer:
        """The token tracking of one rollout.

        Args:
            group: names its group: rollouts that begin with the same prompt. Their first requests prefer the server
                that has it.
            session: names the rollout to routers between here and the servers; default: a random name.
        """
        return ManagedServer(self, affinity=self._affinity(group, session))

    @asynccontextmanager
    async def managed_server(self, tokenizer: Any = None, **_: Any) -> AsyncIterator[ManagedServer]:
        """`for_rollout`, as environments written for Atropos open it.

        `tokenizer` must be equal to the server's, because prompts are built with one tokenizer.
        """
        own = self.prompts.tokenizer
        if tokenizer is not None and tokenizer is not own and tokenizer.get_vocab() != own.get_vocab():
            raise ValueError(
                "managed_server(tokenizer=...) is another tokenizer than the server's; set openai.tokenizer_name to "
                "the model's and leave the argument out"
            )
        yield self.for_rollout()

    async def chat(
        self, messages: Sequence[Mapping[str, Any]], *, split: Split = "train", **options: Unpack[ChatOptions]
    ) -> ChatResponse:
        """One completion of a conversation that is not remembered; see `ManagedServer.chat`."""
        return await self.for_rollout().chat(messages, split=split, **options)

    async def chat_completion(self, **kwargs: Any) -> ChatCompletion:
        """The same in OpenAI's form; see `ManagedServer.chat_completion`."""
        return await self.for_rollout().chat_completion(**kwargs)

    async def completion(self, **kwargs: Any) -> Completion:
        """Text completion in OpenAI's form; see `ManagedServer.completion`."""
        return await self.for_rollout().completion(**kwargs)

    async def get_logprobs(
        self,
        *,
        input_ids: Sequence[int] | None = None,
        prompt: str | None = None,
        top_k: int = 1,
        split: Split = "train",
        **others: Any,
    ) -> dict[str, Any]:
        """How likely the tokens of a given prompt are, in Atropos' form: no token is sampled for anybody.

        Args:
            input_ids: the prompt; or `prompt`, a text that the tokenizer encodes.
            top_k: likeliest ids at each position. `top_logprobs` is another name of it.

        Returns:
            `prompt_tokens`, and for each of them a list in `prompt_topk_token_ids` and one in `prompt_topk_logprobs`:
            the token itself, then the likeliest others. The lists of the first token are empty.

        Raises:
            PromptsNotScored: the engine cannot do this.
            TypeError: neither or both prompts, or an argument that would have no effect.
        """
        top_k = int(others.pop("top_logprobs", None) or top_k)
        check_arguments(
            others, {"model", "max_tokens", "max_new_tokens", "temperature", "timeout", "n"}, "get_logprobs"
        )
        if (input_ids is None) == (prompt is None):
            raise TypeError("get_logprobs() takes either input_ids or prompt")
        ids = list(input_ids) if input_ids is not None else list(self.prompts.tokenizer(prompt)["input_ids"])

        async def send(engine: TokenEngine, retries: int | None, _: Route) -> list[PromptLogprobs]:
            if not isinstance(engine, PromptScorer):
                raise PromptsNotScored(
                    f"get_logprobs() scores a given prompt, which the engine {engine.kind!r} does not do; use one that "
                    "does: --openai.engine vllm"
                )
            return [await engine.prompt_logprobs(ids, max(1, top_k), max_retries=retries)]

        positions = (await self._run(send, split, asked=lambda: ids, demand=Demand(len(ids))))[0].positions
        return {
            "prompt_tokens": ids,
            "prompt_topk_token_ids": [[token for token, _ in position] for position in positions],
            "prompt_topk_logprobs": [[logprob for _, logprob in position] for position in positions],
        }
