"""The same with openenv's own client: openenv_client.py URL ENVIRONMENT CALLS."""

import asyncio
import json
import sys

from openenv.core.generic_client import GenericEnvClient


async def main(url, calls):
    async with GenericEnvClient(base_url=url) as env:
        first = await env.reset(seed=0)
        listed = await env.step({"type": "list_tools"})
        steps = [await env.step({"type": "call_tool", "tool_name": tool, "arguments": given}) for tool, given in calls]
        assert (await env.state())["step_count"] == len(calls)
    print(
        json.dumps(
            {
                "prompt": first.observation["prompt"],
                "tools": [tool["name"] for tool in listed.observation["tools"]],
                "rewards": [step.reward for step in steps],
                "finished": [step.done for step in steps],
                "last": steps[-1].observation["result"],
            }
        )
    )


asyncio.run(main(sys.argv[1], json.loads(sys.argv[3])))
