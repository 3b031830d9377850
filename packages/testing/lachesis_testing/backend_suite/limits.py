"""`create` enforces the fields of the spec, or rejects them by name."""

from __future__ import annotations

from collections.abc import Collection
from typing import Any

import pytest

from backends import Backend, BackendError, BackendUnavailable, SandboxExhausted, SandboxSpec
from lachesis_testing.attacks.resources import FORKS

from .probes import output

MIB = 1 << 20
SPIN = """
import time
end, begin = time.monotonic() + 1.5, time.process_time()
while time.monotonic() < end:
    pass
print(time.process_time() - begin)
"""

LOWERED = """
import ctypes, os
libc = ctypes.CDLL(None)
libc.shmat.restype = ctypes.c_void_p
libc.shmdt.argtypes = [ctypes.c_void_p]
for score in range(0, 1000, 100):  # the lowest that it may choose
    try:
        with open("/proc/self/oom_score_adj", "w") as file:
            file.write(str(score))
        break
    except OSError:
        pass
"""
SEGMENTS = (
    LOWERED
    + """
# Down to the last page: a child that is killed is replaced by one that takes smaller pieces.
for step in (4 << 20, 1 << 16, 4096):
    for _ in range(6):
        pid = os.fork()
        if pid == 0:
            with open("/proc/self/oom_score_adj", "w") as file:
                file.write("1000")
            for _ in range(min(1500, (150 << 20) // step)):
                segment = libc.shmget(0, step, 0o1600)
                place = libc.shmat(segment, None, 0) if segment >= 0 else None
                if place in (None, (1 << 64) - 1):
                    break
                ctypes.memset(place, 1, step)
                libc.shmdt(place)
            os._exit(0)
        if not os.WIFSIGNALED(os.waitpid(pid, 0)[1]):
            break
"""
)
"""Fills memory with segments of System V that no process has attached."""
QUEUES = (
    LOWERED
    + """
message = ctypes.create_string_buffer((1).to_bytes(8, "little") + b"x" * 8000)
for _ in range(9_000):
    queue = libc.msgget(0, 0o1600)
    if queue < 0 or libc.msgsnd(queue, message, 8000, 0o4000) < 0 or libc.msgsnd(queue, message, 8000, 0o4000) < 0:
        break
for _ in range(4_000):
    if libc.semget(0, 250, 0o1600) < 0:
        break
"""
)
HIDDEN = (
    LOWERED
    + """
files = [os.memfd_create("hidden", 0) for _ in range(16)]
reading, writing = os.pipe()
for fd in (*files, reading, writing):
    os.set_inheritable(fd, True)
for _ in range(8):
    if os.fork() == 0:
        os.execv("/bin/bash", ["bash", "-c", f"read -u {reading}"])
while True:
    for fd in files:
        os.write(fd, b"x" * 65536)
"""
)
"""Fills memory with files that small processes hold, which the kernel takes for no users of memory."""


@pytest.mark.parametrize(
    ("field", "limit"), [("cpus", 0.25), ("memory_bytes", 160 * MIB), ("pids", 80), ("disk_bytes", 16 * MIB)]
)
async def test_a_limit_is_enforced_or_rejected_by_name(
    backend: Backend, unchecked: Collection[str], field: str, limit: Any
) -> None:
    try:
        sandbox = await backend.create(SandboxSpec(**{field: limit}))
    except BackendUnavailable as error:
        assert field in str(error), "the message names the field that cannot be enforced"
        return
    try:
        if field in unchecked:
            pytest.skip(f"the fixture `unchecked` names {field}")
        ignored = f"create() accepts {field}={limit}, and nothing enforces it: reject_fields(name, spec, {field!r})"
        if field == "cpus":
            used = await sandbox.exec("python3 -", stdin=SPIN.encode(), timeout=60)
            assert float(used.stdout) < 0.9, ignored
        elif field == "memory_bytes":
            greedy = await sandbox.exec("python3 -c 'x = bytearray(400 << 20)'", timeout=60)
            assert greedy.exit_code == 137, ignored
        elif field == "pids":
            forks = await sandbox.exec("python3 -", stdin=FORKS.encode(), timeout=60)
            assert int(forks.stdout or 0) < limit, ignored
            await sandbox.stop_processes()
        else:
            full = await sandbox.exec("head -c 64M /dev/zero > full", timeout=60)
            assert full.exit_code != 0, ignored
        assert await output(sandbox, "echo alive") == "alive"
    finally:
        await sandbox.close()


async def test_memory_that_no_process_holds_is_freed_or_ends_the_sandbox_as_the_agents_doing(
    backend: Backend, unchecked: Collection[str]
) -> None:
    if "memory_bytes" in unchecked:
        pytest.skip("the fixture `unchecked` names memory_bytes")
    for attacks in ([SEGMENTS, QUEUES], [HIDDEN]):
        try:
            sandbox = await backend.create(SandboxSpec(memory_bytes=128 * MIB))
        except BackendUnavailable as error:
            assert "memory_bytes" in str(error)
            return
        try:
            for attack in attacks:
                await sandbox.exec("python3 -", stdin=attack.encode(), timeout=10)
                await sandbox.exec("python3 -c 'x = bytearray(50 << 20)'", timeout=20)
            await sandbox.stop_processes()
            assert await output(sandbox, "python3 -c 'x = bytearray(50 << 20)'; echo $?") == "0"
        except SandboxExhausted:
            pass  # any other error would excuse the agent
        finally:
            await sandbox.close()


async def test_an_image_that_does_not_exist_is_an_error(backend: Backend, unchecked: Collection[str]) -> None:
    if "image" in unchecked:
        pytest.skip("the fixture `unchecked` names image")
    with pytest.raises(BackendError):
        await (await backend.create(SandboxSpec(image="/no/such/image-of-lachesis"))).close()
