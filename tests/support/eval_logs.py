"""An evaluation as a log of Inspect, and what reads the archive without Inspect."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any
from zipfile import ZipFile

from lachesis import HermesAgentBaseEnv, Reward
from lachesis.cli import main
from lachesis_tools.tool_registry import ToolRegistry, tool
from tests.support.scripted_server import Answer, ScriptedServer, call, say
from tests.support.small_envs import make

SHELVES = {"north": 12, "south": 30, "east": 7}


@tool(toolset="shelves", errors=(KeyError,))
async def count(shelf: str) -> int:
    """Count what is on a shelf.

    Args:
        shelf: north, south or east.
    """
    return SHELVES[shelf]


class Shelves(HermesAgentBaseEnv):
    """The agent asks how much is on a shelf."""

    name = "shelves"
    tools = ToolRegistry([count])
    toolsets = ("shelves",)

    async def get_next_item(self):
        raise AssertionError("only evaluated")

    async def get_eval_items(self):
        return [{"shelf": shelf, "answer": number} for shelf, number in SHELVES.items()]

    def format_prompt(self, item):
        return f"Count {item['shelf']}."

    async def compute_reward(self, item, result, ctx):
        right = str(item["answer"]) in result.final_response
        return Reward(float(right), {"right": float(right), "short": 0.5})


def _plays(request: dict[str, Any]) -> Answer:
    """North is counted, south asks for a shelf that does not exist until its turns are over, east breaks the server."""
    asked = next(message["content"] for message in request["messages"] if message["role"] == "user")
    if "east" in asked:
        return 500
    if "south" in asked:
        return call(("count", {"shelf": "cellar"}), content="Where?")
    return (
        say("It is 12", reasoning_content="So.")
        if len(request["messages"]) > 2
        else call(("count", {"shelf": "north"}))
    )


async def evaluated(folder: Path) -> Path:
    """Three items with two samples each: solved, out of turns, and without an answer of the server. The log."""
    settings = {"eval_items": 3, "eval_samples": 2, "max_failed_groups": 100, "max_agent_turns": 2}
    async with ScriptedServer(_plays) as server:
        env = make(Shelves, server, folder, enabled_toolsets=["shelves"], **settings)
        await env._run_evaluate()
    log = folder / "logs" / "shelves.eval"
    assert main(["export", str(folder / "eval"), "--format", "inspect", "--out", str(log)]) == 0
    return log


def read_log(path: Path) -> dict[str, Any]:
    """Each file of the archive by its name."""
    with ZipFile(path) as log:
        assert len(set(log.namelist())) == len(log.namelist())
        return {name: json.loads(log.read(name)) for name in log.namelist()}


def read_samples(path: Path) -> list[Any]:
    return [content for name, content in read_log(path).items() if name.startswith("samples/")]
