"""A taskset of verifiers: the model looks prices up with a tool, and answers with a sum."""

from __future__ import annotations

from collections.abc import Iterator

import verifiers.v1 as vf
from pydantic import Field
from verifiers.v1.errors import SandboxError

PRICES = {"pear": 3, "fig": 5, "apple": 2, "plum": 4}


class PriceData(vf.TaskData):
    answer: str


class Asked(vf.State):
    """What the tool server and the task share in one rollout."""

    fruits: list[str] = Field(default_factory=list)


class Prices(vf.Toolset[vf.ToolsetConfig, Asked]):
    TOOL_PREFIX = "shop"

    @vf.tool
    async def price(self, fruit: str) -> int:
        """The price of one fruit, by its name in the singular."""
        self.state.fruits.append(fruit)
        return PRICES[fruit]


class PriceTaskConfig(vf.TaskConfig):
    broken: str = ""
    """A part that fails."""
    tools: vf.ToolsetConfig = vf.ToolsetConfig()
    with_tools: bool = True
    enough: int = 0
    """Prices after which the rollout ends."""


class PriceTask(vf.Task[PriceData, Asked, PriceTaskConfig]):
    @classmethod
    def toolsets(cls, config: PriceTaskConfig) -> list[vf.Toolset]:
        return [Prices(config.tools)] if config.with_tools else []

    async def setup(self, trace: vf.Trace) -> None:
        if self.config.broken == "setup":
            raise ValueError("the row cannot be read")
        if self.config.broken == "sandbox":
            raise SandboxError("no sandbox could be made")

    @vf.stop
    async def asked_enough(self, trace: vf.Trace) -> bool:
        return 0 < self.config.enough <= len(trace.state.fruits)

    @vf.reward
    async def right(self, trace: vf.Trace) -> float:
        if self.config.broken == "reward":
            raise RuntimeError("the reward is out of order")
        return float(trace.last_reply.strip() == self.data.answer)

    @vf.reward(weight=0.5)
    async def short(self, trace: vf.Trace) -> float:
        return float(len(trace.last_reply.strip()) < 10)

    @vf.metric
    async def lookups(self, trace: vf.Trace) -> float:
        return float(len(trace.state.fruits))


class PriceConfig(vf.TasksetConfig):
    count: int = 12
    task: PriceTaskConfig = PriceTaskConfig()


class PriceTaskset(vf.Taskset[PriceTask, PriceConfig]):
    def load(self) -> Iterator[PriceTask]:
        fruits = sorted(PRICES)
        for number in range(self.config.count):
            one, other = fruits[number % 4], fruits[(number // 4 + number + 1) % 4]
            prompt = f"What do {number + 1} x {one} and 2 x {other} cost together? Answer with the number only."
            answer = str((number + 1) * PRICES[one] + 2 * PRICES[other])
            data = PriceData(name=f"sum {number}", prompt=prompt, system_prompt="Use the tool.", answer=answer)
            yield PriceTask(data, self.config.task)


__all__ = ["PriceTaskset"]

if __name__ == "__main__":
    Prices.run()
