"""The base class of every error that is meant to be read by a person."""

from __future__ import annotations

from enum import IntEnum
from typing import ClassVar


class ExitCode(IntEnum):
    """How a command ended."""

    DONE = 0
    FAILED = 1
    """Something failed: a group, the environment's code, a server, a backend, a disk, a file."""
    SETTINGS = 2
    """Settings or arguments that cannot be used. argparse has the same."""
    STOPPED = 130
    """The user stopped it; the same command continues."""


class LachesisError(Exception):
    """An expected failure. Its message names the thing, the reason and the next step, so commands print it without a
    traceback."""

    exit_code: ClassVar[int] = ExitCode.FAILED
    """Exit code of a command that ends with this error: `SETTINGS` if other arguments are the remedy."""


class SettingsError(LachesisError, ValueError):
    """Settings that cannot be used."""

    exit_code = ExitCode.SETTINGS
