"""The prepared executor: a fork of the helper that enters the sandbox instead of a Python that starts inside."""

from __future__ import annotations

import contextlib
import dataclasses
import marshal
import os
import re
import signal
import sys
from collections.abc import AsyncIterator
from pathlib import Path

import pytest
from sandbox_watch import missing

from backends import BackendError, SandboxLost, SandboxSpec, create_backend
from backends.host.bubblewrap import Bubblewrap, waiting
from backends.host.plan import FIRST_FILE, Prepared, Request
from backends.host.sandbox import HostSandbox
from backends.host.spawner import Spawner
from backends.local import LocalBackend

# What can be seen of PID 1, and what a command may do. Each line has to be the same however the executor was started.
LOOK = r"""
grep -E '^(Name|Umask|Tgid|PPid|NSpid|[UG]id|Groups|Cap|NoNewPrivs|Seccomp|Sig(Blk|Ign|Cgt)|THP)' /proc/1/status
grep -E '^(Umask|[UG]id|Cap|NoNewPrivs|Seccomp|Sig(Blk|Ign|Cgt))' /proc/self/status
cut -d ' ' -f 1-2,4-8 /proc/1/stat
for name in environ exe cwd root maps mem fd/0 auxv ns/mnt; do cat /proc/1/$name 2>&1 | head -c 99; done
ls /proc/1/fd 2>&1; cat /proc/1/oom_score_adj /proc/self/oom_score_adj /proc/1/task/1/oom_score_adj 2>&1
ulimit -a; hostname; id; pwd; umask; ls /proc | grep -v '^[0-9]'
ls -la --time-style=+ /dev / /.lachesis | sed 's/ [0-9]* / /g'
for path in /proc/[a-z]*; do
    [ -d "$path" ] || { head -c 1 "$path" > /dev/null 2>&1; echo "$path reads: $?"; }
    (: >> "$path") 2> /dev/null; echo "$path opens for writing: $?"
    touch "$path/x" 2> /dev/null; echo "$path takes files: $?"
done
for path in sys/kernel/core_pattern sys/vm/drop_caches sys/user/max_user_namespaces irq/default_smp_affinity \
            sysrq-trigger 1/oom_score_adj 1/autogroup 1/comm 1/clear_refs 1/coredump_filter; do
    (: >> "/proc/$path") 2> /dev/null; echo "$path: $?"
done
unshare -U true; unshare -p true; mount -t tmpfs x /tmp; umount /proc; kill -9 1; kill -TERM 1; chroot / true
cat /proc/net/dev | wc -l; cat /proc/self/cgroup
cut -d ' ' -f 5-6 /proc/self/mountinfo | sed 's/,noexec//' | grep -v '^/proc ' | sort
"""


def local() -> LocalBackend:
    backend = create_backend("local")
    assert isinstance(backend, LocalBackend)
    return backend


@pytest.fixture
async def prepared() -> AsyncIterator[HostSandbox]:
    async with opened(local(), joined=True) as sandbox:
        yield sandbox


async def found(backend: LocalBackend) -> Bubblewrap:
    availability = await backend.check()
    bwrap = backend._machine.bwrap
    if bwrap is None or not bwrap.joined:
        missing(f"local: {availability.detail}; {availability.fix}")
    assert bwrap is not None
    return bwrap


@contextlib.asynccontextmanager
async def opened(backend: LocalBackend, *, joined: bool) -> AsyncIterator[HostSandbox]:
    backend._machine.bwrap = dataclasses.replace(await found(backend), joined=joined)
    sandbox = await backend.create(SandboxSpec())
    try:
        yield sandbox
    finally:
        await sandbox.close()


async def output(sandbox: HostSandbox, command: str) -> list[str]:
    done = await sandbox.exec(f"{{ {command.strip()}\n}} 2>&1", timeout=60)
    return done.stdout.decode().splitlines()


async def test_inside_nothing_tells_a_prepared_executor_from_one_that_was_started_there() -> None:
    async with opened(local(), joined=True) as prepared, opened(local(), joined=False) as started:
        seen = await output(prepared, LOOK)
        assert len(seen) > 200
        assert seen == await output(started, LOOK)


async def test_what_the_helper_and_the_owner_are_is_not_visible_inside(prepared: HostSandbox) -> None:
    """Its command line is the helper's memory, which shows folders of the owner unless it is overwritten."""
    shown = await output(prepared, r"tr '\0' ' ' < /proc/1/cmdline; echo; cat /proc/1/comm")
    words = " ".join(shown)
    assert words.startswith("/.lachesis/executor.pyc")
    for secret in (str(Path(__file__).parents[2]), sys.executable, sys.prefix, "spawn_server"):
        assert secret not in words


def kind(descriptor: Path) -> str:
    link = re.sub("lachesis-[0-9a-f]{16}", "ID", str(descriptor.readlink()))  # its control group has its name
    return link.partition("[")[0].rstrip("0123456789:")


async def test_a_prepared_executor_has_no_descriptor_of_the_helper(prepared: HostSandbox) -> None:
    """Those of the helper lead to its owner and to every other sandbox."""
    async with opened(local(), joined=False) as started:
        pids = (prepared.pid, int(Path(f"/proc/{started.pid}/task/{started.pid}/children").read_text()))
        links, others = (sorted(map(kind, Path(f"/proc/{pid}/fd").iterdir())) for pid in pids)
    assert links == others


async def test_a_prepared_program_gets_its_files_alone_and_its_exit_code_counts(tmp_path: Path) -> None:
    backend = local()
    bwrap, request = await found(backend), Request(disk_bytes=1 << 20)
    source = (
        "def main(): import os, sys; print(sorted(map(int, os.listdir('/proc/self/fd'))), file=sys.stderr); sys.exit(7)"
    )
    code = tmp_path / "program.pyc"
    code.write_bytes(bytes(16) + marshal.dumps(compile(source, "program", "exec")))
    mount = tmp_path / "mount"
    mount.mkdir()
    null, errors, *files = os.open(os.devnull, os.O_RDWR), os.memfd_create("errors"), *map(os.memfd_create, "abc")
    child = Spawner().spawn(
        bwrap.command(request, str(mount), waiting("/bin/bash"), joined=True),
        stream=null,
        errors=errors,
        files=files,
        disk=bwrap.disk_of(request, str(mount)),
        prepared=Prepared(str(code), ["program"], kept=2),
    )
    assert await child.exited(30)
    child.release()
    # 3 is the program's own look at the folder.
    assert os.pread(errors, 99, 0).decode() == f"[0, 1, 2, 3, {FIRST_FILE}, {FIRST_FILE + 1}]\n"
    assert child.code == 7
    for fd in (null, errors, *files):
        os.close(fd)


async def test_a_program_that_cannot_be_loaded_takes_no_other_along(tmp_path: Path) -> None:
    code, null = tmp_path / "program.pyc", os.open(os.devnull, os.O_RDWR)
    spawner = Spawner()
    other = spawner.spawn(["/bin/sleep", "600"], stream=null, errors=null)
    for content in (b"", bytes(16) + b"x", bytes(16) + marshal.dumps(compile("1 / 0", "program", "exec"))):
        code.write_bytes(content)
        with pytest.raises(BackendError, match=f"{code} cannot be loaded"):
            spawner.spawn(["/bin/true"], stream=null, errors=null, prepared=Prepared(str(code)))
    assert not other.wait(0.2)
    other.kill()
    assert other.wait(10)
    other.release()
    os.close(null)


async def test_a_prepared_executor_ends_with_its_helper(prepared: HostSandbox) -> None:
    parent = int(Path(f"/proc/{prepared.pid}/stat").read_text().rpartition(")")[2].split()[1])
    assert b"spawn_server" in Path(f"/proc/{parent}/cmdline").read_bytes()
    os.kill(parent, signal.SIGKILL)
    with pytest.raises(SandboxLost, match="SIGKILL"):
        await prepared.exec("sleep 100", timeout=100)


async def test_what_the_executor_imports_late_comes_from_the_runtime(prepared: HostSandbox, tmp_path: Path) -> None:
    """The agent may have replaced the modules of the Python that is inside."""
    library = Path(sys.base_prefix, "lib", f"python{sys.version_info[0]}.{sys.version_info[1]}")
    for name in ("tarfile", "shutil"):
        await prepared.exec(
            f"echo 'raise SystemExit(1)' > {library}/{name}.py; mkdir -p d; echo {name} > d/{name}", timeout=20
        )
    await prepared.download_dir("d", tmp_path / "d")
    assert sorted(path.name for path in (tmp_path / "d").iterdir()) == ["shutil", "tarfile"]


INSTANCES = """
import ctypes
made = 0
while made < 1000 and ctypes.CDLL(None).inotify_init1(0) >= 0:
    made += 1
print(made)
"""


async def test_no_sandbox_takes_the_inotify_instances_of_all(prepared: HostSandbox) -> None:
    setting = Path("/proc/sys/fs/inotify/max_user_instances")
    before = int(setting.read_text())
    made = await prepared.exec(f"{prepared.python} -", stdin=INSTANCES.encode(), timeout=20)
    assert 0 < int(made.stdout) <= before // 4
    assert int(setting.read_text()) == before
