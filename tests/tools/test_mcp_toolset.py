"""MCP servers of rollouts, each in its sandbox, from the setting `mcp`."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from backends.errors import SettingsError
from lachesis_tools import ToolSessions, ToolsetError, call_tool
from lachesis_tools.mcp.client import McpLost
from lachesis_tools.mcp.toolset import mcp_tools
from lachesis_tools.tool_registry import ToolRegistry
from tests.support.scripted_server import call, say
from tests.support.small_envs import SortWords, lines, make, process, rollouts

SERVER = """
import json, sys
total, by = 0, {"type": "object", "properties": {"by": {"type": "integer"}}, "required": ["by"]}
for line in sys.stdin:
    asked = json.loads(line)
    if "id" not in asked:
        continue
    name, result = (asked.get("params") or {}).get("name"), {}
    if asked["method"] == "tools/list":
        result = {"tools": [{"name": each, "description": each, "inputSchema": by} for each in ("add", "fail.now")]}
    elif name == "add":
        total += asked["params"]["arguments"]["by"]
        result = {"content": [{"type": "text", "text": str(total)}]}
    elif name:
        result = {"content": [{"type": "text", "text": "the disk is full"}], "isError": True}
    print(json.dumps({"jsonrpc": "2.0", "id": asked["id"], "result": result}), flush=True)
"""
COMMAND = f"python3 -c 'exec(bytes.fromhex(\"{SERVER.encode().hex()}\"))'"


class Sums(SortWords):
    """The agent adds with a server."""

    name = "sums"
    toolsets = ("mcp", "terminal", "delegation")

    async def compute_reward(self, item: Any, result: Any, ctx: Any) -> float:
        return 1.0


def plays(*turns: Any) -> Any:
    def model(request: dict[str, Any]) -> Any:
        return turns[sum(message["role"] == "assistant" for message in request["messages"])]

    return model


async def played(folder: Path, *turns: Any, **settings: Any) -> Any:
    chosen = {"mcp": {"sums": COMMAND}, "enabled_toolsets": ["mcp", "terminal"], "total_steps": 1, **settings}
    return await process(Sums, folder, plays(*turns, say("Done.")), **chosen)


async def test_each_rollout_has_servers_of_its_own_and_a_failed_call_is_an_answer(tmp_path: Path) -> None:
    turns = (
        call(("sums__add", {"by": 3}), ("sums__add", {"by": 4})),
        call(("sums__fail_now", {"by": 0}), ("sums__add", {}), ("process", {"action": "list"})),
    )
    result = await played(tmp_path, *turns)
    (group,) = lines(result.files.groups)
    assert [tool["function"]["name"] for tool in json.loads(json.dumps(group["tools"]))][-2:] == [
        "sums__add",
        "sums__fail_now",
    ]
    for messages, rollout in zip(group["messages"], group["rollouts"], strict=True):
        said = [message["content"] for message in messages if message["role"] == "tool"]
        assert said[:3] == ["3", "7", '{"error": "the disk is full"}'] and said[-1] == '{"processes": []}'
        assert "by" in said[3] and (rollout["reward"], rollout["outcome"]) == (1.0, "completed")
        assert len(rollout["tool_errors"]) == 2


async def test_a_server_that_is_lost_in_a_rollout_is_the_infrastructures(tmp_path: Path) -> None:
    turns = (
        call(("sums__add", {"by": 3})),
        call(("terminal", {"command": "pkill -9 -f 'exec.bytes'; true"})),
        call(("sums__add", {"by": 4})),
    )
    result = await played(tmp_path, *turns, group_size=1, max_infra_retries=1)
    (rollout,) = rollouts(result.files.failures)
    assert (rollout["reward"], rollout["unscored_kind"], rollout["attempts"]) == (None, "infra_error", 2)
    assert rollout["reason"].startswith("the MCP server sums ended with 137")


@pytest.mark.parametrize(
    "content", ['{"type": "text"}', '{"type": "text", "text": None}', '{"type": "image", "data": "aGk="}', '"hi"']
)
async def test_an_answer_of_another_form_is_the_infrastructures(tmp_path: Path, content: str) -> None:
    other = SERVER.replace('{"type": "text", "text": str(total)}', content)
    command = f"python3 -c 'exec(bytes.fromhex(\"{other.encode().hex()}\"))'"
    turn = call(("sums__add", {"by": 3}))
    result = await played(tmp_path, turn, group_size=1, max_infra_retries=0, mcp={"sums": command})
    (rollout,) = rollouts(result.files.failures)
    assert (rollout["reward"], rollout["unscored_kind"]) == (None, "infra_error")
    assert rollout["reason"].startswith("the MCP server sums answered tools/call in another form than the protocol's")


@pytest.mark.parametrize("listed", ['"tools"', "[5]", '[{"nome": "add"}]', '[{"name": "add", "inputSchema": 5}]', "5"])
async def test_a_list_of_tools_of_another_form_names_its_server(sessions: ToolSessions, listed: str) -> None:
    source = f"""
import json, sys
for line in sys.stdin:
    asked = json.loads(line)
    if "id" in asked:
        print(json.dumps({{"jsonrpc": "2.0", "id": asked["id"], "result": {{"tools": {listed}}}}}), flush=True)
"""
    with pytest.raises(McpLost, match="the MCP server odd answered tools/list in another form"):
        await mcp_tools({"odd": f"python3 -c 'exec(bytes.fromhex(\"{source.encode().hex()}\"))'"}, sessions)


@pytest.mark.parametrize(
    ("servers", "error", "said"),
    [
        ({"sums": "python3 -c 'exit(\"no licence\")'"}, McpLost, r"ended with 1: no licence\. Next step: correct its"),
        ({"a__b": COMMAND}, SettingsError, "rename the server 'a__b'"),
        ({"a_": COMMAND}, SettingsError, "rename the server 'a_'"),
    ],
)
async def test_a_server_that_cannot_be_used_is_named_before_the_first_rollout(
    tmp_path: Path, servers: Any, error: type[Exception], said: str
) -> None:
    with pytest.raises(error, match=said):
        await played(tmp_path, mcp=servers)


def test_the_toolset_without_servers_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(ToolsetError, match=r"name servers with --env\.mcp"):
        make(Sums, None, tmp_path, enabled_toolsets=["mcp"])


async def test_two_sessions_share_no_server_and_closing_one_ends_its_own(sessions: ToolSessions) -> None:
    tools = ToolRegistry(await mcp_tools({"a": COMMAND, "b": COMMAND}, sessions))
    assert [*tools] == ["a__add", "a__fail_now", "b__add", "b__fail_now"] and len(sessions) == 0
    one, other = sessions.open("one"), sessions.open("other")

    async def add(session: Any, tool: str) -> str:
        return (await call_tool(tool, {"by": 1}, session, registry=tools)).content

    assert [await add(one, "a__add"), await add(one, "a__add"), await add(one, "b__add")] == ["1", "2", "1"]
    assert await add(other, "a__add") == "1"
    await sessions.close("one")
    assert await add(other, "a__add") == "2"
