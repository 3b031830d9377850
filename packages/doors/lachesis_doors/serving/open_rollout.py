"""A rollout that somebody outside drives: their calls and answers stand where a model's completions would.

The rollout is an ordinary one, with its loop, tools, session, sandbox and rewards. Its source of completions waits for
what the client does next.
"""

from __future__ import annotations

import asyncio
import itertools
import json
import time
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import asynccontextmanager
from contextvars import ContextVar
from dataclasses import dataclass, replace
from typing import Any, NoReturn, Protocol, Self

from backends.errors import LachesisError
from lachesis import HermesAgentBaseEnv
from lachesis.loop.rollout import Rollout
from lachesis.runs.reference_policy import ReferencePolicy
from lachesis_messages.history import MessageHistory
from lachesis_messages.markup import NotJson, load_json
from lachesis_messages.messages import FinishReason, Message, ToolCall
from lachesis_messages.responses import ChatResponse, Node, ToolResponse


class RolloutSource(Protocol):
    """Where the completions of one rollout come from: its client, or the model server that a request names."""

    def for_rollout(self, *, group: str | None = None, session: str | None = None) -> Any: ...


completions_from: ContextVar[RolloutSource] = ContextVar("lachesis_completions")
"""Set where a rollout begins; what it starts inherits it."""


class EpisodeEnded(LachesisError):
    """The rollout is over: it takes no more calls."""


class NotScored(LachesisError):
    """The rollout ended without a score. This is never a reward."""

    def __init__(self, rollout: Rollout) -> None:
        self.kind = rollout.unscored_kind
        """One word, as in `Rollout.unscored_kind`."""
        super().__init__(f"the rollout has no score ({self.kind}): {rollout.unscored_because}")


@dataclass(frozen=True, slots=True)
class ServedStep:
    """The answer to a call, or to a message."""

    text: str
    images: Sequence[str] = ()
    """Data URLs."""
    failed: bool = False
    """The call failed, and `text` says why: the model should read it."""
    done: bool = False
    reward: float | None = None
    """The score of the whole rollout, with its last step. The steps before have none."""
    components: Mapping[str, float] | None = None
    """Of the reward, by name."""


class OpenRollout:
    """Plays `item` as fast as its client goes on. `close` it in any case.

    Args:
        answer_tool: the name of the call that stands for a message: an answer, or words to the user.
        key: of the item, with a number that no other rollout of the item has.
    """

    def __init__(self, env: HermesAgentBaseEnv, item: Any, key: str, answer_tool: str, *, evaluation: bool) -> None:
        self.item_key = key
        self.answer_tool = answer_tool
        self.steps = 0
        self.tools = tools_of(env, item, key, answer_tool)
        self.first: list[dict[str, Any]] = []
        """The messages that the agent reads first, once it has begun."""
        self._turns: asyncio.Queue[Node | None] = asyncio.Queue()
        self._turn: asyncio.Task[Node | None] | None = None
        self._said: asyncio.Future[Message] | None = None
        self._one_at_a_time = asyncio.Lock()
        self.touched = time.monotonic()
        """When the client was last heard, or got an answer."""
        self._numbers = itertools.count()
        self._began = self._told_end = False
        self._heard: Node | None = None  # the last message when the client was last asked
        self._task = asyncio.create_task(self._play(env, item, key, evaluation=evaluation), name=f"rollout {key}")

    async def _play(self, env: HermesAgentBaseEnv, item: Any, key: str, *, evaluation: bool) -> Rollout:
        completions_from.set(self)
        (group,) = await env.play_item(item, key, size=1, evaluation=evaluation)
        return group.rollouts[0]

    def for_rollout(self, **_: Any) -> Self:
        """Itself."""
        return self

    async def chat(self, messages: MessageHistory, **options: Any) -> ChatResponse:
        """What the client says next. Called by the loop."""
        asked = time.monotonic()
        self._said = asyncio.get_running_loop().create_future()
        if self._heard is None:
            self.first = messages.to_openai()
        # The same one again: what the client said could not stay in the conversation.
        self._turns.put_nowait(None if messages.head is self._heard else messages.head)
        self._heard = messages.head
        message = await self._said
        reason = FinishReason.TOOL_CALLS if message.tool_calls else FinishReason.STOP
        took = time.monotonic() - asked  # the agent's own time
        return ChatResponse(message, reason, reason.value, model="client", latency=took, server="client")

    async def _asked(self) -> Node | None:
        """The last message when the client is asked next; None if what it said last was nothing.

        Raises:
            _Over: the rollout has ended.
        """
        if self._turn is None:
            self._turn = asyncio.ensure_future(self._turns.get())
        # Where this is cancelled, the turn that may just have come stays for whoever asks next.
        await asyncio.wait({self._turn, self._task}, return_when=asyncio.FIRST_COMPLETED)
        turn, self._turn = self._turn, None
        if turn.done():
            return turn.result()
        turn.cancel()
        if self._task.cancelled():
            raise EpisodeEnded("the rollout was closed")
        self._told_end = True
        rollout = self._task.result()
        if rollout.reward is None:
            raise NotScored(rollout)
        raise _Over(rollout)

    @asynccontextmanager
    async def _alone(self) -> AsyncIterator[None]:
        """One call at a time. A client that waits for its answer is not silent."""
        async with self._one_at_a_time:
            try:
                yield
            finally:
                self.touched = time.monotonic()

    async def begin(self) -> Self:
        """Wait until the agent can read its first messages.

        Raises:
            NotScored: it could not begin.
            EpisodeEnded: it was closed.
            LachesisError: the run cannot go on, because of a setting.
        """
        async with self._alone():
            if not self._began:
                try:
                    await self._asked()
                except _Over as over:
                    raise EpisodeEnded(f"the rollout ended before it began: {over.rollout.reason}") from None
                self._began = True
            return self

    async def call(self, name: str, arguments: Mapping[str, Any]) -> ServedStep:
        """Call a tool; the one named `answer_tool` says its only argument.

        Raises:
            EpisodeEnded: the rollout is over.
            NotScored: it ended with this call, and has no score.
        """
        if name == self.answer_tool:
            text = arguments.get(ANSWER)
            if not isinstance(text, str):
                return ServedStep(f"{name} needs the argument {ANSWER!r}, a text", failed=True)
            return await self.say(text)
        number = next(self._numbers)
        call = ToolCall(f"call_{number:08d}", name, json.dumps(dict(arguments)))
        return await self._act(Message("assistant", None, tool_calls=(call,)))

    async def say(self, text: str) -> ServedStep:
        """Say something without a call: the answer, which ends the rollout unless a user replies. Raises as `call`."""
        return await self._act(Message("assistant", text))

    async def _act(self, message: Message) -> ServedStep:
        await self.begin()
        async with self._alone():
            if self._told_end or self._said is None:
                raise EpisodeEnded("the task has ended")
            self.steps += 1
            if not self._said.done():  # it may have been cut off, by its time limit for example
                self._said.set_result(message)
            try:
                return _read(await self._asked(), message)
            except _Over as over:
                rollout = over.rollout
                head = rollout.result.history.head if rollout.result is not None else None
                calls = {call.id for call in message.tool_calls}
                answered = head is not None and head.message.tool_call_id in calls
                step = _read(head, message) if answered else ServedStep(f"The task has ended: {rollout.reason}.")
                return replace(step, done=True, reward=rollout.reward, components=rollout.metrics)

    @property
    def ended(self) -> bool:
        return self._task.done()

    async def over(self) -> None:
        """Wait for its end."""
        await asyncio.wait({self._task})

    @property
    def busy(self) -> bool:
        """Whether a call is being answered."""
        return self._one_at_a_time.locked()

    async def close(self) -> None:
        """End it, and remove its sandbox. What has not ended has no score."""
        self._task.cancel()
        if self._turn is not None:
            self._turn.cancel()
        await asyncio.shield(self.over())
        if not self._task.cancelled():
            self._task.exception()  # its client has heard of it


class Clients(ReferencePolicy):
    """The model server of a run whose rollouts have sources of their own."""

    def __init__(self) -> None:
        super().__init__(_nobody)

    def for_rollout(self, *, group: str | None = None, session: str | None = None) -> Any:
        """That of the rollout which is running."""
        return completions_from.get().for_rollout(group=group, session=session)


def _nobody(*_: Any) -> NoReturn:
    raise LachesisError("each rollout has a policy of its own here: nothing else can ask it")


ANSWER = "answer"
"""The argument of the call that stands for a message."""


def answer_name(env: HermesAgentBaseEnv, taken: Sequence[str]) -> str:
    """The name of the call that stands for a message of the agent."""
    name = "submit" if env.follow_up is None else "reply"
    return next(each for each in (name, *(f"{name}_{n}" for n in range(2, 99))) if each not in taken)


def tools_of(env: HermesAgentBaseEnv, item: Any, key: str, answer_tool: str) -> list[dict[str, Any]]:
    """The tools of an item, each `{"name", "description", "parameters"}`; the answer is the last one."""
    given = [
        *env.group_tools(key.partition("+")[0])[1],
        *(tool.definition() for tool in env.tools_for(item) if tool.offered),
    ]
    return [*described(given), answer_description(env, answer_tool)]


def described(definitions: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """OpenAI's definitions of tools, each as `{"name", "description", "parameters"}`."""
    empty = {"type": "object", "properties": {}}
    return [
        {
            "name": each["function"]["name"],
            "description": each["function"].get("description") or "",
            "parameters": each["function"].get("parameters") or empty,
        }
        for each in definitions
    ]


def answer_description(env: HermesAgentBaseEnv, name: str) -> dict[str, Any]:
    """The tool that stands for a message of the agent."""
    ends = "Give the final answer, which ends the task." if env.follow_up is None else "Say something to the user."
    schema = {"type": "object", "properties": {ANSWER: {"type": "string", "description": "What is said."}}}
    return {"name": name, "description": ends, "parameters": {**schema, "required": [ANSWER]}}


def _read(node: Node | None, message: Message) -> ServedStep:
    """What the client reads after `message`."""
    if node is None:
        for call in message.tool_calls:
            try:
                load_json(call.arguments)
            except NotJson as error:
                return ServedStep(f"The arguments of {call.name} are not JSON: {error}.", failed=True)
        return ServedStep("Nothing was said: write an answer.", failed=True)
    failed = isinstance(node.origin, ToolResponse) and node.origin.error is not None
    content = node.message.content
    if content is None or isinstance(content, str):
        return ServedStep(content or "", failed=failed)
    texts = [part["text"] for part in content if part["type"] == "text"]
    images = [part["image_url"]["url"] for part in content if part["type"] == "image_url"]
    return ServedStep("\n".join(texts), images, failed)


class _Over(Exception):
    """The rollout has ended, with a score."""

    def __init__(self, rollout: Rollout) -> None:
        self.rollout = rollout
