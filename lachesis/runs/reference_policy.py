"""A Python function that answers in the place of a model: whole rollouts in this process, without a server.

Its answers name the model `reference-policy`, and have no `usage`, because there is no tokenizer.
"""

from __future__ import annotations

import asyncio
import inspect
import json
import logging
import time
import uuid
from collections.abc import Awaitable, Callable, Mapping, Sequence
from contextlib import AsyncExitStack
from dataclasses import replace
from typing import TYPE_CHECKING, Any, Final, NoReturn, TypeAlias, Unpack

import orjson

from backends.errors import SettingsError
from lachesis.authors import AuthorError
from lachesis.settings.server_settings import REFERENCE, ServerConfig, ServerConfigError, describe
from lachesis.tracebacks import explained, in_one_line, lines_of
from lachesis_client.chat_options import AnswerTimes, ChatOptions, Split, check_arguments
from lachesis_client.errors import RequestRejected, ServerUnavailable
from lachesis_client.model_server import MessageServer
from lachesis_messages.messages import FinishReason, Message
from lachesis_messages.responses import ChatResponse, Usage, as_message

if TYPE_CHECKING:
    from openai.types.chat import ChatCompletion

log = logging.getLogger(__name__)

MODEL_NAME: Final = "reference-policy"
_NEXT_STEP: Final = "correct reference_policy, whose policy(messages, tools) returns a Message"
_ANSWERED: Final = ("content", "tool_calls", "reasoning_content")
"""Fields of an answer that are read."""

Policy: TypeAlias = Callable[
    [Sequence[Mapping[str, Any]], Sequence[Mapping[str, Any]] | None], Message | Awaitable[Message]
]
"""`policy(messages, tools) -> Message`, with the messages and tools of the request. It may be async."""


class PolicyFailed(RequestRejected):
    """The policy raised. No server is in the text: there is none."""

    def __init__(self, reason: str) -> None:
        super().__init__(MODEL_NAME, 400, reason, _NEXT_STEP)
        self.args = (f"{reason}; {_NEXT_STEP}",)


class ReferencePolicy(MessageServer):
    """Answers with a policy. What the policy gets is its own: it may change it.

    If the policy raises, `chat` raises `RequestRejected`, which nothing retries; its traceback is logged once.

    Raises:
        ServerConfigError: `policy` is None or no function.
    """

    def __init__(self, policy: Policy | None, config: ServerConfig | None = None) -> None:
        if policy is None:
            raise ServerConfigError(
                "the environment has no reference_policy() to play: write one, or name a model (-m)"
            )
        if not callable(policy):
            raise ServerConfigError(
                f"reference_policy() returned {policy!r:.80}, which is not a function; return one that takes messages "
                "and tools, and returns a Message"
            )
        self.policy = policy
        self.config = config or ServerConfig(model_name=REFERENCE)
        self.requests = 0
        """The number of requests for completions."""
        self._times = AnswerTimes()
        self._shown: set[str] = set()
        self._room = asyncio.Semaphore(self.config.num_max_requests_at_once)
        self._room_of_evaluations = asyncio.Semaphore(self.config.num_requests_for_eval)
        self._recorded: Mapping[str, Any] = {}
        if self.config.extra_body:
            from lachesis_client.sampling import recorded_fields

            self._recorded = recorded_fields(self.config.extra_body)

    async def chat(
        self, messages: Sequence[Message | Mapping[str, Any]], *, split: Split = "train", **options: Unpack[ChatOptions]
    ) -> ChatResponse:
        """One answer of the policy.

        Raises:
            RequestRejected: the policy raised, or its answer is no `Message`.
            ServerUnavailable: an async policy took longer than the setting `timeout`.
        """
        check_arguments(options, ChatOptions.__annotations__.keys(), "chat")
        async with AsyncExitStack() as rooms:
            if split == "eval":
                await rooms.enter_async_context(self._room_of_evaluations)
            await rooms.enter_async_context(self._room)
            started = time.monotonic()
            self.requests += 1
            message = await self._answer(messages, options.get("tools"))
            latency = time.monotonic() - started
        self._times.add(split, latency, 1)
        apart = ("tools", "extra_body") if options.get("tools") else ("tools", "extra_body", "tool_choice")
        sampling = {name: value for name, value in options.items() if value is not None and name not in apart}
        reason = FinishReason.TOOL_CALLS if message.tool_calls else FinishReason.STOP
        return ChatResponse(
            message=message,
            finish_reason=reason,
            raw_finish_reason=reason.value,
            model=MODEL_NAME,
            latency=latency,
            usage=Usage(sampled=False),
            server=MODEL_NAME,
            sampling={**self._recorded, **sampling, **(options.get("extra_body") or {})},
        )

    async def _answer(
        self, messages: Sequence[Message | Mapping[str, Any]], tools: Sequence[Mapping[str, Any]] | None
    ) -> Message:
        deadline = asyncio.timeout(self.config.timeout)
        try:
            async with deadline:
                said = self.policy(_as_requested(messages), orjson.loads(orjson.dumps(tools)) if tools else None)
                return _read(await said if inspect.isawaitable(said) else said)
        except Exception as error:
            if deadline.expired():
                raise ServerUnavailable(MODEL_NAME, f"no answer within {self.config.timeout:g} s", 1) from None
            if isinstance(error, SettingsError):  # a policy says that it cannot know: nothing is wrong with its code
                raise RequestRejected(MODEL_NAME, 400, str(error), "name a model (-m)") from None
            if lines_of(trace := explained(error)) and trace not in self._shown:  # the reason says the rest
                self._shown.add(trace)
                log.error("exception in the policy: %s", trace.rstrip())
            reason = f"the policy failed: {in_one_line(trace)}"
            raise PolicyFailed(reason) from None

    async def chat_completion(self, *, split: Split = "train", n: int = 1, **kwargs: Any) -> ChatCompletion:
        """`n` answers, as OpenAI's object; of the other arguments, `messages` and `tools` are read."""
        from openai.types.chat import ChatCompletion

        choices = []
        for index in range(n):
            response = await self.chat(kwargs["messages"], split=split, tools=kwargs.get("tools"))
            plain = response.message.to_openai("reasoning_content")
            choices.append({"index": index, "message": plain, "finish_reason": response.raw_finish_reason})
        named: dict[str, Any] = {
            "id": f"chatcmpl-reference-{self.requests}",
            "object": "chat.completion",
            "created": int(time.time()),
        }
        return ChatCompletion.construct(**named, model=MODEL_NAME, choices=choices)

    async def completion(self, **_: Any) -> NoReturn:
        """Raises `RequestRejected`: a policy answers messages."""
        raise RequestRejected(MODEL_NAME, 404, "the reference policy answers messages only", "use chat_completion()")

    def for_rollout(self, *, group: str | None = None, session: str | None = None) -> ReferencePolicy:
        """Itself."""
        return self

    def wandb_metrics(self, metrics: Mapping[str, float] | None = None) -> dict[str, float]:
        """`metrics` and the times of its answers."""
        return {**(metrics or {}), **self._times.metrics(0)}

    async def update_weight(self, weight: float) -> None:
        """Without effect: nothing is shared with other runs."""

    async def check(self) -> list[list[str]]:
        """The name of its model."""
        return [[MODEL_NAME]]

    async def close(self) -> None:
        """Without effect."""


def player_of(server: object, configs: Sequence[ServerConfig]) -> str:
    """Who answers, for records: a warm start has the reference policy in the place of the model that `configs` name."""
    return describe([server.config] if isinstance(server, ReferencePolicy) else configs)


def _as_requested(messages: Sequence[Message | Mapping[str, Any]]) -> list[dict[str, Any]]:
    """What a server would get."""
    if hasattr(messages, "encoded"):  # the text of a conversation that grows is kept
        return list(orjson.loads(b"".join(messages.encoded("reasoning_content").json_pieces())))
    plain = [as_message(message).to_openai("reasoning_content") for message in messages]
    return list(json.loads(json.dumps(plain)))


def _read(said: Any) -> Message:
    """The answer as a server would send it: of the assistant, and plain JSON."""
    if not isinstance(said, Message):
        raise AuthorError(f"it returned {said!r:.80}, not a Message")
    plain = json.loads(json.dumps(said.to_openai("reasoning_content")))
    for call in plain.get("tool_calls") or ():
        call["id"] = call["id"] or f"call_{uuid.uuid4().hex}"  # results refer to calls by id
    message = Message.from_openai({"role": "assistant", **{name: plain.get(name) for name in _ANSWERED}})
    parts = message.content if isinstance(message.content, tuple) else ()
    if parts and all(part["type"] == "text" for part in parts):
        return replace(message, content=message.text)
    return message
