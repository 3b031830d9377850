"""A machine that others keep busy."""

from __future__ import annotations

import contextlib
import os
import subprocess
import sys
from collections.abc import Iterator

_SPIN = "import time; end = time.monotonic() + 120\nwhile time.monotonic() < end: pass"


@contextlib.contextmanager
def busy_machine(each: int = 5) -> Iterator[None]:
    """`each` processes for every processor, in sessions of their own: the kernel shares time out among sessions."""
    command = [sys.executable, "-S", "-c", _SPIN]
    spinning = [subprocess.Popen(command, start_new_session=True) for _ in range(each * len(os.sched_getaffinity(0)))]
    try:
        yield
    finally:
        for process in spinning:
            process.kill()
        for process in spinning:
            process.wait()
