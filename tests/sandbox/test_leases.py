"""A lease ends once and for good: late calls are rejected, and never run in the sandbox of the next rollout."""

from __future__ import annotations

import asyncio
import os
import signal
from collections.abc import AsyncIterator
from typing import Any

import pytest

from backends import (
    Lease,
    LeaseOver,
    Sandbox,
    SandboxLost,
    SandboxPerLease,
    SandboxSpec,
    SupportsPty,
    SupportsSnapshot,
    create_backend,
)
from lachesis_tools import ToolSessions, call_tool


@pytest.fixture
async def sandbox() -> AsyncIterator[Sandbox]:
    sandbox = await create_backend("local", isolation="none").create(SandboxSpec())
    yield sandbox
    await sandbox.close()


class OneSlot:
    """The smallest pool: every lease gets the same sandbox, one after the other."""

    def __init__(self, sandbox: Sandbox) -> None:
        self.sandbox = sandbox
        self.free = asyncio.Lock()

    async def lease(self, spec: SandboxSpec) -> Lease:
        await self.free.acquire()

        async def give_back() -> None:
            self.free.release()

        return Lease(self.sandbox, give_back, lifetime=spec.lifetime)


async def test_a_released_lease_refuses_every_call(sandbox: Sandbox) -> None:
    lease = await OneSlot(sandbox).lease(SandboxSpec())
    leased = lease.sandbox
    process = await leased.start("cat")
    await leased.write_bytes("f", b"x")
    await lease.release()
    late = [
        leased.exec("echo late >> f", timeout=60),
        leased.start("echo late >> f"),
        leased.processes(),
        leased.stop_processes(),
        leased.read_bytes("f"),
        leased.write_bytes("f", b"late"),
        leased.upload_dir("/tmp", "d"),
        leased.download_dir(".", "/tmp/never"),
        anext(leased.read_chunks("f")),
        process.write(b"late"),
        process.read(),
        process.status(),
        process.close_stdin(),
        process.kill(),
    ]
    results = await asyncio.gather(*late, return_exceptions=True)
    assert [type(result) for result in results] == [LeaseOver] * len(late)
    assert await sandbox.read_bytes("f") == b"x"
    assert (await (await sandbox.processes())[0].status()).exit_code is None, "the late kill reached nothing"


async def test_a_call_under_way_is_cut_off_before_the_next_rollout_gets_the_sandbox(sandbox: Sandbox) -> None:
    pool = OneSlot(sandbox)
    first = await pool.lease(SandboxSpec())
    command = "touch begun; until test -e go; do sleep 0.01; done; echo first > winner; sleep 30"
    running = asyncio.create_task(first.sandbox.exec(command, timeout=60))
    while (await sandbox.exec("test -e begun", timeout=60)).exit_code != 0:
        pass
    waiting = asyncio.create_task(pool.lease(SandboxSpec()))
    await first.release()
    with pytest.raises(LeaseOver, match="under this call"):
        await running
    second = await waiting
    assert second.token > first.token
    done = await second.sandbox.exec("touch go; sleep 1; cat winner 2>/dev/null || echo nobody", timeout=60)
    assert done.stdout == b"nobody\n"
    with pytest.raises(LeaseOver):
        await first.sandbox.exec("echo first > winner", timeout=60)
    await second.release()


async def test_a_write_that_has_hardly_begun_leaves_nothing_to_the_next_rollout() -> None:
    sandbox: Any = await create_backend("local", isolation="none").create(SandboxSpec())
    executor = sandbox._launched.child.pid
    lease = await OneSlot(sandbox).lease(SandboxSpec())
    os.kill(executor, signal.SIGSTOP)  # it takes the write, and does not answer yet
    writing = asyncio.create_task(lease.sandbox.write_bytes("f", b"x" * (3 << 20)))
    await asyncio.sleep(0.1)
    await lease.release()
    os.kill(executor, signal.SIGCONT)
    with pytest.raises(LeaseOver):
        await writing
    assert (await sandbox.exec("ls -A", timeout=60)).stdout == b""
    await sandbox.close()


async def test_a_caller_that_is_cancelled_is_cancelled_and_nothing_else(sandbox: Sandbox) -> None:
    lease = await OneSlot(sandbox).lease(SandboxSpec())
    running = asyncio.create_task(lease.sandbox.exec("sleep 30", timeout=60))
    await asyncio.sleep(0.05)
    running.cancel()
    with pytest.raises(asyncio.CancelledError):
        await running
    assert (await lease.sandbox.exec("echo on", timeout=60)).stdout == b"on\n"
    await lease.release()


async def test_an_expired_lease_refuses_although_the_sandbox_lives(sandbox: Sandbox) -> None:
    for lifetime in (0.2, 10.0):
        lease = await OneSlot(sandbox).lease(SandboxSpec(lifetime=lifetime))
        try:
            assert (await lease.sandbox.exec("echo in time", timeout=60)).exit_code == 0
            break
        except SandboxLost:
            assert lifetime < 10.0  # a busy machine takes longer than the shorter one
            await lease.release()
    await asyncio.sleep(lifetime + 0.05)
    with pytest.raises(SandboxLost, match=rf"lifetime of {lifetime:g} s is over"):
        await lease.sandbox.exec("echo late", timeout=60)
    await lease.release()
    assert (await sandbox.exec("true", timeout=60)).exit_code == 0


async def test_releasing_twice_gives_back_once(sandbox: Sandbox) -> None:
    given: list[int] = []

    async def give_back() -> None:
        await asyncio.sleep(0.05)
        given.append(1)

    lease = Lease(sandbox, give_back, lifetime=60)
    impatient = asyncio.create_task(lease.release())
    await asyncio.sleep(0.01)
    impatient.cancel()
    await asyncio.gather(lease.release(), lease.sandbox.close())
    assert given == [1]


async def test_a_sandbox_per_lease_is_removed_with_it_and_shows_its_own_powers() -> None:
    lease = await SandboxPerLease(create_backend("local", isolation="none")).lease(SandboxSpec())
    assert isinstance(lease.sandbox, Sandbox) and isinstance(lease.sandbox, SupportsPty)
    assert not isinstance(lease.sandbox, SupportsSnapshot)
    folder = lease.sandbox.workdir
    async with asyncio.timeout(60):
        await lease.release()
    again = await create_backend("local", isolation="none").create(SandboxSpec())
    assert (await again.exec(f"ls {folder}", timeout=60)).exit_code == 2
    await again.close()


async def test_tool_sessions_work_through_a_pool_and_a_forgotten_task_reaches_nothing(sandbox: Sandbox) -> None:
    async with ToolSessions(OneSlot(sandbox)) as sessions:
        first = sessions.open("first")
        held = await first.sandbox()
        await call_tool("terminal", {"command": "echo one > mark"}, first)
        await sessions.close("first")
        second = sessions.open("second")
        await call_tool("terminal", {"command": "echo two > mark"}, second)
        with pytest.raises(LeaseOver):
            await held.write_bytes("mark", b"forged")
        assert await (await second.sandbox()).read_bytes("mark") == b"two\n"
