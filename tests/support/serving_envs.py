"""Environments to try `serve` with, as users run them: `python -m tests.support.serving_envs NAME serve ...`."""

from __future__ import annotations

import random
import sys
from typing import Any

from lachesis.base_env import HermesAgentBaseEnv
from tests.support.small_envs import ManyWords


class Coins(ManyWords):
    """Rewards that differ within a group, whatever the answer."""

    name = "coins"

    async def compute_reward(self, item: Any, result: Any, ctx: Any) -> float:
        return random.random()


class Raising(Coins):
    """A reward with a mistake in it."""

    name = "raising"

    async def compute_reward(self, item: Any, result: Any, ctx: Any) -> float:
        raise KeyError("answer")


class Counted(Coins):
    """As many items as `dataset_name` says, each once."""

    name = "counted"

    async def setup(self) -> None:
        self.items = iter([f"b{number} a{number}" for number in range(int(self.config.dataset_name or 6))])

    async def get_next_item(self) -> Any:
        return next(self.items, None)


ENVIRONMENTS: dict[str, type[HermesAgentBaseEnv]] = {
    env.name: env for env in (Coins, Raising, Counted) if env.name is not None
}

if __name__ == "__main__":
    ENVIRONMENTS[sys.argv.pop(1)].cli()
