"""`serve` bounds the age of groups: no group waits for the trainer while others overtake it for ever."""

from __future__ import annotations

import asyncio
import io
import itertools
import random
import sqlite3
import sys
from collections import Counter
from collections.abc import Awaitable, Callable, Coroutine
from contextlib import closing
from typing import Any

import orjson
import pytest
from rich.console import Console

from lachesis.settings.server_settings import ServerConfig
from lachesis_testing.fake_server import FakeServer, RandomWords, fake_tokenizer
from lachesis_tokens.samples.group_shapes import samples_from_atropos
from lachesis_tokens.samples.verification import verify
from lachesis_train.serve_result import ServeResult
from tests.support.fake_serving import make_run, number_of, play
from tests.support.serving_envs import Counted
from tests.support.small_envs import ROOT
from tests.support.stock_run_api import StockRunApi, Trainer, run_api, until

__all__ = ["run_api"]

FAR = 14
"""Batches that the trainer takes while a slow item plays, if it is let."""
SMALL = {"group_size": 2, "max_token_length": 64, "max_agent_turns": 2, "total_steps": -1, "steps_per_eval": 0}


class AgeTrainer(Trainer):
    """Tells how old each group was when it was taken."""

    def ages(self) -> dict[int, int]:
        """Number of a group -> batches that came after its begin and before its own."""
        return {
            number_of(group): at - group["group_overrides"]["begin_step"]
            for at, batch in enumerate(self.batches)
            for group in batch
        }


async def started(server: StockRunApi, *, batch_size: int = 4) -> AgeTrainer:
    trainer = AgeTrainer(server.url, batch_size=batch_size)
    await trainer.register()
    await trainer.poll()
    return trainer


def slow_items(slow: set[int], condition: Callable[[], bool]) -> Callable[[dict[str, int], str], Awaitable[int]]:
    """The slow ones end when the condition holds."""

    async def play_item(item: dict[str, int], key: str) -> int:
        if item["number"] in slow:
            await until(condition)
        return await play(item, key)

    return play_item


async def test_a_slow_item_is_waited_for_when_it_reaches_the_cap(tmp_path, run_api):
    """One item of 45 s among others of 0.2 s came 61 steps after its begin."""
    async with run_api.wiped() as server:
        trainer = await started(server)

        def waits() -> bool:
            note: str = run.sink.standing(run).note
            return note.startswith("max_staleness: waiting for ")  # at the begin: a terminal cuts the end

        run = make_run(server.url, tmp_path, 24, play=slow_items({0, 9}, waits), max_staleness=2)
        await asyncio.gather(run.serve(), trainer.take(24))
        ages = trainer.ages()
        assert sorted(ages) == list(range(24)), "each item is trained, slow ones too"
        assert max(ages.values()) <= 2


async def taken_by(trainer: AgeTrainer, serving: Coroutine[Any, Any, ServeResult]) -> ServeResult:
    """The result of a run whose groups a trainer takes, however many these are."""
    task = asyncio.create_task(serving)
    while not task.done():
        if not await trainer.poll():
            await asyncio.wait([task], timeout=0.02)
    return task.result()


def refused(folder) -> list[dict]:
    return [orjson.loads(line) for line in (folder / "groups.refused.jsonl").read_bytes().splitlines()]


def table(result) -> dict[str, str]:
    return dict(result.rows())


async def test_a_group_that_is_too_old_is_ended_and_counted_if_that_is_set(tmp_path, run_api):
    async with run_api.wiped() as server:
        trainer = await started(server)
        play_item, cancelled = slow_items({0, 17}, lambda: False), []

        async def noted(item, key):
            try:
                return await play_item(item, key)
            except asyncio.CancelledError:
                cancelled.append(item["number"])
                raise

        run = make_run(server.url, tmp_path, 30, play=noted, max_staleness=2, when_stale="drop")
        result = await taken_by(trainer, run.serve())
        ages, dropped = trainer.ages(), refused(tmp_path)
        assert not {0, 17} & ages.keys()
        assert max(ages.values()) <= 2
        assert {0, 17} <= set(cancelled), "no time is lost on them"
        assert result.refused == {"too old": len(dropped)}, "on a busy machine also a quick group may become too old"
        assert all(line["reason"] == "too old" and "max_staleness is 2" in line["detail"] for line in dropped)
        assert result.sent + len(dropped) == 30
        assert f"too old {len(dropped)}" in table(result)["refused"]


async def test_the_item_of_a_group_that_is_too_old_is_played_again_anew_a_few_times(tmp_path, run_api):
    plays = Counter()
    async with run_api.wiped() as server:
        trainer = await started(server)

        async def slow_at_first(item, key):
            plays[item["number"]] += 1
            if item["number"] == 3 or (item["number"] == 0 and plays[0] == 1):
                await asyncio.sleep(3600)
            return await play(item, key)

        run = make_run(server.url, tmp_path, 25, play=slow_at_first, max_staleness=1, when_stale="replay")
        result = await taken_by(trainer, run.serve())
        assert 3 not in trainer.ages() and plays[3] == 3
        assert plays[0] > 1
        assert max(trainer.ages().values()) <= 1
        dropped = refused(tmp_path)
        assert result.refused == {"too old": len(dropped)}, "on a busy machine also a quick group may become too old"
        assert result.sent + len(dropped) == 25
        assert any(line["detail"].endswith("played 3 times") for line in dropped)
        again = [count - 1 for count in plays.values() if count > 1]
        assert table(result)["replayed for age"].startswith(f"{sum(again)} times, {len(again)} items; most often ")


async def test_a_group_that_is_too_old_is_sent_and_counted_if_that_is_set(tmp_path, run_api):
    async with run_api.wiped() as server:
        trainer = await started(server)
        play_item = slow_items({0}, lambda: trainer.steps >= FAR)
        run = make_run(server.url, tmp_path, 48, play=play_item, max_staleness=2, when_stale="mark", total_steps=24)
        result, _ = await asyncio.gather(run.serve(), trainer.take(48))
        assert trainer.ages()[0] >= FAR - 2
        unseen = Counter(trainer.ages().values()) - Counter(result.ages)
        assert unseen.total() <= 2, "the last batch may be formed after the end"
        assert sum(result.ages.values()) + unseen.total() == 48
        rows = table(result)
        over = sum(age > 2 for age in trainer.ages().values())
        assert rows["too old, sent"] == f"{over}, older than max_staleness = 2"
        assert f"most {trainer.ages()[0]} (" in rows["age"]


def on_their_way(folder) -> int:
    """Groups in the outbox of a process that has ended."""
    with closing(sqlite3.connect(folder / "spool/outbox.db")) as database:
        (count,) = database.execute("SELECT count(*) FROM groups WHERE state IN ('waiting', 'accepted')").fetchone()
    return count


async def test_the_cap_holds_for_groups_that_a_killed_start_left_in_the_outbox(tmp_path, run_api):
    """Three batches of two groups wait when the environment is killed. Only the first of them can still be in time."""
    async with run_api.wiped() as server:
        trainer = await started(server)
        command = [sys.executable, "-m", "tests.support.fake_serving", server.url, str(tmp_path), "20"]
        left = 0
        while left < 6:
            process = await asyncio.create_subprocess_exec(*command, cwd=ROOT)
            await until((tmp_path / "spool/outbox.db").exists)
            await asyncio.sleep(1.0)
            process.kill()
            await process.wait()
            left = on_their_way(tmp_path)
        run = make_run(server.url, tmp_path, 20, max_staleness=0, when_stale="drop")
        result, _ = await asyncio.gather(run.serve(), trainer.take(16))
        assert sorted(trainer.ages().values()) == [0] * 16
        assert result.refused == {"too old": 4}
        assert all(line["group"] is None and line["group_id"] for line in refused(tmp_path))


async def test_two_environments_with_a_cap_never_block_each_other(tmp_path, run_api):
    """Each can always fill the trainer's next batch, also while a slow group of the other one is over the cap."""
    async with run_api.wiped() as server:
        trainer = await started(server)
        slow = slow_items({5}, lambda: trainer.steps >= 11)  # the other one alone fills twelve batches
        runs = [
            make_run(server.url, tmp_path / str(number), 24, play=play_item, max_staleness=0)
            for number, play_item in enumerate([slow, play])
        ]
        await asyncio.gather(*(run.run() for run in runs), trainer.take(48))
        assert Counter(number_of(group) for group in trainer.groups) == Counter(dict.fromkeys(range(24), 2))


async def test_a_trainer_that_goes_back_to_a_checkpoint_ages_groups_from_there(tmp_path):
    """Otherwise a group begun at step 5 would count as young until a trainer that is at step 1 again gets there."""
    held = asyncio.Event()

    async def play_item(item, key):
        if item["number"] >= 10:
            await held.wait()
        return await play(item, key)

    async with StockRunApi() as server:
        trainer = await started(server)
        run = make_run(server.url, tmp_path, 60, play=play_item)
        task = asyncio.create_task(run.serve())
        await trainer.take(10)
        await until(lambda: any(flight.step > 1 for flight in run._playing.values()), task)
        server.kill()
        await server.start()
        await trainer.register(starting_step=1)
        await trainer.poll()
        await until(lambda: run.sink.step == 1, task)
        await until(lambda: all(flight.step == 1 for flight in run._playing.values()), task)
        run.stop("enough")
        held.set()
        await task


class Tailed(Counted):
    """One item in twelve has a slow judge."""

    name = "tailed"

    async def compute_reward(self, item: Any, result: Any, ctx: Any) -> float:
        if int(str(item).split("b")[-1].split()[0]) % 12 == 0:
            await asyncio.sleep(1.0)
        return random.random()


@pytest.mark.slow
async def test_under_faults_tails_and_new_weights_every_group_arrives_within_the_cap(tmp_path, run_api):
    """5 % of the requests fail, one item in twelve makes the trainer wait, and the weights change all the time."""
    fake_tokenizer().save_pretrained(tmp_path / "tokenizer")
    server = {"model_name": "fake", "server_type": "vllm", "tokenizer_name": str(tmp_path / "tokenizer")}
    faults = {"server_error": 0.025, "disconnect": 0.025}
    async with run_api.wiped() as api, FakeServer(RandomWords(), vary=True, faults=faults) as model:
        trainer = await started(api, batch_size=8)
        settings = {**SMALL, "dataset_name": "24", "max_staleness": 1, "max_infra_retries": 3}
        settings |= {"rollout_server_url": api.url, "spool_path": str(tmp_path / "spool")}
        engine = ServerConfig(base_url=model.base_url, max_retries=1, **server)
        env = Tailed(Tailed.env_config_cls(**settings), [engine])
        env.console = Console(file=io.StringIO(), width=200)

        async def new_weights() -> None:
            for version in itertools.count(1):
                model.update_weights(f"step+{version}", seed=version)
                await asyncio.sleep(0.2)

        updating = asyncio.create_task(new_weights())
        result, _ = await asyncio.gather(env.env_manager(), trainer.take(24))
        updating.cancel()
    assert model.stats["faults.server_error"] + model.stats["faults.disconnect"] > 0
    assert len(trainer.groups) == 24 and result.refused == {}
    begun = [(at, group["group_overrides"]) for at, batch in enumerate(trainer.batches) for group in batch]
    ages = [at - of_group["begin_step"] for at, of_group in begun]
    assert max(ages) <= 1
    versions = {name for _, of_group in begun for name in of_group["model_versions"]}
    assert len(versions) > 1 and all(name.startswith("step+") for name in versions - {"default"})
    samples = [sample for group in trainer.groups for sample in samples_from_atropos(group)]
    assert [reason for sample in samples for reason in verify(sample)] == []
