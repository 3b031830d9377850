"""The limits that sandboxes have by default, and the control groups that keep them."""

from __future__ import annotations

import asyncio
import errno
import logging
import os
import signal
import subprocess
import sys
import uuid
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from sandbox_watch import opened, output

from backends import BackendError, BackendUnavailable, SandboxExhausted, SandboxLost, SandboxSpec, create_backend
from backends.docker.client import EngineInfo
from backends.docker.container import Image, Options, container, default_disk, ending, limited
from backends.host import cgroups
from backends.host.cgroups import Cgroup, Cgroups, Limits
from backends.host.delegation import bus, in_scope
from backends.host.requests import executor_death
from backends.host.spawner import Spawner
from backends.limits import CPUS, MEMORY, MissingDefaults, with_defaults
from backends.spec import disk_in_memory
from lachesis_testing.backend_suite.limits import HIDDEN

MIB = 1 << 20
ALL = ("cpus", "memory_bytes", "pids")
sizes = st.none() | st.integers(0, 1 << 40)


@given(sizes, sizes, st.lists(st.sampled_from(ALL)), st.sampled_from([0, 1, 4]))
def test_a_limit_is_the_one_asked_for_or_the_default_or_none(
    memory: int | None, pids: int | None, can: list[str], file_systems: int
) -> None:
    spec = with_defaults(
        SandboxSpec(memory_bytes=memory, pids=pids), can, processors=64, pids=9, file_systems=file_systems
    )
    assert spec.memory_bytes == (memory or None if memory is not None else MEMORY if "memory_bytes" in can else None)
    assert spec.pids == (pids or None if pids is not None else 9 if "pids" in can else None)
    assert spec.cpus == (CPUS if "cpus" in can else None)


@given(st.none() | st.integers(1, 1 << 42), st.sampled_from([1, 4]))
def test_a_disk_in_memory_fits_into_the_default_memory(disk: int | None, file_systems: int) -> None:
    asked = SandboxSpec(disk_bytes=disk)
    spec = with_defaults(asked, ALL, processors=64, pids=9, file_systems=file_systems)
    assert spec.memory_bytes is not None
    used = file_systems * disk_in_memory(spec, file_systems=file_systems)
    assert spec.memory_bytes - used >= MEMORY // 2, "a full disk leaves room for commands"


def test_few_processors_are_not_limited_and_no_limit_of_a_disk_in_memory_is_refused() -> None:
    assert with_defaults(SandboxSpec(), ALL, processors=CPUS, pids=9).cpus is None
    with pytest.raises(BackendUnavailable, match=r"disk_bytes of 0 .*Next step: name a size"):
        disk_in_memory(SandboxSpec(disk_bytes=0))
    for field in ("wall_time", "lifetime"):
        with pytest.raises(ValueError, match=f"{field} must be positive"):
            SandboxSpec(**{field: 0})


def test_a_missing_default_is_said_once_with_the_next_step(caplog: pytest.LogCaptureFixture) -> None:
    missing = MissingDefaults("local")
    with caplog.at_level(logging.WARNING):
        missing.warn(SandboxSpec(cpus=0, memory_bytes=0), ["cpus", "memory_bytes"], "why", "step")
        assert caplog.messages == [], "who asks for no limit gets none, and knows it"
        for _ in range(2):
            missing.warn(SandboxSpec(cpus=1), ["cpus", "memory_bytes"], "no cgroups", "run it as root")
    (message,) = caplog.messages
    assert "no limit of memory_bytes: no cgroups. Next step: run it as root" in message


# --- groups ----------------------------------------------------------------------------------------------------------

FILES = ("cgroup.procs", "cgroup.events", "memory.max", "memory.swap.max", "pids.max", "cpu.max", "memory.events")


@pytest.fixture
def unified(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A folder in which a new folder has the files that the kernel gives to a group of version 2."""
    plain_make, plain_remove = Path.mkdir, Path.rmdir

    def populate(folder: Path) -> None:
        for name in (*FILES, "cgroup.subtree_control"):
            (folder / name).write_text("")
        (folder / "cgroup.controllers").write_text("cpu io memory pids")

    def make(folder: Path, *arguments: int, exist_ok: bool = False, **more: bool) -> None:
        plain_make(folder, *arguments, exist_ok=exist_ok, **more)
        populate(folder)

    def remove(folder: Path) -> None:
        if any(each.is_dir() for each in folder.iterdir()):
            raise OSError(16, "Device or resource busy")
        for each in folder.iterdir():
            each.unlink()
        plain_remove(folder)

    populate(tmp_path)
    monkeypatch.setattr(Path, "mkdir", make)
    monkeypatch.setattr(Path, "rmdir", remove)
    yield tmp_path


def test_in_version_2_commands_and_executor_have_a_leaf_each(unified: Path) -> None:
    available = Cgroups(2, dict.fromkeys(("cpu", "memory", "pids"), unified))
    group = available.create("box", Limits(cpus=1.5, memory_bytes=512 * MIB, pids=99))
    own = unified / "lachesis/box"
    assert group.divided
    assert (own / "memory.max").read_text() == str(512 * MIB)
    assert (own / "commands/memory.max").read_text() == str(480 * MIB), "the rest is left to the executor"
    assert (own / "memory.swap.max").read_text() == "0"
    assert (own / "pids.max").read_text() == "99"
    assert (own / "cpu.max").read_text() == "150000 100000"
    assert (own / "cgroup.subtree_control").read_text() == "+memory"
    joined = group.open()
    assert [Path(f"/proc/self/fd/{fd}").readlink() for fd in joined] == [own / "executor/cgroup.procs"]
    assert group.arguments(20) == ["--group", "folder:20"]
    commands = group.open_commands()
    assert Path(f"/proc/self/fd/{commands}").readlink() == own / "commands"
    for fd in (*joined, commands):
        os.close(fd)
    assert group.remove()
    assert not own.exists()
    undivided = available.create("box", Limits(pids=99))
    assert not undivided.divided
    assert undivided.folders == (own,)


def test_only_kills_at_the_limit_of_the_sandbox_are_its_own(tmp_path: Path) -> None:
    group = Cgroup((tmp_path / "commands", tmp_path))
    (tmp_path / "commands").mkdir()
    for text, starved in (
        ("low 0\nhigh 0\nmax 9\noom 0\noom_kill 0\noom_group_kill 0\n", False),
        ("low 0\nhigh 0\nmax 9\noom 2\noom_kill 2\noom_group_kill 0\n", True),
        ("low 0\nhigh 0\nmax 9\noom 0\noom_kill 1\noom_group_kill 0\n", False),  # the machine had no memory
    ):
        (tmp_path / "memory.events").write_text(text)
        assert group.starved() == starved
    (tmp_path / "memory.events").unlink()
    (tmp_path / "commands/memory.oom_control").write_text("oom_kill_disable 0\nunder_oom 0\noom_kill 1\n")
    assert group.starved(), "version 1"


def test_the_end_of_an_executor_is_the_agents_doing_only_at_the_limit() -> None:
    for code in (-9, 137, 112):
        assert type(executor_death(code, "", True)) is SandboxExhausted
    for code, starved in ((-9, False), (1, True), (-15, True), (None, False)):
        assert type(executor_death(code, "", starved)) is not SandboxExhausted

    def ended(code: str, *actions: str, memory: int | None = 1 << 30) -> type[BackendError]:
        events = [{"Action": action} for action in actions]
        death = {"Action": "die", "Actor": {"Attributes": {"exitCode": code}}}
        return type(ending([*events, death], SandboxSpec(memory_bytes=memory)))

    assert ended("137", "oom") is ended("112", "oom") is SandboxExhausted
    for other in (ended("137"), ended("137", "oom", "kill"), ended("1", "oom"), ended("137", "oom", memory=None)):
        assert other is not SandboxExhausted


def test_a_process_starts_in_a_group_of_version_2_behind_the_filter() -> None:
    mounts = [line.split() for line in Path("/proc/mounts").read_text().splitlines()]
    roots = [Path(words[1]) for words in mounts if words[2] == "cgroup2" and os.access(words[1], os.W_OK)]
    if not roots or os.geteuid() != 0:
        pytest.skip("there is no cgroup of version 2 that could be divided")
    group = roots[0] / f"test-{uuid.uuid4().hex}"
    group.mkdir()
    tries = "import ctypes; l = ctypes.CDLL(None, use_errno=True); print(l.syscall(435, None, 0), ctypes.get_errno())"
    code = (
        "import os, sys\nfrom backends.executor.groups import CommandGroup\n"
        "from backends.executor.loop import Loop\nfrom backends.executor.shells import Shells\n"
        "from backends.executor.system_calls import refuse_system_calls\n"
        "group = CommandGroup(os.open(sys.argv[1], os.O_RDONLY))\n"
        "assert refuse_system_calls(group) == ''\n"
        "shells = Shells(Loop(), '/bin/bash', None, group)\n"
        f'script = b\'cat /proc/self/cgroup; exec "$0" -c "{tries}"\'\n'
        "command = [b'/bin/bash', b'-c', script, os.fsencode(sys.executable)]\n"
        "os.waitpid(shells.starter.start(command, [], [(0, 0), (1, 1), (2, 2)]), 0)\n"
        "shells.starter = None\n"  # then they are forked
        "os.waitpid(shells.start_shell(command, [0, 1, 2], None, [], {}), 0)\n"
    )
    try:
        command = [sys.executable, "-c", code, str(group)]
        done = subprocess.run(command, stdin=subprocess.DEVNULL, capture_output=True, text=True, check=False)
        assert done.returncode == 0, done.stderr
        assert not done.stderr
        assert done.stdout.count(f"0::/{group.name}\n") == 2, done.stdout
        assert done.stdout.count(f"-1 {errno.ENOSYS}\n") == 2, "clone3 is for the executor alone"
    finally:
        group.rmdir()


def test_commands_run_without_a_group_of_their_own_where_they_cannot_start_in_it(tmp_path: Path) -> None:
    code = (
        "import os, sys\nfrom backends.executor.groups import CommandGroup\n"
        "from backends.executor.loop import Loop\nfrom backends.executor.shells import Shells\n"
        "group = CommandGroup(os.open(sys.argv[1], os.O_RDONLY))\n"
        "shells = Shells(Loop(), '/bin/bash', None, group)\n"
        "print(shells.starter is None)"
    )
    command = [sys.executable, "-c", code, str(tmp_path)]  # no folder of a control group
    done = subprocess.run(command, stdin=subprocess.DEVNULL, capture_output=True, text=True, check=True)
    assert done.stdout == "False\n"
    assert "commands have no control group of their own" in done.stderr


async def test_commands_that_fill_their_memory_do_not_end_the_executor() -> None:
    """Also if they lower their score to its own, and hold the memory outside their processes."""
    available = await asyncio.to_thread(cgroups.find)
    if "memory" not in available.parents:
        pytest.skip(cgroups.describe(available))
    spec = SandboxSpec(memory_bytes=96 * MIB)
    async with opened(create_backend("local"), spec) as sandbox:
        await sandbox.exec("python3 -", stdin=HIDDEN.encode(), timeout=10)
        assert (await sandbox.exec("python3 -c 'x = bytearray(40 << 20)'", timeout=20)).exit_code == 137
        await sandbox.stop_processes()
        assert await output(sandbox, "python3 -c 'x = bytearray(40 << 20)'; echo $?") == "0"


# --- docker ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("storage", "size"),
    [
        ("overlay2 on xfs", 1 << 30),
        ("btrfs on ?", (1 << 30) + 7),
        ("zfs on ?", (1 << 30) + 7),
        ("overlay2 on extfs", None),
        ("overlayfs on ?", None),
    ],
)
def test_the_root_of_a_container_is_limited_by_default_where_its_storage_can(storage: str, size: int | None) -> None:
    assert default_disk(Image("id", {}, "", "", (), size=7), engine(storage)) == size


def engine(storage: str = "overlay2 on extfs", *, rootless: bool = False) -> EngineInfo:
    works = dict.fromkeys(("memory_limit", "cpu_limit", "pids_limit"), not rootless)
    return EngineInfo(
        "Docker", "28", "v1.41", rootless, cpus=8.0, selinux=False, storage=storage, architecture="x86_64", **works
    )


def config(spec: SandboxSpec, facts: EngineInfo) -> dict[str, Any]:
    spec = limited(spec, facts, file_systems=0)
    paths: Any = {"workdir": "/", "command": [], "mounts": [], "labels": {}, "scratch": [], "quota": None}
    found: dict[str, Any] = container(spec, Image("id", {}, "", "", ()), facts, Options(), **paths)["HostConfig"]
    return found


def test_a_container_has_limits_by_default_as_far_as_its_engine_keeps_them() -> None:
    host = config(SandboxSpec(), engine())
    assert (host["Memory"], host["MemorySwap"]) == (MEMORY, MEMORY)
    assert (host["NanoCpus"], host["PidsLimit"]) == (2_000_000_000, 1024)
    assert host["Sysctls"]["kernel.shm_rmid_forced"] == "1"
    assert "/dev" in host["ReadonlyPaths"], "else it is a disk beside those that have a limit"
    unlimited = config(SandboxSpec(cpus=0, memory_bytes=0, pids=0, disk_bytes=0), engine())
    assert unlimited["PidsLimit"] == -1
    for without in (unlimited, config(SandboxSpec(), engine(rootless=True))):
        assert not {"Memory", "MemorySwap", "NanoCpus"} & set(without)


# --- systemd ---------------------------------------------------------------------------------------------------------

STARTS = '#!/bin/sh\n[ "$1" = --user ] && [ -n "$XDG_RUNTIME_DIR" ] || exit 1\necho "$*" >> %s\n'
STARTS += 'while [ "$1" != -- ]; do shift; done; shift; exec "$@"\n'


def test_only_an_ordinary_user_without_groups_asks_systemd(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    program, log = tmp_path / "systemd-run", tmp_path / "log"
    program.write_text(STARTS % log)
    program.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:/usr/bin:/bin")
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(tmp_path))
    monkeypatch.setattr(os, "geteuid", lambda: 1000)
    none = Cgroups(2)
    before = in_scope(none)
    assert before[0] == str(program)
    assert log.read_text().count("--scope") == 1, "it is tried"
    assert in_scope(Cgroups(1)) == in_scope(Cgroups(2, {"memory": tmp_path})) == []
    spawner, null = Spawner(), os.open(os.devnull, os.O_RDWR)
    pid = spawner.start_by(before, bus())
    assert "spawn_server" in Path(f"/proc/{pid}/cmdline").read_text()
    child = spawner.spawn(["/bin/true"], stream=null, errors=null)
    assert child.wait(20)
    assert child.code == 0
    child.release()
    program.write_text("#!/bin/sh\nexit 1\n")
    assert in_scope(none) == [], "it does not work here"
    with pytest.raises(BackendError, match="could not be started"):
        spawner.start_by(before, bus())
    child = spawner.spawn(["/bin/true"], stream=null, errors=null)  # as without it
    assert child.wait(20)
    child.release()
    os.close(null)
    monkeypatch.setattr(os, "geteuid", lambda: 0)
    assert in_scope(none) == []


@pytest.mark.slow
@pytest.mark.parametrize("busy", [True, False])
async def test_a_silent_executor_is_the_agents_doing_only_while_the_processor_limit_holds_it_back(busy: bool) -> None:
    backend = create_backend("local")
    try:
        sandbox = await backend.create(SandboxSpec(cpus=0.1))
    except BackendUnavailable as error:
        assert "cpus" in str(error)
        return
    try:
        await sandbox.start("for i in 1 2 3 4 5 6; do while :; do :; done & done; wait" if busy else "sleep 100")
        await asyncio.sleep(0.5 if busy else 0)  # the shells take a while to start
        children = Path(f"/proc/{sandbox.pid}/task/{sandbox.pid}/children").read_text().split()
        for executor in [*map(int, children), sandbox.pid]:
            os.kill(executor, signal.SIGSTOP)
        with pytest.raises(SandboxLost, match="has not answered 'read'") as lost:
            await sandbox._connection.request("read", patience=0.2, path="x", offset=0, limit=None)
        assert isinstance(lost.value, SandboxExhausted) == busy
    finally:
        await sandbox.close()
