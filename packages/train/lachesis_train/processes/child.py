"""Replaces itself by a command that ends with the process that started it, however that ends.

    python child.py PARENT_PID COMMAND [ARGUMENT ...]

A file of its own, which imports nothing of the project: the child itself must ask to end with its parent.
"""

from __future__ import annotations

import ctypes
import os
import signal
import sys

_PR_SET_PDEATHSIG = 1


def main() -> None:
    parent, *command = sys.argv[1:]
    if sys.platform == "linux":
        ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
    if os.getppid() != int(parent):  # it has ended before the wish was made
        sys.exit(1)
    os.execvp(command[0], command)  # the wish outlives this


if __name__ == "__main__":
    main()
