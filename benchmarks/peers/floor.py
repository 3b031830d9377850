"""The conversation by aiohttp and orjson alone: no agent, no record, no file.

python -m benchmarks.peers.floor URL ROLLOUTS AT_ONCE
"""

from __future__ import annotations

import asyncio
import sys
from typing import Any

import aiohttp
import orjson

from benchmarks.peers.conversation import NOOP


async def main(url: str, rollouts: int, at_once: int) -> None:
    gate = asyncio.Semaphore(at_once)
    connector = aiohttp.TCPConnector(limit=at_once)
    async with aiohttp.ClientSession(connector=connector, headers={"Content-Type": "application/json"}) as session:

        async def play(number: int) -> None:
            messages: list[Any] = [{"role": "user", "content": f"What is the answer to question {number}?"}]
            async with gate:
                while True:
                    body = orjson.dumps({"model": "instant", "messages": messages, "tools": [NOOP]})
                    async with session.post(f"{url}/chat/completions", data=body) as response:
                        message = orjson.loads(await response.read())["choices"][0]["message"]
                    messages.append(message)
                    if not message.get("tool_calls"):
                        return
                    messages += [
                        {"role": "tool", "tool_call_id": call["id"], "content": "done"}
                        for call in message["tool_calls"]
                    ]

        await asyncio.gather(*(play(number) for number in range(rollouts)))


if __name__ == "__main__":
    asyncio.run(main(sys.argv[1], int(sys.argv[2]), int(sys.argv[3])))
