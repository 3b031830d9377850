"""`create` enforces the fields of the spec, or rejects them by name."""

from __future__ import annotations

import socket
from collections.abc import Collection
from typing import Any

import pytest

from backends import Backend, BackendError, BackendUnavailable, SandboxSpec

from .probes import opened, output

MIB = 1 << 20
FORKS = """
import os, time
started = 0
try:
    while started < 300:
        if os.fork() == 0:
            time.sleep(100)
            os._exit(0)
        started += 1
except OSError:
    pass
print(started)
"""
SPIN = """
import time
end, begin = time.monotonic() + 1.5, time.process_time()
while time.monotonic() < end:
    pass
print(time.process_time() - begin)
"""


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


async def test_an_image_that_does_not_exist_is_an_error(backend: Backend, unchecked: Collection[str]) -> None:
    if "image" in unchecked:
        pytest.skip("the fixture `unchecked` names image")
    with pytest.raises(BackendError):
        await (await backend.create(SandboxSpec(image="/no/such/image-of-lachesis"))).close()


async def test_there_is_no_network_by_default(backend: Backend, unchecked: Collection[str]) -> None:
    if "network" in unchecked:
        pytest.skip("the fixture `unchecked` names network")
    with socket.create_server(("127.0.0.1", 0)) as server:
        async with opened(backend) as sandbox:
            port = server.getsockname()[1]
            connect = f"(exec 3<> /dev/tcp/127.0.0.1/{port}) 2> /dev/null && echo reached; true"
            assert await output(sandbox, connect) == "", "a command reaches a server of this machine"
            routes = await output(sandbox, "tail -n +2 /proc/net/route | cut -f 1")
            assert routes == "", "there is a way out"
