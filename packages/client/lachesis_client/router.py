"""Several OpenAI-compatible servers as one (Phase 1): `chat`, and the two calls of Atropos' ServerManager."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from copy import copy
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, Any, Final, Unpack

from backends.tasks import run_all
from lachesis_client.affinity import Demand, Route
from lachesis_client.balancer import Balancer
from lachesis_client.chat_format import in_order, read_choices, request_messages, restate_choices
from lachesis_client.chat_options import ChatOptions, Split
from lachesis_client.http_client import HttpAnswer
from lachesis_client.model_server import MessageServer
from lachesis_client.openai_server import HARMLESS, OpenAIServer
from lachesis_client.parse_thread import is_long, parse
from lachesis_client.streaming import AnswerStream
from lachesis_messages.messages import Message
from lachesis_messages.responses import ChatResponse

if TYPE_CHECKING:
    from openai.types import Completion
    from openai.types.chat import ChatCompletion


_TEXT_PER_TOKEN: Final = 4
"""Characters, about: for prompts that no server has counted yet."""


class Router(Balancer[OpenAIServer], MessageServer):
    """`chat` over several servers; see `Balancer`."""

    _counted = 0
    """Tokens of the rollout's last prompt and completion, as the server counted them."""

    async def chat(
        self,
        messages: Sequence[Message | Mapping[str, Any]],
        *,
        split: Split = "train",
        stream: AnswerStream | None = None,
        **options: Unpack[ChatOptions],
    ) -> ChatResponse:
        """`OpenAIServer.chat` on the best server. `split="eval"` counts against the evaluation limit too."""

        async def send(server: OpenAIServer, retries: int | None, route: Route) -> list[ChatResponse]:
            return [await server.chat(messages, max_retries=retries, route=route, stream=stream, **options)]

        demand = self._demand(messages, options.get("max_tokens"))
        responses = await self._run(
            send,
            split,
            asked=lambda: list(messages),
            demand=demand,
            sampled=lambda answer: answer.usage.completion_tokens,
        )
        response = responses[0]
        if self.affinity is not None:
            self._counted = (response.usage.prompt_tokens or 0) + (response.usage.completion_tokens or 0)
        return response

    def for_rollout(self, *, group: str | None = None, session: str | None = None) -> Router:
        """The same servers, for one rollout; see `TokenTracker.for_rollout`."""
        other = copy(self)
        other.affinity = self._affinity(group, session)
        return other

    def _demand(self, prompt: object, max_tokens: int | None, n: int = 1) -> Demand:
        if not self._choice:
            return Demand(affinity=self.affinity)
        length = self._counted or _text_length(prompt) // _TEXT_PER_TOKEN
        return Demand(length, self._expected.of(max_tokens, n), self.affinity)

    # Calls of environments written for Atropos' ServerManager.

    async def chat_completion(self, *, split: Split = "train", n: int = 1, **kwargs: Any) -> ChatCompletion:
        """OpenAI's keyword arguments in, `openai.types.chat.ChatCompletion` out; `model` is the server's.

        If a server ignores `n`, the missing completions are requested again. The parser reads the text, as in `chat`.
        """
        from openai.types.chat import ChatCompletion

        body = await self._complete("/chat/completions", kwargs, n, split)
        return ChatCompletion.construct(**body)

    async def completion(self, *, split: Split = "train", n: int = 1, **kwargs: Any) -> Completion:
        """The same for the text-completion route (`prompt=`)."""
        from openai.types import Completion

        return Completion.construct(**await self._complete("/completions", kwargs, n, split))

    async def _complete(self, path: str, kwargs: Mapping[str, Any], n: int, split: Split) -> dict[str, Any]:
        extra_body = kwargs.get("extra_body") or {}
        payload = {key: value for key, value in kwargs.items() if key not in ("extra_body", "model", "timeout")}
        payload |= extra_body

        async def request(count: int) -> dict[str, Any]:
            async def send(server: OpenAIServer, retries: int | None, route: Route) -> list[HttpAnswer]:
                body = dict(payload)
                if "messages" in body:
                    body["messages"] = request_messages(body["messages"], server.settings.reasoning_field)
                if count > 1:
                    body["n"] = count
                text = path == "/completions"
                answer = await server.post(
                    path,
                    body,
                    max_retries=retries,
                    route=route,
                    check=None if text else partial(read_choices, server=server.base_url),
                    harmless=lambda: {**body, **({"prompt": "Hi"} if text else {"messages": HARMLESS})},
                )
                if text:
                    return [answer]
                choices = read_choices(answer.body, server.base_url)
                long = any(is_long(choice["message"]) for choice in choices)
                restate = partial(restate_choices, answer.body, server.base_url, server.parser, payload.get("tools"))
                return [replace(answer, body=await parse(long, restate))]

            asked = payload.get("messages", payload.get("prompt"))
            demand = self._demand(asked, payload.get("max_tokens"), count)
            return (await self._run(send, split, asked=lambda: asked, demand=demand))[0].body

        first = await request(n)
        choices = in_order(first.get("choices") or ())[:n]
        if missing := n - len(choices):
            for body in await run_all(request(1) for _ in range(missing)):
                choices += list(body.get("choices") or ())[:1]
        return {**first, "choices": [{**choice, "index": index} for index, choice in enumerate(choices)]}


def _text_length(prompt: object) -> int:
    """Characters of a text or of messages."""
    if isinstance(prompt, str):
        return len(prompt)
    if isinstance(prompt, Message):
        return len(prompt.text)
    if isinstance(prompt, Mapping):
        return _text_length(prompt.get("content") or prompt.get("text"))
    return sum(map(_text_length, prompt)) if isinstance(prompt, Sequence) else 0
