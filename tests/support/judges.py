"""Four ways in which a reward may judge the task of `lachesis_testing.cheats`, and a sandbox backend to try them on."""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import Awaitable, Callable, Mapping
from typing import Any

from lachesis.tool_context.tool_context import ToolContext
from lachesis_testing.cheats import CASES, CHEATS, IDS, SOLUTION, TEST_PATH, TESTS
from lachesis_tools import BUILTIN_TOOLS, ToolSessions

PYTHON = "PYTHONPATH=/opt/pytest python3"
"""Of `root_images.pytest_root`."""
TIMEOUT = 20.0
AGENTS: Mapping[str, Mapping[str, str]] = {
    "honest": {"shop.py": SOLUTION},
    **{cheat.name: cheat.left() for cheat in CHEATS},
}
_numbers = itertools.count()


async def tests_in_place(ctx: ToolContext, left: Mapping[str, str], python: str) -> bool:
    await ctx.write_file(TEST_PATH, TESTS)
    done = await ctx.terminal(f"{python} -m pytest -q {TEST_PATH}", timeout=TIMEOUT)
    return bool(done["exit_code"] == 0)


async def sealed_and_read(ctx: ToolContext, left: Mapping[str, str], python: str) -> bool:
    verifier = await ctx.seal(left)
    await verifier.write_file(TEST_PATH, TESTS)
    done = await verifier.terminal(f"{python} -m pytest -q {TEST_PATH}", timeout=TIMEOUT)
    return f"{len(IDS)} passed" in done["output"]


async def judged(ctx: ToolContext, left: Mapping[str, str], python: str) -> bool:
    found = await ctx.judge_pytest(left, {TEST_PATH: TESTS}, expect=IDS, python=python, timeout=TIMEOUT)
    return found.passed


async def programs(ctx: ToolContext, left: Mapping[str, str], python: str) -> bool:
    verifier = await ctx.seal(left)
    for arguments, expected in CASES.items():
        done = await verifier.terminal(f"{python} shop.py {arguments}", timeout=TIMEOUT)
        if done["output"] != f"{expected}\n":
            return False
    return True


Judge = Callable[[ToolContext, Mapping[str, str], str], Awaitable[bool]]
JUDGES: Mapping[str, Judge] = {
    "tests in place": tests_in_place,
    '`seal`, "N passed"': sealed_and_read,
    "`judge_pytest`": judged,
    "programs": programs,
}


async def scored(sessions: ToolSessions, agent: str, judge: Judge, python: str = PYTHON) -> bool:
    """Whether a judge takes what an agent left for a solution."""
    name = f"tamper-{next(_numbers)}"
    session = sessions.open(name)
    ctx = ToolContext(session, BUILTIN_TOOLS, open_verifier=lambda: sessions.open(f"{name}-verifier"))
    try:
        for path, text in AGENTS[agent].items():
            await ctx.write_file(path, text)
        return await judge(ctx, AGENTS[agent], python)
    finally:
        await asyncio.gather(sessions.close(name), sessions.close(f"{name}-verifier"))


async def table(
    sessions: ToolSessions, agents: Any, judges: Mapping[str, Judge], at_once: int = 4
) -> dict[str, set[str]]:
    """By judge, the agents that it takes for honest."""
    room = asyncio.Semaphore(at_once)

    async def one(agent: str, name: str) -> tuple[str, str, bool]:
        async with room:
            return agent, name, await scored(sessions, agent, judges[name])

    found = await asyncio.gather(*(one(agent, name) for agent in agents for name in judges))
    return {name: {agent for agent, by, passed in found if by == name and passed} for name in judges}
