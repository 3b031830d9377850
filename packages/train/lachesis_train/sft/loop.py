"""The loop of an SFT run: a batch of the plan, a step of the engine, and now and then a measurement and a checkpoint.

Step s trains batch s of the plan. A run that is continued, and one whose engine failed, continues after its checkpoint.
"""

from __future__ import annotations

import asyncio
import contextlib
import math
import time
from collections.abc import Callable, Sequence
from itertools import accumulate
from typing import Any, Final

from backends.errors import LachesisError
from lachesis_messages.records.jsonl import JsonlWriter
from lachesis_train.curves.recorder import StepRecord, TrainingRecorder
from lachesis_train.policy import CurrentPolicy, PolicyVersion
from lachesis_train.sft.plan import batches, digest, split
from lachesis_train.sft.readers import Dataset, Example
from lachesis_train.sft.settings import SftSettings
from lachesis_train.tinker_sdk import TrainingEngineError
from lachesis_train.trainer.engine_link import EngineLink
from lachesis_train.trainer.engine_run import EngineRun
from lachesis_train.trainer.forecast import Work, check_memory, forecast
from lachesis_train.trainer.learning_rate import learning_rate
from lachesis_train.trainer.settings import Settings

_LOSS: Final = "cross_entropy"


class SftRun(EngineRun):
    """One run on files.

    Args:
        recorder: called with the first step that will be recorded, and the number of the last one.

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
        self._sft, self._new_recorder, self._refused = sft, recorder, dataset.refused
        trained, self._held_out = split(dataset.examples, sft)
        if not trained:
            raise LachesisError(f"there is nothing to train on: {dataset.summary()}")
        if sft.validation_share and not self._held_out:
            say(f"no item is held out: sft.validation_share {sft.validation_share:g} of so few items is less than one")
        epochs = batches(trained, sft)
        self._plan = [batch for epoch in epochs for batch in epoch]
        self._measured = set(accumulate(map(len, epochs)))
        self.last_step = min(len(self._plan), settings.training.num_steps or len(self._plan))
        longest = max(len(example.tokens) - 1 for batch in self._plan for example in batch)
        self._work = Work(max(map(len, self._plan)), longest, self.last_step)
        check_memory(settings, self._work)
        content = {**settings.content(), **{f"sft.{k}": v for k, v in sft.model_dump().items()}}
        content["sft.data"] = digest(dataset.examples)
        for name in [name for name in content if name.startswith("env.")]:
            del content[name]  # nothing is played
        super().__init__(settings, link, content, resume=resume, say=say, stop=stop)
        self._write_refused()

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
        found = await self._load()
        assert self._training is not None
        if found is not None:
            self._recorder = await asyncio.to_thread(self._new_recorder, self.step + 1, self.last_step)
            return
        for line in await self._alive(forecast(self._training, self._settings, self._work)):
            self._say(line)
        self._recorder = await asyncio.to_thread(self._new_recorder, 0, self.last_step)
        await self._record(StepRecord(step=0, version=self._version, evaluation=await self._measure(), tokens=0))

    async def _one_step(self) -> bool:
        assert self._training is not None
        settings, sft, step = self._settings, self._sft, self.step + 1
        batch = self._plan[step - 1]
        tokens = sum(len(each.trained) for each in batch) or 1
        rate = learning_rate(settings.training, step, self.last_step, sft.learning_rate)
        begun = time.perf_counter()
        data = await asyncio.to_thread(lambda: [each.datum(1 / tokens) for each in batch])
        trained = await self._alive(self._training.step(data, _LOSS, settings.adam(rate)))
        seconds = {"train": time.perf_counter() - begun}
        self.step = step
        due = step % sft.eval_interval == 0 if sft.eval_interval else step in self._measured
        begun = time.perf_counter()
        evaluation = await self._measure() if due or step == self.last_step else {}
        seconds |= {"evaluate": time.perf_counter() - begun} if evaluation else {}
        await self._record(
            StepRecord(
                step=step,
                version=self._version,
                batch_id=step,
                loss={**trained.metrics, "loss": loss_of(batch, trained.logprobs)},
                evaluation=evaluation,
                tokens=tokens,
                samples=len(batch),
                learning_rate=rate,
                seconds=seconds,
            )
        )
        await self._save_at_interval()
        return True

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

    def _batches(self) -> dict[str, Any]:
        return {"batch_id": self.step, "instance": None}


def loss_of(examples: Sequence[Example], logprobs: Sequence[Sequence[float]]) -> float:
    """The mean over all trained tokens of -log p, in nats; `logprobs` are those of the targets of each datum."""
    found = [-of[place - 1] for example, of in zip(examples, logprobs, strict=True) for place in example.trained]
    return math.fsum(found) / len(found)
