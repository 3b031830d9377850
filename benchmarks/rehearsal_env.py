"""An environment whose rewards are random and whose only tool waits, for `benchmarks.rehearsal`."""

from __future__ import annotations

import asyncio
import itertools
import random
from typing import Any

from lachesis import HermesAgentBaseEnv
from lachesis_tools import ToolRegistry, tool


@tool(toolset="waiting", concurrency_safe=True)
async def wait(text: str) -> str:
    """Wait for something."""
    await asyncio.sleep(random.uniform(0.2, 0.8))
    return "done"


class Waiting(HermesAgentBaseEnv):
    """Agents that call a tool, or answer at once where `enabled_toolsets` is empty."""

    name = "waiting"
    tools = ToolRegistry([wait])

    async def setup(self) -> None:
        self.numbers = itertools.count()

    async def get_next_item(self) -> int:
        return next(self.numbers)

    def format_prompt(self, item: int) -> str:
        return f"Item {item}."

    async def compute_reward(self, item: int, result: Any, ctx: Any) -> float:
        return random.random()
