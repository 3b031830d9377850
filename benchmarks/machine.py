"""Below a benchmark: memory, processor time, the disturbance by other work, and the code that is measured."""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from pathlib import Path


def memory_mb(field: str) -> float:
    """A line of /proc/self/status: VmRSS is the current size, VmHWM the peak since `forget_peak`."""
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith(f"{field}:"):
            return int(line.split()[1]) / 1024
    raise RuntimeError(f"/proc/self/status has no {field}; this benchmark runs on Linux")


def cpu_seconds(*pids: int) -> float:
    """Of living processes, all their threads included, in user and system mode; not of their children."""
    fields = [Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split() for pid in pids]
    return sum(int(one[11]) + int(one[12]) for one in fields) / os.sysconf("SC_CLK_TCK")


def forget_peak() -> None:
    """Reset VmHWM to the current size."""
    Path("/proc/self/clear_refs").write_text("5")


def disturbance(clock: Callable[[], float] = time.process_time) -> float:
    """The mean cost of a fixed piece of work, as a multiple of its best: 1 on an idle machine. The cost of neighbours
    on the same cores and caches is charged to this process."""
    taken = []
    until = time.monotonic() + 1.0
    while time.monotonic() < until:
        started = clock()
        sum(number for number in range(10_000))
        taken.append(clock() - started)
    return sum(taken) / len(taken) / min(taken)


def python_path(checkout: Path) -> str:
    """PYTHONPATH for a process that is to import all packages of this checkout, whatever is installed."""
    return os.pathsep.join(map(str, [checkout, *sorted(checkout.glob("packages/*"))]))
