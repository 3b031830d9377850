"""How much of a processor a program gets in a sandbox.

A limit of wall-clock time is reached by code that hangs, and also by right code on a machine that others keep busy. The
first is the agent's failure, the second is not. The agent must not be able to pass one off as the other: all of this is
measured where none of the agent's processes run any more. What a program itself waited for a processor is measured as
well, by a process that the agent cannot reach, and can only show that the agent is at fault.
"""

from __future__ import annotations

import contextlib
import re
from collections.abc import Iterable
from dataclasses import dataclass

from backends import BackendError, Sandbox
from lachesis_tools import ToolSession

_PROGRAM = """LC_ALL=C TIMEFORMAT='pace %R %U %S'
time for ((i = 0; i < 200000; i++)); do :; done
n=0; while read -r name _; do [[ $name == cpu[0-9]* ]] && n=$((n + 1)); done < /proc/stat
read -r load _ < /proc/loadavg; echo "load $load $n" >&2"""
_LIMIT = 120.0
"""Seconds. The program takes about half a second of processor time."""
_FREE = 1.5
USABLE = 10.0
"""How many times as slow a machine may be. A limit of time becomes longer by no more than this."""
MARGIN = 1.5
"""How much slower a machine may have become during a limit that was made for its pace."""


_ENOUGH = 4.0


@dataclass(frozen=True, slots=True)
class OwnTime:
    """The time of a program that a time limit has ended."""

    seconds: float
    """Of wall-clock time."""
    waited: float | None
    """Seconds of them in which it could have run, and others had the processors: `ExecResult.waited`. None where that
    is not known."""

    def uses_up(self, limit: float) -> bool:
        """Whether it would have reached `limit`, in seconds, on a machine that nobody else uses."""
        return self.waited is not None and self.seconds - self.waited >= 0.9 * limit

    def is_enough(self, limit: float) -> bool:
        """Whether it slept, or had processors, for so large a part of `limit` that no right program needs more."""
        return self.waited is not None and self.seconds - self.waited >= limit / _ENOUGH


class MachineOverloaded(BackendError):
    """The machine of the sandboxes is too busy for limits of time to mean anything."""


@dataclass(frozen=True, slots=True)
class Pace:
    """The share of its machine that a sandbox gets."""

    stretch: float
    """Seconds in which one busy process gets a second of processor time, or the part of it that its sandbox may use at
    most; 1 on a free machine."""
    load: float
    """Processes that ran or waited to run in the last minute, for each processor. The agent's were among them."""

    @property
    def free(self) -> bool:
        """Whether others have not kept the machine busy, now or shortly before."""
        return max(self.stretch, self.load) < _FREE

    def require_usable(self, what: str, at_most: float = USABLE) -> None:
        """Raises `MachineOverloaded`: the failure of `what` says nothing about the agent."""
        if self.stretch > at_most:
            raise MachineOverloaded(
                f"{what}, but a process needs {self.stretch:.1f} s for a second of processor time: the machine of the "
                "sandboxes is overloaded. Next step: set env.max_num_workers or env.max_eval_workers lower"
            )


async def pace(sandbox: Sandbox, cpus: float | None = None) -> Pace:
    """Measure it, with the sandbox' own limit of processors taken into account.

    Raises:
        BackendError: the sandbox failed.
    """
    done = await sandbox.exec(_PROGRAM, timeout=_LIMIT, fresh=True)
    printed = done.stderr.decode(errors="replace")
    times = re.search(r"^pace ([\d.]+) ([\d.]+) ([\d.]+)$", printed, re.MULTILINE)
    if times is None:  # not even that ended in time
        return Pace(_LIMIT, _LIMIT)
    wall, user, system = map(float, times.groups())
    load = re.search(r"^load ([\d.]+) (\d+)$", printed, re.MULTILINE)
    waiting = float(load[1]) / max(1, int(load[2])) if load else 0.0
    return Pace(max(1.0, wall * min(1.0, cpus or 1.0) / max(user + system, 0.001)), waiting)


async def pace_without_agent(sessions: Iterable[ToolSession]) -> Pace | None:
    """The same in a fresh sandbox, after everything in those of a rollout is killed; None if all of them are closed."""
    left = [session for session in sessions if not session.closed]
    if not left:
        return None
    for session in left:
        if session.started:
            with contextlib.suppress(BackendError):  # then nothing runs there either
                await (await session.sandbox()).stop_processes()
    fresh = left[-1].another()
    try:
        return await pace(await fresh.sandbox(), fresh.cpus)
    finally:
        await fresh.close()


async def waited_for_cpu(sessions: Iterable[ToolSession]) -> float | None:
    """Seconds so far in which others had the CPUs that commands there could have used; None if unknown."""
    found = [await session.waited_for_cpu() for session in sessions]
    return None if None in found else sum(each or 0.0 for each in found)
