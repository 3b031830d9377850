"""Commands that end with the process that starts them, however that ends.

    python with_parent.py PARENT_PID COMMAND [ARGUMENT ...]

The child itself must ask for that, so this file is also a program, which imports nothing of the project and replaces
itself by the command.
"""

from __future__ import annotations

import ctypes
import os
import signal
import sys

_PR_SET_PDEATHSIG = 1


def with_parent(*command: str) -> list[str]:
    """The command, as one that the kernel kills when this process ends. Start it from a thread that lasts as long."""
    return [sys.executable, "-I", "-S", __file__, str(os.getpid()), *command]


def main() -> None:
    parent, *command = sys.argv[1:]
    if sys.platform == "linux":
        ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
    if os.getppid() != int(parent):  # it has ended before the wish was made
        sys.exit(1)
    os.execvp(command[0], command)  # the wish outlives this


if __name__ == "__main__":
    main()
