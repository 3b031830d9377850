"""One conversation of an agent: `HermesAgentLoop` with events, and a person who can interrupt and steer it."""

from __future__ import annotations

import asyncio
import copy
import json
import logging
from collections.abc import Callable, Coroutine, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from itertools import groupby
from typing import TYPE_CHECKING, Any, Final, TypeVar

from backends.tasks import run_all
from lachesis import HermesAgentLoop, Message, MessageHistory, Outcome, ToolCall, ToolResult
from lachesis.loop.limits import LoopLimits
from lachesis.loop.result import AgentResult
from lachesis.loop.tool_calls import SessionCalls
from lachesis_client import InferenceError, Router, ServerUnavailable
from lachesis_client.chat_completion_server import ChatServer
from lachesis_client.streaming import AnswerStream, Delta
from lachesis_messages.responses import ChatResponse
from lachesis_tools import ToolRegistry

if TYPE_CHECKING:
    from lachesis.loop.context_edits import Compression

log = logging.getLogger(__name__)
T = TypeVar("T")

SUMMARY: Final = (
    "The limit of steps for this task is reached, and no more tools can be called. Say what you have found and done, "
    "and what is left to do."
)
"""What the user says at the limit of turns."""
STEERED: Final = "[The user adds: {text}]"


class AgentInterrupted(InferenceError):
    """A person stopped the agent. The loop ends as it does where the server is gone: at its last finished turn."""

    def __init__(self) -> None:
        super().__init__("of the agent", "the agent was interrupted", "go on with another message")


def guarded(function: Callable[..., T] | None, *about: Any, **named: Any) -> T | None:
    """What a function returns on which nothing depends: None if there is none, or if it raises, which is logged."""
    try:
        return None if function is None else function(*about, **named)
    except (Exception, SystemExit) as error:  # an exit would end the event loop, and leave the program
        log.warning("%s failed, and the agent goes on: %s", getattr(function, "__name__", ""), error, exc_info=True)
        return None


@dataclass(frozen=True, slots=True)
class AgentEvents:
    """Functions that are told what happens. They are called on the event loop, and should be fast; what one raises is
    logged, and changes nothing."""

    delta: Callable[[Delta], None] | None = None
    """The answer, piece by piece, if the server streams; else the whole."""
    tool_start: Callable[[ToolCall], None] | None = None
    tool_complete: Callable[[ToolCall, ToolResult], None] | None = None
    """`duration` of the result is in seconds."""
    step: Callable[[int], None] | None = None
    """A request begins; requests are counted from 1."""
    status: Callable[[str], None] | None = None

    def tell(self, event: str, *about: Any) -> None:
        """Call the function for an event, if there is one."""
        guarded(getattr(self, event), *about)


@dataclass(frozen=True, slots=True)
class AgentAnswer:
    """How a conversation went on. `result` has its history, without an answer that was not finished."""

    result: AgentResult
    interrupted: bool = False

    @property
    def text(self) -> str:
        """What the model answered at the end; empty if it did not."""
        last = self.result.messages[-1] if self.result.messages else {}
        said = last.get("content") if last.get("role") == "assistant" and not last.get("tool_calls") else None
        return said if isinstance(said, str) else ""

    @property
    def completed(self) -> bool:
        return self.result.outcome is Outcome.COMPLETED


class AgentSession:
    """A model with the tools of one session.

    `run` continues a conversation until the model has answered. `interrupt` and `steer` are called meanwhile, on the
    same event loop.

    Args:
        definitions: OpenAI definitions of the tools.
        calls: the session of the tools, which the caller closes.
        fallback: asked from the first request on that `server` cannot answer.
        tool_delay: seconds between the tool calls of two turns.
        clarify: `(question, choices)`; a person's answer. It is called on a thread of its own.
    """

    def __init__(
        self,
        server: ChatServer,
        definitions: Sequence[Mapping[str, Any]],
        calls: SessionCalls,
        *,
        events: AgentEvents | None = None,
        fallback: ChatServer | None = None,
        max_turns: int = 90,
        max_tokens: int | None = None,
        temperature: float | None = None,
        extra_body: Mapping[str, Any] | None = None,
        limits: LoopLimits | None = None,
        ephemeral_system_prompt: str | None = None,
        prefill_messages: Sequence[Mapping[str, Any]] = (),
        compression: Compression | None = None,
        tool_delay: float = 0.0,
        clarify: Callable[[str, Sequence[str]], str] | None = None,
    ) -> None:
        self.definitions = list(definitions)
        self.events = events or AgentEvents()
        self.history = MessageHistory()
        """The conversation so far, also where `run` was cancelled."""
        self.max_turns = max_turns
        self._calls = calls
        self.fell_back = False
        """Whether the fallback gave the last answers."""
        self._servers = [server] if fallback is None else [server, fallback]
        self._tool_delay = tool_delay
        self._options: dict[str, Any] = {
            "max_tokens": max_tokens,
            "temperature": temperature,
            "extra_body": extra_body,
            "limits": limits or LoopLimits(),
            "ephemeral_system_prompt": ephemeral_system_prompt,
            "prefill_messages": prefill_messages,
        }
        self._compression = compression
        self._clarify = clarify
        self._stop = asyncio.Event()
        self.steered: list[str] = []
        """What `steer` is still to add, in the next `run` if this one has ended."""
        self._added: list[str] = []
        self._requests = 0
        self._ran_tools = False

    def interrupt(self) -> None:
        """Stop now. An unfinished answer is dropped, and an unfinished call has the result "interrupted"."""
        self._stop.set()

    def steer(self, text: str) -> None:
        """Add a text after the next tool results, or as the next message if the model has answered before."""
        self.steered.append(text)

    async def run(self, messages: Sequence[Mapping[str, Any]]) -> AgentAnswer:
        """Continue `messages`, a history or a list, which end with one of the user.

        A cancelled call raises `CancelledError` when the conversation has stopped as after `interrupt`; it is in
        `history` then.

        Raises:
            MessageError: the messages are not a valid conversation.
        """
        self._stop.clear()
        self._requests, self._ran_tools, self._added = 0, False, []
        playing = asyncio.create_task(self._play(messages))
        try:
            return await asyncio.shield(playing)
        except asyncio.CancelledError:
            self.interrupt()
            await asyncio.wait({playing})
            raise

    async def _play(self, messages: Sequence[Mapping[str, Any]]) -> AgentAnswer:
        loop = HermesAgentLoop(
            self,
            self.definitions,
            self._calls.names,
            max_turns=self.max_turns,
            execute=self._execute,
            compression=self._compression,
            **self._options,
        )
        loop.follow_up = self._said_meanwhile
        self._sub_agents = loop.sub_agents = copy.copy(loop)  # nobody watches them
        self._sub_agents.server, self._sub_agents.execute = self._servers[0], self._calls
        if (ask := self._clarify) is not None:
            loop.clarify = lambda *asked: asyncio.to_thread(guarded, ask, *asked)
        result = await loop.run(messages)
        self.history = result.history
        taken_back = [node for left in result.history.discarded if not left.edit for node in left.nodes]
        texts = "\n".join(str(node.message.content) for node in taken_back if node.message.role == "tool")
        self.steered[:0] = [said for said in self._added if STEERED.format(text=said) in texts]
        if result.outcome is Outcome.MAX_TURNS and self._stop.is_set():
            result.error = AgentInterrupted()
        elif result.outcome is Outcome.MAX_TURNS:
            await self._summarise(result)
        return AgentAnswer(result, interrupted=self._stop.is_set() and isinstance(result.error, AgentInterrupted))

    async def _summarise(self, result: AgentResult) -> None:
        """One more answer, without tools. If there is none, the conversation stays as it is."""
        self.events.tell("status", f"{result.reason}; the model is asked for a summary")
        asked = Message("user", SUMMARY)
        last = await HermesAgentLoop(self, (), max_turns=1, execute=self._execute, **self._options).run(
            [*result.history, asked.to_openai("reasoning")]
        )
        result.api_calls += last.api_calls
        if last.outcome is Outcome.COMPLETED:
            result.history.append(asked)
            result.history.append(last.history.completions()[-1])
        elif last.error is not None:
            result.error, result.reason = last.error, f"{result.reason}; {last.reason}"

    async def chat(self, messages: Sequence[Mapping[str, Any]], **options: Any) -> ChatResponse:
        """One completion, for the loop. Raises `AgentInterrupted`, and what the server's `chat` raises."""
        if self._stop.is_set():
            raise AgentInterrupted
        self._requests += 1
        self.events.tell("step", self._requests)
        while True:
            try:
                return await self._unless_stopped(self._ask(self._servers[0], messages, options))
            except ServerUnavailable as error:
                if len(self._servers) == 1:
                    raise
                del self._servers[0]
                self._sub_agents.server = self._servers[0]
                self.fell_back = True
                self.events.tell("status", f"{error}; the fallback model goes on")

    async def _ask(
        self, server: ChatServer, messages: Sequence[Mapping[str, Any]], options: dict[str, Any]
    ) -> ChatResponse:
        tell = self.events.delta
        if tell is not None and isinstance(server, Router):
            return await server.chat(
                messages, stream=AnswerStream(lambda delta: self.events.tell("delta", delta)), **options
            )
        response = await server.chat(messages, **options)
        if response.message.reasoning:
            self.events.tell("delta", Delta("reasoning", response.message.reasoning))
        if response.message.text:
            self.events.tell("delta", Delta("text", response.message.text))
        return response

    async def _unless_stopped(self, work: Coroutine[Any, Any, T]) -> T:
        """The result of `work`, which is cancelled by `interrupt`. Raises `AgentInterrupted` then."""
        task, stopped = asyncio.ensure_future(work), asyncio.ensure_future(self._stop.wait())
        try:
            await asyncio.wait({task, stopped}, return_when=asyncio.FIRST_COMPLETED)
        finally:
            stopped.cancel()
            if not task.done():
                task.cancel()
                await asyncio.wait({task})
        if task.cancelled():
            raise AgentInterrupted
        return task.result()

    async def _said_meanwhile(self, _: MessageHistory) -> str | None:
        if not self.steered or self._stop.is_set():
            return None
        said, self.steered = "\n\n".join(self.steered), []
        return said

    async def _execute(self, calls: Sequence[ToolCall]) -> Sequence[ToolResult]:
        if self._tool_delay and self._ran_tools:
            with suppress(TimeoutError):
                await asyncio.wait_for(self._stop.wait(), self._tool_delay)
        self._ran_tools = True
        results = await in_turn(calls, self._calls.registry, self._run)
        if self.steered:
            said, self.steered = "\n\n".join(self.steered), []
            self._added.append(said)
            last = results[-1]
            results[-1] = replace(last, content=f"{last.content}\n\n{STEERED.format(text=said)}")
        return results

    async def _run(self, call: ToolCall) -> ToolResult:
        if self._stop.is_set():
            return _not_run("interrupted")
        self.events.tell("tool_start", call)
        try:
            result = await self._unless_stopped(self._call(call))
        except AgentInterrupted:
            result = _not_run("interrupted")
        self.events.tell("tool_complete", call, result)
        return result

    async def _call(self, call: ToolCall) -> ToolResult:
        (result,) = await self._calls.bounded([call], [await self._calls.one(call)])
        return result


async def in_turn(
    calls: Sequence[ToolCall], registry: ToolRegistry, run: Callable[[ToolCall], Coroutine[Any, Any, ToolResult]]
) -> list[ToolResult]:
    """Results of the calls of one turn. Neighbours that are safe to run concurrently do."""
    results: list[ToolResult] = []
    for safe, group in groupby(calls, lambda call: call.name in registry and registry[call.name].concurrency_safe):
        batch = list(group)
        for together in [batch] if safe else [[call] for call in batch]:
            over = [_not_run("the task is over") for _ in together if any(result.done for result in results)]
            results += over or await run_all(map(run, together))
    return results


def _not_run(why: str) -> ToolResult:
    return ToolResult(json.dumps({"error": why}), error=why)
