"""The controls of `benchmarks.train_demo`: the rewards of a batch, dealt out to its rollouts at random.

What a training with such rewards gains does not come from the rewards. It is here, and no setting of the project, so
that nobody trains with it by accident.
"""

from __future__ import annotations

import asyncio
import random
from collections.abc import Sequence
from typing import Any

from lachesis import AgentResult
from lachesis_envs.maze import MazeEnv
from lachesis_envs.tool_call import ToolCallEnv, ToolResultEnv

LONGEST_WAIT = 30.0
"""Seconds that a group waits for the others of its batch; what is there then is a batch."""


class ShuffledRewards:
    """Beside an environment: rollouts earn the rewards of others. Those of a batch are permuted, by `dataset_seed`."""

    config: Any

    async def setup(self) -> None:
        await super().setup()  # type: ignore[misc]
        self._random = random.Random(self.config.dataset_seed)
        self._batch: list[tuple[list[float], asyncio.Future[list[float]]]] = []

    async def compute_group_reward(self, item: Any, results: Sequence[AgentResult], ctxs: Any) -> list[float]:
        """The group's share of the permuted rewards, once the groups of a batch are there."""
        earned = [result.reward.value for result in results if result.reward is not None]
        if self.config.group_size == 1:
            return earned  # examples of a warm start: no batch comes together, and nothing is compared
        own: asyncio.Future[list[float]] = asyncio.get_running_loop().create_future()
        self._batch.append((earned, own))
        if sum(len(rewards) for rewards, _ in self._batch) >= self.config.batch_size:
            self._deal()
        try:
            return await asyncio.wait_for(asyncio.shield(own), LONGEST_WAIT)
        except TimeoutError:
            self._deal()
            return await own

    def _deal(self) -> None:
        batch, self._batch = self._batch, []
        dealt = [reward for rewards, _ in batch for reward in rewards]
        self._random.shuffle(dealt)
        for rewards, own in batch:
            own.set_result([dealt.pop() for _ in rewards])


class ShuffledToolCallEnv(ShuffledRewards, ToolCallEnv):  # type: ignore[misc]
    """`ToolCallEnv` with permuted rewards."""


class ShuffledToolResultEnv(ShuffledRewards, ToolResultEnv):  # type: ignore[misc]
    """`ToolResultEnv` with permuted rewards."""


class ShuffledMazeEnv(ShuffledRewards, MazeEnv):  # type: ignore[misc]
    """`MazeEnv` with permuted rewards."""
