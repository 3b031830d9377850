"""What the cookbook and the pages for newcomers show is played: a reference policy earns everything."""

from __future__ import annotations

from pathlib import Path

import pytest

from lachesis_testing.fake_server import FakeServer, Scripted
from tests.support.recipes import RECIPES, played
from tests.support.small_envs import lines, sandboxes


@pytest.mark.parametrize("name", sorted(RECIPES.keys() - {"explain.py", "versions.py"}))
async def test_the_reference_policy_earns_everything(name: str, tmp_path: Path) -> None:
    (rollout,) = await played(name, tmp_path)
    assert (rollout["reward"], rollout["outcome"]) == (1.0, "completed")
    assert sandboxes() == set()
    if name == "guess_the_city.py":
        assert rollout["turns"] == 4, "Rome is the last of four"
    if name == "cheapest.py":
        assert rollout["tool_calls"] == 3, "the list of shops, then a price each"
    if name == "haiku.py":
        assert rollout["metrics"]["reward/characters"] == 35.0


async def test_the_judge_decides(tmp_path: Path) -> None:
    async with FakeServer(Scripted('{"correct": "partly", "for_children": true}')) as judge:
        server = {"base_url": judge.base_url, "model_name": "fake"}
        (rollout,) = await played("explain.py", tmp_path, judge_server=server)
    assert rollout["reward"] == 0.5


async def test_each_item_has_its_image(tmp_path: Path, python_image: Path) -> None:
    (python_image / "usr/local/bin").mkdir(parents=True, exist_ok=True)
    (python_image / "usr/local/bin/python3").write_text("#!/bin/sh\necho Python 9.9.9\n")
    (python_image / "usr/local/bin/python3").chmod(0o755)
    (rollout,) = await played(
        "versions.py", tmp_path, {"python:3.11-slim": str(python_image)}, terminal_backend="local"
    )
    assert rollout["reward"] == 1.0
    (group,) = lines(tmp_path / "groups.jsonl")
    assert group["messages"][0][-1]["content"] == "Python 9.9.9"
