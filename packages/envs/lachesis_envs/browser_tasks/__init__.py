"""Things to do in a small web application: forms, tables, pages of lists, log-ins, decoys.

    lachesis process browser_tasks --openai.model_name reference --env.total_steps 4

The application is generated from a seed and runs in the rollout's sandbox, where the agent has a browser and nothing
else. What its server has received decides the reward.
"""

from __future__ import annotations

import itertools
import json
import re
import shlex
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from pydantic import Field

from backends.base import Process
from backends.errors import BackendError
from lachesis import HermesAgentBaseEnv, HermesAgentEnvConfig
from lachesis.loop.rollout_session import rollout_session
from lachesis_envs.browser_tasks.tasks import BrowserTask, draw
from lachesis_messages.messages import Message, ToolCall

if TYPE_CHECKING:
    from lachesis import AgentResult, Policy
    from lachesis_tools import ToolSession

START_SECONDS = 60.0
HELD_OUT = 20
"""Tasks for evaluation."""


@dataclass(frozen=True)
class Application:
    """The server of a rollout's site."""

    process: Process
    port: int
    begin: int
    """Where the record begins in its output."""

    async def received(self) -> list[tuple[str, tuple[tuple[str, str], ...]]] | None:
        """Path and fields of each form that it accepted, in order. None if there were more than the record holds."""
        output = b""
        while (chunk := await self.process.read(self.begin + len(output), limit=1 << 20)).data:
            if chunk.offset != self.begin + len(output):
                return None
            output += chunk.data
        lines = map(json.loads, output.splitlines())
        return [
            (line["path"], tuple((name, value.replace("\r\n", "\n")) for name, value in line["fields"]))
            for line in lines
        ]


class BrowserTasksConfig(HermesAgentEnvConfig):
    """Settings of the tasks."""

    dataset_seed: int = Field(default=0, description="Seed of the tasks.")
    dataset_size: int = Field(default=20, ge=1, description="How many tasks there are; kinds take turns.")


class BrowserTasksEnv(HermesAgentBaseEnv):
    """1.0 if the server of the application received exactly the forms that the task asks for, in order; else 0.0.

    The record is the output of the server's process, which the executor keeps. An agent with the tools of the browser
    cannot write to it; one with a terminal could.
    """

    name = "browser-tasks"
    env_config_cls = BrowserTasksConfig
    toolsets = ("browser",)
    max_turns = 40
    max_token_length = 1024
    needs_sandboxes = True

    def __init__(self, config: Any, *arguments: Any, **more: Any) -> None:
        super().__init__(config, *arguments, **more)
        settings: Any = self.config
        training = draw(settings.dataset_seed, settings.dataset_size)
        held_out = draw(f"{settings.dataset_seed}, held out", HELD_OUT)
        self.tasks: dict[str, BrowserTask] = {task.prompt: task for _, task in (*training, *held_out)}
        items, self.held_out = (
            [{"task": task.prompt, "category": kind} for kind, task in of] for of in (training, held_out)
        )
        self.training = itertools.cycle(items)

    async def get_next_item(self) -> Mapping[str, str]:
        return next(self.training)

    async def get_eval_items(self) -> Sequence[Mapping[str, str]]:
        return self.held_out[: self.config.eval_items]

    @asynccontextmanager
    async def session(self, item: Mapping[str, str], tools: ToolSession) -> AsyncIterator[Application]:
        """The application, running in the sandbox."""
        sandbox = await tools.sandbox()
        if sandbox.python is None:
            raise BackendError("the sandbox has no Python for the web server. Next step: choose an image that has one")
        code = Path(__file__).with_name("site.py").read_text(encoding="utf-8")
        process = await sandbox.start(f"exec {shlex.quote(sandbox.python)} -c {shlex.quote(code)}", cwd="/")
        tools.internal_processes.add(process.id)
        await process.write(json.dumps(self.tasks[item["task"]].site()).encode() + b"\n")
        said = await process.read(wait=START_SECONDS)
        if not said.data.endswith(b"\n") or not said.data.strip().isdigit():
            raise BackendError(f"the web server does not start: {said.data.decode(errors='replace')[-500:]!r}")
        yield Application(process, int(said.data), len(said.data))

    def format_prompt(self, item: Mapping[str, str]) -> str:
        application = rollout_session()
        port = application.port if application is not None else 8000
        return f"{item['task']}\n\nThe web application is at http://127.0.0.1:{port}/."

    async def compute_reward(self, item: Mapping[str, str], result: AgentResult, ctx: Any) -> float:
        return float(await ctx.session.received() == list(self.tasks[item["task"]].received))

    def reference_policy(self) -> Policy:
        """Takes a snapshot before each step, and finds the element there."""

        def policy(messages: Sequence[Mapping[str, Any]], tools: Sequence[Mapping[str, Any]] | None) -> Message:
            asked = next(message["content"] for message in messages if message["role"] == "user")
            prompt, _, place = asked.rpartition("\n\n")
            results = [message["content"] for message in messages if message["role"] == "tool"]
            number, looks = divmod(len(results) - 1, 2)
            steps = self.tasks[prompt].steps
            if not results:
                return _call("navigate", url=re.findall(r"http\S+/", place)[0])
            if number == len(steps):
                return Message("assistant", "Done.")
            if looks == 0:
                return _call("snapshot")
            action, role, name, *text = steps[number]
            shown = re.search(rf'- {role} "{re.escape(name)}" \[.*?\bref=(\w+)', json.loads(results[-1])["snapshot"])
            assert shown is not None, f"no {role} {name!r} in {results[-1]}"
            return _call(action, ref=f"@{shown[1]}", **dict(zip(("text",), text, strict=False)))

        return policy


def _call(tool: str, **arguments: str) -> Message:
    return Message("assistant", tool_calls=(ToolCall("call_1", f"browser_{tool}", json.dumps(arguments)),))
