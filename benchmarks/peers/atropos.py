"""The conversation as an environment of atroposlib, whose `process` plays one group after the other."""

from __future__ import annotations

import itertools
from typing import Any

from atroposlib.envs.base import BaseEnv, BaseEnvConfig
from atroposlib.envs.server_handling.server_baseline import APIServerConfig

from benchmarks.peers.conversation import NOOP


class Noop(BaseEnv):  # type: ignore[misc]
    name = "noop"

    @classmethod
    def config_init(cls) -> tuple[BaseEnvConfig, list[APIServerConfig]]:
        return BaseEnvConfig(), [APIServerConfig(model_name="instant")]

    async def setup(self) -> None:
        self.items = itertools.count()

    async def get_next_item(self) -> Any:
        return [{"role": "user", "content": f"What is the answer to question {next(self.items)}?"}]

    async def evaluate(self, *args: Any, **kwargs: Any) -> None: ...

    async def collect_trajectory(self, item: Any) -> tuple[dict[str, Any], list[Any]]:
        messages = [dict(message) for message in item]
        while True:
            completion = await self.server.chat_completion(messages=messages, tools=[NOOP], n=1)
            message = completion.choices[0].message
            calls = [call.model_dump() for call in message.tool_calls or []]
            messages.append({"role": "assistant", "content": message.content, "tool_calls": calls or None})
            if not calls:
                break
            messages += [{"role": "tool", "tool_call_id": call["id"], "content": "done"} for call in calls]
        scored = float("42" in message.content)
        return {"tokens": [1], "masks": [1], "scores": scored, "messages": messages}, []


if __name__ == "__main__":
    Noop.cli()
