"""OpenAI-compatible servers as one (Phase 1): `chat`, and the two calls of Atropos' ServerManager."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any, NoReturn

from lachesis.inference import wire
from lachesis.inference.balancer import SPLITS, Balancer, Split
from lachesis.inference.http_client import Answer
from lachesis.inference.openai_server import OpenAIServer
from lachesis.trajectories.messages import ChatResponse, Message

if TYPE_CHECKING:
    from openai.types import Completion
    from openai.types.chat import ChatCompletion

__all__ = ["SPLITS", "Router", "Split", "TokenTrackingUnavailable"]


class TokenTrackingUnavailable(RuntimeError):
    """Exact tokens and logprobs were asked of servers that do not report them."""


class Router(Balancer[OpenAIServer]):
    """The same `chat` as one server, over several; see `Balancer`."""

    async def chat(
        self, messages: Sequence[Message | Mapping[str, Any]], *, split: Split = "train", **parameters: Any
    ) -> ChatResponse:
        """`OpenAIServer.chat` on the best server there is; `split="eval"` counts against the evaluation limit too."""
        return await self._run(lambda server, retries: server.chat(messages, max_retries=retries, **parameters), split)

    def for_rollout(self) -> Router:
        """What a rollout talks to: nothing of it is kept here, so this is shared by all."""
        return self

    # What environments written for Atropos' ServerManager call.

    async def chat_completion(self, *, split: Split = "train", n: int = 1, **kwargs: Any) -> ChatCompletion:
        """OpenAI keyword arguments in, `openai.types.chat.ChatCompletion` out; `model` is the server's own.

        Servers that ignore `n` are asked again for the rest, and what they leave in the text is parsed, as in `chat`.
        """
        from openai.types.chat import ChatCompletion

        body = await self._complete("/chat/completions", kwargs, n, split)
        return ChatCompletion.construct(**body)

    async def completion(self, *, split: Split = "train", n: int = 1, **kwargs: Any) -> Completion:
        """The same for the text-completion endpoint (`prompt=`)."""
        from openai.types import Completion

        return Completion.construct(**await self._complete("/completions", kwargs, n, split))

    def managed_server(self, *_: Any, **__: Any) -> NoReturn:
        """Not here: raises `TokenTrackingUnavailable`."""
        raise TokenTrackingUnavailable(
            "managed_server() tracks exact tokens, which OpenAI-style servers do not report: that is Phase 2, with a "
            "server_type of vllm or sglang. For evaluation and trajectories without tokens (Phase 1) use chat()"
        )

    async def _complete(self, path: str, kwargs: Mapping[str, Any], n: int, split: Split) -> dict[str, Any]:
        extra_body = kwargs.get("extra_body") or {}
        payload = {key: value for key, value in kwargs.items() if key not in ("extra_body", "model", "timeout")}
        payload |= extra_body

        async def ask(count: int) -> dict[str, Any]:
            async def send(server: OpenAIServer, retries: int | None) -> Answer:
                body = dict(payload)
                if "messages" in body:
                    body["messages"] = wire.encode_messages(body["messages"], server.settings.reasoning_field)
                if count > 1:
                    body["n"] = count
                answer = await server.post(path, body, max_retries=retries)
                if path == "/completions":
                    return answer
                read = wire.restate_choices(answer.body, server.base_url, server.parser, payload.get("tools"))
                return replace(answer, body=read)

            return (await self._run(send, split)).body

        first = await ask(n)
        choices = list(first.get("choices") or ())[:n]
        if missing := n - len(choices):
            for body in await asyncio.gather(*(ask(1) for _ in range(missing))):
                choices += list(body.get("choices") or ())[:1]
        return {**first, "choices": [{**choice, "index": index} for index, choice in enumerate(choices)]}
