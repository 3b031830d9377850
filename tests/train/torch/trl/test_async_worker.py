"""`LachesisRolloutWorker`, the rollout worker of TRL's AsyncGRPOTrainer, against the fake model server at the wire.

The trainer itself needs a GPU. Rows go through TRL's own queue dataset, batcher and collator.
"""

from __future__ import annotations

import asyncio
import random
import sys
import time
from collections import defaultdict
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("trl.experimental.async_grpo", reason="trl or torch is not installed; `make test-train` has them")

from trl.experimental.async_grpo import AsyncGRPOConfig
from trl.experimental.async_grpo.async_grpo_trainer import (
    DataCollatorForRollout,
    FixedCountBatcher,
    RolloutQueueDataset,
)
from trl.experimental.async_grpo.async_rollout_worker import RolloutSample

from backends.errors import LachesisError
from lachesis import HermesAgentBaseEnv
from lachesis.settings.server_settings import ServerConfig
from lachesis_testing.fake_server import FakeServer, ToolUser
from lachesis_train import LachesisRolloutWorker, SettingsDisagree
from tests.support.small_envs import Shows
from tests.support.training_runs import with_tokens

pytestmark = pytest.mark.filterwarnings("ignore::UserWarning", "ignore::FutureWarning")
SETTINGS = {"max_infra_retries": 0, "max_token_length": 40, "max_agent_turns": 3, "max_resamples": 2}


class Tosses(HermesAgentBaseEnv):
    """Rewards that differ within a group. Every fourth rollout is not scored."""

    name = "tosses"
    toolsets = ("todo",)

    async def setup(self) -> None:
        self.items = iter([f"item {number}" for number in range(3)])

    async def get_next_item(self) -> Any:
        return next(self.items, None)

    def format_prompt(self, item: str) -> str:
        return item

    async def compute_reward(self, item: str, result: Any, ctx: Any) -> float | None:
        return None if int(ctx.task_id.rsplit("-", 3)[1]) == 3 else random.random()


class Blocks(Tosses):
    name = "blocks"

    async def compute_reward(self, item: str, result: Any, ctx: Any) -> float | None:
        time.sleep(2)  # noqa: ASYNC251
        return 1.0


def config(folder: Path, **changes: Any) -> AsyncGRPOConfig:
    settings = {
        "output_dir": str(folder),
        "num_generations": 4,
        "max_inflight_tasks": 8,
        "use_cpu": True,
        "bf16": False,
    }
    return AsyncGRPOConfig(**{**settings, **changes})


async def worker_of(model: FakeServer, folder: Path, env: Any = Tosses, **changes: Any) -> LachesisRolloutWorker:
    """A worker that plays. Its calls block, and the server is on this loop."""
    server = with_tokens(model, folder).model_copy(update={"max_retries": 0})
    worker = LachesisRolloutWorker(env, args=config(folder, **changes), settings=SETTINGS, servers=[server])
    dataset = await asyncio.to_thread(worker.dataset, 10)
    assert len(dataset) == 3, "all that the environment has"
    worker.start()
    return worker


async def rows_of(worker: LachesisRolloutWorker, count: int) -> list[RolloutSample]:
    return [await asyncio.to_thread(worker.rollout_buffer.get, timeout=60) for _ in range(count)]


async def unhealthy(worker: LachesisRolloutWorker, stale_after: float) -> str:
    """What `check_health` raises in the end."""
    async with asyncio.timeout(60):
        while True:
            try:
                worker.check_health(stale_after)
            except LachesisError as error:
                return str(error)
            await asyncio.sleep(0.05)


async def test_rows_hold_what_the_server_sampled_with_the_advantage_of_their_rollout(tmp_path: Path) -> None:
    faults = {"cut_tool_call": 0.2}  # such a turn is sampled again: its rollout has two samples
    async with FakeServer(ToolUser(turns=2), vary=True, faults=faults) as model:
        worker = await worker_of(model, tmp_path)
        rows = await rows_of(worker, 30)
        worker.check_health(60)
        sampled = {
            (tuple(seen.call.prompts[completion.prompt]), tuple(completion.ids))
            for seen in model.requests
            for completion in seen.completions
        }
        await asyncio.to_thread(worker.stop)
    groups = defaultdict(list)
    for row in rows:
        assert type(row) is RolloutSample
        assert len(row.input_ids) == len(row.completion_mask) == len(row.old_log_probs)
        assert (row.input_ids.dtype, row.completion_mask.dtype, row.old_log_probs.dtype) == (
            "int64",
            "int64",
            "float32",
        )
        assert ((row.old_log_probs != 0) <= (row.completion_mask == 1)).all()
        assert any(
            tuple(row.input_ids[: len(prompt)]) == prompt and tuple(row.input_ids[len(prompt) :][: len(ids)]) == ids
            for prompt, ids in sampled
        ), "the beginning of the row is a prompt of the server and its completion"
        assert row.prompt[-1]["role"] == "user"
        assert all(message["role"] != "user" for message in row.completion)
        groups[row.group_id].append(row)
    assert len(groups) > 3, "items are played again"
    whole = [of for number, of in groups.items() if number < max(groups)]
    for of in whole:
        by_reward = {row.metrics["reward"]: row.advantage for row in of}
        assert len(by_reward) == 3, "the rollout that was not scored has no row"
        assert sum(by_reward.values()) == pytest.approx(0, abs=1e-9)
    assert worker.totals["unscored"] >= len(whole)


async def test_every_sampled_token_of_a_group_is_in_the_totals_once(tmp_path: Path) -> None:
    played: list[Any] = []

    class Noting(LachesisRolloutWorker):
        def _rows(self, item: Any, rollouts: Any, version: int) -> list[Any]:
            played.extend(rollouts)
            return super()._rows(item, rollouts, version)

    async with FakeServer(ToolUser(turns=2), vary=True, faults={"cut_tool_call": 0.2}) as model:
        settings, server = {**SETTINGS, "max_infra_retries": 1}, with_tokens(model, tmp_path)
        worker = Noting(Tosses, args=config(tmp_path), settings=settings, servers=[server])
        await asyncio.to_thread(worker.dataset, 10)
        worker.start()
        await rows_of(worker, 12)
        await asyncio.to_thread(worker.stop)
    totals = worker.totals
    sampled = sum(rollout.result.tokens.completion_tokens + rollout.lost.completion_tokens for rollout in played)
    assert totals["trained"] + totals["undelivered"] + totals["replaced_tokens"] == sampled
    assert totals["unscored"] and totals["rollouts"] == len(played)


async def test_rows_go_through_the_queue_and_the_collator_of_trl(tmp_path: Path) -> None:
    """A row that is older than `max_staleness` is dropped there, and counted."""
    async with FakeServer(ToolUser(turns=2), vary=True) as model:
        worker = await worker_of(model, tmp_path)
        await rows_of(worker, 1)
        worker.update_model_version(4)
        while (await rows_of(worker, 1))[0].model_version < 4:
            pass
        metrics: dict[str, list[Any]] = defaultdict(list)
        (late,) = await rows_of(worker, 1)
        late.model_version = 0
        worker.rollout_buffer.queue.appendleft(late)  # rows from before the update may be behind it
        source = RolloutQueueDataset(
            worker.rollout_buffer, lambda: 4, worker.check_health, 60.0, metrics, max_staleness=3
        )
        batch = await asyncio.to_thread(lambda: next(iter(FixedCountBatcher(source, 1, 6))))
        packed = DataCollatorForRollout(pad_token_id=0, metrics=metrics)([batch])
        await asyncio.to_thread(worker.stop)
    assert set(metrics["sample/dropped_stale_total"]) == {1.0}
    assert packed["global_n_tokens"].item() > 0
    assert packed["advantages"].isfinite().all()
    assert metrics["reward"], "TRL logs the rewards of the rows"


async def test_full_queues_hold_rollouts_up(tmp_path: Path) -> None:
    async with FakeServer(ToolUser(turns=1), vary=True) as model:
        worker = await worker_of(model, tmp_path, queue_maxsize=2)
        held = False
        async with asyncio.timeout(60):
            while not held:
                figures = await asyncio.to_thread(worker.metrics_queue.get)
                held = "rollout/backpressure_s" in figures
        assert worker.rollout_buffer.qsize() == 2
        assert worker.totals["groups"] <= 8 // 4, "no group begins while the rows of another wait"
        worker.check_health(10)
        await asyncio.to_thread(worker.stop)


async def test_a_model_server_that_dies_ends_the_worker_and_not_a_score(tmp_path: Path) -> None:
    async with FakeServer(ToolUser(turns=1), vary=True) as model:
        worker = await worker_of(model, tmp_path)
        await rows_of(worker, 3)
    error = await unhealthy(worker, 60)
    assert all(text in error for text in ("has ended", "max_failed_groups", "unavailable"))
    await asyncio.to_thread(worker.stop)
    rest = [worker.rollout_buffer.get_nowait() for _ in range(worker.rollout_buffer.qsize())]
    assert all(0 < row.metrics["reward"] < 1 for row in rest)


async def test_images_for_which_rows_have_no_place_end_the_worker_by_name(tmp_path: Path) -> None:
    async with FakeServer(lambda ask: "I see.", images=True) as model:
        server = with_tokens(model, tmp_path).model_copy(update={"engine": "vllm-generate"})
        worker = LachesisRolloutWorker(Shows, args=config(tmp_path), settings=SETTINGS, servers=[server])
        await asyncio.to_thread(worker.dataset, 1)
        worker.start()
        assert "it has images" in await unhealthy(worker, 60)
        await asyncio.to_thread(worker.stop)


async def test_a_blocked_event_loop_is_not_healthy(tmp_path: Path) -> None:
    async with FakeServer(ToolUser(turns=1), vary=True) as model:
        worker = await worker_of(model, tmp_path, Blocks)
        assert "has not run" in await unhealthy(worker, 1.0)
        await asyncio.to_thread(worker.stop)
    with pytest.raises(LachesisError, match="stopped"):
        worker.check_health(60)


def test_what_cannot_be_trained_is_refused_at_the_begin(tmp_path: Path) -> None:
    with pytest.raises(SettingsDisagree, match=r"env\.agent_temperature.*AsyncGRPOConfig\.temperature"):
        LachesisRolloutWorker(Tosses, args=config(tmp_path), settings={"agent_temperature": 0.5})
    with pytest.raises(SettingsDisagree, match="discarded_attempts"):
        penalty = {"discarded_attempts": -1.0, "split_rollouts": "all"}
        LachesisRolloutWorker(Tosses, args=config(tmp_path), settings=penalty)
    attempts = {**SETTINGS, "discarded_attempts": "rollout", "split_rollouts": "all"}
    assert LachesisRolloutWorker(Tosses, args=config(tmp_path), settings=attempts).env
    chat = LachesisRolloutWorker(
        Tosses, args=config(tmp_path), settings=SETTINGS, servers=[ServerConfig(base_url="http://127.0.0.1:9/v1")]
    )
    with pytest.raises(LachesisError, match="no items"):
        chat.start()


def test_a_trl_that_has_moved_its_row_is_refused_with_versions_that_have_it(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setitem(sys.modules, "trl.experimental.async_grpo.async_rollout_worker", None)
    with pytest.raises(LachesisError, match=r'this TRL has no RolloutSample.*pip install "trl>=1.16,<1.18"'):
        LachesisRolloutWorker(Tosses, args=None)
