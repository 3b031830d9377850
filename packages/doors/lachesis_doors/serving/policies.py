"""The model servers of rollouts that the environment's own loop runs for the requests of a trainer."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence
from contextlib import AsyncExitStack
from contextvars import ContextVar
from dataclasses import replace
from typing import Any, Final

from lachesis import HermesAgentBaseEnv
from lachesis.other_packages import TOKENS
from lachesis.runs.model_servers import settings_of, start_servers
from lachesis.runs.reference_policy import ReferencePolicy
from lachesis.settings.server_settings import ServerConfig, needs_start, plays_reference, token_engine
from lachesis_client import OpenAIServer, Router
from lachesis_client.errors import BadResponse
from lachesis_client.http_client import HttpAnswer
from lachesis_client.model_server import ModelServer, tracks_tokens
from lachesis_doors.serving.refusals import TOKEN_FIELDS
from lachesis_messages.messages import Message
from lachesis_messages.responses import ChatResponse, as_message
from lachesis_tokens.engines.checks import checked_completion, checked_ids

_CHECK_TOKENS: Final = "it has to report all tokens of a completion, or none: look at return_token_id_information"


class Policies:
    """Starts each model server once. `stack` closes them."""

    def __init__(self, env: HermesAgentBaseEnv, stack: AsyncExitStack) -> None:
        self._env, self._stack = env, stack
        self._started: dict[str, ModelServer] = {}
        self._starting = asyncio.Lock()

    async def get(self, configs: Sequence[ServerConfig], *, keeps_tokens: bool = False) -> ModelServer:
        """The server with these settings. It need not answer yet.

        Args:
            keeps_tokens: a chat server may report tokens with its answers; see `TOKEN_FIELDS`.
        """
        name = "\n".join(config.model_dump_json() for config in configs)
        async with self._starting:
            if name not in self._started:
                self._started[name] = await self._start(configs, keeps_tokens=keeps_tokens)
            return self._started[name]

    async def _start(self, configs: Sequence[ServerConfig], *, keeps_tokens: bool) -> ModelServer:
        env = self._env
        if plays_reference(configs):
            return ReferencePolicy(env.reference_policy(), configs[0])
        if keeps_tokens and not any(needs_start(each) or token_engine(each) for each in configs):
            parser = env.config.tool_call_parser
            settings = [settings_of(each, base_url=None, tool_call_parser=parser) for each in configs]
            return await self._stack.enter_async_context(Router([_TokenChat(each) for each in settings]))

        async def unchecked(_: Sequence[Any]) -> None:
            """A trainer may start its server after this one."""

        server = await start_servers(configs, settings=env.config, stack=self._stack, check=unchecked)
        if tracks_tokens(server):
            await TOKENS.load("check")(env, server, env.tool_definitions())
        return server


class RequestPolicy:
    """A model server with the sampling parameters of one request, as the source of a rollout's completions."""

    def __init__(self, server: Any, sampling: Mapping[str, Any]) -> None:
        named = {name: sampling[name] for name in ("temperature", "max_tokens") if sampling.get(name) is not None}
        self._server, self._named = server, named
        self._extra = {name: value for name, value in sampling.items() if value is not None and name not in named}

    def for_rollout(self, **names: Any) -> RequestPolicy:
        """The same, for one rollout."""
        return RequestPolicy(self._server.for_rollout(**names), {**self._named, **self._extra})

    @property
    def named(self) -> frozenset[str]:
        """The parameters that the request sets."""
        return frozenset({*self._named, *self._extra})

    async def chat(self, messages: Any, **options: Any) -> ChatResponse:
        """One completion."""
        extra = {**(options.pop("extra_body", None) or {}), **self._extra} or None
        found: ChatResponse = await self._server.chat(messages, **{**options, **self._named}, extra_body=extra)
        return found

    def __getattr__(self, name: str) -> Any:
        return getattr(self._server, name)


_said: ContextVar[list[Mapping[str, Any]] | None] = ContextVar("lachesis_token_chat", default=None)


class _TokenChat(OpenAIServer):
    """Keeps the tokens that an answer has (`TOKEN_FIELDS`) in its message, so that the next request repeats them."""

    async def chat(self, messages: Sequence[Message | Mapping[str, Any]], **options: Any) -> ChatResponse:
        answers: list[Mapping[str, Any]] = []
        token = _said.set(answers)
        try:
            response = await super().chat([*map(self._plain, messages)], **options)
        finally:
            _said.reset(token)
        said = answers[-1]["choices"][0]["message"]
        prompt, ids, logprobs = values = [said.get(name) for name in TOKEN_FIELDS]
        if all(value is None for value in values):
            return response
        url = self.settings.base_url  # nobody else reads what a trainer gets
        if not isinstance(prompt, list) or not prompt:
            raise BadResponse(url, "a completion with tokens has no prompt_token_ids", _CHECK_TOKENS)
        ids, logprobs = checked_completion(url, ids, logprobs, _CHECK_TOKENS)
        values = [checked_ids(url, prompt, _CHECK_TOKENS), ids, logprobs]
        return replace(response, message=replace(response.message, extra=dict(zip(TOKEN_FIELDS, values, strict=True))))

    def _plain(self, message: Message | Mapping[str, Any]) -> dict[str, Any]:
        """As NeMo Gym's servers take it, which refuse fields that they do not know."""
        read = as_message(message)
        from_gym = TOKEN_FIELDS[0] in read.extra
        plain = read.to_openai(None if from_gym else self.settings.reasoning_field)
        if read.role == "tool":
            plain.pop("name", None)
        if from_gym and read.reasoning:  # which they had written so
            plain["content"] = f"<think>{read.reasoning}</think>{plain['content'] or ''}"
        return plain

    async def post(self, path: str, payload: Mapping[str, Any], **how: Any) -> HttpAnswer:
        answer = await super().post(path, payload, **how)
        if (answers := _said.get()) is not None:
            answers.append(answer.body)
        return answer
