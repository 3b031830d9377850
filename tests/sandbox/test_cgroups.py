"""Control groups with limits, and the helper process that starts programs in them."""

from __future__ import annotations

import asyncio
import gc
import os
import signal
import subprocess
import sys
import uuid
from collections.abc import Iterator
from pathlib import Path

import pytest
from sandbox_watch import host_processes, until

from backends import BackendError, BackendUnavailable
from backends.host.cgroups import Cgroup, Cgroups, Limits, describe, find
from backends.host.plan import Disk, numbers
from backends.host.spawner import Child, Spawner

SH = "/bin/sh"
BOMB = "f() { f | f & }; f; sleep 100"


@pytest.fixture(scope="module")
def available() -> Cgroups:
    found = find()
    if not found.parents:
        if os.environ.get("CI") == "true":
            pytest.fail(describe(found))
        pytest.skip(describe(found))
    return found


@pytest.fixture
def group(available: Cgroups) -> Iterator[Cgroup]:
    group = available.create(f"test-{uuid.uuid4().hex}", Limits(pids=100))
    yield group
    assert group.kill()
    assert group.remove()
    assert not any(folder.exists() for folder in group.folders)


@pytest.fixture
def spawner() -> Spawner:
    return Spawner()


def run(spawner: Spawner, *argv: str, groups: list[int] | None = None, disk: Disk | None = None) -> tuple[Child, int]:
    """Start a program; returns it with a file of what it writes."""
    output, null = os.memfd_create("output"), os.open(os.devnull, os.O_RDONLY)
    try:
        return spawner.spawn(argv, stream=null, errors=output, groups=groups or [], disk=disk), output
    finally:
        os.close(null)


def written(output: int) -> str:
    return os.pread(output, 100_000, 0).decode()


# --- groups ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("limits", "files"),
    [
        (Limits(memory_bytes=64 << 20), {"memory.limit_in_bytes": "67108864", "memory.max": "67108864"}),
        (Limits(pids=20), {"pids.max": "20"}),
        (Limits(cpus=0.25), {"cpu.cfs_quota_us": "25000", "cpu.max": "25000 100000"}),
        (Limits(cpus=0.0001), {"cpu.cfs_quota_us": "1000", "cpu.max": "1000 100000"}),
    ],
)
def test_a_group_has_the_limits_that_were_asked_for(available: Cgroups, limits: Limits, files: dict[str, str]) -> None:
    group = available.create(f"test-{uuid.uuid4().hex}", limits)
    try:
        found = {name: (f / name).read_text().strip() for f in group.folders for name in files if (f / name).exists()}
        assert found
        assert found.items() <= files.items()
    finally:
        assert group.remove()
    assert not any(folder.exists() for folder in group.folders)
    assert group.remove(), "it is gone already"


@pytest.mark.parametrize("field", ["cpus", "memory_bytes", "pids"])
def test_a_limit_that_cannot_be_enforced_is_rejected_with_the_reason(field: str) -> None:
    nowhere = Cgroups(2, {}, dict.fromkeys(("cpu", "memory", "pids"), "/sys/fs/cgroup/x does not belong to this user"))
    for cgroups in (nowhere, Cgroups(0)):
        with pytest.raises(BackendUnavailable, match=f"^{field} cannot be enforced.* Next step: .*leave it out"):
            cgroups.create("any", Limits(**{field: 1}))
        cgroups.require(Limits())
        assert not cgroups.allot("any", Limits(), countable=False, tracked=True)[0].folders
    assert "does not belong to this user" in describe(nowhere)


async def test_a_process_is_in_its_group_before_it_runs_anything(group: Cgroup, spawner: Spawner) -> None:
    fds = group.open()
    child, output = run(spawner, SH, "-c", "cat /proc/self/cgroup >&2", groups=fds)
    assert await child.exited(20)
    assert written(output).count(group.folders[0].name) == len(group.folders)
    assert child.code == 0
    child.release()
    for fd in (*fds, output):
        os.close(fd)


async def test_killing_a_group_ends_a_fork_bomb_and_what_left_its_session(group: Cgroup, spawner: Spawner) -> None:
    fds = group.open()
    mark = str(uuid.uuid4().int)[:9]
    child, output = run(spawner, "/bin/bash", "-c", f"env -i setsid -f sleep {mark}; {BOMB}", groups=fds)
    assert await until(lambda: "fork" in written(output) and bool(host_processes(mark)))
    assert await asyncio.to_thread(group.kill, 20.0)
    assert await child.exited(20)
    assert child.code == -signal.SIGKILL
    assert await until(lambda: host_processes(mark) == [])
    child.release()
    for fd in (*fds, output):
        os.close(fd)


async def test_a_group_of_version_2_is_killed_at_once(spawner: Spawner) -> None:
    mounts = [line.split() for line in Path("/proc/mounts").read_text().splitlines()]
    roots = [Path(words[1]) for words in mounts if words[2] == "cgroup2" and os.access(words[1], os.W_OK)]
    if not roots or os.geteuid() != 0:
        pytest.skip("there is no cgroup of version 2 that could be divided")
    group = Cgroup((roots[0] / f"test-{uuid.uuid4().hex}",))
    group.folders[0].mkdir()
    try:
        fds = group.open()
        child, output = run(
            spawner, "/bin/bash", "-c", "for i in 1 2 3; do setsid -f sleep 100; done; wait", groups=fds
        )
        for fd in (*fds, output):
            os.close(fd)
        assert await until(lambda: len(group.processes()) == 3)
        assert group.kill()
        child.release()
    finally:
        assert group.remove()


# --- the helper ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("command", "code"), [("exit 3", 3), ("kill -9 $$", -9), ("true", 0)])
async def test_the_end_of_a_process_is_reported(spawner: Spawner, command: str, code: int) -> None:
    child, output = await asyncio.to_thread(run, spawner, SH, "-c", command)
    assert await child.exited(20)
    assert child.code == code
    assert child.wait(0), "and again"
    child.release()
    os.close(output)


async def test_a_process_gets_what_it_was_given_and_nothing_else(
    spawner: Spawner, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("SECRET", "of the owner")
    (tmp_path / "file").write_text("content")
    with (tmp_path / "file").open() as inherited, (tmp_path / "file").open() as given:
        os.set_inheritable(inherited.fileno(), True)
        output = os.memfd_create("output")
        number = numbers(1)[0]
        script = f"env; pwd; cat <&{number}; echo; ls /proc/$$/fd; ps -o sid= -p $$ | tr -d ' '; echo $$"
        child = spawner.spawn(
            ["/bin/bash", "-c", f"({script}) >&2"], stream=given.fileno(), errors=output, files=[given.fileno()]
        )
        assert await child.exited(20)
    lines = written(output).split("\n")
    environment = [line for line in lines if "=" in line]
    assert {line.partition("=")[0] for line in environment} <= {"PWD", "SHLVL", "_", "OLDPWD"}
    rest = [line for line in lines if "=" not in line]
    assert rest[:2] == ["/", "content"]
    assert set(rest[2:-3]) <= {"0", "1", "2", str(number), "255"}
    assert rest[-3] == rest[-2] == str(child.pid)
    child.release()
    os.close(output)


async def test_what_cannot_be_started_says_why(spawner: Spawner, tmp_path: Path) -> None:
    disk = Disk(str(tmp_path / "absent"), 1 << 20)
    for argv, on, reason in ((["/no/such/program"], None, "No such file"), ([SH], disk, "making its disk: .*absent")):
        child, output = run(spawner, *argv, disk=on)
        assert await child.exited(20)
        assert child.code == 126
        with pytest.raises(AssertionError, match=reason):
            raise AssertionError(written(output))
        child.release()
        os.close(output)


async def test_a_disk_is_private_and_bounded(spawner: Spawner, tmp_path: Path) -> None:
    script = (
        f"cd {tmp_path}; ls >&2; head -c 8M /dev/zero > a/big; wc -c < a/big >&2; for i in $(seq 9999); do : > $i; done"
    )
    child, output = run(spawner, SH, "-c", script, disk=Disk(str(tmp_path), 4 << 20, [("a", 0o755), ("b/c", 0o700)]))
    assert await child.exited(60)
    lines = written(output).splitlines()
    if "Operation not permitted" in lines[0]:
        pytest.skip(lines[0])
    assert lines[:3] == ["a", "b", "empty"]
    assert "No space left" in lines[3]
    assert int(lines[4]) <= 4 << 20
    assert "No space left" in lines[-1] or "cannot create" in lines[-1], "files cost memory, too"
    assert list(tmp_path.iterdir()) == []
    child.release()
    os.close(output)


async def test_a_killed_helper_takes_its_children_along_and_is_replaced(spawner: Spawner) -> None:
    mark = str(uuid.uuid4().int)[:9]
    child, output = run(spawner, "/bin/sleep", mark)
    helper = int(Path(f"/proc/{child.pid}/stat").read_text().rpartition(")")[2].split()[1])
    assert helper != os.getpid(), "not even the first step of a process is the owner's"
    os.kill(helper, signal.SIGKILL)
    assert await child.exited(20)
    assert await until(lambda: host_processes(mark) == [])
    child.release()
    os.close(output)
    child, output = run(spawner, "/bin/true")
    assert await child.exited(20)
    assert child.code == 0
    child.release()
    os.close(output)


FORKING_OWNER = """
import os, sys, time
from backends.host.spawner import Spawner
null = os.open(os.devnull, os.O_RDWR)
spawner = Spawner()
spawner.spawn(["/bin/sleep", sys.argv[1]], stream=null, errors=null)
if os.fork() == 0:
    spawner.spawn(["/bin/sleep", sys.argv[1] + "1"], stream=null, errors=null)  # a helper of its own
    time.sleep(100)
print("ready", flush=True)
time.sleep(100)
"""


async def test_processes_end_with_their_owner_even_if_it_has_forked() -> None:
    mark = str(uuid.uuid4().int)[:9]
    with subprocess.Popen(  # noqa: ASYNC220
        [sys.executable, "-c", FORKING_OWNER, mark], stdout=subprocess.PIPE, start_new_session=True
    ) as owner:
        try:
            assert owner.stdout is not None
            owner.stdout.readline()
            sleeping = f"sleep\0{mark}\0"
            assert await until(lambda: len(host_processes(f"sleep\0{mark}")) == 2)
            owner.kill()
            assert await until(lambda: host_processes(sleeping) == [])
            assert len(host_processes(f"sleep\0{mark}1\0")) == 1, "the copy's is none of its business"
        finally:
            os.killpg(owner.pid, signal.SIGKILL)
    assert await until(lambda: host_processes(mark) == [])


async def test_the_helper_lives_as_long_as_anybody_holds_its_spawner_or_a_child() -> None:
    mark = str(uuid.uuid4().int)[:9]
    spawner = Spawner()
    child, output = run(spawner, "/bin/sleep", mark)
    del spawner
    gc.collect()
    assert not await child.exited(0.1)
    child.release()
    assert await until(lambda: host_processes(mark) == [])
    os.close(output)


def test_more_descriptors_than_the_kernel_passes_are_an_error(spawner: Spawner) -> None:
    null = os.open(os.devnull, os.O_RDWR)
    with pytest.raises(BackendError, match="could not be started"):
        spawner.spawn(["/bin/true"], stream=null, errors=null, files=[null] * 300)
    os.close(null)
