"""The rollout worker of TRL's AsyncGRPOTrainer: an environment that plays while the trainer runs, against a model
server.

The trainer's queue takes any number of rows a rollout, so that all that was sampled is trained.
"""

from __future__ import annotations

import asyncio
import itertools
import queue
import time
from collections import Counter
from collections.abc import Mapping, Sequence
from concurrent.futures import Future
from typing import TYPE_CHECKING, Any, Final

import numpy as np

from backends.errors import LachesisError
from lachesis.figures.repaired_calls import RepairedCalls
from lachesis_messages.records.split_rollouts import SplitRollouts
from lachesis_messages.tokens import MASKED
from lachesis_tokens.samples.advantages import LossAverage, rollout_advantages, sample_advantage
from lachesis_tokens.samples.group_shapes import (
    GroupSettings,
    RejectedGroup,
    RejectReason,
    RolloutSamples,
    build_group,
)
from lachesis_tokens.server.token_server import TokenServer
from lachesis_train.trainers.agreement import SettingsDisagree, use_temperature
from lachesis_train.trainers.env_thread import EnvThread
from lachesis_train.trainers.items import environment_of
from lachesis_train.trainers.rows import call_figures, count_calls, refuse_not_written
from lachesis_train.trl.items import DrawnKeys, parted
from lachesis_train.trl.trainer_settings import require_trl

if TYPE_CHECKING:
    from datasets import Dataset

_BEAT: Final = 0.2
"""Seconds between two signs of life, and between two attempts to put a row into a full queue."""


def _row_class() -> Any:
    """TRL's row.

    Raises:
        LachesisError: this TRL has it at neither place.
    """
    try:
        try:
            from trl.experimental.async_grpo.async_rollout_worker import RolloutSample
        except ModuleNotFoundError:
            # Where the notes of TRL 1.18 say that it has moved to. Not run: the extra takes 1.16 and 1.17.
            from trl.trainer.async_grpo_trainer import RolloutSample
    except ImportError as error:
        raise LachesisError(f'this TRL has no RolloutSample ({error}); pip install "trl>=1.16,<1.18"') from error
    return RolloutSample


class LachesisRolloutWorker:
    """See `RolloutWorkerProtocol` of TRL. Rollouts run on a thread of the trainer's process.

        worker = LachesisRolloutWorker(MyEnv, args=args, servers=[ServerConfig(base_url=..., server_type="vllm")])
        trainer = AsyncGRPOTrainer(model, args=args, train_dataset=worker.dataset(256), rollout_worker=worker, ...)

    Args:
        env: the class of an environment, or an environment that is not running. Its server is the one that the trainer
            sends its weights to.
        args: the trainer's `AsyncGRPOConfig`.
        settings, servers: settings of the environment by name, and its model servers, if `env` is a class.

    Raises:
        SettingsDisagree: settings of the trainer contradict those of the environment.
        LachesisError: a package is missing.
    """

    def __init__(
        self, env: Any, *, args: Any, settings: Mapping[str, Any] | None = None, servers: Sequence[Any] | None = None
    ) -> None:
        require_trl()
        row_class = _row_class()
        self.env = environment_of(env, settings, servers, attempts=("none", "rollout"))
        self.args = args
        config = self.env.config
        use_temperature(config, float(args.temperature), where="AsyncGRPOConfig")
        self.rollout_buffer: queue.Queue[Any] = queue.Queue(maxsize=max(0, args.queue_maxsize))
        self.metrics_queue: queue.Queue[dict[str, Any]] = queue.Queue()
        self.repaired = RepairedCalls()
        """The calls that the parser read, and those that it repaired."""
        self.totals: Counter[str] = Counter()
        """Groups played and left out, by reason; rollouts, rows, and tokens that are trained or not delivered."""
        self._row_class = row_class
        self._items = DrawnKeys(self.env)
        self._thread: EnvThread | None = None
        self._producing: Future[None] | None = None
        self._version = 0
        self._numbers = itertools.count()
        """Of groups, for the trainer's `group_id`."""
        self._alive_at = time.monotonic()
        self._failed_groups = 0

    # Before the training.

    def dataset(self, count: int) -> Dataset:
        """The next `count` items of the environment, which rollouts are played of, over and over and in this order.

        The trainer counts its epochs by the rows of this dataset.
        """
        return self._run.call(lambda: self._items.draw(count))

    @property
    def _run(self) -> EnvThread:
        if self._thread is None:
            self._thread = EnvThread(self.env)
            if not isinstance(self.env.server, TokenServer):
                self.stop()
                raise SettingsDisagree(
                    f"{self.env.run_name}: its model server reports no tokens (Phase 1), and a trainer never gets "
                    "made-up ones; set server_type='vllm' in ServerConfig"
                )
        return self._thread

    # What the trainer calls.

    def start(self) -> None:
        """Begin to play. Raises LachesisError if no dataset was drawn."""
        if not self._items:
            raise LachesisError("LachesisRolloutWorker has no items; train on the dataset of worker.dataset(COUNT)")
        self._alive_at = time.monotonic()
        self._producing = self._run.submit(self._produce)

    def stop(self) -> None:
        """End the rollouts in flight and remove their sandboxes."""
        if self._producing is not None:
            self._producing.cancel()
        if self._thread is not None:
            self._thread.close()

    def update_model_version(self, model_version: int) -> None:
        """Groups that begin from now on are of this version. Older ones keep the one that they began with."""
        self._version = int(model_version)

    def check_health(self, stale_after_s: float) -> None:
        """Raise if rollouts ended with an error, or their event loop has not run for `stale_after_s` seconds."""
        if self._producing is None:
            raise LachesisError(f"{self.env.run_name}: the rollout worker was not started")
        if self._producing.done():
            cause = None if self._producing.cancelled() else self._producing.exception()
            raise LachesisError(f"{self.env.run_name}: the rollout worker has ended: {cause or 'stopped'}") from cause
        if (age := time.monotonic() - self._alive_at) > stale_after_s:
            raise LachesisError(
                f"{self.env.run_name}: the event loop of the rollouts has not run for {age:.0f} s (limit "
                f"{stale_after_s:g}); a tool, a reward or get_next_item may block it"
            )

    # Rollouts, on the loop of the environment.

    async def _produce(self) -> None:
        beating = asyncio.create_task(self._beat())
        size = self.args.num_generations
        most = max(1, (self.args.max_inflight_tasks if self.args.max_inflight_tasks > 0 else 4 * size) // size)
        most = min(most, max(1, self.env.max_num_workers))
        keys = itertools.cycle(list(self._items))
        flights: set[asyncio.Task[list[Any]]] = set()
        try:
            while True:
                while len(flights) < most:
                    flights.add(asyncio.create_task(self._play(next(keys))))
                ended, flights = await asyncio.wait(flights, return_when=asyncio.FIRST_COMPLETED)
                for flight in ended:
                    for row in flight.result():
                        await self._put(row)
        finally:
            for task in (*flights, beating):
                task.cancel()
            await asyncio.gather(*flights, beating, return_exceptions=True)

    async def _beat(self) -> None:
        while True:
            self._alive_at = time.monotonic()
            await asyncio.sleep(_BEAT)

    async def _put(self, row: Any) -> None:
        began = time.monotonic()
        while True:
            row.enqueued_at = time.time()
            try:
                return self.rollout_buffer.put_nowait(row)
            except queue.Full:
                await asyncio.sleep(_BEAT)
                self.metrics_queue.put({"rollout/backpressure_s": time.monotonic() - began})

    async def _play(self, key: str) -> list[Any]:
        """The rows of an item's group, or of its groups where the environment collects several; none if left out."""
        version, item, size = self._version, self._items[key], self.args.num_generations
        rounds = 1 + self.env.config.max_infra_retries
        groups = await self.env.play_item(item, key, size=size, rounds=rounds)
        for group in groups:
            count_calls(self.repaired, group.rollouts, self.env.run_name)
        rows = [await asyncio.to_thread(self._rows, item, group.rollouts, version) for group in groups]
        return [row for of_group in rows for row in of_group]

    def _rows(self, item: Any, rollouts: Sequence[Any], version: int) -> list[Any]:
        """Verified rows of the scored rollouts, each with the advantage of its rollout."""
        config = self.env.config
        scored = [rollout for rollout in rollouts if rollout.reward is not None]
        settings = GroupSettings(
            group_size=len(scored),
            split_rollouts=SplitRollouts.ALL,
            ensure_scores_are_not_same=config.ensure_scores_are_not_same,
            discarded_attempts=config.discarded_attempts,
            unchecked_prompts=config.unchecked_prompts,
        )
        self.totals.update(
            groups=1,
            rollouts=len(rollouts),
            unscored=len(rollouts) - len(scored),
            undelivered=sum(map(_sampled, rollouts)),  # until they are delivered
            replaced=sum(rollout.attempts - 1 for rollout in rollouts),
            replaced_tokens=sum(rollout.lost.completion_tokens for rollout in rollouts),
        )
        figures: dict[str, Any] = {"lachesis/unscored_frac": (len(rollouts) - len(scored), len(rollouts))}
        if len(scored) < 2:
            left = [rollout for rollout in rollouts if rollout.reward is None]
            why = (left[-1].tracebacks or left[-1].unscored_because) if left else "a group of one has no baseline"
            passes = bool(left) and all(rollout.left_to_agent for rollout in left)
            return self._left_out("unscored", f"{len(scored)} rollouts were scored: {why}", figures, failed=not passes)
        given = [RolloutSamples(rollout.rollout_id, rollout.reward, rollout.samples) for rollout in scored]
        group = build_group(given, settings)
        if isinstance(group, RejectedGroup):
            same = group.reason is RejectReason.SAME_SCORES
            return self._left_out(group.reason.value, group.detail, figures, failed=not same)
        self._failed_groups = 0
        rewards = [rollout.reward for rollout in scored]
        advantages = rollout_advantages(rewards, normalise=True)
        by_id = {one.rollout_id: (one, value or 0.0) for one, value in zip(scored, advantages, strict=True)}
        spread = float(np.std(rewards))
        number = next(self._numbers)
        rows = []
        for sample in group.samples:
            rollout, advantage = by_id[sample.rollout_id]
            refuse_not_written(rollout, [sample])
            prompt, said = parted(rollout.result)
            mask = np.asarray(sample.masks, dtype=np.int64) != MASKED
            rows.append(
                self._row_class(
                    prompt=prompt,
                    completion=said,
                    input_ids=np.asarray(sample.tokens, dtype=np.int64),
                    completion_mask=mask.astype(np.int64),
                    old_log_probs=np.where(mask, sample.logprobs, 0.0).astype(np.float32),
                    # The trainer takes the mean over all trained tokens of a batch.
                    advantage=sample_advantage(sample, advantage, LossAverage.TOKEN),
                    model_version=version,
                    group_id=number,
                    metrics={
                        "reward": rollout.reward,
                        "reward_std": spread,
                        **rollout.metrics,
                        **call_figures(rollout),
                    },
                )
            )
        undelivered = sum(group.undelivered.values())
        self.totals.update(rows=len(rows), trained=group.delivered, undelivered=-group.delivered)
        turns = sum(rollout.result.turns_used for rollout in scored)
        figures |= {
            "lachesis/samples_per_rollout": (len(rows), len(scored)),
            "lachesis/undelivered_tokens_total": float(undelivered),
            "rollout/turns_mean": (turns, len(scored)),
        }
        self.metrics_queue.put(figures)
        return rows

    def _left_out(self, reason: str, detail: str, figures: dict[str, Any], *, failed: bool) -> list[Any]:
        """No rows. Raises LachesisError after too many failed groups in a row."""
        self.totals[f"left_out_{reason}"] += 1
        self.metrics_queue.put({**figures, f"lachesis/left_out_{reason}_total": 1.0})
        self._failed_groups = self._failed_groups + 1 if failed else 0
        if self._failed_groups >= self.env.config.max_failed_groups:
            raise LachesisError(
                f"the last {self._failed_groups} groups were left out (env.max_failed_groups), the last one because it "
                f"was {reason}: {detail}"
            )
        return []


def _sampled(rollout: Any) -> int:
    """Tokens, without those of starts that failed."""
    return sum(sample.trained for sample in rollout.samples)
