"""Helpers of backend tests: a sandbox for a block, the output of a command, the processes that this machine shows."""

from __future__ import annotations

import asyncio
import contextlib
import os
import time
from collections.abc import AsyncIterator, Callable
from pathlib import Path

from backends import Backend, BackendError, ExecResult, Sandbox, SandboxSpec


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
    """Wait for `condition`, and return whether it came true. The limit is generous: only failing tests reach it."""
    end = time.monotonic() + seconds
    while time.monotonic() < end:
        if condition():
            return True
        await asyncio.sleep(0.02)
    return condition()


async def stopped(sandbox: Sandbox, command: str, timeout: float) -> ExecResult:
    """The result of a command that writes something and then runs into its time limit.

    On a busy machine the limit may pass before the command has written: then it runs again with more time.
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
        with contextlib.suppress(BackendError):  # a test may have broken it
            await sandbox.close()


async def output(sandbox: Sandbox, command: str, timeout: float = 30) -> str:
    """The stripped output of a command, which must succeed."""
    result = await sandbox.exec(command, timeout=timeout)
    assert result.exit_code == 0, result
    return result.stdout.decode().strip()
