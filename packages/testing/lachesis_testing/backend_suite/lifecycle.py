"""What creating, limiting, leasing and closing a sandbox promise."""

from __future__ import annotations

import asyncio
import contextlib
import os
import uuid
from collections.abc import AsyncIterator

import pytest

from backends import Backend, Lease, LeaseOver, Process, Sandbox, SandboxLost, SandboxSpec

from .fixtures import FindProcesses
from .probes import opened, output, until


async def test_the_backend_has_every_method(backend: Backend) -> None:
    missing = [name for name in ("name", "check", "create", "sandboxes", "reap") if not hasattr(backend, name)]
    assert missing == [], f"{type(backend).__name__} lacks {', '.join(missing)} of the protocol backends.Backend"


async def test_the_sandbox_has_every_method(sandbox: Sandbox) -> None:
    assert isinstance(sandbox, Sandbox)


@contextlib.asynccontextmanager
async def answered() -> AsyncIterator[None]:
    """Calls on a sandbox that has ended raise at once."""
    try:
        async with asyncio.timeout(30):
            yield
    except TimeoutError:
        pytest.fail("a call on a sandbox that has ended hangs: connection.fail(reason) must be called when it ends")


async def nothing() -> AsyncIterator[bytes]:
    empty: tuple[bytes, ...] = ()
    for part in empty:
        yield part


async def every_call_raises(sandbox: Sandbox, process: Process, reason: str) -> None:
    for call in (
        sandbox.exec("true", timeout=5),
        sandbox.start("true"),
        sandbox.processes(),
        sandbox.read_bytes("x"),
        sandbox.write_bytes("x", b""),
        sandbox.write_chunks("x", nothing()),
        sandbox.upload_dir(os.curdir, "x"),
        sandbox.stop_processes(),
        process.status(),
        process.read(),
        process.kill(),
    ):
        with pytest.raises(SandboxLost, match=reason):
            async with answered():
                await call


async def test_after_close_nothing_is_left_and_every_call_raises(
    backend: Backend, find_processes: FindProcesses
) -> None:
    mark = str(uuid.uuid4().int)[:9]
    sandbox = await backend.create(SandboxSpec(labels={"task_id": "t-17"}))
    process = await sandbox.start(f"setsid sleep {mark} & sleep {mark}")
    await sandbox.exec(f"setsid sleep {mark} > /dev/null 2>&1 &", timeout=20)
    running = asyncio.create_task(sandbox.exec(f"sleep {mark}", timeout=100))
    assert await until(lambda: len(find_processes(mark)) >= 4)
    await sandbox.close()
    assert find_processes(mark) == []
    with pytest.raises(SandboxLost):
        async with answered():
            await running
    await every_call_raises(sandbox, process, "task_id=t-17.* was closed")
    await sandbox.close()


async def test_a_sandbox_ends_itself_after_its_lifetime(backend: Backend) -> None:
    for lifetime in (0.6, 10.0):
        sandbox = await backend.create(SandboxSpec(lifetime=lifetime))
        try:
            process = await sandbox.start("sleep 100")
            break
        except SandboxLost:  # on a busy machine it may be over before anything was started
            await sandbox.close()
    with pytest.raises(SandboxLost, match=rf"its lifetime of {lifetime:g} s is over"):
        async with answered():
            await sandbox.exec("sleep 100", timeout=100)
    await every_call_raises(sandbox, process, "lifetime")
    await sandbox.close()


async def test_the_wall_time_of_the_spec_bounds_every_command(backend: Backend) -> None:
    for wall_time in (0.6, 10.0):
        sandbox = await backend.create(SandboxSpec(wall_time=wall_time))
        process = await sandbox.start("echo begun; sleep 100")
        result = await sandbox.exec("echo begun; sleep 100", timeout=100)
        ended = await process.read(6, wait=50)
        short = await sandbox.exec("exit 3", timeout=100)
        await sandbox.close()
        if result.stdout and short.exit_code != 124:
            break  # else this machine is too busy to do anything in so little time
    assert (result.exit_code, result.timed_out, result.stdout) == (124, True, b"begun\n")
    assert ended.exit_code == 124
    assert short.exit_code == 3


async def test_the_working_directory_of_the_spec_is_made(backend: Backend) -> None:
    sandbox = await backend.create(SandboxSpec(workdir="/tmp/made/for it"))
    assert sandbox.workdir == "/tmp/made/for it"
    assert await output(sandbox, "pwd; touch here") == "/tmp/made/for it"
    assert await sandbox.read_bytes("here") == b""
    await sandbox.exec("rm -r /tmp/made", timeout=20)
    await sandbox.close()


async def test_thirty_two_sandboxes_at_once(backend: Backend) -> None:
    sandboxes = await asyncio.gather(*(backend.create(SandboxSpec()) for _ in range(32)))
    results = await asyncio.gather(*(s.exec(f"echo {i} > me; cat me", timeout=60) for i, s in enumerate(sandboxes)))
    assert [int(result.stdout) for result in results] == list(range(32))
    assert len({sandbox.id for sandbox in sandboxes}) == 32
    await asyncio.gather(*(sandbox.close() for sandbox in sandboxes))


async def test_python_inside_is_usable(sandbox: Sandbox) -> None:
    assert sandbox.python is not None
    code = "import sys, json, ssl, sqlite3; assert sys.version_info >= (3, 8); print(json.dumps([1]))"
    assert await output(sandbox, f"{sandbox.python} -c '{code}'; python3 -c '{code}'") == "[1]\n[1]"


async def test_variables_of_the_spec_are_set_and_nothing_of_the_hosts(
    backend: Backend, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("OPENAI_API_KEY", "sk-secret")
    sandbox = await backend.create(SandboxSpec(env={"TASK": "sort me", "LANG": "C"}))
    names = set((await output(sandbox, "env | cut -d= -f1")).split())
    assert await output(sandbox, "echo $TASK $LANG") == "sort me C"
    allowed = "PATH HOME USER LOGNAME SHELL LANG TERM TASK PWD SHLVL _ TMPDIR LACHESIS_SANDBOX"
    assert names <= {*allowed.split()}
    assert await output(sandbox, "cd; pwd; touch x; cd /tmp; ls ${TMPDIR:-/tmp}") != ""
    await sandbox.close()


async def test_a_sandbox_is_listed_while_it_lives_and_only_its_owner_removes_it(backend: Backend) -> None:
    run = uuid.uuid4().hex
    async with opened(backend, SandboxSpec(labels={"run_id": run, "task_id": "t-17"})) as sandbox:
        (listed,) = [info for info in await backend.sandboxes() if info.run_id == run]
        assert (listed.backend, listed.id, listed.task_id, listed.orphan) == (backend.name, sandbox.id, "t-17", False)
        assert await backend.reap(run_id=run) == []
        assert await output(sandbox, "echo alive") == "alive"
    assert run not in {info.run_id for info in await backend.sandboxes()}


async def test_no_call_through_a_released_lease_reaches_the_sandbox(sandbox: Sandbox) -> None:
    async def give_back() -> None:
        pass

    lease = Lease(sandbox, give_back, lifetime=60)
    leased = lease.sandbox
    assert isinstance(leased, Sandbox)
    process = await leased.start("cat")
    running = asyncio.create_task(leased.exec("touch begun; sleep 100; touch late", timeout=200))
    await output(sandbox, "until test -e begun; do sleep 0.02; done")
    await leased.close()
    with pytest.raises(LeaseOver):
        await running
    await every_call_raises(leased, process, "is over")
    (same,) = [one for one in await sandbox.processes() if one.id == process.id]
    assert (await same.status()).exit_code is None, "the late kill reached nothing"
    assert await output(sandbox, "ls") == "begun"
