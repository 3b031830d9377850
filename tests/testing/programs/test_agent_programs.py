"""The recipes of docs/agent-programs.md, each played with the program itself. `make test-programs` installs them."""

from __future__ import annotations

import asyncio
import json
import os
import re
import shlex
import subprocess
import sys
import time
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
import yaml
from rich.console import Console

from lachesis.settings.server_settings import ServerConfig
from lachesis_envs.terminal_test import TerminalTestEnv
from lachesis_testing.fake_server import Ask, FakeServer
from lachesis_testing.fake_server.policies import offered_tools
from lachesis_tokens.endpoint.agent_program import AgentProgramEnv
from lachesis_tokens.samples.verification import verify_records
from tests.support.small_envs import lines
from tests.support.training_runs import with_tokens

PAGE = Path(__file__).parents[3] / "docs" / "agent-programs.md"
PROGRAMS = Path(os.environ.get("LACHESIS_PROGRAMS", "/nonexistent"))
TASK = re.compile(
    r"Create the file (\S+) with exactly this content:\n\n(.*?)(?:\n\nYou can execute|<\|im_end\|>)", re.S
)

pytestmark = pytest.mark.skipif(not PROGRAMS.is_dir(), reason="LACHESIS_PROGRAMS names no folder: make test-programs")


class TerminalTasks(AgentProgramEnv, TerminalTestEnv):
    """The tasks of `TerminalTestEnv`, played by a program."""

    name = "terminal-tasks"

    async def compute_reward(self, item: Any, result: Any, ctx: Any) -> float:
        assert (await ctx.terminal("tail -n +2 /proc/net/route"))["output"] == "", "there is no network"
        return await super().compute_reward(item, result, ctx)


def recipe(name: str, folder: Path) -> dict[str, Any]:
    """The settings that the page shows under a heading, with its scripts written into `folder`."""
    text = PAGE.read_text(encoding="utf-8").partition(f"\n### {name}\n")[2].partition("\n### ")[0]
    blocks = dict(re.findall(r"^```(\w+)\n(.*?)^```", text, re.MULTILINE | re.DOTALL))
    settings = blocks["yaml"]
    if "py" in blocks:
        script = blocks["py"].splitlines()[0].removeprefix("# ")
        (folder / script).write_text(blocks["py"])
        settings = settings.replace(f"/srv/agents/{script}", str(folder / script))
    chosen: dict[str, Any] = yaml.safe_load(settings.replace("/srv/agents", str(PROGRAMS)))["env"]
    return chosen


def solves(ask: Ask) -> str:
    """A model that solves the tasks with whichever shell tool it is offered, then submits or says that it is done."""
    tools = {tool["function"]["name"]: tool["function"] for tool in offered_tools(ask.prompt)}
    task = TASK.search(ask.prompt)
    shell = next((name for name in ("bash", "Bash", "exec_command") if name in tools), None)
    if shell is None or task is None:
        return "Done."
    path, content = task.groups()
    if ask.turn == 0:
        folder = shlex.quote(str(Path(path).parent))
        command = f"mkdir -p {folder} && printf '%s\\n' {shlex.quote(content)} > {path}"
    elif "COMPLETE_TASK_AND_SUBMIT_FINAL_OUTPUT" in ask.prompt:
        command = "echo COMPLETE_TASK_AND_SUBMIT_FINAL_OUTPUT"
    else:
        return "Done."
    argument = "command" if "command" in tools[shell]["parameters"]["properties"] else "cmd"
    call = {"name": shell, "arguments": {argument: command}}
    return f"Next step.\n<tool_call>\n{json.dumps(call)}\n</tool_call>"


async def play(folder: Path, server: ServerConfig, recipe: dict[str, Any], **settings: Any) -> list[dict[str, Any]]:
    """The rollouts, after `lachesis verify` over the file that holds them."""
    groups = folder / "groups.jsonl"
    chosen = {"data_path_to_save_groups": str(groups), "max_infra_retries": 0, "max_num_workers": 1, **settings}
    env = TerminalTasks(TerminalTasks.env_config_cls(**recipe, **chosen), [server])
    env.console = Console(file=(folder / "console.txt").open("a"), width=200)
    begin = time.monotonic()
    await env.process_manager()
    seconds = time.monotonic() - begin
    verify = [sys.executable, "-m", "lachesis", "verify", str(groups)]
    assert (await asyncio.to_thread(subprocess.run, verify, check=False)).returncode == 0
    totals = verify_records([sample for group in lines(groups) for sample in group["samples"]])
    assert totals.delivered == totals.sampled > 0
    assert (totals.duplicated, totals.wrong_prefix, totals.undelivered, totals.lost) == (0, 0, 0, 0)
    rollouts = [rollout for group in lines(groups) for rollout in group["rollouts"]]
    rewards = [rollout["reward"] for rollout in rollouts]
    turns = sum(rollout["turns"] for rollout in rollouts)
    ends = dict(Counter(f"{rollout['outcome']}, exit code {rollout['program']['exit_code']}" for rollout in rollouts))
    print(f"{len(rollouts)} rollouts, {turns} turns, {seconds:.0f} s; rewards {Counter(rewards)}; {ends}; {totals}")
    return rollouts


@pytest.mark.parametrize("name", ["mini-swe-agent", "OpenAI Agents SDK", "Anthropic SDK", "Codex CLI", "Claude Code"])
async def test_a_program_solves_tasks_and_every_token_is_certified(name: str, tmp_path: Path) -> None:
    many = name == "mini-swe-agent"
    if not (PROGRAMS / "node").is_dir() and name in ("Codex CLI", "Claude Code"):
        pytest.skip("npm was not there to install it")
    async with FakeServer(solves, context_length=200_000) as model:
        server = with_tokens(model, tmp_path)
        settings = {"total_steps": 10 if many else 2, "group_size": 5 if many else 2}
        rollouts = await play(tmp_path, server, recipe(name, tmp_path), **settings)
        sampled = sum(len(made.ids) for seen in model.requests for made in seen.completions)
    assert len(rollouts) == settings["total_steps"] * settings["group_size"]
    assert {(rollout["outcome"], rollout["reward"]) for rollout in rollouts} == {("completed", 1.0)}
    samples = [sample for group in lines(tmp_path / "groups.jsonl") for sample in group["samples"]]
    assert sum(span["end"] - span["start"] for sample in samples for span in sample["spans"]) == sampled


async def test_mini_swe_agent_plays_with_the_embedded_model(tmp_path: Path) -> None:
    server = ServerConfig(model_name="embedded", engine="llama.cpp", parallel=2, context=8192)
    limits = {"max_agent_turns": 6, "max_token_length": 96, "rollout_timeout": 600.0}
    how_many = int(os.environ.get("LACHESIS_PROGRAM_GROUPS", "10"))
    rollouts = await play(
        tmp_path, server, recipe("mini-swe-agent", tmp_path), total_steps=how_many, group_size=5, **limits
    )
    assert len(rollouts) == 5 * how_many
    assert all(rollout["reward"] is not None for rollout in rollouts), "none was left out"
