"""Whichever instant the rollout API is killed at, each group is in exactly one batch; `serve` and trainers go on."""

from __future__ import annotations

import asyncio
import random
import signal
import subprocess
import sys
from pathlib import Path

import aiohttp
import pytest

from lachesis.runs.decisions import Kept
from lachesis_testing.fake_server import fake_tokenizer
from lachesis_train.api import ApiSettings, RolloutApiServer
from tests.support.fake_serving import GROUP_SIZE, LENGTH, make_run, number_of, payload
from tests.support.own_api import AcknowledgingTrainer, OwnApi
from tests.support.stock_run_api import LIVENESS, Trainer


async def train(trainer: Trainer, groups: int, draw: random.Random) -> None:
    """Take batches until there are this many groups. One that acknowledges has checkpoints, and dies now and then."""
    saved = 0
    while len(trainer.groups) < groups:
        try:
            if not await trainer.poll():
                await asyncio.sleep(0.02)
            elif not isinstance(trainer, AcknowledgingTrainer) and trainer.batches[-2:-1] == trainer.batches[-1:]:
                trainer.batches.pop()  # one that cannot acknowledge may get a whole batch twice, one after the other
            if isinstance(trainer, AcknowledgingTrainer):
                if len(trainer.batches) - saved > 4:
                    await trainer.acknowledge(len(trainer.batches))
                    saved = len(trainer.batches)
                elif draw.random() < 0.1:
                    trainer.go_back(saved)
                    await trainer.register()
        except (aiohttp.ClientError, OSError):
            await asyncio.sleep(0.02)


@pytest.mark.parametrize("kills", [1, pytest.param(20, marks=pytest.mark.long)])
@pytest.mark.parametrize("kind", [AcknowledgingTrainer, Trainer])
async def test_kills_at_random_instants_lose_and_double_nothing(
    tmp_path: Path, kind: type[Trainer], kills: int
) -> None:
    draw = random.Random(random.getrandbits(32))
    groups = 30 + 12 * kills
    async with asyncio.timeout(LIVENESS), OwnApi(tmp_path) as api:
        trainer = kind(api.url, batch_size=3 * GROUP_SIZE)
        await trainer.register()
        await trainer.poll()
        serving = asyncio.create_task(make_run(api.url, tmp_path, groups).serve())
        training = asyncio.create_task(train(trainer, groups, draw))
        for _ in range(kills):
            await asyncio.sleep(0.4 * draw.random())
            api.kill()
            await api.start()
        await training
        result = await serving
    assert sorted(map(number_of, trainer.groups)) == list(range(groups))
    assert (result.waiting, result.requeued) == (0, 0)


@pytest.mark.parametrize("when", ["before", "after"])
async def test_a_kill_of_serve_beside_a_post_loses_and_doubles_nothing(tmp_path: Path, when: str) -> None:
    async with RolloutApiServer(ApiSettings(tmp_path / "api.db", port=0)) as api:
        trainer = AcknowledgingTrainer(api.url, batch_size=3 * GROUP_SIZE)
        await trainer.register()
        await trainer.poll()
        command = [sys.executable, "-m", "tests.support.fake_serving", api.url, str(tmp_path), "12"]
        killed = await asyncio.create_subprocess_exec(*command, "--when", when, "--at", "4")
        training = asyncio.create_task(train(trainer, 12, random.Random(1)))
        assert await killed.wait() == -signal.SIGKILL
        result = await make_run(api.url, tmp_path, 12).serve()
        await training
    assert sorted(map(number_of, trainer.groups)) == list(range(12))
    assert result.requeued == 0


async def test_split_rollouts_are_served_whole_in_groups_of_any_size(tmp_path: Path) -> None:
    def build(number: int, info: object) -> Kept:
        return Kept(payload(number, group_size=2 + number % 4), tokens=LENGTH, rewards=[0.0, 1.0])

    async with OwnApi(tmp_path, "--pack-wait", "0.1") as api:
        trainer = AcknowledgingTrainer(api.url, batch_size=8)
        await trainer.register()
        await trainer.poll()
        run = make_run(api.url, tmp_path, 16, build=build, split_rollouts="all")
        serving = asyncio.create_task(run.serve())
        async with asyncio.timeout(LIVENESS):
            while sum(len(group["tokens"]) for group in trainer.groups) < 48:  # 8 of 56 may be left at the end
                if not await trainer.poll():
                    await asyncio.sleep(0.02)
            await serving
    assert all(sum(len(group["tokens"]) for group in batch) <= 8 for batch in trainer.batches)
    numbers = [number_of(group) for group in trainer.groups]
    assert len(set(numbers)) == len(numbers) >= 13


@pytest.mark.long
async def test_an_environment_on_atropos_own_base_class_serves_a_stock_trainer(tmp_path: Path) -> None:
    fake_tokenizer().save_pretrained(str(tmp_path / "tokenizer"))
    async with OwnApi(tmp_path) as api:
        trainer = Trainer(api.url, batch_size=2 * GROUP_SIZE, num_steps=9)
        await trainer.register()
        await trainer.poll()
        command = [sys.executable, "-m", "tests.support.stock_serving", api.url, str(tmp_path / "tokenizer")]
        environment = subprocess.Popen(command, stderr=subprocess.DEVNULL)  # noqa: ASYNC220
        try:
            await trainer.take(6)
        finally:
            environment.kill()
            environment.wait()
    assert [group["env_id"] for group in trainer.groups] == [0] * len(trainer.groups)
    numbers = sorted(map(number_of, trainer.groups))
    assert numbers == list(range(1, len(numbers) + 1))
