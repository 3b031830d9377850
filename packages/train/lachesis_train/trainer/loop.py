"""The loop of a training run: a batch, a step of the engine, new weights for the policy server, and now and then a
checkpoint.

A failure of the engine leaves it unknown whether the weights have changed. So the run goes back to its last checkpoint,
and trains the batches after it again, which the batch source still has: each batch is in the weights exactly once.
"""

from __future__ import annotations

import asyncio
import contextlib
import secrets
import time
from collections.abc import Callable, Coroutine, Iterator
from dataclasses import replace
from typing import Any, Final, TypeVar

from backends.errors import LachesisError
from backends.tasks import run_all
from backends.text import counted
from lachesis_train.curves.recorder import TrainingRecorder
from lachesis_train.curves.records import StepRecord
from lachesis_train.policy import CurrentPolicy, PolicyVersion
from lachesis_train.tinker_sdk import TinkerSampler, Trained, Training, TrainingEngineError
from lachesis_train.trainer.batches import Batch, BatchSource
from lachesis_train.trainer.checkpoints import REMEMBERED, Checkpoint, first_weights
from lachesis_train.trainer.datums import PreparedBatch, penalise_divergence, prepare, with_signal
from lachesis_train.trainer.engine_link import EngineLink, begin, forget, pause_after, while_alive
from lachesis_train.trainer.forecast import forecast
from lachesis_train.trainer.learning_rate import learning_rate
from lachesis_train.trainer.losses import data_and_losses, ratio_bounds
from lachesis_train.trainer.off_policy import correct, scored
from lachesis_train.trainer.settings import Settings
from lachesis_train.trainer.teacher import Teacher, TeacherFailed

REFUSED_BATCHES: Final = 3
"""Batches in a row of which every group is refused after which the run stops: the next one will not be better."""
_BASE_AT_ONCE: Final = 32
"""Sequences of which the base model computes logprobs at the same time."""

T = TypeVar("T")


class TrainingStopped(LachesisError):
    """The run cannot go on. Its checkpoint is complete."""


def stopped(step: int, error: Exception, checkpoint: Checkpoint | None, failures: int = 0) -> TrainingStopped:
    """`step` failed, `failures` times in a row if there were other tries."""
    tries = f" ({failures} failures in a row)" if failures > 1 else ""
    kept = f"The checkpoint of step {checkpoint.step} is complete" if checkpoint else "Nothing was trained"
    return TrainingStopped(f"step {step}: {error}{tries}. {kept}: remove the cause and start the same command again")


class Trainer:
    """One training run.

    Args:
        resume: there must be a checkpoint. A run whose folder has one continues in any case.
        recorder: called with the first step that will be recorded.
        serving: a context in which the policy is served, entered before the first batch is asked for.
        say: for messages to a person.
        stop: set to end the run after the step that is under way.
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
        self._settings = settings
        self._link = link
        self._source = source
        self._new_recorder = recorder
        self._serving = serving
        self._teacher = teacher
        self._say = say
        self._stop = stop or asyncio.Event()
        self._content = settings.content()
        self._checkpoint = Checkpoint.of_run(settings.run_dir, self._content, resume=resume)
        self._first = None if self._checkpoint else first_weights(settings.first_run, self._content)
        self.step = 0
        """Steps in the weights."""
        self._batch_id = 0
        self._group_ids: dict[str, None] = {}
        self._training: Training | None = None
        self._base: TinkerSampler | None = None
        self._policy: CurrentPolicy | None = None
        self._recorder: TrainingRecorder | None = None
        self._refused_batches = 0
        self._recording = 0.0
        """Seconds that the record of the last step took. They are in that of the next one."""

    async def run(self) -> int:
        """Train to the last step, or until `stop` is set; the number of steps in the weights.

        Raises:
            LachesisError: why it ended before, and what to do. What was trained is in a checkpoint where possible.
        """
        failures, furthest, registered = 0, 0, False
        async with contextlib.AsyncExitStack() as stack:
            stack.push_async_callback(self._source.close)
            stack.push_async_exit(self._end_recorder)
            while True:
                try:
                    if self._training is None:
                        await self._open()
                    if not registered:
                        assert self._policy is not None
                        await stack.enter_async_context(self._serving(self._policy))
                        registered = bool(await self._unless_stopped(self._register()))
                    if self.step > furthest:
                        failures, furthest = 0, self.step
                    if self._stop.is_set() or self.step >= self._settings.num_steps or not await self._one_step():
                        await self._save()
                        return self.step
                except TrainingEngineError as error:
                    failures += 1
                    if error.final or failures > self._settings.training.step_retries:
                        raise self._stopped(error, failures) from error
                    pause, place = pause_after(failures), f", from the checkpoint of step {self._saved_step}"
                    if isinstance(error, TeacherFailed):
                        place = ""  # the weights are known
                    else:
                        self._training = None
                    self._say(f"{error}; another try in {pause:g} s{place}")
                    await self._pause(pause)
                except OSError as error:  # the disk is full, say
                    raise self._stopped(error) from error
                except LachesisError:
                    with contextlib.suppress(LachesisError, OSError):
                        await self._save()
                    raise

    # A start, also after a failure.

    async def _open(self) -> None:
        """Connect to the engine, load the checkpoint, or make the first one, and serve its weights."""
        service = await self._link.connect()
        settings, found = self._settings, self._checkpoint
        if found is None:
            self._training = await begin(self._link, service, settings, self._first)
            run_id = f"{settings.training.name}-{secrets.token_hex(3)}"
            await self._write_checkpoint(run_id, sampler=None)
        else:
            self._training = await self._alive(service.resume(found.state, settings.base_model, settings.lora))
            self.step, self._batch_id = found.step, found.batch_id
            self._group_ids = dict.fromkeys(found.group_ids)
            self._say(f"continues after step {self.step}")
        if settings.training.kl_penalty:
            self._base = await self._alive(service.base_sampler(settings.base_model))
        await self._close_recorder()
        self._recorder = await asyncio.to_thread(self._new_recorder, self.step + 1)
        version = self._version(await self._alive(self._training.sampler()))
        if self._policy is None:
            for line in await self._alive(forecast(self._training, settings)):
                self._say(line)
            self._policy = CurrentPolicy(version)
        else:
            self._policy.restore(version)

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
                prepare, batch.groups, settings.training, run=self._run_id, step=self.step, seen=self._group_ids
            )
        self._check_refused(batch, prepared)
        rate = learning_rate(settings.training, step, settings.num_steps)
        trained, figures = Trained((), {}), dict[str, float]()
        sampler = self._policy.current.sampler
        if prepared.samples and settings.training.needs_ratios:
            with seconds("ratios"):
                before = await self._alive(self._training.forward(scored(prepared)))
                prepared, figures = correct(prepared, before.logprobs, settings.training)
        if prepared.samples:
            if self._teacher is not None:
                with seconds("teacher_logprobs"):
                    figures["teacher_divergence"] = await self._distil(prepared, self._teacher)
            if self._base is not None:
                with seconds("base_logprobs"):
                    await self._alive(self._penalise(prepared))
            prepared = with_signal(prepared)
        if prepared.samples:
            with seconds("train"):
                data, parts = await asyncio.to_thread(data_and_losses, prepared, settings)
                trained = await self._alive(self._training.step_in_parts(data, parts, settings.adam(rate)))
            with seconds("publish"):
                sampler = await self._alive(self._training.sampler())
        self.step, self._batch_id = step, batch.id
        self._group_ids = dict.fromkeys([*self._group_ids, *prepared.new_ids][-REMEMBERED:])
        version = self._version(sampler)
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
        interval = settings.training.save_checkpoint_interval
        if interval and step % interval == 0:
            await self._save()
        return True

    async def _unless_stopped(self, waiting: Coroutine[Any, Any, T]) -> T | None:
        """What it waits for; None if `stop` is set before."""
        asked = asyncio.ensure_future(waiting)
        stopped = asyncio.ensure_future(self._stop.wait())
        try:
            await asyncio.wait([asked, stopped], return_when=asyncio.FIRST_COMPLETED)
            return asked.result() if asked.done() else None
        finally:
            asked.cancel()
            stopped.cancel()

    def _check_refused(self, batch: Batch, prepared: PreparedBatch) -> None:
        """Report refused groups; raise when nothing else comes."""
        refused = prepared.refused
        self._refused_batches = self._refused_batches + 1 if len(refused) == len(batch.groups) else 0
        if refused:
            name, detail = refused[0]
            self._say(
                f"batch {batch.id}: {len(refused)} of {counted(len(batch.groups), 'group')} refused, {name}: {detail}"
            )
        if self._refused_batches >= REFUSED_BATCHES:
            raise TrainingStopped(
                f"{REFUSED_BATCHES} batches in a row held only groups that must not be trained on, the last "
                f"one for: {refused[0][1]}"
            )

    async def _penalise(self, prepared: PreparedBatch) -> None:
        base, places = self._base, asyncio.Semaphore(_BASE_AT_ONCE)
        assert base is not None

        async def logprobs(ids: list[int]) -> list[float]:
            async with places:
                return await base.logprobs(ids)

        found = await run_all(logprobs(list(each.sample.tokens)) for each in prepared.samples)
        penalise_divergence(prepared, found, self._settings.training.kl_penalty)

    async def _distil(self, prepared: PreparedBatch, teacher: Teacher) -> float:
        found = await teacher.logprobs([each.sample.tokens for each in prepared.samples])
        training = self._settings.training
        return penalise_divergence(prepared, found, training.teacher_weight, training.reward_weight)

    # Checkpoints.

    async def _save(self) -> None:
        """Save the weights, unless the checkpoint has them, and acknowledge the batches in them."""
        if self._training is None or self.step == self._saved_step:
            return
        sampler = await self._alive(self._training.save_sampler(_name(self.step)))
        await self._write_checkpoint(self._run_id, sampler=sampler)
        await self._source.acknowledge(self._batch_id)

    async def _write_checkpoint(self, run_id: str, *, sampler: str | None) -> None:
        assert self._training is not None
        limit = self._settings.training.keep_checkpoints
        old, kept = Checkpoint.old_and_kept(self._checkpoint, self._link.keeps if limit is None else limit)
        found = Checkpoint(
            run_id=run_id,
            step=self.step,
            batch_id=self._batch_id,
            instance=self._source.instance,
            state=await self._alive(self._training.save_state(_name(self.step))),
            sampler=sampler,
            settings=self._content,
            group_ids=list(self._group_ids),
            earlier=kept,
        )
        await asyncio.to_thread(found.write, self._settings.run_dir)
        self._checkpoint = found
        await forget(self._link, self._training, old, self._say)

    @property
    def _saved_step(self) -> int:
        return 0 if self._checkpoint is None else self._checkpoint.step

    @property
    def _run_id(self) -> str:
        assert self._checkpoint is not None
        return self._checkpoint.run_id

    def _version(self, sampler: Any) -> PolicyVersion:
        return PolicyVersion(self.step, f"{self._run_id}:{self.step}", sampler)

    # The rest.

    async def _alive(self, call: Coroutine[Any, Any, T]) -> T:
        return await while_alive(self._link, call)

    async def _pause(self, seconds: float) -> None:
        with contextlib.suppress(TimeoutError):
            await asyncio.wait_for(self._stop.wait(), seconds)

    def _stopped(self, error: Exception, failures: int = 0) -> TrainingStopped:
        return stopped(self.step + 1, error, self._checkpoint, failures)

    async def _close_recorder(self, *, failed: bool = False) -> None:
        recorder, self._recorder = self._recorder, None
        if recorder is not None:
            await asyncio.to_thread(recorder.close, failed=failed)

    async def _end_recorder(self, _: object, error: BaseException | None, __: object) -> None:
        with contextlib.suppress(*(() if error is None else (LachesisError, OSError))):
            await self._close_recorder(failed=error is not None)


class _Seconds:
    """Wall seconds of phases."""

    def __init__(self, **found: float) -> None:
        self.found: dict[str, float] = found

    @contextlib.contextmanager
    def __call__(self, phase: str) -> Iterator[None]:
        begin = time.perf_counter()
        yield
        self.found[phase] = self.found.get(phase, 0.0) + time.perf_counter() - begin


def _name(step: int) -> str:
    return f"step-{step:05d}"
