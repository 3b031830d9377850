"""Runs the processes of a training run as one: in order, watched, started again where they die, ended together.

One invariant: a process runs only while those before it in the list have answered their probe, and when `run` returns
none of them is left.
"""

from __future__ import annotations

import asyncio
import contextlib
import signal
import time
from collections import deque
from collections.abc import Awaitable, Callable, Sequence
from pathlib import Path
from typing import Any, Final

from backends.errors import ExitCode
from backends.tasks import run_all
from lachesis_train.processes.process import Part, PartProcess, Say

STEADY: Final = 600.0
"""Seconds after which a restart is forgotten."""


class Stopped(Exception):
    """The run ends, with this exit code. `patient`: processes may finish what they are at."""

    def __init__(self, code: int, reason: str, *, patient: bool = False) -> None:
        super().__init__(reason)
        self.code = code
        self.patient = patient


class Supervisor:
    """The processes of a run.

    Args:
        parts: in the order in which they start. The first one ends last.
        main: the name of the part whose end is the end of the run.
        logs: the folder of `NAME.log`.
        say: gets every line of every process, and `lachesis` as the name of those of the supervisor.
        max_restarts: how often a part is started again within `STEADY` seconds.
        finished: called when another part than `main` has ended by itself with exit code 0. It returns when the run can
            go on without it, and otherwise why it cannot.
    """

    def __init__(
        self,
        parts: Sequence[Part],
        *,
        main: str,
        logs: Path,
        say: Say,
        max_restarts: int = 5,
        finished: Callable[[str], Awaitable[str | None]] | None = None,
    ) -> None:
        self.parts = list(parts)
        self.main = main
        self.logs = logs
        self.say = say
        self.max_restarts = max_restarts
        self.restarts: dict[str, int] = {part.name: 0 for part in parts}
        """How often each was started again."""
        self.running: dict[str, PartProcess] = {}
        self._finished = finished
        self._ready = {part.name: asyncio.Event() for part in parts}
        self._deaths: dict[str, deque[float]] = {part.name: deque() for part in parts}

    async def run(self) -> int:
        """Start all, and wait for the end of the main one; the exit code of the run.

        0 when the main part ended with 0, 130 after SIGINT or SIGTERM, otherwise the code of what could not go on.
        """
        self.logs.mkdir(parents=True, exist_ok=True)
        interrupted = asyncio.Event()
        loop = asyncio.get_running_loop()
        for number in (signal.SIGINT, signal.SIGTERM):
            loop.add_signal_handler(number, self._interrupt, interrupted)
        code, patient = 0, False
        try:
            # It ends with the first `Stopped`, after which nothing is started again.
            await run_all([self._until_interrupted(interrupted), *map(self._keep, self.parts)])
        except Stopped as stopped:
            code, patient = stopped.code, stopped.patient
            if code not in (0, ExitCode.STOPPED):
                self.note(str(stopped))
        finally:
            try:
                await self._end(patient=patient)
            finally:
                for number in (signal.SIGINT, signal.SIGTERM):
                    loop.remove_signal_handler(number)
        return code

    def note(self, text: str) -> None:
        """Say something about the run."""
        self.say("lachesis", text)

    async def _keep(self, part: Part) -> None:
        """Run a part, again and again where it dies."""
        before = [other.name for other in self.parts[: self.parts.index(part)]]
        while True:
            for name in before:
                await self._ready[name].wait()
            began, restarts = time.monotonic(), [self.restarts[name] for name in before]
            process = self.running[part.name] = await PartProcess.start(part, self.logs / f"{part.name}.log", self.say)
            if await process.answers():
                if part.probe is not None:
                    self.note(f"{part.name} is ready after {time.monotonic() - began:.1f} s (pid {process.pid})")
                self._ready[part.name].set()
            code = await process.ended()
            self._ready[part.name].clear()
            process.kill()  # what it may have left
            if code == 0:
                if part.name == self.main:
                    raise Stopped(0, "")
                self._ready[part.name].set()
                if self._finished and (problem := await self._finished(part.name)):
                    raise Stopped(1, problem, patient=True)
                return
            if restarts != [self.restarts[name] for name in before]:
                self._count_death(
                    part, code, final=(ExitCode.SETTINGS,)
                )  # it may have failed for one that was not there
            else:
                self._count_death(part, code, final=(ExitCode.FAILED, ExitCode.SETTINGS))

    def _count_death(self, part: Part, code: int, *, final: Sequence[int]) -> None:
        """Allow another start, or end the run."""
        reason = f"{part.name} {_described(code)}"
        log = self.logs / f"{part.name}.log"
        if code in final:
            raise Stopped(code, f"{reason}: see its last lines above, or {log}. The same command continues the run")
        deaths, now = self._deaths[part.name], time.monotonic()
        while deaths and deaths[0] < now - STEADY:
            deaths.popleft()
        if len(deaths) >= self.max_restarts:
            raise Stopped(
                code if code > 0 else 1,
                f"{reason}, after {len(deaths)} restarts within {STEADY / 60:.0f} minutes; its log is {log}. Start the "
                "same command again to continue",
            )
        deaths.append(now)
        self.restarts[part.name] += 1
        self.note(f"{reason}; it is started again ({len(deaths)} of {self.max_restarts})")

    async def _until_interrupted(self, interrupted: asyncio.Event) -> None:
        await interrupted.wait()
        raise Stopped(ExitCode.STOPPED, "", patient=True)

    def _interrupt(self, interrupted: asyncio.Event) -> None:
        if not interrupted.is_set():
            self.note(f"stopping: {self.main} finishes its current work; interrupt again to end all processes at once")
            interrupted.set()
            return
        for process in self.running.values():
            process.kill()

    async def _end(self, *, patient: bool) -> None:
        """End what still runs: the main part and those after it together, then those before it, the last one first.

        The main part is told first, so that it begins nothing with what is left of the others when some have gone.

        `patient`: a part may finish what it is at, while the main part is there.
        """
        at = [part.name for part in self.parts].index(self.main)
        useless = asyncio.ensure_future(self._useless(patient=patient))
        await run_all([self._end_part(part, useless) for part in self.parts[at:]])
        for part in reversed(self.parts[:at]):
            await self._end_part(part, useless)
        useless.cancel()

    async def _useless(self, *, patient: bool) -> None:
        """Wait until there is no use in what the parts are still at."""
        await asyncio.sleep(1.0)
        if patient and (main := self.running.get(self.main)) is not None:
            await main.ended()

    async def _end_part(self, part: Part, useless: asyncio.Future[Any]) -> None:
        """Ask a part to end, and again where there is no use in what it is at."""
        process = self.running.get(part.name)
        if process is None:
            return
        ending = asyncio.ensure_future(process.ended())
        process.signal(signal.SIGTERM)
        await asyncio.wait([ending, useless], timeout=part.grace, return_when=asyncio.FIRST_COMPLETED)
        process.signal(signal.SIGTERM)
        await asyncio.wait([ending], timeout=part.grace)
        process.kill()
        await ending


def _described(code: int) -> str:
    if code >= 0:
        return f"ended with exit code {code}"
    with contextlib.suppress(ValueError):
        return f"was ended by {signal.Signals(-code).name}"
    return f"was ended by signal {-code}"
