"""Errors that are meant to be read by a person; those of sandboxes among them.

A failure of the infrastructure is a `BackendError`. Whatever a command does is a result, including a timeout.
"""

from __future__ import annotations

import errno
import os
import resource
from enum import IntEnum
from pathlib import Path

INSIDE = "the error of a system call inside the sandbox"
"""A note (`__notes__`) of each `OSError` that an executor reported: none of them is an error of this machine."""


class ExitCode(IntEnum):
    """How a command ended."""

    DONE = 0
    FAILED = 1
    """Something failed: a group, the environment's code, a server, a backend, a disk; or a check found something."""
    SETTINGS = 2
    """The input is wrong: settings, arguments, or the content of a file that is read. argparse has the same."""
    STOPPED = 130
    """The user stopped it; the same command continues."""


class LachesisError(Exception):
    """An expected failure. Its message names the thing, the reason and the next step, so commands print it without a
    traceback."""

    exit_code: int = ExitCode.FAILED
    """Exit code of a command that ends with this error: `SETTINGS` if other arguments, or another file, are the
    remedy."""


class SettingsError(LachesisError, ValueError):
    """Settings that cannot be used."""

    exit_code = ExitCode.SETTINGS


def cannot_read(path: str | os.PathLike[str], error: OSError | None = None) -> str:
    """What each command says of a path that it cannot read; a hint may follow.

    Args:
        error: of the system; None where no file is at `path`.
    """
    if isinstance(error, IsADirectoryError) or (error is None and os.path.isdir(path)):  # noqa: PTH112
        return f"{os.fspath(path)} is a folder, not a file"
    if error is None or isinstance(error, FileNotFoundError | NotADirectoryError):
        return f"there is no file or folder {os.fspath(path)}"
    return f"{os.fspath(path)} cannot be read ({error.strerror or error})"


def refuse_empty(path: Path) -> None:
    """Raises SettingsError for an empty file. A command that rewrites a file writes an empty one instead."""
    try:
        empty = path.is_file() and not path.stat().st_size
    except OSError:  # who reads it says so
        return
    if empty:
        raise SettingsError(f"{path} is empty; name another file, or fill it first")


def cannot_listen(host: str, port: int, error: OSError) -> SettingsError:
    """What a server raises whose address cannot be bound."""
    if error.errno == errno.EADDRINUSE:
        return SettingsError(f"port {port} on {host} is in use; choose another with --port (0 takes a free one)")
    reason = error.strerror or error
    return SettingsError(f"cannot listen on {host}, port {port} ({reason}); choose another --port or --host")


class BackendError(LachesisError):
    """The sandbox technology failed, not the code inside."""

    may_pass = True
    """Whether another attempt at the same rollout may succeed."""


class BackendUnavailable(BackendError):
    """The backend cannot do this here. The message says what is missing and how to get it."""


class ImageUnavailable(BackendUnavailable):
    """There is no image of the name that the spec has, or it is denied: another attempt ends in the same way."""

    may_pass = False


class SandboxLost(BackendError):
    """The sandbox is gone: closed, killed, or past its lifetime. The rollout has to start again."""


class SandboxExhausted(SandboxLost):
    """What ran inside used up the sandbox's own limits, and that ended it. A new attempt would excuse the agent."""


class ProcessesRunning(LachesisError):
    """A checkpoint was asked for while something ran inside. It is not in `running="left out"` checkpoints."""

    def __init__(self, sandbox: str, commands: list[str]) -> None:
        super().__init__(
            f"sandbox {sandbox} still runs {', '.join(commands)}: processes are in no checkpoint. Next step: end them, "
            "or pass running='left out'"
        )
        self.commands = commands
        """The command lines, one of each process."""


def os_error_hint(error: OSError) -> str:
    """What to do about an error of the system; empty if nothing is known."""
    if error.errno in (errno.EMFILE, errno.ENFILE):
        most, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
        return (
            f"this process may have {most} files open, and sockets and sandboxes count: raise it with `ulimit -n`, or "
            "lower --env.max_num_workers"
        )
    if error.errno in (errno.ENOSPC, errno.EDQUOT):
        return "the disk is full: make room there and start again"
    name = error.filename
    if isinstance(error, FileNotFoundError) and isinstance(name, str) and not Path(name).is_absolute():
        return f"the path begins in the folder of the command, {Path.cwd()}"
    return ""
