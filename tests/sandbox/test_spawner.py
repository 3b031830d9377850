"""The helper that starts sandboxes: its children live as long as it does."""

from __future__ import annotations

import contextlib
import os
import resource
import signal
import subprocess
import sys
import time
import uuid
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from sandbox_watch import host_processes

from backends import BackendError
from backends.host.plan import Prepared
from backends.host.spawner import Child, Spawner

AT_ONCE = 6


@pytest.fixture
def null() -> Iterator[int]:
    fd = os.open(os.devnull, os.O_RDWR)
    yield fd
    os.close(fd)


def helpers() -> set[int]:
    """Those of this process. Others on the machine come and go."""
    found = set()
    for pid in host_processes("spawn_server"):
        with contextlib.suppress(OSError):
            if f"PPid:\t{os.getpid()}\n" in status(pid):
                found.add(pid)
    return found


def status(pid: int) -> str:
    return Path(f"/proc/{pid}/status").read_text()


def end(children: list[Child]) -> None:
    for child in children:
        child.kill()
        assert child.wait(10)
        child.release()


def test_those_that_lose_their_helper_at_once_share_the_next_one(null: int) -> None:
    others = helpers()
    spawner = Spawner()
    end([spawner.spawn(["/bin/true"], stream=null, errors=null)])
    (first,) = helpers() - others
    os.kill(first, signal.SIGSTOP)  # all requests are on their way when it dies
    with ThreadPoolExecutor(AT_ONCE) as threads:
        spawning = [
            threads.submit(spawner.spawn, ["/bin/sleep", "600"], stream=null, errors=null) for _ in range(AT_ONCE)
        ]
        while "stopped" not in status(first) or any(not task.running() for task in spawning):
            time.sleep(0.01)
        os.kill(first, signal.SIGKILL)
        children = [task.result() for task in spawning]
    assert [child.wait(0.2) for child in children] == [False] * AT_ONCE
    end(children)


def test_a_job_that_is_too_long_takes_no_other_along(null: int) -> None:
    spawner = Spawner()
    other = spawner.spawn(["/bin/sleep", "600"], stream=null, errors=null)
    for length in (250_000, 10_000_000):  # a machine may have room for the first
        with contextlib.suppress(BackendError):
            end([spawner.spawn(["/bin/true"], stream=null, errors=null, env={"X": "y" * length})])
    assert not other.wait(0.2)
    end([other])


def test_what_is_started_too_late_is_not_left_alone(null: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """The caller gets an error; processes that were started in time go on."""
    monkeypatch.setattr("backends.host.spawner._PATIENCE", 0.5)
    others = helpers()
    spawner = Spawner()
    early = spawner.spawn(["/bin/sleep", "600"], stream=null, errors=null)
    (helper,) = helpers() - others
    os.kill(helper, signal.SIGSTOP)
    mark = str(uuid.uuid4().int)[:9]
    try:
        with pytest.raises(BackendError, match=r"could not be started within 0\.5 s"):
            spawner.spawn(["/bin/sleep", mark], stream=null, errors=null)
    finally:
        os.kill(helper, signal.SIGCONT)
    end([spawner.spawn(["/bin/true"], stream=null, errors=null)])  # requests are served in order: the late one was
    assert until_none(mark)
    assert not early.wait(0.0)
    end([early])


def until_none(mark: str) -> bool:
    deadline = time.monotonic() + 60
    while host_processes(mark) and time.monotonic() < deadline:
        time.sleep(0.01)
    return not host_processes(mark)


CROWD = """
import os, resource, sys
from backends import BackendError
from backends.host.spawner import Spawner

resource.setrlimit(resource.RLIMIT_NOFILE, (230, int(sys.argv[1])))
null, spawner, children = os.open(os.devnull, os.O_RDWR), Spawner(), []
for _ in range(60):
    try:
        children.append(spawner.spawn(["/bin/sleep", "600"], stream=null, errors=null))
    except BackendError:
        break
print(len(children), any(child.wait(0.0) for child in children))
for child in children:
    child.kill()
    child.wait(10)
    child.release()
"""


@pytest.mark.parametrize("hard", [230, 400])
def test_one_sandbox_too_many_takes_no_other_along(hard: int) -> None:
    done = subprocess.run([sys.executable, "-c", CROWD, str(hard)], capture_output=True, text=True, timeout=60)
    count, any_ended = done.stdout.split()
    assert any_ended == "False" and done.stderr == ""
    assert int(count) == 60 if hard == 400 else int(count) > 10


def test_a_limit_of_open_files_below_what_a_sandbox_takes_is_named() -> None:
    code = "import asyncio; from backends import create_backend; print(asyncio.run(create_backend('local').check()))"
    command = ["/bin/sh", "-c", 'ulimit -n 150 && exec "$0" -c "$1"', sys.executable, code]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
    assert "150 open files are too few for a sandbox; allow 256 or more (ulimit -n)" in done.stdout + done.stderr


def settled(table: Path) -> int:
    """The number of a helper's descriptors once it stays the same: it closes those of a job after the job has begun,
    and takes note of an end after the one who waits for it."""
    counts = [len(list(table.iterdir()))]
    deadline = time.monotonic() + 60
    while len(counts) < 30 or len(set(counts[-30:])) > 1:
        assert time.monotonic() < deadline, f"its descriptors keep changing: {counts[-30:]}"
        time.sleep(0.01)
        counts.append(len(list(table.iterdir())))
    return counts[-1]


def test_a_helper_without_descriptors_goes_on(null: int) -> None:
    """Whatever it cannot open, the others live on, nothing of the job is left, and it can start the next one."""
    others = helpers()
    spawner = Spawner()
    other = spawner.spawn(["/bin/sleep", "600"], stream=null, errors=null)
    (helper,) = helpers() - others
    table = Path(f"/proc/{helper}/fd")
    end([spawner.spawn(["/bin/true"], stream=null, errors=null)])
    before = settled(table)
    soft, hard = resource.prlimit(helper, resource.RLIMIT_NOFILE)
    failed = 0
    for limit in range(4, before + 12):
        for prepared in (None, Prepared("")):
            resource.prlimit(helper, resource.RLIMIT_NOFILE, (limit, hard))
            try:
                end([spawner.spawn(["/bin/true"], stream=null, errors=null, prepared=prepared)])
            except BackendError:
                failed += 1
            assert not other.wait(0.0), "it ended with another job"
    resource.prlimit(helper, resource.RLIMIT_NOFILE, (soft, hard))
    end([spawner.spawn(["/bin/true"], stream=null, errors=null)])
    assert failed > 3 and settled(table) == before
    end([other])
