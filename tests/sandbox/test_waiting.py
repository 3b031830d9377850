"""What a command waited for a processor: the time in which it could have run, and others had it."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from typing import Any

import pytest

from backends import Sandbox, SandboxSpec
from backends.factory import create_backend
from tests.support.busy_machine import busy_machine

SPIN = "python3 -S -c 'while True: pass'"
DAEMON = "import os\nif os.fork(): os._exit(0)\nos.setsid()\nif os.fork(): os._exit(0)\nwhile True: pass"

STARVED = {
    "a loop": SPIN,
    "many loops": f"for i in $(seq 20); do {SPIN} & done; wait",
    "a loop in another session": f"setsid {SPIN} & sleep 60",
    "a daemon that loops": f"python3 -S -c '{DAEMON}'; sleep 60",
    "many short programs": "while :; do /bin/true; done",
}
HANGS = {
    "sleep": "sleep 60",
    "its parent waits": "bash -c 'sleep 60; :'",
    "it is stopped": "kill -STOP $BASHPID",
    "a loop that lets all others run first": f"nice -n 19 {SPIN}",
    "a loop of the lowest class": f"chrt --idle 0 {SPIN}",
    "the parent of a vfork": "exec python3 -S -c 'import ctypes, time\nctypes.CDLL(None).vfork() or time.sleep(60)'",
}
SECONDS = 3.0


@pytest.fixture
async def sandbox() -> Sandbox:
    return await create_backend("local").create(SandboxSpec())


async def own_time(sandbox: Sandbox, command: str) -> float:
    """The part of its time in which nobody else kept the command from running."""
    try:
        done = await sandbox.exec(command, timeout=SECONDS, fresh=True)
    finally:
        await sandbox.close()
    assert done.timed_out and done.waited is not None, done
    return 1 - done.waited / done.duration


def one_of(commands: Iterable[str], *names: str) -> list[Any]:
    """All of them, of which `make test` runs those with these names: the machine is busy meanwhile."""
    return [name if name in names else pytest.param(name, marks=pytest.mark.long) for name in commands]


@pytest.mark.parametrize("name", one_of(STARVED, "many short programs"))
async def test_what_a_busy_machine_keeps_from_running_waits(sandbox: Sandbox, name: str) -> None:
    with busy_machine(12):
        assert await own_time(sandbox, STARVED[name]) < 0.5


@pytest.mark.parametrize("name", one_of(HANGS, "the parent of a vfork"))
async def test_what_does_not_want_to_run_does_not_wait_on_a_busy_machine(sandbox: Sandbox, name: str) -> None:
    with busy_machine(12):
        assert await own_time(sandbox, HANGS[name]) > 0.5


@pytest.mark.slow
@pytest.mark.parametrize("command", [SPIN, STARVED["many loops"]], ids=["a loop", "many loops"])
async def test_a_sandbox_that_may_use_little_of_a_processor_does_not_wait_for_others(command: str) -> None:
    sandbox = await create_backend("local").create(SandboxSpec(cpus=0.05))
    assert await own_time(sandbox, command) > 0.5


async def test_a_command_that_was_cancelled_has_waited_as_well(sandbox: Sandbox, tmp_path: Path) -> None:
    import asyncio

    with busy_machine(12):
        with pytest.raises(TimeoutError):
            async with asyncio.timeout(SECONDS):
                await sandbox.exec(SPIN, timeout=60, fresh=True)
        waited = await sandbox.waited()  # type: ignore[attr-defined]
        await sandbox.close()
    assert waited is not None and waited > SECONDS / 2
