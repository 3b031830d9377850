"""The files and the set-up of an item on every backend, as the agent's tools find them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from backends import Backend
from lachesis.rewards.scorer import Scorer, SetUpFailed
from lachesis_tools import BUILTIN_TOOLS, ToolSessions, call_tool
from tests.support.docker_engine import AGENT_IMAGE, FULL_IMAGE, DockerEngine
from tests.support.recipes import played


async def test_files_and_set_up_are_in_the_workspace_and_a_path_out_of_it_is_refused(
    backend: Backend, tmp_path: Path
) -> None:
    (tmp_path / "tree" / "deep").mkdir(parents=True)
    (tmp_path / "tree" / "deep" / "tool.sh").write_text("cat words.txt\n")
    (tmp_path / "tree" / "deep" / "tool.sh").chmod(0o755)

    def files(item: Any) -> Any:
        return {"words.txt": "pear fig\n", "raw.bin": b"\x00\xff", "tree": tmp_path / "tree", **item}

    async def set_up(item: Any, ctx: Any) -> None:
        await ctx.terminal("test $(wc -c < raw.bin) = 2 && sh tree/deep/tool.sh > copy.txt", check=True)

    scorer = Scorer("env", None, sandbox_files=files, setup_sandbox=set_up)
    async with ToolSessions(backend) as sessions:
        session = sessions.open("task")
        await scorer.set_up({}, session, BUILTIN_TOOLS)
        found = await call_tool("terminal", {"command": "cat copy.txt && test -x tree/deep/tool.sh"}, session)
        assert "pear fig" in found.content and found.error is None
        for path in ("../out.txt", "~/out.txt", "/etc/out.txt"):
            with pytest.raises(SetUpFailed, match=r"outside the workspace .*write it in setup_sandbox"):
                await scorer.set_up({path: "x"}, sessions.open(path), BUILTIN_TOOLS)


async def test_the_recipe_with_an_image_for_each_item_plays_on_docker(docker: DockerEngine, tmp_path: Path) -> None:
    images = {"python:3.11-slim": FULL_IMAGE, "python:3.13-slim": AGENT_IMAGE}
    found = await played("versions.py", tmp_path, images, terminal_options=docker.options, total_steps=2)
    assert [rollout["reward"] for rollout in found] == [1.0, 1.0]
