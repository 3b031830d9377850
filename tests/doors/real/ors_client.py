"""Plays one task with ors-sdk: ors_client.py URL ENVIRONMENT CALLS, in the interpreter that has it. Prints JSON."""

import asyncio
import json
import sys

from ors.client.environment import AsyncEnvironmentsAPI


async def main(url, name, calls):
    api = AsyncEnvironmentsAPI(url)
    env = api.get(name)
    assert await env.list_splits() and await env.num_tasks("train") > 0
    task = (await env.list_tasks("train"))[0]
    async with env.session(task=task) as session:
        prompt = await session.get_prompt()
        tools = await session.list_tools(format="openai")
        steps = [await session.call_tool(tool, given) for tool, given in calls]
    print(
        json.dumps(
            {
                "prompt": prompt[-1].text,
                "tools": [tool["name"] for tool in tools],
                "rewards": [step.reward for step in steps],
                "finished": [step.finished for step in steps],
                "last": steps[-1].blocks[0].text,
            }
        )
    )


asyncio.run(main(sys.argv[1], sys.argv[2], json.loads(sys.argv[3])))
