"""Records a training run: `metrics.jsonl`, the rollouts of each step, the report, W&B and progress."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from types import TracebackType
from typing import Any, Self

from rich.console import Console

from lachesis.figures.repaired_calls import RepairedCalls
from lachesis_messages.records.jsonl import JsonlWriter, read_lines
from lachesis_messages.records.step_files import ROLLOUTS
from lachesis_train.curves.metrics import step_metrics
from lachesis_train.curves.progress import TrainingProgress
from lachesis_train.curves.records import GroupRecord, SampleRecord, StepRecord
from lachesis_train.curves.rollouts import RolloutFiles
from lachesis_view.wandb_run import WandbSettings, start_run
from lachesis_view.wandb_sender import Sender

__all__ = ["GroupRecord", "SampleRecord", "StepRecord", "TrainingRecorder", "WandbSettings"]

log = logging.getLogger(__name__)

METRICS, REPORT = "metrics.jsonl", "report.html"
"""Names in the folder of a run."""
ROLLOUTS_LIMIT = 1 << 30
REPORT_INTERVAL, REPORT_SHARE = 15.0, 0.05
"""Seconds from one report of a run that goes on to the next at least, and their share of the time at most."""


class TrainingRecorder:
    """Records the steps of one training run in its folder.

    All methods block: in an event loop, call them in a thread. Steps that are recorded survive `kill -9`.
    """

    def __init__(
        self,
        run_dir: str | Path,
        *,
        title: str = "training",
        first_step: int = 0,
        total_steps: int | None = None,
        decode: Callable[[Sequence[int]], str] | None = None,
        rollouts_limit: int = ROLLOUTS_LIMIT,
        wandb: WandbSettings | None = None,
        console: Console | None = None,
    ) -> None:
        """
        Args:
            run_dir: the folder of the run; it is created.
            first_step: the first step that will be recorded. A resumed run trains the steps after its checkpoint
                again: what is recorded of these is removed.
            total_steps: the number of the last step, for the progress.
            decode: token ids to text, for reading the rollouts; None: their messages only.
            rollouts_limit: bytes of all `rollouts/*.jsonl` together; 0 writes none.
            wandb: None: no W&B.
            console: where progress is shown; None: nowhere.

        Raises:
            TrackingError: W&B cannot be used.
            JsonlError: `run_dir` cannot be written, or its `metrics.jsonl` has a line that is not valid JSON.
        """
        self.run_dir = Path(run_dir)
        self.title = title
        self._total_steps = total_steps or 0
        self._next = first_step
        self._next_report = 0.0
        self._rollouts = RolloutFiles(self.run_dir / ROLLOUTS, limit=rollouts_limit, decode=decode)
        path = self.run_dir / METRICS
        self._metrics = JsonlWriter(path)
        self.rewound = _keep_before(path, first_step)
        """Recorded steps that are trained again."""
        if self.rewound:
            self._metrics.close()
            log.info("%s: %d steps after the checkpoint are trained again", path, self.rewound)
        self._rollouts.rewind(first_step)
        self._repaired = RepairedCalls()
        self._resumed = False
        for line in read_lines(path):
            self._resumed = True
            self._count_calls(line)
        self._sender = None if wandb is None else Sender(start_run(wandb, self.run_dir))
        self._progress = None if console is None else TrainingProgress(console, title, total_steps).__enter__()

    def step(self, record: StepRecord) -> dict[str, Any]:
        """Record one step; returns the line of `metrics.jsonl`.

        Raises:
            ValueError: the step has been recorded, or a sample has more logprobs of the one side than of the other.
        """
        if record.step < self._next:
            raise ValueError(f"step {record.step} has been recorded; the next one is {self._next}")
        line = {"step": record.step, "timestamp": time.time(), **step_metrics(record)}
        if self._resumed:  # the report names the first step of each further start
            line["resumed"], self._resumed = True, False
        alarm = self._count_calls(line)
        if self._repaired.parsed:
            line["train/repaired_calls_alarm"] = int(bool(self._repaired.alarm))
        self._rollouts.write(record)
        self._metrics.write(line)
        self._next = record.step + 1
        if self._sender is not None:
            # W&B keeps what it has of a step that is trained again after a resume.
            shown = {name: value for name, value in line.items() if "/" in name}
            self._sender.send(lambda run: run.log(shown, step=record.step))
        if self._progress is not None:
            self._progress.show(line)
            if alarm:
                self._progress.tell(f"alarm: {alarm}")
        if time.monotonic() >= self._next_report:
            self.report()
        return line

    def _count_calls(self, line: Mapping[str, Any]) -> str:
        """The alarm, where this step is the first to raise it."""
        return "".join(self._repaired.add([counts]) for counts in line.get("repaired_calls", ()))

    def report(self) -> Path:
        """Write `report.html` as of now."""
        from lachesis_view.reports.training import write_report

        begun = time.monotonic()
        path = write_report(self.run_dir, title=self.title, total_steps=self._total_steps)
        took = time.monotonic() - begun
        self._next_report = begun + max(REPORT_INTERVAL, took / REPORT_SHARE)
        return path

    def close(self, *, failed: bool = False) -> None:
        """Write the last report and end the W&B run, as failed or not."""
        if self._progress is not None:
            self._progress.__exit__()
            self._progress = None
        self._metrics.close()
        self.report()
        if self._sender is not None:
            self._sender.finish(1 if failed else 0)
            self._sender = None

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.close(failed=error is not None)


def _keep_before(path: Path, step: int) -> int:
    """Removes the lines of `step` and later ones, in one move; returns how many they were."""
    lines = list(read_lines(path))
    kept = [line for line in lines if line["step"] < step]
    if len(kept) < len(lines):
        temporary = path.with_name(f".{path.name}.tmp")
        temporary.unlink(missing_ok=True)
        with JsonlWriter(temporary) as file:
            file.write_all(kept)
        temporary.replace(path)
    return len(lines) - len(kept)
