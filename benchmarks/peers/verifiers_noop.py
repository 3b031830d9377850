"""The conversation as tasks of verifiers. One server has the tool for all rollouts."""

from __future__ import annotations

import itertools
from collections.abc import Iterator

import verifiers.v1 as vf


class Tools(vf.Toolset[vf.ToolsetConfig, vf.State]):
    @vf.tool
    async def noop(self, text: str) -> str:
        """Does nothing."""
        return "done"


class Question(vf.Task[vf.TaskData, vf.State, vf.TaskConfig]):
    @vf.reward
    async def right(self, trace: vf.Trace) -> float:
        return float("42" in trace.last_reply)


class NoopConfig(vf.TasksetConfig):
    tools: vf.ToolsetConfig = vf.ToolsetConfig()


class NoopTaskset(vf.Taskset[Question, NoopConfig]):
    INFINITE = True

    @classmethod
    def toolsets(cls, config: NoopConfig) -> list[vf.Toolset]:
        return [Tools(config.tools)]

    def load(self) -> Iterator[Question]:
        for number in itertools.count():
            prompt = f"What is the answer to question {number}?"
            yield Question(vf.TaskData(name=f"question {number}", prompt=prompt), self.config.task)


__all__ = ["NoopTaskset"]

if __name__ == "__main__":
    Tools.run()
