"""Plays one task with the MCP SDK: mcp_client.py URL CALLS, in the interpreter that has it. Prints JSON."""

import asyncio
import json
import sys

from mcp import ClientSession
from mcp.client.streamable_http import streamablehttp_client


async def main(url, calls):
    async with streamablehttp_client(url) as (reads, writes, _), ClientSession(reads, writes) as session:
        begun = await session.initialize()
        tools = await session.list_tools()
        steps = [await session.call_tool(tool, given) for tool, given in calls]
        resources = await session.list_resources()
        reward = await session.read_resource("lachesis://reward")
    said = {
        "prompt": begun.instructions,
        "tools": [tool.name for tool in tools.tools],
        "rewards": [(step.meta or {}).get("lachesis/reward") for step in steps],
        "finished": [(step.meta or {}).get("lachesis/done", False) for step in steps],
        "last": steps[-1].content[0].text,
        "resources": [str(each.uri) for each in resources.resources],
        "reward": json.loads(reward.contents[0].text)["reward"],
    }
    print(json.dumps(said))


asyncio.run(main(sys.argv[1], json.loads(sys.argv[2])))
