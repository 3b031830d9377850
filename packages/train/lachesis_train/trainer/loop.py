"""The loop of a training run: a batch, a step of the engine, new weights for the policy server, and now and then a
checkpoint.

A failure of the engine leaves it unknown whether the weights have changed. So the run goes back to its last checkpoint,
and trains the batches after it again, which the batch source still has: each batch is in the weights exactly once.
"""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import Callable, Coroutine, Iterator, Sequence
from dataclasses import replace
from typing import Any, Final, TypeVar

from backends.tasks import cancel_all, run_all
from backends.text import counted
from lachesis_tokens.prompts.vocabulary import ANY_ROW
from lachesis_train.curves.recorder import TrainingRecorder
from lachesis_train.curves.records import StepRecord
from lachesis_train.policy import CurrentPolicy, PolicyVersion
from lachesis_train.tinker_sdk import TinkerSampler, Trained, TrainingEngineError
from lachesis_train.trainer.batches import Batch, BatchSource
from lachesis_train.trainer.checkpoints import REMEMBERED
from lachesis_train.trainer.datums import PreparedBatch, penalise_divergence, prepare, with_signal
from lachesis_train.trainer.engine_link import EngineLink
from lachesis_train.trainer.engine_run import EngineRun, TrainingStopped
from lachesis_train.trainer.forecast import forecast, rows_of_model
from lachesis_train.trainer.learning_rate import learning_rate
from lachesis_train.trainer.losses import data_and_losses, ratio_bounds
from lachesis_train.trainer.off_policy import correct, scored
from lachesis_train.trainer.settings import Settings
from lachesis_train.trainer.teacher import Teacher

REFUSED_BATCHES: Final = 3
"""Batches in a row of which every group is refused after which the run stops: the next one will not be better."""
_NAMED: Final = 16
"""Groups of a batch that an error names."""
_BASE_AT_ONCE: Final = 32
"""Sequences of which the base model computes logprobs at the same time."""

T = TypeVar("T")


class Trainer(EngineRun):
    """One training run.

    Args:
        recorder: called with the first step that will be recorded.
        serving: a context in which the policy is served, entered before the first batch is asked for.
    """

    def __init__(
        self,
        settings: Settings,
        link: EngineLink,
        source: BatchSource,
        *,
        recorder: Callable[[int], TrainingRecorder],
        serving: Callable[[CurrentPolicy], contextlib.AbstractAsyncContextManager[object]],
        teacher: Teacher | None = None,
        resume: bool = False,
        say: Callable[[str], None] = print,
        stop: asyncio.Event | None = None,
    ) -> None:
        super().__init__(settings, link, settings.content(), resume=resume, say=say, stop=stop)
        self.last_step = settings.num_steps
        self._source = source
        self._new_recorder = recorder
        self._serving = serving
        self._teacher = teacher
        self._batch_id = 0
        self._group_ids: dict[str, None] = {}
        self._base: TinkerSampler | None = None
        self._policy: CurrentPolicy | None = None
        self._rows = ANY_ROW
        self._registered = False
        self._refused_batches: set[int] = set()
        self._recording = 0.0
        """Seconds that the record of the last step took. They are in that of the next one."""
        self._while_it_runs.push_async_callback(source.close)

    # A start, also after a failure.

    async def _open(self) -> None:
        """Connect to the engine, load the checkpoint, or make the first one, and serve its weights."""
        settings, found = self._settings, await self._load()
        assert self._service is not None
        assert self._training is not None
        if found is not None:
            self._batch_id, self._group_ids = found.batch_id, dict.fromkeys(found.group_ids)
        if settings.training.kl_penalty:
            self._base = await self._alive(self._service.base_sampler(settings.base_model))
        self._recorder = await asyncio.to_thread(self._new_recorder, self.step + 1)
        version = PolicyVersion(self.step, self._version, await self._alive(self._training.sampler()))
        if self._policy is None:
            for line in await self._alive(forecast(self._training, settings)):
                self._say(line)
            self._rows = rows_of_model(settings)
            self._policy = CurrentPolicy(version)
        else:
            self._policy.restore(version)
        if not self._registered:
            await self._while_it_runs.enter_async_context(self._serving(self._policy))
            self._registered = bool(await self._unless_stopped(self._register()))

    async def _register(self) -> bool:
        """Register, and settle which batches of this API the checkpoint contains."""
        await self._source.register(self.step)
        found = self._checkpoint
        assert found is not None
        if found.step and found.instance == self._source.instance:
            await self._source.acknowledge(found.batch_id)  # an earlier start may have ended just before that
            return True
        if found.step:
            self._say(f"{self._source.url} now has a different database, so its batch numbers start over")
        if self._source.instance is not None:
            self._batch_id = self._source.acknowledged
        self._checkpoint = replace(found, batch_id=self._batch_id, instance=self._source.instance)
        await asyncio.to_thread(self._checkpoint.write, self._settings.run_dir)
        return True

    # A step.

    async def _one_step(self) -> bool:
        """Train one batch; False if the run is to stop before there is one."""
        assert self._training is not None
        assert self._policy is not None
        assert self._recorder is not None
        settings, seconds = self._settings, _Seconds(record=self._recording)
        with seconds("wait"):
            batch = await self._unless_stopped(self._source.next(self._batch_id, self.step))
        if batch is None:
            return False
        step = self.step + 1
        with seconds("check"):
            prepared = await asyncio.to_thread(
                prepare,
                batch.groups,
                settings.training,
                run=self._run_id,
                step=self.step,
                seen=self._group_ids,
                rows=self._rows,
            )
        self._check_refused(batch, prepared)
        rate = learning_rate(settings.training, step, settings.num_steps)
        trained, figures = Trained((), {}), dict[str, float]()
        sampler = self._policy.current.sampler
        if prepared.samples and settings.training.needs_ratios:
            with seconds("ratios"), _naming(batch, prepared.new_ids):
                before = await self._alive(self._training.forward(scored(prepared)))
                prepared, figures = correct(prepared, before.logprobs, settings.training)
        if prepared.samples:
            if self._teacher is not None:
                with seconds("teacher_logprobs"):
                    found = await self._unless_stopped(self._distil(prepared, self._teacher))
                if found is None:  # nothing is trained yet, and the batch comes again
                    return False
                figures["teacher_divergence"], figures["impossible_tokens_of_teacher"] = found
            if self._base is not None:
                with seconds("base_logprobs"):
                    figures["impossible_tokens_of_base"] = await self._alive(self._penalise(prepared))
            prepared = with_signal(prepared)
        if prepared.samples:
            with seconds("train"), _naming(batch, prepared.new_ids):
                data, parts = await asyncio.to_thread(data_and_losses, prepared, settings)
                trained = await self._alive(self._training.step_in_parts(data, parts, settings.adam(rate)))
            with seconds("publish"):
                sampler = await self._alive(self._training.sampler())
        self.step, self._batch_id = step, batch.id
        self._group_ids = dict.fromkeys([*self._group_ids, *prepared.new_ids][-REMEMBERED:])
        version = PolicyVersion(step, self._version, sampler)
        self._policy.publish(version)
        record = StepRecord(
            step=step,
            version=version.name,
            batch_id=batch.id,
            groups=prepared.records(trained.logprobs),
            loss={**trained.metrics, **figures},
            learning_rate=rate,
            ratio_bounds=ratio_bounds(prepared, settings),
            seconds=seconds.found,
            queue=batch.queue,
        )
        recording = _Seconds()
        with recording("record"):
            await asyncio.to_thread(self._recorder.step, record)
        self._recording = recording.found["record"]
        await self._save_at_interval()
        return True

    async def _unless_stopped(self, waiting: Coroutine[Any, Any, T]) -> T | None:
        """What it waits for; None if `stop` is set before."""
        asked = asyncio.ensure_future(waiting)
        stopped = asyncio.ensure_future(self._stop.wait())
        try:
            await asyncio.wait([asked, stopped], return_when=asyncio.FIRST_COMPLETED)
            return asked.result() if asked.done() else None
        finally:
            await cancel_all([asked, stopped])

    def _check_refused(self, batch: Batch, prepared: PreparedBatch) -> None:
        """Report refused groups; raise when nothing else comes."""
        refused = prepared.refused
        if len(refused) < len(batch.groups):
            self._refused_batches.clear()
        else:  # one that comes again, after a failure of the engine, is the same
            self._refused_batches.add(batch.id)
        if refused:
            name, detail = refused[0]
            self._say(
                f"batch {batch.id}: {len(refused)} of {counted(len(batch.groups), 'group')} refused, {name}: {detail}"
            )
        if len(self._refused_batches) >= REFUSED_BATCHES:
            raise TrainingStopped(
                f"{REFUSED_BATCHES} batches in a row held only groups that must not be trained on, the last "
                f"one for: {refused[0][1]}"
            )

    async def _penalise(self, prepared: PreparedBatch) -> int:
        base, places = self._base, asyncio.Semaphore(_BASE_AT_ONCE)
        assert base is not None

        async def logprobs(ids: list[int]) -> list[float]:
            async with places:
                return await base.logprobs(ids)

        found = await run_all(logprobs(list(each.sample.tokens)) for each in prepared.samples)
        return penalise_divergence(prepared, found, self._settings.training.kl_penalty)[1]

    async def _distil(self, prepared: PreparedBatch, teacher: Teacher) -> tuple[float, int]:
        found = await teacher.logprobs([each.sample.tokens for each in prepared.samples])
        training = self._settings.training
        return penalise_divergence(prepared, found, training.teacher_weight, training.reward_weight)

    # Checkpoints.

    def _batches(self) -> dict[str, Any]:
        return {"batch_id": self._batch_id, "instance": self._source.instance, "group_ids": list(self._group_ids)}

    async def _saved(self) -> None:
        await self._source.acknowledge(self._batch_id)


@contextlib.contextmanager
def _naming(batch: Batch, ids: Sequence[str]) -> Iterator[None]:
    """Errors of the engine say of which batch and groups they are: the next start gets them again."""
    try:
        yield
    except TrainingEngineError as error:
        more = f" and {len(ids) - _NAMED} more" if len(ids) > _NAMED else ""
        groups = f", with the groups {', '.join(ids[:_NAMED])}{more}" if ids else ""
        error.args = (f"{error} (batch {batch.id}{groups})",)
        raise


class _Seconds:
    """Wall seconds of phases."""

    def __init__(self, **found: float) -> None:
        self.found: dict[str, float] = found

    @contextlib.contextmanager
    def __call__(self, phase: str) -> Iterator[None]:
        begin = time.perf_counter()
        yield
        self.found[phase] = self.found.get(phase, 0.0) + time.perf_counter() - begin
