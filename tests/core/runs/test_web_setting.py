"""The setting `web`: tools for the agent and the reward, and what a run says where it is missing."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from aiohttp import web

from backends.errors import SettingsError
from lachesis_tools.toolsets import ToolsetError
from tests.support.scripted_server import call, say
from tests.support.small_envs import SortWords, lines, make, process

TOOLS = {"web_search", "web_extract"}


class Asks(SortWords):
    """The agent searches, and so does the reward."""

    name = "asks"
    needs_sandboxes = False

    async def compute_reward(self, item: Any, result: Any, ctx: Any) -> float:
        searched = await ctx.web_search("salt", limit=1)
        read = await ctx.web_extract(["u"])
        assert [row["url"] for row in searched["data"]["web"]] == ["u"] and read["results"][0]["content"] == "white"
        return 1.0


def searches(request: dict[str, Any]) -> Any:
    if request["messages"][-1]["role"] == "tool":
        return say("Done.")
    return call(("web_search", {"query": "salt"}))


def results(folder: Path) -> list[str]:
    """What the tools said in the first rollout."""
    messages = lines(folder / "groups.jsonl")[0]["messages"][0]
    return [each["content"] for each in messages if each["role"] == "tool"]


def names(env: Any) -> set[str]:
    return {each["function"]["name"] for each in env.tool_definitions()}


@pytest.fixture
def corpus(tmp_path: Path) -> str:
    (tmp_path / "pages.jsonl").write_text(json.dumps({"url": "u", "title": "Salt", "text": "white"}))
    return f"corpus:{tmp_path / 'pages.jsonl'}"


async def test_agents_and_rewards_search_the_corpus(tmp_path: Path, corpus: str) -> None:
    result = await process(Asks, tmp_path, searches, web=corpus, enabled_toolsets=["web"])
    assert result.summary.reward.mean == 1.0
    row = {"url": "u", "title": "Salt", "description": "white", "position": 1}
    assert json.loads(results(tmp_path)[0])["data"]["web"] == [row]


async def test_without_the_setting_nothing_is_offered_or_said(tmp_path: Path) -> None:
    result = await process(SortWords, tmp_path, enabled_toolsets=None)
    assert result.summary.reward.mean == 1.0 and "web" not in (tmp_path / "console.txt").read_text()
    env = make(SortWords, None, tmp_path, enabled_toolsets=None)
    assert not TOOLS & names(env)


async def test_the_toolset_without_the_setting_is_an_error_or_left_out_with_advice(tmp_path: Path) -> None:
    with pytest.raises(ToolsetError, match=r"none of the toolsets web has tools here.*--env.web, for example corpus:"):
        make(SortWords, None, tmp_path, enabled_toolsets=["web"]).tool_definitions()
    with pytest.raises(ToolsetError, match=r"'web_search' has no tools here.*--env.web"):
        make(SortWords, None, tmp_path, enabled_toolsets=["file", "web_search"]).tool_definitions()
    await process(SortWords, tmp_path, enabled_toolsets=["file", "web"])
    assert "no tools here: web; web tools need a provider of pages: --env.web" in (
        (tmp_path / "console.txt").read_text()
    )


def test_distributions_draw_it_where_it_is_available(tmp_path: Path, corpus: str) -> None:
    with_web = make(SortWords, None, tmp_path, web=corpus, distribution="terminal_web", enabled_toolsets=None)
    assert with_web.group_tools("key")[0] == ["terminal", "file", "web"] and names(with_web) >= TOOLS
    without = make(SortWords, None, tmp_path, distribution="terminal_web", enabled_toolsets=None)
    assert without.group_tools("key")[0] == ["terminal", "file"]


def test_a_setting_that_cannot_work_is_an_error_at_once(tmp_path: Path) -> None:
    with pytest.raises(SettingsError, match="/no/where does not exist"):
        make(SortWords, None, tmp_path, web="corpus:/no/where")


async def test_a_server_that_is_down_costs_no_score_and_its_answers_can_be_replayed(tmp_path: Path) -> None:
    async def search(request: web.Request) -> web.Response:
        return web.json_response({"results": [{"url": "http://x", "title": "T", "content": "salt"}]})

    class Searches(SortWords):
        name = "searches"
        needs_sandboxes = False

        async def compute_reward(self, item: Any, result: Any, ctx: Any) -> float:
            return 1.0

    app = web.Application()
    app.router.add_get("/search", search)
    runner = web.AppRunner(app)
    await runner.setup()
    await web.TCPSite(runner, "127.0.0.1", 0).start()
    settings = {"enabled_toolsets": ["search"], "total_steps": 1, "group_size": 1}
    url = f"searxng:http://127.0.0.1:{runner.addresses[0][1]}"

    for folder in ("live", "replay", "down"):
        (tmp_path / folder).mkdir()
    try:
        live = await process(Searches, tmp_path / "live", searches, web=url, **settings)
    finally:
        await runner.cleanup()
    record = tmp_path / "live" / "groups.web.jsonl"
    replayed = await process(Searches, tmp_path / "replay", searches, web=f"replay:{record}", **settings)
    assert live.summary.reward.mean == replayed.summary.reward.mean == 1.0
    assert results(tmp_path / "live") == results(tmp_path / "replay") and "http://x" in results(tmp_path / "live")[0]
    record.write_text("")
    down = await process(Searches, tmp_path / "down", searches, web=f"replay:{record}", **settings)
    assert down.summary.scored == 0 and down.summary.outcomes == {"infra_error": 1}
