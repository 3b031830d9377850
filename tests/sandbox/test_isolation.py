"""What a walled sandbox keeps in, and what it keeps out."""

from __future__ import annotations

import os
import socket
import sys
import uuid
from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from backends import Backend, Sandbox, SandboxSpec
from backends.host import cgroups

AUDIT = r"""
import os, stat, sys

def opens(path, flags):
    try:
        fd = os.open(path, flags | os.O_NONBLOCK)
        if flags == os.O_RDONLY:
            os.read(fd, 1)
        os.close(fd)
        return True
    except OSError:
        return False

def unescape(path):
    return path.encode().decode("unicode_escape")

# What is on a disk of the sandbox' own may be changed: nobody else sees it.
mounts = {}
for line in open("/proc/self/mountinfo"):
    before, _, after = line.partition(" - ")
    point, options = before.split()[4:6]
    mounts[unescape(point)] = after.split()[0] in ("overlay", "tmpfs") and "ro" not in options.split(",")

def private(path):
    while path not in mounts:
        path = os.path.dirname(path)
    return mounts[path]

DEVICES = "/dev/null /dev/zero /dev/full /dev/random /dev/urandom /dev/tty /dev/pts/ptmx /dev/ptmx /dev/console".split()
for root, folders, files in os.walk("/"):
    if root == "/proc":
        folders[:] = [f for f in folders if not f.isdigit() and not os.path.islink("/proc/" + f)]
    if private(root):
        folders[:] = [f for f in folders if any(m.startswith(os.path.join(root, f)) for m in mounts)]
    elif not root.startswith(("/proc", "/sys", "/dev")):
        try:
            os.mkdir(root + "/made")
            print("writable folder:", root)
        except OSError:
            pass
    for name in files:
        path = os.path.join(root, name)
        if os.path.islink(path) or path in DEVICES or private(path):
            continue
        if opens(path, os.O_WRONLY):
            print("writable:", path)
        if root == "/proc" and not os.stat(path).st_mode & 0o004 and opens(path, os.O_RDONLY):
            print("for root alone, yet readable:", path)
for name in os.listdir("/proc/1/fd") if os.access("/proc/1/fd", os.R_OK) else []:
    for flags in (os.O_RDONLY, os.O_WRONLY):
        if opens("/proc/1/fd/" + name, flags):
            print("executor's descriptor:", name)
for name in "environ mem maps stack".split():
    if opens("/proc/1/" + name, os.O_RDONLY) or opens("/proc/1/" + name, os.O_WRONLY):
        print("executor's", name)
for path in "/proc/kcore /proc/kmsg /proc/keys /dev/mem /dev/kmsg /dev/vda /dev/sda /sys/kernel".split():
    if (os.path.isdir(path) and not path.startswith("/sys")) or opens(path, os.O_RDONLY) or opens(path, os.O_WRONLY):
        print("reachable:", path)
for line in open("/proc/self/status"):
    if line.startswith("Cap") and int(line.split()[1], 16) or line.startswith("NoNewPrivs") and line.split()[1] != "1":
        print(line)
"""


OURS = ["local-bubblewrap", "docker", "singularity", "ssh"]
"""Walls that are built here. Modal's are not: the fake of its service has others."""
STRICT = ["local-bubblewrap", "singularity", "ssh"]
"""Docker gives a container more of /proc and /etc."""
ORDINARY = ["local-bubblewrap", "ssh"]
"""Commands run as an ordinary user, not as the image's."""
BRIDGED = ["local-bubblewrap", "singularity", "ssh", "modal"]
"""The tests' Docker engine has no network to give."""


@pytest.fixture
async def inside(walled: Backend, monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[Sandbox]:
    monkeypatch.setenv("OPENAI_API_KEY", "sk-very-secret")
    sandbox = await walled.create(SandboxSpec())
    yield sandbox
    await sandbox.close()


async def lines(sandbox: Sandbox, command: str) -> list[str]:
    return (await sandbox.exec(command, timeout=30)).stdout.decode().splitlines()


@pytest.mark.parametrize("walled", STRICT, indirect=True)
async def test_nothing_of_the_system_is_writable_or_readable_beyond_need(inside: Sandbox) -> None:
    await inside.write_bytes("audit.py", AUDIT.encode())
    result = await inside.exec("python3 audit.py", timeout=300)
    assert (result.stdout, result.stderr) == (b"", b"")


async def test_the_hosts_folders_are_not_there(inside: Sandbox, walled: Backend) -> None:
    hidden = "/root/.ssh /root/.bash_history /etc/shadow /etc/ssl/private /var/log /mnt /opt /srv /boot /sys"
    if walled.name in ("local", "ssh"):  # an image may have some of these
        assert await lines(inside, f"ls -dA {hidden} 2>/dev/null; ls -A /home; find /tmp ~ . -mindepth 1") == ["agent"]
    assert await lines(inside, "cat /proc/[0-9]*/environ | tr '\\0' '\\n' | grep -a sk-very-secret") == []


async def test_only_its_own_processes_are_seen(inside: Sandbox) -> None:
    seen = await lines(inside, "cat /proc/[0-9]*/comm | sort -u")
    assert set(seen) <= {"python3.11", "python3", "bash", "cat", "sort", Path(inside.python or "").name}


@pytest.mark.parametrize("walled", BRIDGED, indirect=True)
async def test_the_network_is_off_unless_asked_for(walled: Backend) -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
        connect = f"(echo > /dev/tcp/127.0.0.1/{port}) 2>/dev/null && echo reached"
        off, on = await walled.create(SandboxSpec()), await walled.create(SandboxSpec(network=True))
        assert await lines(off, connect) == []
        assert await lines(on, connect) == ["reached"]
        assert await lines(off, "cut -d: -f1 /proc/net/dev | tail -n +3 | tr -d ' '") == ["lo"]
        await off.close()
        await on.close()


@pytest.mark.parametrize("walled", ORDINARY, indirect=True)
async def test_it_cannot_make_namespaces_or_become_another_user(inside: Sandbox) -> None:
    assert await lines(inside, "unshare -Ur id -u 2>/dev/null; id -u; whoami; echo $HOME; pwd") == [
        "1000",
        "agent",
        "/home/agent",
        "/workspace",
    ]


@pytest.mark.parametrize("walled", OURS, indirect=True)
async def test_a_command_can_change_its_own_limits_and_priority(inside: Sandbox) -> None:
    own = "ulimit -n 50; ulimit -n; nice -n 5 nice"
    assert await lines(inside, own) == ["50", str(min(19, 5 + os.getpriority(os.PRIO_PROCESS, 0)))]
    if await lines(inside, "command -v taskset chrt"):
        assert await lines(inside, "taskset -c 0 true; chrt -i 0 true; echo $?") == ["0"]


@pytest.mark.parametrize("walled", OURS, indirect=True)
async def test_a_command_that_lowers_its_score_is_still_the_one_that_memory_is_taken_from(walled: Backend) -> None:
    if "memory" not in cgroups.find().parents:
        pytest.skip(cgroups.describe(cgroups.find()))
    sandbox = await walled.create(SandboxSpec(memory_bytes=128 << 20))
    lower = "for s in 500 0 -1000; do echo $s > /proc/$$/oom_score_adj; done; echo 1000 > /proc/1/oom_score_adj"
    result = await sandbox.exec(f"{{ {lower}; }} 2>/dev/null; exec python3 -c 'x = bytearray(400 << 20)'", timeout=60)
    assert result.exit_code == 137
    assert await lines(sandbox, "echo alive") == ["alive"]
    await sandbox.close()


async def test_what_is_written_anywhere_stays_inside(inside: Sandbox) -> None:
    name = f"written-{uuid.uuid4().hex}"
    folders = ["/", "/usr", "/usr/bin", "/etc", "/var", "/run", "/tmp", "/home", "/dev/shm", sys.base_prefix]
    written = await lines(inside, f"for d in {' '.join(folders)}; do (: > $d/{name}) 2>/dev/null && echo $d; done")
    assert {"/tmp", "/dev/shm"} <= set(written)
    assert [folder for folder in folders if Path(folder, name).exists()] == []
    other = await lines(inside, "rm -f /usr/bin/yes /bin/yes; command -v yes; true")
    assert Path("/usr/bin/yes").exists() or other == []
