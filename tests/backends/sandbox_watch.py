"""What the tests of all backends use: a sandbox for a block, its output, and what the machine still shows of it."""

from __future__ import annotations

import asyncio
import contextlib
import os
import time
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from typing import NoReturn

import pytest

from backends import Backend, BackendError, ExecResult, Sandbox, SandboxSpec


def missing(reason: str) -> NoReturn:
    """Skip what cannot be tested here; on CI, where everything is installed, that is a failure."""
    if os.environ.get("CI") == "true":
        pytest.fail(reason)
    pytest.skip(reason)


def host_processes(mark: str) -> list[int]:
    """Processes of this machine, zombies aside, whose command line or environment contains `mark`."""
    found = []
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit() and int(entry.name) != os.getpid():
            try:
                state = (entry / "stat").read_text().rpartition(")")[2].split()[0]
                text = (entry / "cmdline").read_bytes() + (entry / "environ").read_bytes()
            except OSError:
                continue
            if state not in "ZX" and mark.encode() in text:
                found.append(int(entry.name))
    return found


async def until(condition: Callable[[], bool], seconds: float = 60.0) -> bool:
    """Whether `condition` came true in time, which is far more than it takes: nobody waits who need not."""
    end = time.monotonic() + seconds
    while time.monotonic() < end:
        if condition():
            return True
        await asyncio.sleep(0.02)
    return condition()


async def stopped(sandbox: Sandbox, command: str, timeout: float) -> ExecResult:
    """A command that says something and then meets its time limit.

    A busy machine may come to the limit before the command has said it: then it is run again, with more time.
    """
    while True:
        result = await sandbox.exec(command, timeout=timeout)
        if result.stdout or timeout > 60:
            return result
        timeout *= 4


@contextlib.asynccontextmanager
async def opened(backend: Backend, spec: SandboxSpec | None = None) -> AsyncIterator[Sandbox]:
    """A sandbox for the length of a block."""
    sandbox = await backend.create(spec or SandboxSpec())
    try:
        yield sandbox
    finally:
        with contextlib.suppress(BackendError):  # of one that a test has broken
            await sandbox.close()


async def output(sandbox: Sandbox, command: str, timeout: float = 30) -> str:
    """What a command writes that has to succeed."""
    result = await sandbox.exec(command, timeout=timeout)
    assert result.exit_code == 0, result
    return result.stdout.decode().strip()
