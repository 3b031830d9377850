"""`self.server` of an environment that collects its own groups: Atropos' calls, answered and recorded."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Callable, Coroutine, Mapping, Sequence
from contextlib import asynccontextmanager
from types import SimpleNamespace
from typing import Any, TypeVar

from lachesis_client import InferenceError
from lachesis_client.chat_format import read_finish_reason
from lachesis_client.errors import ContextExhausted, ConversationRefused
from lachesis_client.model_server import MessageServer, ModelServer, TokenTrackingUnavailable
from lachesis_compat.collecting.recording import (
    RecordedCompletion,
    RecordingError,
    current_recording,
    recording_of_request,
)
from lachesis_messages.messages import Message
from lachesis_messages.records.sampling_record import sampling_problem, sampling_without_problem
from lachesis_messages.responses import ChatResponse, Usage, as_message
from lachesis_tokens.server.managed_server import ManagedServer
from lachesis_tokens.server.token_server import TokenServer

T = TypeVar("T")

_WITHOUT_MEANING = ("skip_reasoning", "preserve_think_blocks", "base_url")
"""Arguments of Atropos' servers that change nothing here: no reasoning settings are injected, and none are stripped."""


class RecordedServer:
    """Atropos' `ServerManager` over the servers of a run. Anything else is an attribute of the run's own server.

    Each completion goes into the recording of the item that is being collected. Plain requests of one item share one
    session, so that a conversation continues from the exact tokens of its earlier turns; `managed_server()` opens
    another. Code that runs in another event loop, in a thread, may call it too.

    Args:
        configs: settings of the servers, with `model_name` and `base_url`, as environments read them.
        sampling: sampling parameters that replace those of every training request.
    """

    def __init__(self, configs: Sequence[Any] = (), *, sampling: Mapping[str, Any] | None = None) -> None:
        self.sampling = dict(sampling or {})
        self.tell: Callable[[str], None] | None = None
        """Prints a line about sampling that no trainer can use; None for not at all."""
        self._told: set[str] = set()
        self.tool_parser: str | None = None
        """Atropos' name for a setting of the run: env.tool_call_parser. Setting it here changes nothing."""
        self.servers = [ServerOfList(self, config) for config in configs]
        self._server: ModelServer | None = None
        self._loop: asyncio.AbstractEventLoop | None = None

    def bind(self, server: ModelServer) -> None:
        """Answer with `server`, whose event loop is the running one."""
        self._server, self._loop = server, asyncio.get_running_loop()

    @property
    def in_use(self) -> bool:
        """Whether the caller is collecting the groups of an item."""
        return current_recording() is not None

    @property
    def bound(self) -> ModelServer:
        """The run's own server."""
        if self._server is None:
            raise RuntimeError("the model server is not started yet; make requests in setup() or later")
        return self._server

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return getattr(self.bound, name)

    # Atropos' calls.

    async def chat_completion(self, **kwargs: Any) -> Any:
        """`openai.types.chat.ChatCompletion`; see `ManagedServer.chat_completion`."""
        return await self._here(self._ask(self._shared_session(), "chat_completion", kwargs))

    async def completion(self, **kwargs: Any) -> Any:
        """`openai.types.Completion`; see `ManagedServer.completion`."""
        return await self._here(self._ask(self._shared_session(), "completion", kwargs))

    async def tokens_and_logprobs_completion(self, **kwargs: Any) -> tuple[list[int], list[Any], list[Any], list[str]]:
        """`(prompt ids, sampled ids, logprobs, finish reasons)`, the last three with one entry for each completion."""
        return await self._here(self._ask_for_tokens(self._shared_session(), kwargs))

    async def get_logprobs(self, **kwargs: Any) -> Any:
        """The logprobs of a given prompt, where the run's server has this call."""
        call = getattr(self.bound, "get_logprobs", None)
        if call is None:
            raise NotImplementedError("get_logprobs: the run's model server does not score given prompts")
        return await self._here(_asked(call(**kwargs)))

    @asynccontextmanager
    async def managed_server(self, tokenizer: Any = None, **_: Any) -> AsyncIterator[RecordedSession]:
        """A session of its own, whose `get_state()` has the exact tokens of its completions.

        Raises:
            TokenTrackingUnavailable: the servers report no tokens (Phase 1).
            ValueError: `tokenizer` is another one than the model's.
        """
        server = self.bound
        if isinstance(server, MessageServer):
            server.managed_server()
        assert isinstance(server, TokenServer)
        async with server.managed_server(tokenizer=tokenizer) as session:
            yield RecordedSession(self, session)

    @asynccontextmanager
    async def dedicated_server(self) -> AsyncIterator[RecordedServer]:
        """This server: the servers are balanced request by request."""
        yield self

    async def update_weight(self, weight: float) -> None:
        """Nothing: the run asks the rollout API for its share itself."""

    # How requests are answered.

    async def _here(self, asked: Coroutine[Any, Any, T]) -> T:
        """The result of `asked`, which runs in the event loop of the servers."""
        loop = self._loop
        if loop is None or loop is asyncio.get_running_loop():
            return await asked
        return await asyncio.wrap_future(asyncio.run_coroutine_threadsafe(asked, loop))

    def _shared_session(self) -> ManagedServer | MessageServer:
        server, recording = self.bound, recording_of_request()
        session: ManagedServer | MessageServer = recording.sessions.setdefault(id(server), server.for_rollout())
        return session

    async def _ask(self, session: ManagedServer | MessageServer, kind: str, kwargs: Mapping[str, Any]) -> Any:
        recording = recording_of_request()
        arguments = self._arguments(kwargs)
        answer = await _asked(getattr(session, kind)(**arguments))
        if recording.closed:
            raise RecordingError("an answer of the model after the groups of its item were returned; it is left out")
        messages = None
        if kind == "chat_completion":
            messages = tuple(map(_plain, arguments["messages"]))
        for response in _responses(session, answer):
            prompt = self._prompt(session, response, arguments)
            recording.completions.append(RecordedCompletion(response, response.message.text, messages, prompt))
            if recording.trains and response.tokens is not None:
                self._tell_problem(response)
        return answer

    def _tell_problem(self, response: ChatResponse) -> None:
        """Say once what keeps a completion from being trained: the environment may have chosen it itself."""
        problem = sampling_problem(response.sampling) if self.tell is not None else None
        if self.tell is None or problem is None or problem in self._told:
            return
        self._told.add(problem)
        values = ", ".join(
            f"{name}: {json.dumps(value)}" for name, value in sampling_without_problem(response.sampling).items()
        )
        fix = f"; --env.override_sampling '{{{values}}}' samples as a trainer needs it" if values else ""
        self.tell(f"the environment's samples cannot be trained: {problem}{fix}")

    async def _ask_for_tokens(self, session: ManagedServer | MessageServer, kwargs: Mapping[str, Any]) -> Any:
        if not isinstance(session, ManagedServer):
            raise TokenTrackingUnavailable(
                "tokens_and_logprobs_completion() needs a server that reports tokens (Phase 2): set "
                "--openai.server_type vllm or sglang"
            )
        given = dict(kwargs)
        ids = given.pop("input_ids", None)
        answer = await self._ask(session, "completion", {**given, "prompt": ids} if ids is not None else given)
        tokens = [tokens for response in _responses(session, answer) if (tokens := response.tokens) is not None]
        reasons = [str(choice.finish_reason) for choice in answer.choices]
        return tokens[0].prompt.ids, [each.ids for each in tokens], [list(each.logprobs) for each in tokens], reasons

    def _arguments(self, kwargs: Mapping[str, Any]) -> dict[str, Any]:
        kept = {name: value for name, value in kwargs.items() if name not in _WITHOUT_MEANING}
        if kept.get("split", "train") == "train":
            kept |= self.sampling
        server, stop = self.bound, kept.get("stop")
        if isinstance(server, TokenServer) and isinstance(stop, list):  # some give the id that ends a turn anyway
            kept["stop"] = [text for text in stop if text not in server.prompts.end_of_turn] or None
        return kept

    def _prompt(
        self, session: ManagedServer | MessageServer, response: ChatResponse, arguments: Mapping[str, Any]
    ) -> str:
        if response.tokens is not None and isinstance(session, ManagedServer):
            return session.server.reader.decode(response.tokens.prompt.ids)
        prompt = arguments.get("prompt")
        return prompt if isinstance(prompt, str) else ""


class RecordedSession:
    """The server that `managed_server()` yields: a `ManagedServer` that records its completions."""

    def __init__(self, server: RecordedServer, session: ManagedServer) -> None:
        self._server = server
        self._session = session

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return getattr(self._session, name)

    async def chat_completion(self, **kwargs: Any) -> Any:
        return await self._server._here(self._server._ask(self._session, "chat_completion", kwargs))

    async def completion(self, **kwargs: Any) -> Any:
        return await self._server._here(self._server._ask(self._session, "completion", kwargs))

    async def tokens_and_logprobs_completion(self, **kwargs: Any) -> Any:
        return await self._server._here(self._server._ask_for_tokens(self._session, kwargs))

    async def get_logprobs(self, **kwargs: Any) -> Any:
        return await self._server.get_logprobs(**kwargs)


class ServerOfList:
    """An entry of `server.servers`: its settings, and the same calls."""

    server_healthy = True

    def __init__(self, manager: RecordedServer, config: Any) -> None:
        self.config = config
        self.request_timings: list[float] = []
        self.attempts_list: list[int] = []
        self._manager = manager

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return getattr(self._manager, name)

    async def wandb_metrics(self, metrics: dict[str, Any] | None, server_name: str | None) -> dict[str, Any]:
        """`metrics` with those of all servers, under Atropos' names."""
        return self._manager.bound.wandb_metrics(metrics)


async def _asked(answer: Coroutine[Any, Any, T]) -> T:
    """The answer. A failure of the infrastructure is noted with the item, also if the environment catches it."""
    try:
        return await answer
    except (ContextExhausted, ConversationRefused):
        raise  # the conversation is too long, or refused: nothing is broken
    except InferenceError as error:
        recording = recording_of_request()
        recording.error = recording.error or error
        raise


def _responses(session: ManagedServer | MessageServer, answer: Any) -> Sequence[ChatResponse]:
    if isinstance(session, ManagedServer):  # it has just added them: nothing else has run since
        return session.completions()[-len(answer.choices) :]
    usage = getattr(answer, "usage", None)
    of_all = getattr(usage, "completion_tokens", None)
    count = len(answer.choices)
    share = [None if of_all is None else of_all // count + (at < of_all % count) for at in range(count)]
    prompt_tokens = getattr(usage, "prompt_tokens", None)
    return [
        ChatResponse(
            _message(choice),
            read_finish_reason(choice.finish_reason),
            model=getattr(answer, "model", None),
            usage=Usage(prompt_tokens if at == 0 else 0, share[at]),
        )
        for at, choice in enumerate(answer.choices)
    ]


def _message(choice: Any) -> Message:
    message = getattr(choice, "message", None)
    if message is None:
        return Message("assistant", choice.text)
    return as_message({**_plain(message), "role": "assistant"})


def _plain(message: Any) -> dict[str, Any]:
    return dict(message.model_dump(exclude_none=True) if hasattr(message, "model_dump") else message)


def describe_servers(configs: Sequence[Any]) -> list[Any]:
    """Copies of server settings without keys, for environments that read or print them."""
    return [SimpleNamespace(**{**config.model_dump(), "api_key": "x"}) for config in configs]
