"""Create a file with given content: the smallest environment whose reward inspects the sandbox."""

from __future__ import annotations

import itertools
import json
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from lachesis import HermesAgentBaseEnv
from lachesis_messages.messages import Message, ToolCall

if TYPE_CHECKING:
    from lachesis import AgentResult, Policy

TRAIN_ITEMS = (
    {"path": "greeting.txt", "content": "Hello from the sandbox"},
    {"path": "numbers.txt", "content": "\n".join(str(number) for number in range(1, 11))},
    {"path": "notes/today.md", "content": "# Today\n\n- measure\n- cut"},
)
EVAL_ITEMS = (
    {"path": "answer.txt", "content": "42"},
    {"path": "data/colours.csv", "content": "name,hex\nred,#ff0000\ngreen,#00ff00"},
)


class TerminalTestEnv(HermesAgentBaseEnv):
    """Create a file with exact content: 1.0 for the content, 0.5 when the file merely contains it, else 0.0."""

    name = "terminal-test"
    toolsets = ("terminal", "file")
    max_turns = 10
    max_token_length = 512
    system_prompt = "You work in a Linux sandbox. Use the tools to do what is asked, then say that it is done."

    async def setup(self) -> None:
        self.items = itertools.cycle(TRAIN_ITEMS)

    async def get_next_item(self) -> Mapping[str, str]:
        return next(self.items)

    async def get_eval_items(self) -> list[Mapping[str, str]]:
        return list(EVAL_ITEMS)

    def format_prompt(self, item: Mapping[str, str]) -> str:
        return f"Create the file {item['path']} with exactly this content:\n\n{item['content']}"

    async def compute_reward(self, item: Mapping[str, str], result: AgentResult, ctx: Any) -> float:
        written = (await ctx.read_file(item["path"])).rstrip("\n")
        if written == item["content"]:
            return 1.0
        return 0.5 if item["content"] in written else 0.0

    def reference_policy(self) -> Policy:
        """Writes the file with one call of `write_file`."""
        items = {self.format_prompt(item): item for item in (*TRAIN_ITEMS, *EVAL_ITEMS)}

        def policy(messages: Sequence[Mapping[str, Any]], tools: Sequence[Mapping[str, Any]] | None) -> Message:
            if messages[-1]["role"] == "tool":
                return Message("assistant", "Done.")
            item = items[next(message["content"] for message in messages if message["role"] == "user")]
            arguments = json.dumps({"path": item["path"], "content": item["content"] + "\n"})
            return Message("assistant", tool_calls=(ToolCall("call_1", "write_file", arguments),))

        return policy
