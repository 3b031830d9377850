"""The conversation as environments of ours: with a tool that costs nothing, and with a command in a sandbox."""

from __future__ import annotations

import itertools
from typing import Any

from lachesis import HermesAgentBaseEnv, tool
from lachesis_tools import BUILTIN_TOOLS


@tool(toolset="noop")
async def noop(text: str) -> str:
    """Does nothing."""
    return "done"


class Noop(HermesAgentBaseEnv):
    name = "noop"
    tools = BUILTIN_TOOLS.extended(noop)
    toolsets = ("noop",)

    async def setup(self) -> None:
        self.items = itertools.count()

    async def get_next_item(self) -> Any:
        return {"question": f"What is the answer to question {next(self.items)}?"}

    def format_prompt(self, item: Any) -> str:
        return str(item["question"])

    async def compute_reward(self, item: Any, result: Any, ctx: Any) -> float:
        return float("42" in result.final_response)


class Shell(Noop):
    name = "shell"
    toolsets = ("terminal",)
