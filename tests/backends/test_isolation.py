"""What a walled sandbox keeps in, and what it keeps out."""

from __future__ import annotations

import socket
from pathlib import Path

import pytest

from backends import Backend, Sandbox, SandboxSpec

AUDIT = r"""
import os, stat

def opens(path, flags):
    try:
        fd = os.open(path, flags | os.O_NONBLOCK)
        if flags == os.O_RDONLY:
            os.read(fd, 1)
        os.close(fd)
        return True
    except OSError:
        return False

DEVICES = "/dev/null /dev/zero /dev/full /dev/random /dev/urandom /dev/tty /dev/pts/ptmx /dev/ptmx".split()
for root, folders, files in os.walk("/"):
    if root in ("/proc", "/usr", "/root/.pyenv"):
        folders[:] = [f for f in folders if root == "/proc" and not f.isdigit() and not os.path.islink("/proc/" + f)]
    if root == "/usr":
        files = []
    for name in files:
        path = os.path.join(root, name)
        if os.path.islink(path) or path in DEVICES:
            continue
        if opens(path, os.O_WRONLY):
            print("writable:", path)
        if root == "/proc" and not os.stat(path).st_mode & 0o004 and opens(path, os.O_RDONLY):
            print("for root alone, yet readable:", path)
for folder in "/ /usr /etc /proc/sys /dev /run /var /root /home /usr/bin".split():
    try:
        os.mkdir(folder + "/made")
        print("writable folder:", folder)
    except OSError:
        pass
for name in os.listdir("/proc/1/fd"):
    for flags in (os.O_RDONLY, os.O_WRONLY):
        if opens("/proc/1/fd/" + name, flags):
            print("executor's descriptor:", name)
for name in "environ mem maps stack".split():
    if opens("/proc/1/" + name, os.O_RDONLY) or opens("/proc/1/" + name, os.O_WRONLY):
        print("executor's", name)
for path in "/proc/kcore /proc/kmsg /proc/keys /dev/mem /dev/kmsg /dev/vda /dev/sda /sys/kernel /etc/shadow".split():
    if os.path.isdir(path) or opens(path, os.O_RDONLY) or opens(path, os.O_WRONLY):
        print("reachable:", path)
for line in open("/proc/self/status"):
    if line.startswith("Cap") and int(line.split()[1], 16) or line.startswith("NoNewPrivs") and line.split()[1] != "1":
        print(line)
"""


@pytest.fixture
async def inside(walled: Backend, monkeypatch: pytest.MonkeyPatch):  # type: ignore[no-untyped-def]
    monkeypatch.setenv("OPENAI_API_KEY", "sk-very-secret")
    sandbox = await walled.create(SandboxSpec())
    yield sandbox
    await sandbox.close()


async def lines(sandbox: Sandbox, command: str) -> list[str]:
    return (await sandbox.exec(command, timeout=30)).stdout.decode().splitlines()


async def test_nothing_of_the_system_is_writable_or_readable_beyond_need(inside: Sandbox) -> None:
    await inside.write_bytes("audit.py", AUDIT.encode())
    result = await inside.exec("python3 audit.py | grep -v /workspace/audit.py", timeout=60)
    assert (result.stdout, result.stderr) == (b"", b"")


@pytest.mark.parametrize(
    "path",
    [
        "/proc/sys/kernel/core_pattern",
        "/proc/sysrq-trigger",
        "/proc/sys/vm/drop_caches",
        "/proc/irq/default_smp_affinity",
    ],
)
async def test_kernel_settings_cannot_be_written(inside: Sandbox, path: str) -> None:
    before = Path(path).read_text() if Path(path).exists() and path.endswith("pattern") else None
    result = await inside.exec(f"echo x > {path}", timeout=20)
    assert result.exit_code != 0
    assert before is None or Path(path).read_text() == before


async def test_host_secrets_are_invisible(inside: Sandbox) -> None:
    result = await inside.exec("env; cat /proc/*/environ /proc/*/cmdline; true", timeout=20)
    assert b"sk-very-secret" not in result.stdout
    assert b"/workspace/audit" not in result.stdout
    hidden = "/root/.ssh /root/.bash_history /etc/shadow /etc/ssl/private /var/log /mnt /opt /srv /boot /sys"
    assert await lines(inside, f"ls -dA {hidden} 2>/dev/null; ls -A /home; find /tmp ~ . -mindepth 1") == ["agent"]


async def test_only_its_own_processes_are_seen(inside: Sandbox) -> None:
    seen = await lines(inside, "cat /proc/[0-9]*/comm | sort -u")
    assert set(seen) <= {"python3.11", "python3", "bash", "cat", "sort", Path(inside.python or "").name}


async def test_the_executor_survives_what_the_agent_sends_it(inside: Sandbox) -> None:
    await inside.exec("for s in $(seq 1 64); do kill -$s 1; done; kill -9 -1", timeout=20)
    assert await lines(inside, "echo alive") == ["alive"]


async def test_two_sandboxes_share_nothing(walled: Backend) -> None:
    one, two = await walled.create(SandboxSpec(env={"WHO": "one"})), await walled.create(SandboxSpec())
    await one.exec("for d in . ~ /tmp /dev/shm; do echo secret > $d/secret-of-one; done; export LEAK=1", timeout=20)
    await one.start("exec -a process-of-one sleep 100")
    found = (
        "find / -path /usr -prune -o -path /proc -prune -o -name 'secret-of-one' -print 2>/dev/null;"
        "cat /proc/*/cmdline | tr '\\0' '\\n' | grep '^process-of-on[e]'"
    )
    assert len(await lines(one, found)) == 5
    assert await lines(two, found + "; echo ${WHO-}${LEAK-}") == [""]
    assert await lines(two, "find ~ /tmp . /dev/shm -mindepth 1") == []
    await one.close()
    await two.close()


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


async def test_the_disk_is_bounded(walled: Backend) -> None:
    sandbox = await walled.create(SandboxSpec(disk_bytes=4 << 20))
    for folder in (".", "~", "/tmp", "/dev/shm"):
        result = await sandbox.exec(f"head -c 8M /dev/zero > {folder}/big; wc -c < {folder}/big", timeout=20)
        assert b"No space left" in result.stderr
        assert int(result.stdout) <= 4 << 20
    with pytest.raises(OSError, match="No space left"):
        await sandbox.write_bytes("new", b"x" * (8 << 20))
    assert await lines(sandbox, "ls -A") == ["big"]
    await sandbox.close()


async def test_it_cannot_make_namespaces_or_become_another_user(inside: Sandbox) -> None:
    assert await lines(inside, "unshare -Ur id -u 2>/dev/null; id -u; whoami; echo $HOME; pwd") == [
        "1000",
        "agent",
        "/home/agent",
        "/workspace",
    ]


async def test_commands_cannot_cripple_the_executor_through_its_limits_and_priority(inside: Sandbox) -> None:
    attack = """
import os, resource
def attempt(name, call, *arguments):
    try:
        call(*arguments)
        print("done:", name)
    except PermissionError:
        pass
attempt("limit", resource.prlimit, 1, resource.RLIMIT_NOFILE, (3, 3))
attempt("cpu", resource.prlimit, 1, resource.RLIMIT_CPU, (1, 1))
attempt("priority", os.setpriority, os.PRIO_PROCESS, 1, 19)
attempt("priority of the user", os.setpriority, os.PRIO_USER, 0, 19)
attempt("affinity", os.sched_setaffinity, 1, {0})
attempt("policy", os.sched_setscheduler, 1, os.SCHED_IDLE, os.sched_param(0))
"""
    result = await inside.exec("python3 -", timeout=20, stdin=attack.encode())
    assert (result.exit_code, result.stdout, result.stderr) == (0, b"", b"")
    own = "ulimit -n 50; ulimit -n; nice -n 5 nice; taskset -c 0 true; chrt -i 0 true; echo $?"
    assert await lines(inside, own) == ["50", "5", "0"]
