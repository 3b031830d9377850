"""Tasks of verifiers, without an end: the agent finds a number with a tool. One server has it for all rollouts."""

from __future__ import annotations

import itertools
from collections.abc import Iterator

import verifiers.v1 as vf


class Numbers(vf.Toolset[vf.ToolsetConfig, vf.State]):
    @vf.tool
    async def compare(self, number: int) -> str:
        """Compare a number with the one that is looked for."""
        return "higher" if number < 7 else "lower" if number > 7 else "right"


class Number(vf.Task[vf.TaskData, vf.State, vf.TaskConfig]):
    @vf.reward
    async def right(self, trace: vf.Trace) -> float:
        return float("7" in trace.last_reply)


class NumbersConfig(vf.TasksetConfig):
    tools: vf.ToolsetConfig = vf.ToolsetConfig()


class NumberTaskset(vf.Taskset[Number, NumbersConfig]):
    INFINITE = True

    @classmethod
    def toolsets(cls, config: NumbersConfig) -> list[vf.Toolset]:
        return [Numbers(config.tools)]

    def load(self) -> Iterator[Number]:
        for number in itertools.count():
            yield Number(vf.TaskData(name=f"number {number}", prompt="Which number is it?"), self.config.task)


__all__ = ["NumberTaskset"]

if __name__ == "__main__":
    Numbers.run()
