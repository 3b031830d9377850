"""What a run on batches and one on files share: steps of an engine that may fail, and checkpoints to go back to."""

from __future__ import annotations

import asyncio
import contextlib
import secrets
from abc import ABC, abstractmethod
from collections.abc import Callable, Coroutine
from typing import Any, TypeVar

from backends.errors import LachesisError
from lachesis_train.curves.recorder import TrainingRecorder
from lachesis_train.tinker_sdk import Service, Training, TrainingEngineError
from lachesis_train.trainer.checkpoints import Checkpoint, first_weights
from lachesis_train.trainer.engine_link import EngineLink, begin, pause_after, while_alive
from lachesis_train.trainer.settings import Settings

T = TypeVar("T")


class TrainingStopped(LachesisError):
    """The run cannot go on. Its checkpoint is complete."""


class EngineRun(ABC):
    """A failure of the engine leaves it unknown whether the weights have changed: the run goes back to its checkpoint.

    Args:
        content: the settings that decide what is trained.
        resume: there must be a checkpoint. A run whose folder has one continues in any case.
        say: for messages to a person.
        stop: set to end the run after the step that is under way.
    """

    last_step: int
    """The steps of the whole run."""

    def __init__(
        self,
        settings: Settings,
        link: EngineLink,
        content: dict[str, Any],
        *,
        resume: bool,
        say: Callable[[str], None],
        stop: asyncio.Event | None,
    ) -> None:
        self._settings, self._link, self._content = settings, link, content
        self._say, self._stop = say, stop or asyncio.Event()
        self._checkpoint = Checkpoint.of_run(settings.run_dir, content, resume=resume)
        self._first = None if self._checkpoint else first_weights(settings.first_run, content)
        self.step = 0
        """Steps in the weights."""
        self._service: Service | None = None
        self._training: Training | None = None
        self._recorder: TrainingRecorder | None = None
        self._while_it_runs = contextlib.AsyncExitStack()

    @abstractmethod
    async def _open(self) -> None:
        """Get ready for the next step, at first or again after a failure of the engine: `_load`, and a recorder."""

    @abstractmethod
    async def _one_step(self) -> bool:
        """Train one step; False if the run is to stop before there is one."""

    @abstractmethod
    def _batches(self) -> dict[str, Any]:
        """What a checkpoint says of the batches in the weights."""

    async def _saved(self) -> None:  # noqa: B027
        """A checkpoint of the last step was written."""

    async def run(self) -> int:
        """Train to the last step, or until `stop` is set; the number of steps in the weights.

        Raises:
            LachesisError: why it ended before, and what to do. What was trained is in a checkpoint where possible.
        """
        failures, furthest = 0, 0
        async with self._while_it_runs as stack:
            stack.push_async_exit(self._end_recorder)
            while True:
                try:
                    if self._training is None:
                        await self._open()
                    if self.step > furthest:
                        failures, furthest = 0, self.step
                    if self._stop.is_set() or self.step >= self.last_step or not await self._one_step():
                        await self._save()
                        return self.step
                except TrainingEngineError as error:
                    failures += 1
                    if error.final or failures > self._settings.training.step_retries:
                        raise self._stopped(error, failures) from error
                    pause, place = pause_after(failures), ""
                    if not error.weights_known:
                        place = f", from the checkpoint of step {self._saved_step}"
                        self._training = None
                    self._say(f"{error}; another try in {pause:g} s{place}")
                    with contextlib.suppress(TimeoutError):
                        await asyncio.wait_for(self._stop.wait(), pause)
                except OSError as error:  # the disk is full, say
                    raise self._stopped(error) from error
                except LachesisError:
                    with contextlib.suppress(LachesisError, OSError):
                        await self._save()
                    raise

    async def _load(self) -> Checkpoint | None:
        """Connect to the engine and load the checkpoint; None where the run begins, whose first one is then written."""
        service = self._service = await self._link.connect()
        settings, found = self._settings, self._checkpoint
        await self._close_recorder()
        if found is None:
            self._training = await begin(self._link, service, settings, self._first)
            await self._write_checkpoint(f"{settings.training.name}-{secrets.token_hex(3)}")
            return None
        self._training = await self._alive(service.resume(found.state, settings.base_model, settings.lora))
        self.step = found.step
        self._say(f"continues after step {self.step}")
        return found

    async def _save_at_interval(self) -> None:
        interval = self._settings.training.save_checkpoint_interval
        if interval and self.step % interval == 0:
            await self._save()

    async def _save(self) -> None:
        """Save the weights, unless the checkpoint has them."""
        if self._training is None or self.step == self._saved_step:
            return
        await self._write_checkpoint(self._run_id)
        await self._saved()

    async def _write_checkpoint(self, run_id: str) -> None:
        assert self._training is not None
        before, limit, name = self._checkpoint, self._settings.training.keep_checkpoints, f"step-{self.step:05d}"
        earlier = [*before.earlier, before.paths] if before is not None else []
        kept = (self._link.keeps if limit is None else limit) - 1
        old = earlier[: max(0, len(earlier) - kept)] if kept >= 0 else []
        found = Checkpoint(
            run_id=run_id,
            step=self.step,
            sampler=await self._alive(self._training.save_sampler(name)) if self.step else None,
            state=await self._alive(self._training.save_state(name)),
            settings=self._content,
            earlier=earlier[len(old) :],
            **self._batches(),
        )
        await asyncio.to_thread(found.write, self._settings.run_dir)
        self._checkpoint = found
        for path in (path for paths in old for path in paths):  # no checkpoint refers to them any more
            try:
                await self._alive(self._training.forget(path))
            except TrainingEngineError as error:
                self._say(str(error))

    @property
    def _saved_step(self) -> int:
        return 0 if self._checkpoint is None else self._checkpoint.step

    @property
    def _run_id(self) -> str:
        assert self._checkpoint is not None
        return self._checkpoint.run_id

    @property
    def _version(self) -> str:
        """The name of the weights."""
        return f"{self._run_id}:{self.step}"

    async def _alive(self, call: Coroutine[Any, Any, T]) -> T:
        return await while_alive(self._link, call)

    def _stopped(self, error: Exception, failures: int = 0) -> TrainingStopped:
        tries = f" ({failures} failures in a row)" if failures > 1 else ""
        kept = (
            "Nothing was trained"
            if self._checkpoint is None
            else (f"The checkpoint of step {self._saved_step} is complete")
        )
        return TrainingStopped(
            f"step {self.step + 1}: {error}{tries}. {kept}: remove the cause and start the same command again"
        )

    async def _close_recorder(self, *, failed: bool = False) -> None:
        recorder, self._recorder = self._recorder, None
        if recorder is not None:
            await asyncio.to_thread(recorder.close, failed=failed)

    async def _end_recorder(self, _: object, error: BaseException | None, __: object) -> None:
        with contextlib.suppress(*(() if error is None else (LachesisError, OSError))):
            await self._close_recorder(failed=error is not None)
