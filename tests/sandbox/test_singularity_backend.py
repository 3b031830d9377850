"""What is particular to Apptainer. What all backends do is in the conformance suite."""

from __future__ import annotations

import asyncio
import contextlib
import os
import pwd
import shutil
import signal
import socket
import subprocess
import sys
import uuid
from pathlib import Path

import pytest
from sandbox_watch import host_processes, opened, output, until

from backends import BackendError, BackendUnavailable, SandboxLost, SandboxSpec
from backends.host import records
from backends.host.layout import RUNTIME
from backends.host.runtime import portable_runtime
from backends.singularity import Installation, SingularityBackend, command
from tests.support.image_registry import image_registry
from tests.support.root_images import root_archive
from tests.support.singularity_engine import SingularityEngine

MIB = 1 << 20
ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture(scope="session")
def engine(singularity: SingularityEngine) -> SingularityEngine:
    return singularity


@pytest.fixture(scope="session")
def backend(engine: SingularityEngine) -> SingularityBackend:
    return SingularityBackend(**engine.options)


@pytest.fixture
def empty_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Without images; the runtime need not be made again."""
    runtime = portable_runtime()
    (tmp_path / "lachesis").mkdir()
    (tmp_path / "lachesis" / runtime.name).symlink_to(runtime)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setenv("APPTAINER_CACHEDIR", str(tmp_path / "apptainer"))


def ordinary_user_exists() -> bool:
    return any(user.pw_uid == 1000 for user in pwd.getpwall())


def groups(id: str) -> list[Path]:
    return [path for path in Path("/sys/fs/cgroup").rglob(id) if path.is_dir()]


# --- finding it ------------------------------------------------------------------------------------------------------


async def test_check_names_the_version(backend: SingularityBackend, engine: SingularityEngine) -> None:
    availability = await backend.check()
    assert availability.ok, availability
    assert "version" in availability.detail and engine.binary in availability.detail


async def test_another_program_is_rejected(engine: SingularityEngine) -> None:
    """Debian has a game called singularity."""
    backend = SingularityBackend("/bin/true", image=engine.bare)
    availability = await backend.check()
    assert not availability.ok
    assert "/bin/true is not Apptainer" in availability.detail
    assert "apptainer" in availability.fix
    with pytest.raises(BackendUnavailable, match=r"is not Apptainer.*Next step"):
        await backend.create(SandboxSpec())


# --- the inside ------------------------------------------------------------------------------------------------------


async def test_an_image_needs_neither_python_nor_bash(backend: SingularityBackend, engine: SingularityEngine) -> None:
    assert not list(engine.bare.rglob("bash")) + list(engine.bare.rglob("python*"))
    async with opened(backend, SandboxSpec(image=str(engine.bare))) as sandbox:
        assert sandbox.python is None
        assert await output(sandbox, "x=(a b); echo ${x[1]} $$") != ""
        assert await output(sandbox, "echo ${BASH_VERSION:+bash}; busybox true") == "bash"
        user = "nobody" if os.geteuid() == 0 and not ordinary_user_exists() else "agent"  # what the image calls it
        assert await output(sandbox, "whoami") == user
        await sandbox.upload_dir(engine.bare / "etc", "copied")
        assert await sandbox.read_bytes("copied/passwd") == (engine.bare / "etc/passwd").read_bytes()


async def test_everything_may_be_written_and_the_image_stays(
    backend: SingularityBackend, engine: SingularityEngine
) -> None:
    before = sorted(engine.bare.rglob("*"))
    spec = SandboxSpec(image=str(engine.bare), disk_bytes=8 * MIB)
    async with opened(backend, spec) as sandbox, opened(backend, spec) as other:
        places = "/ /etc /usr/bin /tmp /var/tmp /root /home/agent /workspace /dev/shm /new/folder"
        await output(sandbox, f"mkdir -p /new/folder && for p in {places}; do echo mine > $p/mark || exit 1; done")
        await output(sandbox, "echo mine > /etc/passwd && rm /bin/cat")
        assert await output(other, "cat /etc/group && ls -d /mark /tmp/mark /dev/shm/mark 2>&1 | grep -c 'No such'")
        # One limit for all places together, not one for each.
        filled = await sandbox.exec(
            "for p in /opt /tmp /home/agent /dev/shm /dev; do dd if=/dev/zero of=$p/big bs=64k; done 2>&1 | "
            "grep -c 'No space left'; du -ck /opt/big /tmp/big /home/agent/big /dev/shm/big /dev/big | tail -n 1",
            timeout=200,
        )
        full, _, total = filled.stdout.decode().partition("\n")
        assert full == "5"
        assert 4096 < int(total.split()[0]) <= 8192
    assert sorted(engine.bare.rglob("*")) == before


async def test_nothing_of_the_host_is_visible(
    backend: SingularityBackend, engine: SingularityEngine, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    secret = f"planted-{uuid.uuid4().hex}"
    for name in ("API_KEY", "APPTAINERENV_API_KEY", "SINGULARITYENV_API_KEY", "APPTAINER_BIND_SECRET", "SSH_AUTH_SOCK"):
        monkeypatch.setenv(name, secret)
    monkeypatch.setenv("APPTAINER_BIND", f"{tmp_path}:/mnt")
    (tmp_path / "file").write_text(secret)
    shared = Path("/dev/shm") / secret
    with contextlib.ExitStack() as planted:
        for path in (shared, Path("/tmp") / secret, Path.home() / f".{secret}", Path("/var/tmp") / secret):
            path.write_text(secret)
            planted.callback(path.unlink)
        listener = planted.enter_context(socket.socket(socket.AF_UNIX))
        listener.bind(f"\0{secret}")
        listener.listen()
        host = planted.enter_context(socket.create_server(("127.0.0.1", 0)))
        async with opened(backend) as sandbox:
            await output(
                sandbox, "! env | grep -a plante[d]; ! cat /proc/[0-9]*/{environ,cmdline} 2>&1 | grep -a plante[d]"
            )
            await output(
                sandbox, "! grep -ra plante[d] /proc/net/unix /proc/mounts /home /root /tmp /var /dev/shm /mnt /etc"
            )
            names = set((await output(sandbox, "cut -d= -f1 <(env)")).split())
            assert names <= {*["PATH", "HOME", "USER", "LOGNAME", "SHELL", "LANG", "TERM", "PWD", "SHLVL", "_"]}, names
            assert await output(sandbox, "hostname") == "sandbox"
            assert int(await output(sandbox, "ls /proc | grep -c '^[0-9]*$'")) < 10  # its own, and shells that wait
            assert (await output(sandbox, "tail -n +3 /proc/net/dev | cut -d: -f1")).split() == ["lo"]
            connect = f"exec 3<>/dev/tcp/127.0.0.1/{host.getsockname()[1]}"
            assert (await sandbox.exec(connect, timeout=10)).exit_code != 0
            async with opened(backend, SandboxSpec(network=True)) as networked:
                assert (await networked.exec(connect, timeout=10)).exit_code == 0


async def test_root_inside_is_nobody_outside(backend: SingularityBackend) -> None:
    async with opened(backend) as sandbox:
        assert (
            await output(sandbox, "grep -E 'Cap(Inh|Prm|Eff|Bnd|Amb)' /proc/self/status | sort -u -k 2 | wc -l") == "1"
        )
        assert await output(sandbox, "grep CapEff /proc/self/status | tr -d '0\t '") == "CapEff:"
        assert await output(sandbox, "grep NoNewPrivs /proc/self/status | tr -d '\t '") == "NoNewPrivs:1"
        # A kernel file that only root may write to is closed to who is root outside.
        for path in (
            "/proc/sys/kernel/core_pattern",
            "/proc/sys/vm/swappiness",
            "/proc/1/oom_score_adj",
            "/sys/kernel/mm",
        ):
            assert (await sandbox.exec(f": > {path}", timeout=10)).exit_code != 0, path
        assert (await sandbox.exec("cat /proc/1/environ", timeout=10)).exit_code != 0
        assert await output(sandbox, "ls /proc/1/root/ 2>&1 | grep -c denied") == "1"


async def test_memory_limit_ends_the_command_and_not_the_sandbox(backend: SingularityBackend) -> None:
    async with opened(backend, SandboxSpec(memory_bytes=160 * MIB, pids=100)) as sandbox:
        result = await sandbox.exec("exec python3 -c 'x = bytearray(400 << 20)'", timeout=30)
        assert result.exit_code == 137, result
        bomb = await sandbox.exec("f() { f | f & }; f; wait; exit 7", timeout=2)
        assert bomb.exit_code in (7, 124, 254), bomb
        await sandbox.stop_processes()  # a bomb that its shell did not wait for goes on, and leaves room for nobody
        assert await output(sandbox, "echo still here") == "still here"
        assert groups(sandbox.id)
    assert groups(sandbox.id) == []


async def test_a_disk_of_less_than_a_mebibyte_is_rejected(backend: SingularityBackend) -> None:
    with pytest.raises(BackendUnavailable, match=r"disk_bytes of 1000 cannot be enforced.*Next step"):
        await backend.create(SandboxSpec(disk_bytes=1000))


def test_an_installation_without_configuration_rejects_a_disk_limit(engine: SingularityEngine) -> None:
    """As those with setuid programs do from anyone but root: the rest works with its administrator's settings."""
    installation = Installation(engine.binary, "1.0", configurable=False)
    inner = [f"{RUNTIME}/bin/bash", "-c", "echo > /etc/mark && [[ ! -e /sys/kernel ]] && echo works"]
    argv = command(installation, engine.bare, inner, disk_bytes=None, network=False)
    assert subprocess.run(argv, env={}, cwd="/", capture_output=True, check=False).stdout == b"works\n"
    with pytest.raises(BackendUnavailable, match=r"disk_bytes cannot be enforced.*Next step"):
        command(installation, engine.bare, inner, disk_bytes=MIB, network=False)


# --- images ----------------------------------------------------------------------------------------------------------


async def test_images_that_do_not_exist_are_named(backend: SingularityBackend, tmp_path: Path) -> None:
    with pytest.raises(BackendUnavailable, match=r"there is no image '/no/such'.*Next step"):
        await backend.create(SandboxSpec(image="/no/such"))
    broken = tmp_path / "broken.sif"
    broken.write_bytes(b"no image")
    with pytest.raises(BackendError, match=r"broken.sif' cannot be made: .*Next step"):
        await backend.create(SandboxSpec(image=str(broken)))
    with pytest.raises(BackendError, match=r"127.0.0.1.*connection refused.*Next step"):
        await backend.create(SandboxSpec(image="docker://127.0.0.1:1/tool:1.0"))
    with pytest.raises(BackendUnavailable, match=r"needs an image.*Next step"):
        await SingularityBackend(backend._binary).create(SandboxSpec())


@pytest.mark.usefixtures("empty_cache")
async def test_a_registry_is_asked_once_and_the_images_variables_hold(engine: SingularityEngine) -> None:
    steps: list[str] = []
    backend = SingularityBackend(engine.binary, progress=steps.append)
    layer = await asyncio.to_thread(root_archive, engine.bare)
    with image_registry(layer) as registry:
        spec = SandboxSpec(image=f"docker://{registry.name}")
        sandboxes = await asyncio.gather(*(backend.create(spec) for _ in range(3)))
        asked = list(registry.requests)
    assert sum("/blobs/" in request for request in asked) == 2, "one image has a config and a layer"
    assert any(registry.name in step for step in steps)
    paths = [await output(sandbox, "echo $PATH") for sandbox in sandboxes]
    assert all(path.startswith("/bin:") for path in paths), paths  # the image's own comes first
    async with opened(backend, spec) as later:  # the registry has gone
        assert await output(later, "busybox echo here") == "here"
    await asyncio.gather(*(sandbox.close() for sandbox in sandboxes))


@pytest.mark.skipif(not shutil.which("mksquashfs"), reason="squashfs-tools are missing")
@pytest.mark.usefixtures("empty_cache")
async def test_a_sif_file_is_unpacked_once(engine: SingularityEngine, tmp_path: Path) -> None:
    sif = tmp_path / "bare.sif"
    build = [engine.binary, "build", str(sif), str(engine.bare)]
    await asyncio.to_thread(subprocess.run, build, check=True, capture_output=True)
    steps: list[str] = []
    backend = SingularityBackend(engine.binary, image=sif, progress=steps.append)
    async with opened(backend) as sandbox:
        assert await output(sandbox, "busybox echo from SIF") == "from SIF"
    unpacked = len(steps)
    assert unpacked > 0
    async with opened(backend) as sandbox:
        assert await output(sandbox, "busybox echo again") == "again"
    assert len(steps) == unpacked


# --- the end ---------------------------------------------------------------------------------------------------------

OWNER = """
import asyncio, sys
from backends import SandboxSpec
from backends.singularity import SingularityBackend

async def main():
    backend = SingularityBackend(sys.argv[1], image=sys.argv[2])
    specs = [SandboxSpec(pids=100, labels={"run_id": sys.argv[3]}), SandboxSpec(labels={"run_id": sys.argv[3]})]
    sandboxes = await asyncio.gather(*(backend.create(spec) for spec in specs))
    for sandbox in sandboxes:
        await sandbox.exec(f"(setsid sleep {sys.argv[3]} &) ; trap '' TERM; nohup sleep {sys.argv[3]} &", timeout=20)
        await sandbox.start(f"setsid sleep {sys.argv[3]}")
    print("ready", flush=True)
    await asyncio.sleep(600)

asyncio.run(main())
"""


async def test_kill_9_of_the_owner_leaves_nothing(backend: SingularityBackend, engine: SingularityEngine) -> None:
    run = str(uuid.uuid4().int)[:9]
    arguments = [sys.executable, "-c", OWNER, engine.binary, str(engine.full), run]
    owner = await asyncio.create_subprocess_exec(*arguments, cwd=ROOT, stdout=subprocess.PIPE)
    try:
        assert owner.stdout is not None
        assert await owner.stdout.readline() == b"ready\n"
        ids = [info.id for info in await backend.sandboxes() if info.run_id == run]
        assert len(ids) == 2
        assert await until(lambda: len(host_processes(f"sleep\0{run}")) == 6)
        assert await backend.reap(run_id=run) == []  # its owner lives
    finally:
        owner.send_signal(signal.SIGKILL)
        await owner.wait()
    assert await until(lambda: not host_processes(run)), "without any reaping"
    reaped = await backend.reap(run_id=run)
    assert sorted(info.id for info in reaped) == sorted(ids)
    assert all(info.orphan for info in reaped)
    assert [path for id in ids for path in (*groups(id), records.folder(id)) if path.exists()] == []


BUILDER = """
import asyncio, sys
from backends import SandboxSpec
from backends.singularity import SingularityBackend

async def main():
    lines = asyncio.Queue()
    loop = asyncio.get_running_loop()
    report = lambda line: loop.call_soon_threadsafe(lines.put_nowait, line)
    backend = SingularityBackend(sys.argv[1], image="docker://large:1", progress=report)
    creating = asyncio.create_task(backend.create(SandboxSpec()))
    print(await lines.get(), flush=True)
    await asyncio.to_thread(sys.stdin.readline)
    creating.cancel()

asyncio.run(main())
"""


@pytest.mark.parametrize("is_killed", [True, False])
async def test_a_pull_that_nobody_waits_for_ends_with_its_owner(
    tmp_path: Path, empty_cache: None, is_killed: bool
) -> None:
    mark = str(uuid.uuid4().int)[:9]
    slow = tmp_path / "apptainer"  # one that pulls for ever
    script = f"""for word; do
  [ "$word" != --version ] || exec echo apptainer version 1.4.5
  [ "$word" != build ] || {{ echo pulling >&2; sleep {mark}; }}
done
"""
    slow.write_text("#!/bin/sh\n" + script)
    slow.chmod(0o755)
    pipe = subprocess.PIPE
    line = [sys.executable, "-c", BUILDER, str(slow)]
    with subprocess.Popen(line, stdin=pipe, stdout=pipe, text=True) as owner:  # noqa: ASYNC220
        assert owner.stdin is not None and owner.stdout is not None
        assert "pulling" in owner.stdout.readline()
        assert await until(lambda: bool(host_processes(mark)))
        if is_killed:
            owner.kill()
        else:
            owner.stdin.write("go on\n")
            owner.stdin.flush()
        await asyncio.to_thread(owner.wait, 30)
    assert await until(lambda: host_processes(mark) == [])


async def test_a_killed_apptainer_is_a_lost_sandbox(backend: SingularityBackend) -> None:
    mark = str(uuid.uuid4().int)[:9]
    sandbox = await backend.create(SandboxSpec(labels={"task_id": "t-1"}))
    running = asyncio.create_task(sandbox.exec(f"setsid sleep {mark}", timeout=60))
    assert await until(lambda: bool(host_processes(mark)))
    os.kill(sandbox.pid, signal.SIGKILL)
    with pytest.raises(SandboxLost, match=r"task_id=t-1.* is gone: .*SIGKILL"):
        await running
    assert await until(lambda: not host_processes(mark))
    assert await until(lambda: not records.folder(sandbox.id).exists())
    await sandbox.close()


async def test_cancelled_creation_leaves_nothing(backend: SingularityBackend) -> None:
    run = f"run-{uuid.uuid4().hex[:8]}"
    for delay in (0.0, 0.02, 0.1):
        creating = asyncio.create_task(backend.create(SandboxSpec(labels={"run_id": run})))
        await asyncio.sleep(delay)
        creating.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await (await creating).close()

    def left() -> list[records.Record]:
        return [record for record in records.all_records("singularity") if record.run_id == run]

    assert await until(lambda: not left())


async def test_a_living_sandbox_is_reaped_when_everyone_is_meant(backend: SingularityBackend) -> None:
    run = f"run-{uuid.uuid4().hex[:8]}"
    sandbox = await backend.create(SandboxSpec(labels={"run_id": run}))
    (reaped,) = await backend.reap(run_id=run, everyone=True)
    assert (reaped.id, reaped.orphan) == (sandbox.id, False)
    with pytest.raises(SandboxLost):
        await sandbox.exec("true", timeout=5)
    await sandbox.close()


PLAIN_USER = """
import asyncio, sys
from backends import SandboxSpec
from backends.singularity import SingularityBackend

async def main():
    backend = SingularityBackend(sys.argv[1], image=sys.argv[2])
    sandbox = await backend.create(SandboxSpec(disk_bytes=4 << 20))
    command = "echo x > /etc/mark && echo $UID; dd if=/dev/zero of=/opt/big bs=64k 2>&1 | grep -o 'No space left'"
    print((await sandbox.exec(command, timeout=20)).stdout.decode(), end="")
    await sandbox.close()

asyncio.run(main())
"""


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can become somebody else")
def test_it_needs_no_root(engine: SingularityEngine) -> None:
    """As `nobody`, with an image of that user's: limits and walls are the same."""
    python = shutil.which("python3", path="/usr/bin:/usr/local/bin")
    version = [python or "python3", "-c", "import sys; sys.exit(sys.version_info < (3, 11))"]
    if python is None or subprocess.run(version, check=False).returncode:
        pytest.skip("there is no Python >= 3.11 that every user can run")
    if not all(folder.stat().st_mode & 0o001 for folder in Path(engine.binary).parents):
        pytest.skip(f"{engine.binary} is closed to other users")
    folder = Path("/tmp") / f"lachesis-{uuid.uuid4().hex[:8]}"  # pytest's own are closed to others
    try:
        for package in ("backends", "lachesis"):
            shutil.copytree(ROOT / package, folder / package)
        shutil.copytree(engine.bare, folder / "image", symlinks=True)
        for name in ("image", "cache", "tmp"):
            (folder / name).mkdir(exist_ok=True)
            subprocess.run(["chown", "-R", "nobody:nogroup", str(folder / name)], check=True)
        done = subprocess.run(
            [python, "-c", PLAIN_USER, engine.binary, str(folder / "image")],
            user="nobody",
            group="nogroup",
            extra_groups=[],
            env={"PATH": os.environ["PATH"], "XDG_CACHE_HOME": str(folder / "cache"), "TMPDIR": str(folder / "tmp")},
            cwd=folder,
            capture_output=True,
            text=True,
            check=False,
        )
        assert done.stdout == "65534\nNo space left\n", done.stderr
        assert not (folder / "image/etc/mark").exists()
    finally:
        shutil.rmtree(folder, ignore_errors=True)
