"""A server of ors-sdk with one environment: guess the number. Runs in the interpreter that has ors-sdk."""

import sys

from ors import Environment, Server, TextBlock, ToolOutput, tool
from pydantic import BaseModel


class Guess(BaseModel):
    number: int


class Numbers(Environment):
    @classmethod
    def list_splits(cls):
        return ["train"]

    @classmethod
    def list_tasks(cls, split):
        return [{"secret": number} for number in (3, 7)]

    def get_prompt(self):
        return [TextBlock(text="Guess a number from 1 to 9.")]

    @tool
    async def guess(self, params: Guess) -> ToolOutput:
        """Guess."""
        secret = self.task_spec["secret"]
        if params.number == 13:
            raise RuntimeError("the environment fell over")
        right = params.number == secret
        text = "right" if right else "higher" if params.number < secret else "lower"
        return ToolOutput(blocks=[TextBlock(text=text)], reward=1.0 if right else -0.25, finished=right)


Server([Numbers]).run(host="127.0.0.1", port=int(sys.argv[1]))
