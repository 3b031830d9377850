"""Several environments at one rollout API: each has its share of the sequences, whatever the others do."""

from __future__ import annotations

import itertools
import random
from collections import Counter
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from lachesis_train.api import ApiSettings, RolloutApiServer
from lachesis_train.api.dispatcher import MOST_PASSED, Dispatcher
from lachesis_train.api.state import ApiState, Group, PendingBatch, RegisteredEnv
from lachesis_train.rollout_api import TrainerRegistration
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


@pytest.mark.sample(2)
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


class Queue:
    """A dispatcher whose groups are facts without contents, and its trainer."""

    def __init__(self, batch_size: int, shares: Sequence[float]) -> None:
        self.trainer = TrainerRegistration("", "", batch_size, 40, "", 0, 0, acknowledges=True)
        self.state = ApiState(begun=True)
        self.dispatcher = Dispatcher(self, ApiSettings(Path(), pack_wait=0.0), Counter())  # type: ignore[arg-type]
        self.sequences: Counter[int | None] = Counter()
        """That were trained, by environment."""
        for env_id, share in enumerate(shares):
            name = f"env-{env_id}"
            env = RegisteredEnv(
                desired_name=name,
                max_token_length=1,
                group_size=1,
                min_batch_allocation=share,
                env_id=env_id,
                real_name=name,
            )
            self.state.environments.append(env)
        self.dispatcher.restarted()

    def put(self, env_id: int, sequences: int) -> int:
        self.state.received += 1
        number = self.state.received
        self.state.waiting[number] = Group(sequences, env_id, number, None, 1, 1, None, (), 0.0)
        return number

    def fill(self, env_id: int, sequences: int, sizes: Callable[[], int]) -> None:
        while self.state.sequences_by_env()[env_id] < sequences:
            self.put(env_id, sizes())

    async def batch(self) -> bool:
        return await self.dispatcher.leased(self.trainer, "", None) is not None

    async def form(self, groups: Sequence[Group]) -> PendingBatch:
        for group in groups:
            self.sequences[group.env_id] += group.sequences
            del self.state.waiting[group.id]
        self.state.last_batch += 1
        return PendingBatch(self.state.last_batch, groups)

    async def hand_out(self, batch: PendingBatch, name: str) -> None:
        pass


@pytest.mark.parametrize(
    ("batch_size", "shares", "sizes"),
    [
        (32, (1 / 3, 2 / 3), [range(8, 13), range(8, 13)]),
        (32, (3 / 4, 1 / 4), [[4], [16]]),
        (32, (0.1, 0.9), [[16], [4]]),
        (32, (0.25, 0.75), [[20], [20]]),
        (16, (5 / 6, 1 / 6), [[11], [4]]),
        (33, (0.98, 0.02), [range(1, 31), range(1, 10)]),
        (64, (2 / 3, 1 / 3), [[29], [4]]),
        (32, (0.2, 0.8), [[12], [40]]),
        (32, (0.5, 0.5), [[8], [8, 8, 8, 8, 8, 40]]),
        (64, (0.2, 0.3, 0.5), [[16], range(1, 30), range(8, 13)]),
        (64, (0.02, 0.97, 0.01), [range(8, 13)] * 3),
    ],
)
async def test_shares_hold_for_groups_that_fill_no_batch_exactly(
    batch_size: int, shares: Sequence[float], sizes: Sequence[Sequence[int]]
) -> None:
    """All queues but that of the last environment are always full."""
    draw = random.Random(0)
    queue = Queue(batch_size, shares)
    for number in range(1, 201):
        for env_id, of in enumerate(sizes):
            queue.fill(env_id, batch_size * (1 if env_id == len(shares) - 1 else 3), partial(draw.choice, of))
        assert await queue.batch(), f"batch {number} waits for groups that no environment plays"
        for env_id, share in enumerate(shares):
            behind = share * queue.sequences.total() - queue.sequences[env_id]
            assert abs(behind) <= 2 * max(map(max, sizes)), (number, env_id)


@pytest.mark.parametrize(("batch_size", "size"), [(32, 8), (32, 40), (33, 8), (33, 40)])
@pytest.mark.parametrize("shares", [(0.5, 0.5), (0.5, 0.5, 0.0)])
async def test_shares_that_ask_for_each_batch_starve_no_group(
    shares: Sequence[float], batch_size: int, size: int
) -> None:
    """A group of an environment without a share, or one that is too large for a batch while others fit."""
    queue = Queue(batch_size, shares)
    one, another = queue.put(len(shares) - 1, size), queue.put(len(shares) - 1, size)
    gone: dict[int, int] = {}
    for number in range(1, 2 * (MOST_PASSED + 1) + 1):
        for env_id in range(2):
            queue.fill(env_id, 2 * batch_size, lambda: 8)
        assert await queue.batch()
        gone |= {group: number for group in (one, another) if group not in queue.state.waiting and group not in gone}
    assert gone[one] <= MOST_PASSED + 1
    assert gone[another] <= 2 * (MOST_PASSED + 1)


async def test_what_shares_leave_is_for_groups_without_one() -> None:
    """Groups that never fit beside the share of the other environment, half of each batch."""
    queue = Queue(32, (0.5, 0.0))
    for _ in range(200):
        queue.fill(0, 64, lambda: 4)
        queue.fill(1, 64, lambda: 20)
        assert await queue.batch()
    assert 0.3 < queue.sequences[1] / queue.sequences.total() < 0.5
