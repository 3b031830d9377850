"""Where a command of the agent starts: in one folder on the old paths, after the last `cd` elsewhere."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

import lachesis
from environments import hermes_base_env
from tests.support.scripted_server import call, say
from tests.support.small_envs import lines, process

FOUND = "cat later.txt sub/later.txt 2>/dev/null"
STEPS = [
    ("terminal", {"command": "mkdir -p sub && cd sub && export KEPT=yes"}),
    ("terminal", {"command": "echo $KEPT > note.txt"}),
    ("terminal", {"command": "pwd > later.txt", "background": True}),
    ("write_file", {"path": "file.txt", "content": "x"}),
    ("terminal", {"command": f"until {FOUND} | grep /; do sleep 0.1; done; ls . sub", "workdir": "/workspace"}),
]


def moves(request: dict[str, Any]) -> Any:
    done = sum(message["role"] == "tool" for message in request["messages"])
    return call(STEPS[done]) if done < len(STEPS) else say("Done.")


def an_env(base: Any) -> Any:
    class Notes(base):  # type: ignore[misc]
        """The agent leaves a note."""

        async def setup(self) -> None:
            self.items = iter("a")

        async def get_next_item(self) -> Any:
            return next(self.items, None)

        def format_prompt(self, item: Any) -> str:
            return "Leave a note."

        async def compute_reward(self, item: Any, result: Any, ctx: Any) -> float:
            return float(await ctx.read_file("note.txt") == "yes\n")

    return Notes


@pytest.mark.parametrize(
    ("base", "settings", "carries"),
    [
        (hermes_base_env.HermesAgentBaseEnv, {}, False),
        (hermes_base_env.HermesAgentBaseEnv, {"terminal_carries_cd": True}, True),
        (lachesis.HermesAgentBaseEnv, {}, True),
        (lachesis.HermesAgentBaseEnv, {"terminal_carries_cd": False}, False),
    ],
)
async def test_a_command_starts_where_its_description_says(
    tmp_path: Path, base: Any, settings: dict[str, Any], carries: bool
) -> None:
    offered: list[str] = []

    def policy(request: dict[str, Any]) -> Any:
        offered.extend(tool["function"]["description"] for tool in request["tools"])
        return moves(request)

    await process(an_env(base), tmp_path, policy, total_steps=1, group_size=1, max_agent_turns=8, **settings)
    (group,) = lines(tmp_path / "groups.jsonl")
    assert group["scores"] == [float(not carries)]
    last = [message["content"] for message in group["messages"][0] if message["role"] == "tool"][-1]
    assert f"/workspace{'/sub' * carries}\\n" in last
    assert last.index("file.txt") < last.index("sub:")  # write_file has one folder always
    said = "carry over to the next command" if carries else "a cd does not carry over"
    assert any(said in description for description in offered)


async def test_a_terminal_of_the_environments_own_stays_as_it_is() -> None:
    from lachesis_tools import BUILTIN_TOOLS, tool
    from lachesis_tools.terminal import without_carried_folder

    @tool(toolset="terminal", name="terminal")
    async def own(command: str) -> str:
        """Does something else."""
        return command

    tools = BUILTIN_TOOLS.without("terminal").extended(own)
    assert without_carried_folder(tools) is tools
