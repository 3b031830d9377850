"""When `eval` runs beside training."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from typing import Any

from lachesis.tracebacks import explained


class EvaluationSchedule:
    """Runs `eval` beside training.

    Several boundaries that are crossed at once are one evaluation: the weights of the earlier ones are gone. A boundary
    that is crossed during an evaluation is evaluated right after it.

    Args:
        every: steps between two evaluations; 0 or less for none.
        tell: prints a line.
    """

    def __init__(
        self, evaluate: Callable[[], Awaitable[Any]] | None, *, every: int, tell: Callable[[str], None]
    ) -> None:
        self._evaluate = evaluate
        self._every = every
        self._tell = tell
        self._task: asyncio.Task[None] | None = None
        self._boundary: int | None = None
        self._step = 0
        self._next = False

    @property
    def task(self) -> asyncio.Task[None] | None:
        """The evaluation that is running."""
        return self._task if self._task is not None and not self._task.done() else None

    def at_step(self, step: int, changed: Callable[[], None]) -> None:
        """The trainer is at `step`. `changed` is called at the end of an evaluation that this begins."""
        if self._evaluate is None or self._every <= 0:
            return
        boundary = step // self._every
        if self._boundary is None or step < self._step:
            self._boundary = boundary
        elif boundary > self._boundary:
            self._boundary, self._next = boundary, True
            if self.task is None:
                self._task = asyncio.create_task(self._run())
                self._task.add_done_callback(lambda _: changed())
        self._step = step

    async def _run(self) -> None:
        assert self._evaluate is not None
        while self._next:
            self._next = False
            try:
                await self._evaluate()
            except Exception as error:
                self._tell(f"the evaluation at step {self._step} failed:\n{explained(error)}")
