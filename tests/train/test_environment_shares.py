"""Several environments at one rollout API: each has its share of the sequences, whatever the others do."""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest

from lachesis_train.api import ApiSettings, RolloutApiServer
from tests.support.fake_serving import payload
from tests.support.own_api import AcknowledgingTrainer

BATCH, GROUP = 32, 8


class Players:
    """Environments that post groups, and the trainer."""

    def __init__(self, api: RolloutApiServer) -> None:
        self.api = api
        self.trainer = AcknowledgingTrainer(api.url, batch_size=BATCH)
        self.numbers = itertools.count()
        self.sequences: Counter[int] = Counter()
        """That were trained, by environment."""

    async def register(self, name: str, share: float, group_size: int = GROUP) -> int:
        env = {"max_token_length": 40, "desired_name": name, "weight": 1.0, "group_size": group_size}
        answer = await self.trainer.ask("POST", "/register-env", {**env, "min_batch_allocation": share})
        return int(answer["env_id"])

    async def fill(self, env_id: int, groups: int, group_size: int = GROUP) -> None:
        """Until so many of its groups wait."""
        while len(self.api.state.waiting_of(env_id)) < groups:
            number = next(self.numbers)
            body = {**payload(number, group_size=group_size), "env_id": env_id}
            await self.trainer.ask("POST", "/scored_data", {**body, "group_overrides": {"group_id": str(number)}})

    async def batch(self) -> bool:
        if not await self.trainer.poll():
            return False
        for group in self.trainer.batches[-1]:
            self.sequences[group["env_id"]] += len(group["tokens"])
        return True


@asynccontextmanager
async def playing(folder: Path, **settings: Any) -> AsyncIterator[Players]:
    async with RolloutApiServer(ApiSettings(folder / "api.db", port=0, pack_wait=0.0, **settings)) as api:
        players = Players(api)
        await players.trainer.register()
        await players.trainer.poll()
        yield players


@pytest.mark.parametrize("weights", [(2, 1), (1, 2), (1, 1, 1), (5, 2, 1), (1, 1, 1, 1, 1), (30, 1, 1)])
async def test_shares_of_the_sequences_converge_to_the_weights(tmp_path: Path, weights: Sequence[int]) -> None:
    """The first environment always has a full queue, the others never have more than `serve` plays ahead for them."""
    shares = [weight / sum(weights) for weight in weights]
    async with playing(tmp_path) as players:
        ids = [await players.register(f"env-{at}", share) for at, share in enumerate(shares)]
        for number in range(1, 41):
            await players.fill(ids[0], 12)
            for env_id, share in zip(ids[1:], shares[1:], strict=True):
                await players.fill(env_id, -(-int(share * BATCH) // GROUP) or 1)
            assert await players.batch(), f"batch {number} waits for groups that no environment plays"
            for env_id, share in zip(ids, shares, strict=True):
                behind = share * number * BATCH - players.sequences[env_id]
                assert abs(behind) < 2 * GROUP, (number, env_id)


async def test_a_batch_waits_for_an_environment_that_has_a_share_and_not_for_one_that_has_left(tmp_path: Path) -> None:
    async with playing(tmp_path) as players:
        fast, slow = await players.register("fast", 0.5), await players.register("slow", 0.5)
        await players.fill(slow, 1)
        await players.fill(fast, 12)
        assert not await players.batch()
        await players.trainer.ask("POST", "/disconnect-env", {"env_id": slow})
        assert await players.batch() and await players.batch()
        assert players.sequences == {fast: 2 * BATCH - GROUP, slow: GROUP}, "what it had played is trained"


async def test_the_first_batch_waits_for_all_environments_that_are_to_come(tmp_path: Path) -> None:
    async with playing(tmp_path, environments=2) as players:
        killed, fast = await players.register("fast", 0.5), await players.register("fast", 0.5)
        await players.trainer.ask("POST", "/disconnect-env", {"env_id": killed})
        await players.fill(fast, 12)
        assert not await players.batch()
        slow = await players.register("slow", 0.5)
        await players.fill(slow, 2)
        assert await players.batch()
        assert players.sequences[slow] == BATCH // 2


async def test_the_first_batch_does_not_wait_for_ever(tmp_path: Path) -> None:
    async with playing(tmp_path, environments=2, silent_env=0.0) as players:
        await players.fill(await players.register("alone", 0.5), 12)
        assert await players.batch()


async def test_groups_of_an_environment_that_was_restarted_are_of_its_share(tmp_path: Path) -> None:
    async with playing(tmp_path) as players:
        other, killed = await players.register("other", 0.5), await players.register("killed", 0.5)
        await players.fill(killed, 2)
        again = await players.register("killed", 0.5)
        await players.trainer.ask("POST", "/disconnect-env", {"env_id": killed})
        await players.fill(again, 12)
        await players.fill(other, 12)
        assert await players.batch()
        assert players.sequences == {other: BATCH // 2, killed: BATCH // 2}, "the older ones go first"


async def test_groups_of_other_sizes_are_counted_in_sequences(tmp_path: Path) -> None:
    async with playing(tmp_path) as players:
        large, small = await players.register("large", 0.5, 16), await players.register("small", 0.5, 4)
        for number in range(1, 13):
            await players.fill(large, 4, 16)
            await players.fill(small, 8, 4)
            assert await players.batch()
            assert abs(players.sequences[large] - number * BATCH / 2) <= 16
