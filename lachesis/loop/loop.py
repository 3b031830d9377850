"""The agent loop: ask the model, run the tools that it called, until the rollout has an outcome.

One invariant: whatever happens, `AgentResult.messages` is a valid conversation, and every completion that was ever
sampled is reachable from `AgentResult.history`, rolled-back ones under `history.discarded`.
"""

from __future__ import annotations

import asyncio
import time
import uuid
from collections.abc import Awaitable, Callable, Collection, Mapping, Sequence
from functools import cached_property
from typing import TYPE_CHECKING, Any, Protocol

from backends import BackendError, SandboxExhausted
from lachesis.loop.clock import RolloutClock, WaitedTooLong
from lachesis.loop.conversation import AgentConversation
from lachesis.loop.interrupted import note_agent
from lachesis.loop.limits import LoopLimits, fills_context
from lachesis.loop.open_runs import note_failure
from lachesis.loop.outcome import OF_A_FULL_CONTEXT, Outcome, RolloutEnded
from lachesis.loop.result import AgentResult, Cost, StepReward, TokenCount, ToolCount, ToolError, step_rewards
from lachesis.loop.tool_calls import ExecuteTools, in_open_run, unrun
from lachesis.loop.turn_check import RESAMPLED, TurnCheck, check_turn
from lachesis_client import ContextExhausted, InferenceError
from lachesis_client.chat_options import PROMPTED_BY_A_MODEL, Split
from lachesis_client.errors import ConversationRefused, FirstPromptTooLong, TurnRejected
from lachesis_messages.history import MessageHistory
from lachesis_messages.messages import FinishReason, Message, ToolCall
from lachesis_messages.responses import ChatResponse, ToolResponse
from lachesis_tools import ToolCrashed, ToolResult
from lachesis_tools.budget import ResultBudget
from lachesis_tools.dispatch import calling_agent

if TYPE_CHECKING:
    from lachesis.loop.calling_agent import LoopAgent
    from lachesis.loop.context_edits import Compression, RolloutCompression
    from lachesis_client.chat_completion_server import ChatCompletionServer, ChatServer, CompletionSource


class Forking(Protocol):
    """Makes several rollouts of one: `lachesis.loop.trees`."""

    def begin(self, rollout: PlayedRollout) -> None: ...
    async def at_turn(self, rollout: PlayedRollout) -> None: ...


class HermesAgentLoop:
    """OpenAI-style tool calling over any `ChatServer`. Tools are always passed as `tools=`, never inside a prompt.

    Args:
        server: the source of completions; a server that only has OpenAI's `chat_completion` works too.
        tool_schemas: OpenAI tool definitions that the model is offered.
        valid_tool_names: names that may be called; None means the names in `tool_schemas`.
        max_turns: maximum number of completions, including the final answer.
        task_id: name of the rollout. Without `execute`, it names the sandbox too.
        budget_config: limits of tool results, without `execute`; None means the default limits.
        execute: runs tool calls. None runs them in the task's sandbox in the open run; `run` then raises failures of
            the infrastructure, since nothing retries the rollout.
        limits: None means no budgets and the default numbers of retries. Without `execute`, unusable completions are
            not sampled again, because such callers use the last of `managed_state["nodes"]` as the whole conversation.
        ephemeral_system_prompt: appended to the system message of every request, never part of the result.
        prefill_messages: inserted after the system message of every request, never part of the result.
        compression: when and how the context is compressed; None means never.
        split: "train" or "eval"; servers keep separate concurrency limits for the two.
    """

    follow_up: Callable[[MessageHistory], Awaitable[str | ToolResult | None]] | None = None
    """Called when the model has answered: the user's message, or None at the end. It may be set before `run`."""
    clarify: Callable[[str, Sequence[str]], Awaitable[str | None]] | None = None
    """What a person answers to a question with choices; None asks `follow_up`."""
    sub_agents: HermesAgentLoop | None = None  # whose server and tools they use, where a person watches those of this
    branch: Forking | None = None
    """Where the rollout may fork. It may be set before `run`."""

    def __init__(
        self,
        server: ChatServer | CompletionSource,
        tool_schemas: Sequence[Mapping[str, Any]],
        valid_tool_names: Collection[str] | None = None,
        max_turns: int = 30,
        task_id: str | None = None,
        temperature: float | None = 1.0,
        max_tokens: int | None = None,
        extra_body: Mapping[str, Any] | None = None,
        budget_config: ResultBudget | None = None,
        *,
        execute: ExecuteTools | None = None,
        limits: LoopLimits | None = None,
        ephemeral_system_prompt: str | None = None,
        prefill_messages: Sequence[Mapping[str, Any]] = (),
        compression: Compression | None = None,
        split: Split = "train",
    ) -> None:
        if execute is not None and budget_config is not None:
            raise ValueError("budget_config has no effect with execute=: let that keep the results within the budget")
        self.server = server
        self.tool_schemas = list(tool_schemas or ())
        self.max_turns = max_turns
        self.task_id = task_id or str(uuid.uuid4())
        self.temperature = temperature
        self.max_tokens = max_tokens
        self.extra_body = extra_body
        self.budget_config = budget_config or ResultBudget()
        self.execute = execute
        self.limits = limits or (LoopLimits() if execute is not None else LoopLimits(max_resamples=0))
        self.ephemeral_system_prompt = ephemeral_system_prompt
        self.prefill_messages = [dict(message) for message in prefill_messages]
        self.compression = compression
        self.split = split
        required = {
            schema["function"]["name"]: tuple(schema["function"].get("parameters", {}).get("required", ()))
            for schema in self.tool_schemas
        }
        names = required.keys() if valid_tool_names is None else valid_tool_names
        self.required_arguments = {name: required.get(name, ()) for name in names}

    async def run(self, messages: Sequence[Mapping[str, Any]]) -> AgentResult:
        """Play one rollout that starts with `messages`.

        Only raises cancellation and programming errors, for example `MessageError` if `messages` is not a valid
        conversation. Without `execute` it also raises `NoOpenRun`, `ToolCrashed`, and the `InferenceError` or
        `BackendError` of a failed infrastructure.
        """
        execute = self.execute
        if execute is None and self.tool_schemas:
            execute = in_open_run(self.task_id, tuple(self.required_arguments), self.budget_config)
        rollout = PlayedRollout(self, messages, execute)
        if self.branch is not None:
            self.branch.begin(rollout)
        result = await rollout.play()
        if self.execute is None and result.error is not None:
            note_failure(self.task_id, result.error)
            raise result.error
        return result


class PlayedRollout:
    """The state of one run."""

    def __init__(
        self, loop: HermesAgentLoop, messages: Sequence[Mapping[str, Any]], execute: ExecuteTools | None
    ) -> None:
        self.loop = loop
        self.execute = execute
        # Of its class: a wrapper that passes unknown attributes on has a `chat` that goes around the wrapper.
        given: Any = loop.server
        self.source: ChatCompletionServer | None = None
        if not hasattr(type(given), "chat"):
            from lachesis_client.chat_completion_server import ChatCompletionServer

            given = self.source = ChatCompletionServer(given)
        self.server: ChatServer = given
        self.conversation = AgentConversation(messages, loop.ephemeral_system_prompt, loop.prefill_messages)
        self.call_ids = {call.id for node in self.conversation.request.nodes() for call in node.message.tool_calls}
        self.turns = self.faulty_turns = self.tool_calls = 0
        self.context_full = False
        self.responses: list[ChatResponse] = []  # of the turns
        self.tool_errors: list[ToolError] = []
        self.step_rewards: list[StepReward] = []
        self.ended_by = ""  # the tool whose answer said that the task is over
        self.tool_counts: dict[str, ToolCount] = {}
        self.tokens = TokenCount()
        self.inherited: Cost | None = None  # of the below, what the rollout counts that this one branched off
        self.api_calls = 0
        self.seconds_in_model = self.seconds_in_tools = 0.0
        limits = loop.limits
        self.clock = RolloutClock(limits.max_seconds, limits.max_waiting, getattr(execute, "waited", None))
        self.compression: RolloutCompression | None = None
        if loop.compression is not None:
            self.compression = loop.compression.of_rollout(self, max_resamples=limits.max_resamples)
            self.conversation.count_with(self.compression.size)

    @cached_property
    def agent(self) -> LoopAgent:
        """The agent, as its tools see it."""
        from lachesis.loop.calling_agent import LoopAgent  # few tools ask for it

        return LoopAgent(self)

    async def play(self) -> AgentResult:
        error: Exception | None = None
        deadline = asyncio.timeout(None)
        try:
            async with deadline:
                self.clock.start(deadline)
                try:
                    while True:
                        if self.turns and self.loop.branch is not None:
                            await self.loop.branch.at_turn(self)
                        await self.turn()
                finally:
                    self.clock.stop()
        except RolloutEnded as end:
            outcome, reason = end.outcome, end.reason
        except ContextExhausted as refused:
            outcome, reason, self.context_full = Outcome.CONTEXT_EXHAUSTED, str(refused), True
            if not (self.api_calls or PROMPTED_BY_A_MODEL.get()):  # a setting is at fault
                outcome, error = Outcome.INFRA_ERROR, FirstPromptTooLong(refused)
                reason = str(error)
        except ConversationRefused as refused:
            outcome, reason = Outcome.REFUSED, str(refused)
        except TurnRejected as refused:
            outcome, reason = Outcome.MODEL_ERROR, str(refused)
            self.conversation.answered_length = self.conversation.turn_began
        except ToolCrashed as crashed:
            asked = crashed.__cause__  # a tool may ask a model server itself
            error = asked if isinstance(asked, InferenceError) else crashed
            outcome, reason = Outcome.INFRA_ERROR, str(error)
        except SandboxExhausted as ended:
            outcome, reason = Outcome.AGENT_FAULT, str(ended)
        except (InferenceError, BackendError) as broken:
            outcome, reason, error = Outcome.INFRA_ERROR, str(broken), broken
            self.tokens.completion_tokens += getattr(broken, "sampled", 0)
        except TimeoutError:
            if not deadline.expired():
                raise
            if self.clock.used_up:
                outcome, reason = Outcome.TIMEOUT, self.time_is_over()
            else:
                outcome, reason = Outcome.INFRA_ERROR, self.clock.waited_too_long
                error = WaitedTooLong(reason)
        except asyncio.CancelledError:
            note_agent(self.result(Outcome.INFRA_ERROR, "interrupted"))
            raise
        return self.result(outcome, reason, error)

    def result(self, outcome: Outcome, reason: str, error: Exception | None = None) -> AgentResult:
        """The agent's result, without an unfinished turn."""
        compression = self.compression
        full = self.context_full and outcome in OF_A_FULL_CONTEXT and not self.loop.limits.spends_all(self.tokens)
        if compression is not None and compression.broken and full:
            outcome, error = Outcome.INFRA_ERROR, compression.broken
            reason = f"{reason}; its context could not be compressed: {error}"
        self.conversation.drop_unfinished(reason)
        return AgentResult(
            turns_used=self.turns,
            finished_naturally=outcome is Outcome.COMPLETED,
            reasoning_per_turn=[response.message.reasoning for response in self.responses],
            turn_responses=self.responses,
            tool_errors=self.tool_errors,
            outcome=outcome,
            reason=reason,
            history=self.conversation.history,
            tool_counts=self.tool_counts,
            tokens=self.tokens,
            api_calls=self.api_calls,
            seconds_in_model=self.seconds_in_model,
            seconds_in_tools=self.seconds_in_tools,
            seconds_own=self.clock.own,
            seconds_waiting=self.clock.waiting,
            step_rewards=tuple(self.step_rewards),
            context_edits=compression.edits if compression is not None else (),
            error=error,
            server_state=self.source.get_state() if self.source is not None else None,
            inherited=self.inherited,
        )

    async def turn(self) -> None:
        """One completion that can be acted on, and the tool results that follow it."""
        self.check_budgets()
        if self.compression is not None and self.compression.due:
            await self.compression.run()
            self.check_budgets()
        response, check = await self.sample()
        message = response.message
        self.turns += 1
        self.responses.append(response)
        if not message.tool_calls:
            self.conversation.answered_length = len(self.conversation.history)
            if response.finish_reason is FinishReason.LENGTH:
                raise RolloutEnded(Outcome.CONTEXT_EXHAUSTED, "the token limit cut the answer off")
            ask_user, history = self.loop.follow_up, self.conversation.history
            if ask_user is not None and (said := await ask_user(history)) is not None:
                said = said if isinstance(said, ToolResult) else ToolResult(said)
                self.step_rewards += step_rewards(self.turns, "follow_up", said)
                if not said.done:
                    self.conversation.append(Message("user", said.parts))
                    self.conversation.begin_turn()
                    self.faulty_turns = 0
                    return
            raise RolloutEnded(Outcome.COMPLETED, "the model answered")
        await self.run_tools(message, check)
        self.settle(check)

    def time_is_over(self) -> str:
        return f"the agent took longer than {self.loop.limits.max_seconds:g} s: {self.clock.own:.1f} s of its own time"

    def check_budgets(self) -> None:
        limits = self.loop.limits
        if self.clock.used_up:
            raise RolloutEnded(Outcome.TIMEOUT, self.time_is_over())
        if self.turns >= self.loop.max_turns:
            raise RolloutEnded(Outcome.MAX_TURNS, f"{self.turns} turns without a final answer")
        limits.check(self.tokens, self.tool_calls)

    async def sample(self) -> tuple[ChatResponse, TurnCheck]:
        """A completion that can stay, appended to the history; unusable ones are recorded and sampled again."""
        attempts = 0
        while True:
            response = await self.ask()
            response = response.with_new_call_ids(self.call_ids)
            self.conversation.append(response)
            if self.clock.used_up:
                raise RolloutEnded(Outcome.TIMEOUT, self.time_is_over())
            if response.finish_reason is FinishReason.CONTENT_FILTER:
                word = response.raw_finish_reason or response.finish_reason.value
                raise RolloutEnded(Outcome.REFUSED, f"the server withheld the answer: finish reason {word!r}")
            check = check_turn(response, self.loop.required_arguments)
            if check.flaw not in RESAMPLED:
                return response, check
            attempts += 1
            described = f"{check.flaw.value}: {check.detail}" if check.detail else check.flaw.value
            self.conversation.rewind(self.conversation.answered_length, described, attempt=True)
            if attempts > self.loop.limits.max_resamples:
                counted = f"{attempts} unusable completion{'s' * (attempts > 1)} in a row"
                raise RolloutEnded(Outcome.MODEL_ERROR, f"{counted}, the last one: {described}")

    async def ask(self) -> ChatResponse:
        """A completion of the conversation as it is. It is counted, and not appended."""
        loop = self.loop
        self.clock.ask()
        response = await self.server.chat(
            self.conversation.request,
            tools=loop.tool_schemas or None,
            temperature=loop.temperature,
            max_tokens=loop.max_tokens,
            extra_body=loop.extra_body,
            split=loop.split,
        )
        self.clock.answered(response.latency)
        self.api_calls += 1
        self.seconds_in_model += response.latency
        self.context_full = fills_context(response, loop.max_tokens)
        self.tokens.add(response.usage)
        return response.with_scratchpad_read()

    async def wait_for(self, answer: Awaitable[str]) -> str:
        """The answer of a server other than the policy's: its time does not count as the agent's."""
        self.clock.ask()
        try:
            return await answer
        finally:
            self.clock.settle()

    async def run_tools(self, message: Message, check: TurnCheck) -> None:
        """Answer every call of the turn: run it, or say why not. One answer a call, in the order of the calls."""
        wanted = [
            call for call in message.tool_calls if call.id not in check.faulty and call.id not in check.duplicates
        ]
        budget = self.loop.limits.max_tool_calls
        allowed = wanted if budget is None else wanted[: max(0, budget - self.tool_calls)]
        results: dict[str, ToolResult] = {}
        if allowed:
            if self.execute is None:
                raise RuntimeError("a tool was called although none was offered")
            started = time.monotonic()
            self.clock.run()
            self.tool_calls += len(allowed)
            calling_agent.set(lambda: self.agent)
            done = await self.execute(allowed)
            self.clock.settle()
            self.seconds_in_tools += time.monotonic() - started
            results = {call.id: result for call, result in zip(allowed, done, strict=True)}
        for call in message.tool_calls:
            self.answer(call, results.get(call.id) or unrun(call, check, ran=results))

    def answer(self, call: ToolCall, result: ToolResult) -> None:
        response = ToolResponse(
            Message("tool", result.parts, tool_call_id=call.id, name=call.name),
            tool=call.name,
            duration=result.duration,
            error=result.error,
            chat=result.chat,
        )
        self.conversation.append(response)
        self.step_rewards += step_rewards(self.turns, call.name, result)
        if result.done:
            self.ended_by = call.name
        count = self.tool_counts.setdefault(call.name, ToolCount())
        if result.error is None:
            count.success += 1
        else:
            count.failure += 1
            self.tool_errors.append(ToolError(self.turns, call.name, call.arguments, result.error, result.content))

    def settle(self, check: TurnCheck) -> None:
        """The turn is answered. After too many faulty ones in a row, give up and roll back to before the first."""
        self.conversation.end_turn(good=check.flaw is None)
        if self.ended_by:
            raise RolloutEnded(Outcome.COMPLETED, f"the tool {self.ended_by} ended the task")
        if check.flaw is None:
            self.faulty_turns = 0
            return
        self.faulty_turns += 1
        if self.faulty_turns >= self.loop.limits.max_faulty_turns:
            reason = f"{self.faulty_turns} faulty turns in a row, the last one: {check.flaw.value}: {check.detail}"
            self.conversation.rewind(self.conversation.good_length, reason)
            raise RolloutEnded(Outcome.MODEL_ERROR, reason)
