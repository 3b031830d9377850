"""How a run treats failing groups: play them again, pause, or stop."""

from __future__ import annotations

import asyncio
import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from rich.console import Console

from backends import BackendError
from backends.errors import ExitCode, LachesisError
from backends.text import counted
from lachesis.figures.running_figures import Causes
from lachesis.figures.tool_failures import VARYING
from lachesis.runs.decisions import Decision, LeftOut
from lachesis.tracebacks import explained, headline, in_one_line, lines_of
from lachesis_client import InferenceError

MAX_TRACEBACKS = 5
"""Different exceptions of the environment that are printed in full."""

MAX_ATTEMPTS = 3
"""Times that a group is played while others succeed, or becomes too old, before its item is given up."""

MAX_ATTEMPTS_ALONE = 8
"""Times that the last item is tried, over some two minutes, when nothing else can succeed."""

_FIRST_PAUSE, _LONGEST_PAUSE = 1.0, 60.0


PASSES = "start again to continue; finished groups are kept"
REPEATS = (
    "the same command would fail in the same way: fix the cause first; it then continues, finished groups are kept"
)
"""What to do after failures that may pass, and after others."""


class RunStopped(LachesisError):
    """The run cannot continue; finished work is on disk. The message says why and how to continue."""


class UnusableSettings(RunStopped):
    """The run cannot go on with these settings."""

    exit_code = ExitCode.SETTINGS


class NotRunning(LachesisError, RuntimeError, AttributeError):
    """The environment is used outside a run. An `AttributeError` too, so that `hasattr(env, "server")` is an answer."""


@dataclass(slots=True, eq=False)
class ItemJob:
    """One item to be played."""

    item: Any
    key: str
    failures: int = 0
    successes_then: int = -1
    """Groups of the run that had succeeded at its last failure."""
    alone: int = 0
    """Failures while it was the only item left."""
    not_before: float = 0.0
    """When it may be tried again, on the clock of `time.monotonic`."""
    tokens: int = 0
    """Sampled in its failed groups, none of which is sent."""
    too_old: int = 0
    """Times that its group became too old."""


class Retries:
    """Items whose groups the infrastructure broke. They are played again, with growing pauses while nothing succeeds.

    Args:
        item_pause: seconds before an item is played again; four times as long the next time.
        tell: prints a line.
    """

    def __init__(self, item_pause: float, tell: Callable[[str], None]) -> None:
        self._item_pause = item_pause
        self._tell = tell
        self._waiting: deque[ItemJob] = deque()
        self._successes = 0
        self._failed_in_a_row = 0
        self._resume_at = 0.0
        self._pause = _FIRST_PAUSE

    def __len__(self) -> int:
        return len(self._waiting)

    @property
    def down(self) -> bool:
        """Nothing succeeds: one group is tried now and then."""
        return self._failed_in_a_row >= MAX_ATTEMPTS

    @property
    def pausing(self) -> bool:
        return time.monotonic() < self._resume_at

    def ready(self) -> ItemJob | None:
        """An item whose pause is over."""
        now = time.monotonic()
        return next((job for job in self._waiting if job.not_before <= now), None)

    def take(self, job: ItemJob) -> ItemJob:
        self._waiting.remove(job)
        return job

    def succeeded(self) -> None:
        if self.down:
            self._tell("groups succeed again")
        self._successes += 1
        self._failed_in_a_row, self._pause = 0, _FIRST_PAUSE

    def put_aged(self, job: ItemJob, tokens: int) -> bool:
        """Keep the item of a group that became too old; False if that happened too often. Nothing failed: no pause."""
        job.too_old += 1
        if job.too_old >= MAX_ATTEMPTS:
            return False
        job.tokens += tokens
        self._waiting.append(job)
        return True

    def put(self, job: ItemJob, decision: LeftOut, *, last: bool) -> bool:
        """Keep the item for another attempt; False if it had enough of them. `last`: no other item is left."""
        self._failed_in_a_row += 1
        if self._successes != job.successes_then:  # while nothing succeeds, the item is not the cause
            job.failures += 1
            job.successes_then = self._successes
        if last and not self._waiting:
            job.alone += 1
        if job.failures >= MAX_ATTEMPTS or job.alone >= MAX_ATTEMPTS_ALONE:
            return False
        now = time.monotonic()
        # When a server goes away some groups still succeed: without a pause an item would use up its attempts by then.
        job.not_before = now + self._item_pause * 4 ** (job.failures - 1)
        job.tokens += decision.tokens
        self._waiting.append(job)
        if self._failed_in_a_row == MAX_ATTEMPTS:
            self._tell(f"groups fail: {decision.detail}; they are played again, one at a time until one succeeds")
        if self.down and now >= self._resume_at:  # groups fail together: one pause
            self._resume_at = now + self._pause
            self._pause = min(_LONGEST_PAUSE, 2 * self._pause)
        return True


class FailureBrake:
    """Prints exceptions in the environment's own code, and ends the run when no group gets a score any more.

    Args:
        most: groups in a row without a scored rollout after which the run stops.
        causes: why rollouts of the run have no score, to be counted in the last message.
    """

    def __init__(self, console: Console, most: int, causes: Causes | None = None) -> None:
        self.exceptions = 0
        """Rollouts that met an exception in the environment's own code."""
        self.most = most
        self._console = console
        self._most = most
        self._causes = Causes() if causes is None else causes
        self._shown: set[str] = set()
        self._in_a_row = 0

    def show(self, key: str, decision: Decision) -> None:
        """Print the exceptions of a group, each of them once."""
        self.exceptions += len(decision.tracebacks)
        for trace in decision.tracebacks:
            alike = lines_of(trace) or VARYING.sub("#", trace)
            if alike not in self._shown and len(self._shown) < MAX_TRACEBACKS:
                self._shown.add(alike)
                headline, _, rest = trace.partition("\n")
                line = f"exception in the environment, on {key}: {headline}"
                self._console.print(line, style="red", markup=False, highlight=False, soft_wrap=True)
                self._console.print(rest, markup=False, highlight=False, soft_wrap=True)

    def check(self, key: str, decision: Decision) -> None:
        """Raises `RunStopped` after too many groups without a score."""
        self.show(key, decision)
        useless = isinstance(decision, LeftOut) and decision.of_every_group
        kept = not isinstance(decision, LeftOut)
        if kept or (not useless and any(reward is not None for reward in decision.rewards)):
            self._in_a_row = 0
            return
        if isinstance(decision, LeftOut) and decision.blameless:
            return
        self._in_a_row += 1
        if self._in_a_row >= self._most and isinstance(decision, LeftOut) and useless:
            raise RunStopped(
                f"{counted(self._in_a_row, 'group')} in a row that are not sent; the last one: {decision.reason}: "
                f"{decision.detail}\n{REPEATS}"
            )
        if self._in_a_row >= self._most:
            why = decision.unscored_because if isinstance(decision, LeftOut) else ""
            if decision.tracebacks:  # they are printed above
                why = in_one_line(decision.tracebacks[-1])
            may_pass = isinstance(decision, LeftOut) and decision.again and not decision.tracebacks
            stopped = UnusableSettings if self._causes.of_settings else RunStopped
            raise stopped(
                "\n".join(
                    [
                        f"{counted(self._in_a_row, 'group')} in a row without a scored rollout; the last one: "
                        f"{why or 'no reason is known'}",
                        *(["rollouts without a score:", *self._causes.lines()] if self._causes else []),
                        PASSES if may_pass else REPEATS,
                    ]
                )
            )


def broken(error: BaseException, timeout: asyncio.Timeout, seconds: float) -> LeftOut:
    """The decision about a group whose `play` raised."""
    if timeout.expired():
        detail = f"the group took longer than {seconds:g} s; see env.worker_timeout"
        return LeftOut("worker timeout", detail, unscored_because=detail)
    trace = explained(error)
    return LeftOut("failed", headline(error), again=True, tracebacks=[trace])


def is_infrastructure(error: BaseException) -> bool:
    """Whether an exception of `play` may come from broken infrastructure; any other one is a bug in an override."""
    if isinstance(error, BaseExceptionGroup):
        return all(map(is_infrastructure, error.exceptions))
    return isinstance(error, BackendError | InferenceError | OSError)
