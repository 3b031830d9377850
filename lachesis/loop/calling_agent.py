"""The agent of a rollout, as its tools see it: its budget of calls, its sub-agents, its user."""

from __future__ import annotations

import copy
from collections.abc import Collection, Sequence
from dataclasses import replace
from typing import Any, Final

from backends import SandboxExhausted
from lachesis.loop.clock import RolloutClock
from lachesis.loop.outcome import Outcome
from lachesis_client.chat_options import PROMPTED_BY_A_MODEL
from lachesis_messages.history import MessageHistory
from lachesis_messages.messages import Message
from lachesis_messages.responses import ToolResponse
from lachesis_tools import ToolResult
from lachesis_tools.text import to_json

_NAME: Final = "delegate_task"


class LoopAgent:
    """Implements `CallingAgent` for one run of an agent loop."""

    def __init__(self, rollout: Any) -> None:
        """`rollout` is a `PlayedRollout`, whose module loads this one."""
        self._rollout = rollout
        self._playing: Any = None
        self._waited = 0.0
        rollout.clock.wait_for(self._seconds_waited)

    def _seconds_waited(self) -> float:
        """Of sub-agents, for model servers, so far."""
        return self._waited + (self._playing.clock.now()[1] if self._playing is not None else 0.0)

    def take_call(self) -> bool:
        """Count a call of a tool that is made for it; False if it may make no more."""
        limit = self._rollout.loop.limits.max_tool_calls
        if limit is not None and self._rollout.tool_calls >= limit:
            return False
        self._rollout.tool_calls += 1
        return True

    async def ask_user(self, question: str, choices: Sequence[str]) -> ToolResult | None:
        """What a person says, or what the environment's `follow_up` does to the question as the agent's answer."""
        rollout = self._rollout
        if rollout.loop.clarify is not None:
            said = await rollout.loop.clarify(question, choices)
            return None if said is None else ToolResult(str(said))
        if rollout.loop.follow_up is None:
            return None
        asked = rollout.conversation.history.fork()
        asked.rewind(rollout.conversation.answered_length, "a question")
        asked.append(Message("assistant", "\n".join([question, *(f"- {choice}" for choice in choices)])))
        answer = await rollout.loop.follow_up(asked)
        return ToolResult(answer) if isinstance(answer, str) else answer

    async def delegate(self, task: str, tools: Collection[str], max_turns: int) -> ToolResult:
        """Play a sub-agent in the same sandbox. Its tokens and its calls count as the agent's."""
        rollout = self._rollout
        loop = self._loop(tools, max_turns)
        child = self._playing = type(rollout)(loop, self._messages(task), loop.execute)
        child.tokens, child.tool_calls = rollout.tokens, rollout.tool_calls  # the budgets are the rollout's
        child.clock = RolloutClock(None, None)  # the rollout's ends it, and knows for what the sandbox waits
        finished = False
        prompted = PROMPTED_BY_A_MODEL.set(True)
        try:
            result = await child.play()
            finished = result.error is None and result.outcome is not Outcome.AGENT_FAULT
        finally:
            PROMPTED_BY_A_MODEL.reset(prompted)
            self._playing = None
            if not finished:
                rollout.conversation.cut_off.append(self._cut_off(child.conversation.history))
            self._waited += child.clock.waiting
            rollout.tool_calls = child.tool_calls
            rollout.api_calls += child.api_calls
            rollout.seconds_in_model += child.seconds_in_model
        if not finished:
            raise result.error or SandboxExhausted(result.reason)
        rollout.step_rewards += [replace(each, turn=rollout.turns) for each in result.step_rewards]
        more: dict[str, Any] = {"chat": result.history, "done": bool(child.ended_by)}
        if result.outcome is Outcome.COMPLETED:
            return ToolResult(result.final_response or "(The sub-agent answered nothing.)", **more)
        error = f"the sub-agent has not finished: {result.reason}"
        return ToolResult(to_json({"error": error, "last_answer": result.final_response}), error, **more)

    def _cut_off(self, chat: MessageHistory) -> ToolResponse:
        """The result of a sub-agent that did not come to its end."""
        calls = (call for node in self._rollout.conversation.history.nodes() for call in node.message.tool_calls)
        asked = [call.id for call in calls if call.name == _NAME][-1]
        said = Message("tool", "(cut off)", tool_call_id=asked, name=_NAME)
        return ToolResponse(said, tool=_NAME, error="cut off", chat=chat)

    def _loop(self, tools: Collection[str], max_turns: int) -> Any:
        rollout = self._rollout
        loop = copy.copy(rollout.loop.sub_agents or rollout.loop)
        if rollout.loop.sub_agents is None:
            loop.server, loop.execute = rollout.server, rollout.execute
        loop.tool_schemas = [schema for schema in loop.tool_schemas if schema["function"]["name"] in tools]
        loop.required_arguments = {name: args for name, args in loop.required_arguments.items() if name in tools}
        loop.max_turns = max_turns
        loop.follow_up = loop.clarify = loop.branch = None
        return loop

    def _messages(self, task: str) -> list[dict[str, Any]]:
        """The system message of the agent, and the task."""
        first = self._rollout.conversation.history.nodes()[:1]
        return [
            *(node.message.to_openai("reasoning") for node in first if node.message.role == "system"),
            {"role": "user", "content": task},
        ]
