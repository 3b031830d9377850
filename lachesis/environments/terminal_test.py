"""Files to be created with given content: the smallest environment whose reward looks into the sandbox.

python environments/terminal_test_env.py process --env.total_steps 3
"""

from __future__ import annotations

import itertools
import json
from collections.abc import Mapping, Sequence
from typing import Any

from pydantic import Field

from lachesis.agent.result import AgentResult
from lachesis.base_env import HermesAgentBaseEnv
from lachesis.runs.settings import HermesAgentEnvConfig
from lachesis.testing.reference_server import Policy
from lachesis.trajectories import Message, ToolCall

TRAIN_ITEMS = (
    {"path": "greeting.txt", "content": "Hello from the sandbox"},
    {"path": "numbers.txt", "content": "\n".join(str(number) for number in range(1, 11))},
    {"path": "notes/today.md", "content": "# Today\n\n- measure\n- cut"},
)
EVAL_ITEMS = (
    {"path": "answer.txt", "content": "42"},
    {"path": "data/colours.csv", "content": "name,hex\nred,#ff0000\ngreen,#00ff00"},
)


class TerminalTestEnvConfig(HermesAgentEnvConfig):
    """Settings of the terminal test."""

    enabled_toolsets: list[str] | None = Field(
        ["terminal", "file"], description="Toolsets or tools that the agent gets."
    )
    max_agent_turns: int = Field(10, ge=1, description="Completions per rollout, the final answer included.")
    max_token_length: int = Field(512, ge=1, description="Tokens of one completion.")
    system_prompt: str | None = Field(
        "You work in a Linux sandbox. Use the tools to do what is asked, then say that it is done.",
        description="System message of every rollout.",
    )


class TerminalTestEnv(HermesAgentBaseEnv):
    """Create a file with exact content: 1.0 for the content, 0.5 when the file merely contains it, else 0.0."""

    name = "terminal-test"
    env_config_cls = TerminalTestEnvConfig

    async def setup(self) -> None:
        self.items = itertools.cycle(TRAIN_ITEMS)

    async def get_next_item(self) -> Mapping[str, str]:
        return next(self.items)

    async def get_eval_items(self) -> list[Mapping[str, str]]:
        return list(EVAL_ITEMS)

    def format_prompt(self, item: Mapping[str, str]) -> str:
        return f"Create the file {item['path']} with exactly this content:\n\n{item['content']}"

    async def compute_reward(self, item: Mapping[str, str], result: AgentResult, ctx: Any) -> float:
        written = (await ctx.read_file(item["path"])).rstrip("\n")
        if written == item["content"]:
            return 1.0
        return 0.5 if item["content"] in written else 0.0

    def reference_policy(self) -> Policy:
        """Writes the file that is asked for with one call of `write_file`."""
        items = {self.format_prompt(item): item for item in (*TRAIN_ITEMS, *EVAL_ITEMS)}

        def play(messages: Sequence[Mapping[str, Any]], tools: Sequence[Mapping[str, Any]] | None) -> Message:
            if messages[-1]["role"] == "tool":
                return Message("assistant", "Done.")
            item = items[next(message["content"] for message in messages if message["role"] == "user")]
            arguments = json.dumps({"path": item["path"], "content": item["content"] + "\n"})
            return Message("assistant", tool_calls=(ToolCall("call_1", "write_file", arguments),))

        return play


if __name__ == "__main__":
    TerminalTestEnv.cli()
