"""A machine that others keep busy, and tests that cannot judge on one."""

from __future__ import annotations

import contextlib
import os
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest

from lachesis.tool_context.pace import MachineOverloaded

_SPIN = "import time; end = time.monotonic() + 120\nwhile time.monotonic() < end: pass"


@contextlib.contextmanager
def busy_machine(each: int = 3) -> Iterator[None]:
    """This process, and what it starts, have one processor only, which `each` other processes keep busy.

    These have sessions of their own: the kernel shares time out among sessions.
    """
    before = os.sched_getaffinity(0)
    one = {min(before)}
    while _pin(one):  # some may have begun meanwhile
        time.sleep(0.01)
    command = [sys.executable, "-S", "-c", _SPIN]
    spinning = [subprocess.Popen(command, start_new_session=True) for _ in range(each)]
    try:
        yield
    finally:
        for process in spinning:
            process.kill()
        for process in spinning:
            process.wait()
        _pin(before)


@contextlib.contextmanager
def quiet_machine() -> Iterator[None]:
    """Skips a test that needs a verdict by the clock, if others keep the machine so busy that there is none.

    Where they do not, the same error is a failure.
    """
    try:
        yield
    except MachineOverloaded as error:
        if (load := os.getloadavg()[0]) < 2 * len(os.sched_getaffinity(0)):
            raise
        pytest.skip(f"the machine is busy (load {load:.0f}): {error}")


def refuse_to_judge_on_a_busy_machine(failures: Sequence[Mapping[str, Any]]) -> None:
    """Skips a test whose rollouts were left out without a score, if others keep the machine busy."""
    load = os.getloadavg()[0]
    if load >= 2 * len(os.sched_getaffinity(0)) and failures and all(each["reward"] is None for each in failures):
        pytest.skip(f"the machine is busy (load {load:.0f})")


def _pin(processors: set[int]) -> bool:
    """Whether any thread was elsewhere before."""
    moved = False
    for thread in _threads(os.getpid()):
        with contextlib.suppress(ProcessLookupError):
            moved = moved or os.sched_getaffinity(thread) != processors
            os.sched_setaffinity(thread, processors)
    return moved


def _threads(process: int) -> Iterator[int]:
    """Of a process and its descendants."""
    with contextlib.suppress(OSError):  # it has ended
        for task in Path(f"/proc/{process}/task").iterdir():
            yield int(task.name)
            for child in (task / "children").read_text().split():
                yield from _threads(int(child))
