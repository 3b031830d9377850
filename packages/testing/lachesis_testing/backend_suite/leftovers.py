"""Nothing is left of a sandbox that failed to start, and everybody can remove what a killed owner leaves."""

from __future__ import annotations

import asyncio
import contextlib
import os
import pickle
import sys
import time
import uuid
from typing import Any

import pytest

from backends import Backend, BackendError, SandboxLost, SandboxSpec

from .fixtures import FindProcesses
from .probes import opened, output, until

OWNER = """
import asyncio, inspect, pickle, sys

async def main():
    backend = pickle.load(sys.stdin.buffer)
    if not hasattr(backend, "create"):
        backend = backend()
        if inspect.isawaitable(backend):
            backend = await backend
    from backends import SandboxSpec
    sandbox = await backend.create(SandboxSpec(labels={"run_id": sys.argv[1], "task_id": "t-18"}))
    await sandbox.start(f"setsid sleep {sys.argv[2]} & sleep {sys.argv[2]}")
    print(sandbox.id, flush=True)
    await asyncio.sleep(1000)

asyncio.run(main())
"""


async def test_a_creation_that_fails_leaves_nothing(backend: Backend) -> None:
    run = uuid.uuid4().hex
    with pytest.raises(BackendError):
        await backend.create(SandboxSpec(workdir="/dev/null/no-folder", labels={"run_id": run}))
    assert await gone(backend, run), "create() failed, and its sandbox is still listed"


async def test_a_creation_that_is_cancelled_at_any_time_leaves_nothing(backend: Backend) -> None:
    run = uuid.uuid4().hex
    begin = time.monotonic()
    await (await backend.create(SandboxSpec())).close()
    duration = min(time.monotonic() - begin, 5.0)
    for part in (0.0, 0.05, 0.1, 0.2, 0.3, 0.5, 0.7, 0.9):
        creation = asyncio.ensure_future(backend.create(SandboxSpec(labels={"run_id": run})))
        await asyncio.sleep(part * duration)
        creation.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await (await creation).close()  # it may have been quicker
    assert await gone(backend, run), "create() was cancelled, and its sandbox is still listed"


async def test_everyones_sandboxes_are_reaped_on_request_and_their_owners_find_them_lost(backend: Backend) -> None:
    run = uuid.uuid4().hex
    async with opened(backend, SandboxSpec(labels={"run_id": run})) as sandbox:
        reaped = await backend.reap(run_id=run, everyone=True)
        assert [(info.id, info.orphan) for info in reaped] == [(sandbox.id, False)]
        with pytest.raises(SandboxLost):
            await sandbox.exec("sleep 30", timeout=40)
    assert await gone(backend, run)


async def test_what_a_killed_owner_leaves_is_reaped(
    backend: Backend, portable_backend: Any, find_processes: FindProcesses
) -> None:
    run, mark = uuid.uuid4().hex, str(uuid.uuid4().int)[:9]
    try:
        pickled = pickle.dumps(portable_backend)
    except Exception as error:
        pytest.fail(f"the backend cannot be pickled ({error}): override the fixture `portable_backend`")
    owner = await asyncio.create_subprocess_exec(
        *(sys.executable, "-c", OWNER, run, mark),
        stdin=asyncio.subprocess.PIPE,
        stdout=asyncio.subprocess.PIPE,
        env={**os.environ, "PYTHONPATH": os.pathsep.join(map(os.path.abspath, sys.path))},
    )
    try:
        assert owner.stdin is not None and owner.stdout is not None
        owner.stdin.write(pickled)
        owner.stdin.close()
        async with asyncio.timeout(120):
            id = (await owner.stdout.readline()).decode().strip()
        assert id, "the owner failed: its message is in the captured output"
        (info,) = [info for info in await backend.sandboxes() if info.run_id == run]
        assert (info.id, info.task_id, info.orphan) == (id, "t-18", False)
        assert await backend.reap(run_id=run) == [], "its owner lives"
    finally:
        owner.kill()
        await owner.wait()
    async with opened(backend) as mine:
        assert await backend.reap(run_id=uuid.uuid4().hex) == [], "that is another run"
        assert {info.id for info in await backend.reap(run_id=run)} <= {id}  # it may have ended by itself
        assert await gone(backend, run), "its owner was killed, and reap() does not remove it"
        assert await until(lambda: set(find_processes(mark)) <= {owner.pid}), "processes are left"
        assert await output(mine, "echo unharmed") == "unharmed"


async def gone(backend: Backend, run: str) -> bool:
    """Whether no sandbox of this run is listed any more, within the time that a busy machine may need."""
    end = time.monotonic() + 60
    while time.monotonic() < end:
        if run not in {info.run_id for info in await backend.sandboxes()}:
            return True
        await asyncio.sleep(0.1)
    return False
