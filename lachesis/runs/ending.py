"""The end of a program: Ctrl-C, pressed once more while it ends, interrupts nothing that has to be put away."""

from __future__ import annotations

import atexit
import os
import signal
import sys
import time
from collections.abc import Callable
from typing import Any, NoReturn

from backends.errors import ExitCode

PATIENCE = 5.0
"""Seconds after which Ctrl-C ends at once what keeps a program from ending."""


def end_with(main: Callable[[], int]) -> NoReturn:
    """Run the main function of a program, and end it with its exit code."""
    # Comes last: the interpreter takes a handler away in the end, and Ctrl-C would then end it with another exit code.
    atexit.register(signal.signal, signal.SIGINT, signal.SIG_IGN)
    code: Any = ExitCode.STOPPED
    try:
        try:
            code = main()
        except SystemExit as ended:  # of a parser of arguments
            code = ended.code
        _ignore_ctrl_c(code)
    except KeyboardInterrupt:  # one more, while another one was answered
        _ignore_ctrl_c(code)
    sys.exit(code)


def _ignore_ctrl_c(code: Any) -> None:
    # What it needs are its arguments: it may be called when the modules are gone.
    def handle(
        *_: Any,
        ended: float = time.monotonic(),
        now: Callable[[], float] = time.monotonic,
        leave: Callable[[int], NoReturn] = os._exit,
        code: int = code if isinstance(code, int) else int(code is not None),
        patience: float = PATIENCE,
    ) -> None:
        if now() - ended > patience:
            leave(code)

    signal.signal(signal.SIGINT, handle)
