"""The base of all doors: an environment whose items, sessions, tools and rewards are those of another standard."""

from __future__ import annotations

import json
from abc import abstractmethod
from collections.abc import Mapping, Sequence
from contextlib import AbstractAsyncContextManager
from dataclasses import replace
from typing import Any, ClassVar, Literal, Protocol, Self, cast

from backends.errors import SettingsError
from lachesis import (
    AgentResult,
    HermesAgentBaseEnv,
    Message,
    Policy,
    Reward,
    Tool,
    ToolCall,
    ToolContext,
    ToolResult,
    rollout_session,
)
from lachesis.cli.environment_classes import read_target
from lachesis.rewards.reward import scored_by_steps
from lachesis_doors.guest_process import broken_answers
from lachesis_messages.responses import ChatResponse, Node
from lachesis_tools import ToolSession
from lachesis_tools.function_names import function_name

PATIENCE = 0.8
"""The share of `setup_timeout` for which a rollout waits for a place where sessions are limited."""


class DoorSession(Protocol):
    """One rollout in the other standard."""

    @property
    def prompt(self) -> str | list[dict[str, Any]]:
        """What the agent reads first: the text of the user's message, or all messages."""
        ...

    @property
    def solution(self) -> Sequence[Mapping[str, Any]] | None:
        """The turns that solve it, if they are known: `{"calls": [{"name", "arguments"}]}` or `{"text"}`."""
        ...

    async def act(self, text: str) -> Mapping[str, Any] | None:
        """The answer to a message of the agent that calls no tool; None if that ends the rollout.

        `text`, what the agent reads; `reward` and `done`, if there are such.
        """
        ...

    async def call(self, name: str, arguments: Mapping[str, Any]) -> Mapping[str, Any]:
        """The answer to a call of a tool, as for `act`; with `error`, if the call failed."""
        ...

    async def score(self, messages: Sequence[Mapping[str, Any]]) -> Mapping[str, Any]:
        """`reward`, None for no score; `components` by name; `invalid`, why there is no score.

        `messages` begin with the agent's first one: what is before it is no door's to count, for a system prompt of
        ours may be there, or a summary. Without `reward`, the rewards of the steps are the score.
        """
        ...


class SteppedSession:
    """Of a session whose server rewards each step. Tools are the only actions."""

    solution = None

    async def act(self, text: str) -> None:
        return None

    async def score(self, messages: Sequence[Mapping[str, Any]]) -> Mapping[str, Any]:
        return {}


class DoorEnv(HermesAgentBaseEnv):
    """Plays the environment `target` of another standard. A subclass says how one finds items and opens a session."""

    scheme: ClassVar[str]
    target: ClassVar[str]
    arguments: ClassVar[Mapping[str, Any]]
    toolsets = ()
    step_rewards: Literal["sum", "last"] | None = "sum"

    @classmethod
    def at(cls, target: str) -> type[Self]:
        """The class for `SCHEME:NAME?argument=value&...`; values are read as YAML.

        Raises:
            SettingsError: the target names no environment.
        """
        scheme, name, arguments = read_target(target)
        given = {"scheme": scheme, "target": name, "arguments": arguments, "name": f"{scheme}-{name}".replace("/", "-")}
        return type(cls.__name__, (cls,), {"__module__": cls.__module__, "__doc__": cls.__doc__, **given})

    def rule(self) -> Literal["sum", "last"]:
        """How rewards of steps become the score, as the argument `rewards` says. Raises SettingsError."""
        if (rule := self.arguments.get("rewards", "sum")) not in ("sum", "last"):
            raise SettingsError(f"{self.scheme}:{self.target}: rewards={rule} is no rule; write rewards=sum or last")
        return cast('Literal["sum", "last"]', rule)

    @abstractmethod
    async def item_at(self, number: int) -> tuple[Any, Sequence[Mapping[str, Any]]] | None:
        """The item of this number, and its tools, each `{name, description, parameters}`; None after the last one."""

    @abstractmethod
    def opened(self, item: Any, tools: ToolSession) -> AbstractAsyncContextManager[DoorSession]:
        """A new session for `item`. `tools` has the sandbox of the rollout."""

    async def setup(self) -> None:
        self._number = 0

    async def get_next_item(self) -> Any:
        found = await self.item_at(self._number)
        if found is None:
            return None
        self._number += 1
        item, tools = found
        # With the item, for those who run it in another process.
        return {"item": item, "tools": list(tools)}

    def tools_for(self, item: Any) -> list[Tool]:
        taken: set[str] = set()

        def made(tool: Mapping[str, Any]) -> Tool:
            async def call(arguments: dict[str, Any], session: DoorSession) -> ToolResult:
                return self._result(await session.call(tool["name"], arguments))

            name, schema = (
                function_name(tool["name"], taken),
                tool.get("parameters") or {"type": "object", "properties": {}},
            )
            taken.add(name)
            said, offered = tool.get("description") or "", bool(tool.get("offered", True))
            return Tool.from_schema(name, said, schema, call, time_limit=None, offered=offered)

        return [made(tool) for tool in item["tools"]]

    def reference_policy(self) -> Policy | None:
        def policy(messages: Sequence[Mapping[str, Any]], tools: Any) -> Message:
            session: DoorSession | None = rollout_session()
            if session is None or session.solution is None:
                raise SettingsError(f"{self.name}: it has no solutions, so there is no reference policy")
            begun = () if isinstance(session.prompt, str) else session.prompt
            # The prompt may be a conversation that goes on.
            number, before = (sum(each["role"] == "assistant" for each in part) for part in (messages, begun))
            number -= before
            turn = session.solution[number] if number < len(session.solution) else {"text": "Done."}
            calls = (
                ToolCall(f"call_{number}_{at}", function_name(call["name"]), json.dumps(call["arguments"]))
                for at, call in enumerate(turn.get("calls") or ())
            )
            return Message("assistant", turn.get("text"), tool_calls=tuple(calls))

        return policy

    def session(self, item: Any, tools: ToolSession) -> AbstractAsyncContextManager[DoorSession]:
        return self.opened(item["item"], tools)

    def initial_messages(self, item: Any) -> list[dict[str, Any]]:
        session: DoorSession | None = rollout_session()
        if session is None or isinstance(session.prompt, str):
            return super().initial_messages(item)
        messages = list(session.prompt)
        if self.config.system_prompt and (not messages or messages[0]["role"] != "system"):
            messages.insert(0, {"role": "system", "content": self.config.system_prompt})
        return messages

    def format_prompt(self, item: Any) -> str:
        session: DoorSession | None = rollout_session()
        return str(session.prompt) if session is not None else "(the environment says it when a rollout begins)"

    async def follow_up(self, item: Any, messages: list[dict[str, Any]]) -> ToolResult | None:
        session: DoorSession = rollout_session()
        answer = await session.act(messages[-1].get("content") or "")
        return None if answer is None else self._result(answer)

    async def compute_reward(self, item: Any, result: AgentResult, ctx: ToolContext) -> Reward | None:
        session: DoorSession = ctx.session
        scored = await session.score(result.messages[first_answer(result.history.nodes()) :])
        if scored.get("invalid") or scored.get("reward", 0.0) is None:
            return None
        components = {name: float(value) for name, value in (scored.get("components") or {}).items()}
        if "reward" in scored:
            return Reward(float(scored["reward"]), components)
        steps = await scored_by_steps(self, item, result, ctx)
        return replace(steps, components={**steps.components, **components})

    def _result(self, answer: Mapping[str, Any]) -> ToolResult:
        text, error, reward = answer.get("text") or "", answer.get("error"), answer.get("reward")
        if error:
            text = json.dumps({"error": text or error}, ensure_ascii=False)
        with broken_answers(f"{self.scheme}:{self.target}"):  # not by truth: "false" ends no episode
            if reward is not None and type(reward) not in (int, float):
                raise TypeError(f"the reward is {reward!r}, and not a number")
            done = False if answer.get("done") is None else answer["done"]
            if type(done) is not bool:
                raise TypeError(f"{done!r} stands for the end of the episode, and is neither true nor false")
            reward = None if reward is None else float(reward)  # of JSON's numbers, some are too large for it
        images = tuple(answer.get("images") or ())
        return ToolResult(text, error or None, images=images, reward=reward, done=done)


def first_answer(nodes: Sequence[Node]) -> int:
    """The place of the agent's first message."""
    return next((at for at, node in enumerate(nodes) if isinstance(node.origin, ChatResponse)), len(nodes))
