"""The loop of an SFT run: a batch of the plan, a step of the engine, and now and then a measurement and a checkpoint.

Step s trains batch s of the plan. A run that is continued, and one whose engine failed, continues after its checkpoint.
"""

from __future__ import annotations

import asyncio
import contextlib
import math
import secrets
import time
from collections.abc import Callable, Coroutine, Sequence
from itertools import accumulate
from typing import Any, Final, TypeVar

from backends.errors import LachesisError
from lachesis_messages.records.jsonl import JsonlWriter
from lachesis_train.curves.recorder import StepRecord, TrainingRecorder
from lachesis_train.policy import CurrentPolicy, PolicyVersion
from lachesis_train.sft.plan import batches, digest, split
from lachesis_train.sft.readers import Dataset, Example
from lachesis_train.sft.settings import SftSettings
from lachesis_train.tinker_sdk import Service, Training, TrainingEngineError
from lachesis_train.trainer.checkpoints import Checkpoint, first_weights
from lachesis_train.trainer.engine_link import EngineLink, begin, forget, pause_after, while_alive
from lachesis_train.trainer.forecast import Work, check_memory, forecast
from lachesis_train.trainer.learning_rate import learning_rate
from lachesis_train.trainer.loop import stopped
from lachesis_train.trainer.settings import Settings

_LOSS: Final = "cross_entropy"

T = TypeVar("T")


class SftRun:
    """One run on files.

    Args:
        recorder: called with the first step that will be recorded, and the number of the last one.
        resume: there must be a checkpoint. A run whose folder has one continues in any case.
        stop: set to end the run after the step that is under way.

    Raises:
        LachesisError: the files hold nothing to train on, or the folder is of another run.
    """

    def __init__(
        self,
        settings: Settings,
        sft: SftSettings,
        dataset: Dataset,
        link: EngineLink,
        *,
        recorder: Callable[[int, int], TrainingRecorder],
        resume: bool = False,
        say: Callable[[str], None] = print,
        stop: asyncio.Event | None = None,
    ) -> None:
        self._settings, self._sft, self._link = settings, sft, link
        self._new_recorder, self._say, self._stop = recorder, say, stop or asyncio.Event()
        self._refused = dataset.refused
        trained, self._held_out = split(dataset.examples, sft)
        if not trained:
            raise LachesisError(f"there is nothing to train on: {dataset.summary()}")
        if sft.validation_share and not self._held_out:
            say(f"no item is held out: sft.validation_share {sft.validation_share:g} of so few items is less than one")
        epochs = batches(trained, sft)
        self._plan = [batch for epoch in epochs for batch in epoch]
        self._measured = set(accumulate(map(len, epochs)))
        self.last_step = min(len(self._plan), settings.training.num_steps or len(self._plan))
        """The steps of the whole run."""
        longest = max(len(example.tokens) - 1 for batch in self._plan for example in batch)
        self._work = Work(max(map(len, self._plan)), longest, self.last_step)
        check_memory(settings, self._work)
        self._content = {**settings.content(), **{f"sft.{k}": v for k, v in sft.model_dump().items()}}
        self._content["sft.data"] = digest(dataset.examples)
        for name in [name for name in self._content if name.startswith("env.")]:
            del self._content[name]  # nothing is played
        self._checkpoint = Checkpoint.of_run(settings.run_dir, self._content, resume=resume)
        self._first = None if self._checkpoint else first_weights(settings.first_run, self._content)
        self.step = 0
        """Steps in the weights."""
        self._service: Service | None = None
        self._training: Training | None = None
        self._recorder: TrainingRecorder | None = None

    async def run(self) -> int:
        """Train to the last step, or until `stop` is set; the number of steps in the weights.

        Raises:
            LachesisError: why it ended before, and what to do. There is a checkpoint of what was trained.
        """
        failures, furthest = 0, 0
        self._write_refused()
        try:
            while True:
                try:
                    if self._training is None:
                        await self._open()
                    if self.step > furthest:
                        failures, furthest = 0, self.step
                    if self._stop.is_set() or self.step >= self.last_step:
                        await self._save()
                        return self.step
                    await self._one_step()
                except TrainingEngineError as error:
                    failures += 1
                    if error.final or failures > self._settings.training.step_retries:
                        raise stopped(self.step + 1, error, self._checkpoint, failures) from error
                    pause = pause_after(failures)
                    self._say(f"{error}; another try in {pause:g} s, from the last checkpoint")
                    self._training = None
                    with contextlib.suppress(TimeoutError):
                        await asyncio.wait_for(self._stop.wait(), pause)
                except OSError as error:  # the disk is full, say
                    raise stopped(self.step + 1, error, self._checkpoint) from error
        finally:
            self._close_recorder()

    @property
    def sampler(self) -> str | None:
        """The engine's path of the trained weights, for sampling."""
        return None if self._checkpoint is None else self._checkpoint.sampler

    async def policy(self) -> CurrentPolicy:
        """The weights of a run that has ended, to serve them."""
        assert self._training is not None
        return CurrentPolicy(PolicyVersion(self.step, self._version, await self._alive(self._training.sampler())))

    async def close(self) -> None:
        """End its session, so that the engine frees the weights and the optimizer: the checkpoint has them."""
        if self._service is not None:
            with contextlib.suppress(TrainingEngineError):  # it has died
                await self._alive(self._service.close())

    def _write_refused(self) -> None:
        """All that was not trained on, to look it up."""
        path = self._settings.run_dir / "refused.jsonl"
        path.unlink(missing_ok=True)
        if self._refused:
            with JsonlWriter(path) as file:
                file.write_all({"source": e.source, "reason": e.reason, "detail": e.detail} for e in self._refused)

    async def _open(self) -> None:
        service = self._service = await self._link.connect()
        settings, found = self._settings, self._checkpoint
        self._close_recorder()
        if found is None:
            self._training = await begin(self._link, service, settings, self._first)
            for line in await self._alive(forecast(self._training, settings, self._work)):
                self._say(line)
            self._recorder = await asyncio.to_thread(self._new_recorder, 0, self.last_step)
            await self._write_checkpoint(f"{settings.training.name}-{secrets.token_hex(3)}")
            evaluation = await self._measure()
            await self._record(StepRecord(step=0, version=self._version, evaluation=evaluation, tokens=0))
        else:
            self._training = await self._alive(service.resume(found.state, settings.base_model, settings.lora))
            self.step = found.step
            self._say(f"continues after step {self.step}")
            self._recorder = await asyncio.to_thread(self._new_recorder, self.step + 1, self.last_step)

    async def _one_step(self) -> None:
        assert self._training is not None
        settings, sft, step = self._settings, self._sft, self.step + 1
        batch = self._plan[step - 1]
        tokens = sum(len(each.trained) for each in batch)
        rate = learning_rate(settings.training, step, self.last_step, sft.learning_rate)
        begun = time.perf_counter()
        data = await asyncio.to_thread(lambda: [each.datum(1 / tokens) for each in batch])
        trained = await self._alive(self._training.step(data, _LOSS, settings.adam(rate)))
        seconds = {"train": time.perf_counter() - begun}
        self.step = step
        evaluation: dict[str, float] = {}
        if (step % sft.eval_interval == 0 if sft.eval_interval else step in self._measured) or step == self.last_step:
            begun = time.perf_counter()
            evaluation = await self._measure()
            seconds["evaluate"] = time.perf_counter() - begun
        await self._record(
            StepRecord(
                step=step,
                version=self._version,
                batch_id=step,
                loss={**trained.metrics, "loss": loss_of(batch, trained.logprobs)},
                evaluation=evaluation,
                tokens=tokens,
                learning_rate=rate,
                seconds=seconds,
            )
        )
        interval = settings.training.save_checkpoint_interval
        if interval and step % interval == 0:
            await self._save()

    async def _measure(self) -> dict[str, float]:
        """The loss on the held-out examples."""
        assert self._training is not None
        if not self._held_out:
            return {}
        logprobs: list[Sequence[float]] = []
        size = self._sft.batch_size
        for at in range(0, len(self._held_out), size):
            data = [each.datum(1.0) for each in self._held_out[at : at + size]]
            logprobs += (await self._alive(self._training.forward(data, _LOSS))).logprobs
        return {"loss": loss_of(self._held_out, logprobs)}

    async def _record(self, record: StepRecord) -> None:
        assert self._recorder is not None
        await asyncio.to_thread(self._recorder.step, record)

    @property
    def _version(self) -> str:
        assert self._checkpoint is not None
        return f"{self._checkpoint.run_id}:{self.step}"

    async def _save(self) -> None:
        """Save the weights, unless the checkpoint has them."""
        assert self._checkpoint is not None
        if self._checkpoint.step != self.step:
            await self._write_checkpoint(self._checkpoint.run_id)

    async def _write_checkpoint(self, run_id: str) -> None:
        assert self._training is not None
        name, limit = f"step-{self.step:05d}", self._settings.training.keep_checkpoints
        old, kept = Checkpoint.old_and_kept(self._checkpoint, self._link.keeps if limit is None else limit)
        sampler = await self._alive(self._training.save_sampler(name)) if self.step else None
        found = Checkpoint(
            run_id=run_id,
            step=self.step,
            batch_id=self.step,
            instance=None,
            state=await self._alive(self._training.save_state(name)),
            sampler=sampler,
            settings=self._content,
            earlier=kept,
        )
        await asyncio.to_thread(found.write, self._settings.run_dir)
        self._checkpoint = found
        await forget(self._link, self._training, old, self._say)

    async def _alive(self, call: Coroutine[Any, Any, T]) -> T:
        return await while_alive(self._link, call)

    def _close_recorder(self) -> None:
        if self._recorder is not None:
            self._recorder.close()
            self._recorder = None


def loss_of(examples: Sequence[Example], logprobs: Sequence[Sequence[float]]) -> float:
    """The mean over all trained tokens of -log p, in nats; `logprobs` are those of the targets of each datum."""
    found = [-of[place - 1] for example, of in zip(examples, logprobs, strict=True) for place in example.trained]
    return math.fsum(found) / len(found)
