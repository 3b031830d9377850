"""What is particular to containers, on a real engine of the tests' own. What all backends do is in the conformance
suite."""

from __future__ import annotations

import asyncio
import base64
import contextlib
import dataclasses
import hashlib
import json
import os
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
import uuid
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from sandbox_watch import host_processes, opened, output, until

from backends import BackendError, BackendUnavailable, Lease, LeaseOver, SandboxLost, SandboxSpec, SupportsSnapshot
from backends.docker import DockerBackend
from backends.docker.client import Engine, find_engine
from backends.docker.container import Account, account
from backends.docker.images import read_credentials, split_name
from backends.docker.route import SocketRoute, remove_stale_folders, run_folder
from backends.owner import this_owner
from tests.support.docker_engine import AGENT_IMAGE, BARE_IMAGE, FULL_IMAGE, DockerEngine, docker_engine
from tests.support.image_registry import image_registry
from tests.support.root_images import bare_root, root_archive

MIB = 1 << 20


@pytest.fixture
def engine(docker: DockerEngine) -> DockerEngine:
    return docker


@pytest.fixture(autouse=True)
def own_run_folder(engine: DockerEngine, monkeypatch: pytest.MonkeyPatch) -> None:
    """What other processes of this user keep there is none of these tests' business."""
    folder = engine.folder / "run"
    folder.mkdir(exist_ok=True)
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(folder))


def backend_for(engine: DockerEngine, **options: Any) -> DockerBackend:
    return DockerBackend(**{**engine.options, **options})


def left(engine: DockerEngine) -> list[str]:
    """Containers, and folders of sockets, that are still there."""
    return [*engine.containers(), *(path.name for path in run_folder().iterdir())]


# --- the engine ------------------------------------------------------------------------------------------------------


@pytest.mark.slow
async def test_check_tells_what_there_is(engine: DockerEngine) -> None:
    availability = await backend_for(engine).check()
    assert availability.ok, availability
    assert availability.detail.startswith("Docker 2") and str(engine.socket) in availability.detail


async def test_an_engine_without_a_profile_gets_ours(engine: DockerEngine) -> None:
    backend = backend_for(engine)
    found, facts = await backend._engine()
    assert facts.seccomp in ("default", "builtin")
    backend._found = found, dataclasses.replace(facts, seccomp="unconfined")
    probe = "import socket\ntry: socket.socket(40, 1)\nexcept OSError as error: open('/said', 'w').write(str(error))"
    async with opened(backend) as sandbox:
        config = json.dumps({"Cmd": ["python3", "-c", probe]}).encode()
        started = engine.call("POST", f"/containers/{sandbox.id}/exec", config)["Id"]  # no child of the executor
        engine.call("POST", f"/exec/{started}/start", b'{"Detach": true}')
        assert "not supported" in await output(sandbox, "until [ -s /said ]; do sleep 0.05; done; cat /said")


async def test_an_engine_that_is_not_there_is_named_with_the_next_step(tmp_path: Path) -> None:
    backend = DockerBackend(url=f"unix://{tmp_path}/none.sock")
    availability = await backend.check()
    assert not availability.ok
    assert str(tmp_path) in availability.detail
    assert "systemctl start docker" in availability.fix
    with pytest.raises(BackendUnavailable, match=r"cannot be reached"):
        await backend.create(SandboxSpec())


def test_the_engine_is_looked_for_where_the_docker_client_looks(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("DOCKER_HOST", "DOCKER_CONTEXT", "DOCKER_TLS_VERIFY", "DOCKER_CERT_PATH"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("DOCKER_CONFIG", str(tmp_path))
    meta = tmp_path / "contexts/meta" / hashlib.sha256(b"far").hexdigest()
    meta.mkdir(parents=True)
    (meta / "meta.json").write_text(json.dumps({"Endpoints": {"docker": {"Host": "ssh://me@far"}}}))
    (tmp_path / "config.json").write_text(json.dumps({"currentContext": "far"}))
    assert find_engine() == Engine("ssh://me@far")
    monkeypatch.setenv("DOCKER_HOST", "tcp://near:2375")
    assert find_engine() == Engine("tcp://near:2375")
    monkeypatch.setenv("DOCKER_CONTEXT", "far")
    assert find_engine() == Engine("ssh://me@far")
    assert find_engine("unix:///x") == Engine("unix:///x")
    with pytest.raises(BackendUnavailable, match="is invalid"):
        find_engine("/var/run/docker.sock")
    monkeypatch.setenv("DOCKER_CONTEXT", "missing")
    with pytest.raises(BackendUnavailable, match="context 'missing' cannot be read"):
        find_engine()


# --- images ----------------------------------------------------------------------------------------------------------


async def test_a_missing_image_is_pulled_with_progress_and_the_users_login(
    engine: DockerEngine, roots: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    steps: list[str] = []
    backend = backend_for(engine, pull="missing", progress=steps.append)
    layer = await asyncio.to_thread(lambda: root_archive(bare_root(roots / "bare")))
    with image_registry(layer, login=("bob", "pass:word")) as registry:
        monkeypatch.setenv("DOCKER_CONFIG", str(tmp_path))
        with pytest.raises(BackendUnavailable, match=f"docker login {registry.host}"):
            await backend.create(SandboxSpec(image=registry.name))
        auth = base64.b64encode(b"bob:pass:word").decode()
        (tmp_path / "config.json").write_text(json.dumps({"auths": {registry.host: {"auth": auth}}}))
        with pytest.raises(BackendUnavailable, match=r"there is no image .*check its name"):
            await backend.create(SandboxSpec(image=f"{registry.host}/team/tool:2.0"))
        sandboxes = await asyncio.gather(*(backend.create(SandboxSpec(image=registry.name)) for _ in range(2)))
        assert [await output(sandbox, "busybox echo hi") for sandbox in sandboxes] == ["hi", "hi"]
        assert sum("/blobs/" in request for request in registry.requests) == 2, "one image has a config and a layer"
        await asyncio.gather(*(sandbox.close() for sandbox in sandboxes))
        engine.call("DELETE", f"/images/{registry.name}")
    assert any("Pull complete" in step for step in steps)
    assert "pass" not in " ".join(steps)
    with pytest.raises(BackendUnavailable, match=r"registry .* cannot be reached"):
        await backend.create(SandboxSpec(image=registry.name))
    with pytest.raises(BackendUnavailable, match="docker pull no-such-image"):
        await backend_for(engine).create(SandboxSpec(image="no-such-image"))
    assert left(engine) == []


def test_names_of_images_tell_their_registry(tmp_path: Path) -> None:
    assert split_name("python:3.12") == ("docker.io", "docker.io/library/python:3.12")
    assert split_name("team/tool") == ("docker.io", "docker.io/team/tool")
    assert split_name("localhost/tool") == ("localhost", "localhost/tool")
    assert split_name("ghcr.io/a/b:1") == ("ghcr.io", "ghcr.io/a/b:1")
    (tmp_path / "config.json").write_text(json.dumps({"auths": {"x.io": {"identitytoken": "t"}, "y.io": {}}}))
    assert read_credentials("x.io", tmp_path) == {"identitytoken": "t", "serveraddress": "x.io"}
    assert read_credentials("y.io", tmp_path) is None
    assert read_credentials("x.io", tmp_path / "none") is None


async def test_an_image_needs_neither_python_nor_bash(engine: DockerEngine) -> None:
    async with opened(backend_for(engine, image=BARE_IMAGE)) as sandbox:
        assert sandbox.python is None
        assert await output(sandbox, "cd /tmp; export A=(1 2); [[ $BASH_VERSION ]] && echo bash") == "bash"
        assert await output(sandbox, "pwd; busybox id -u") == "/tmp\n0"
        assert "python" not in await output(sandbox, "echo $PATH; env")
        result = await sandbox.exec("busybox sleep 60 & busybox sleep 60", timeout=0.5)
        assert result.timed_out
        assert "sleep" not in await output(sandbox, "busybox ps")


async def test_user_variables_and_folder_are_the_images_and_its_entry_point_is_not_run(engine: DockerEngine) -> None:
    async with opened(backend_for(engine, image=AGENT_IMAGE), SandboxSpec(env={"GIVEN": "s3cret"})) as sandbox:
        assert sandbox.workdir == "/home/agent"
        assert await output(sandbox, "id -u; pwd; echo $HOME $USER $FLAVOUR $GIVEN; touch x; ls") == (
            "1000\n/home/agent\n/home/agent agent agent s3cret\nx"
        )
        inspected = json.dumps(engine.call("GET", f"/containers/{sandbox.id}/json"))
        assert "s3cret" not in inspected, "users who may inspect containers must not see the variables of commands"
    async with opened(backend_for(engine, user="1234:5"), SandboxSpec(workdir="/opt/new/place")) as sandbox:
        assert await output(sandbox, "id -u; id -g; pwd; touch x; ls; echo $HOME") == (
            "1234\n5\n/opt/new/place\nx\n/opt/new/place"
        )


def test_accounts_are_found_by_name_and_by_number() -> None:
    lines = ["root:x:0:0:root:/root:/bin/sh", "web:x:33:33::/var/www:/bin/sh", "broken"]
    assert account("web", lines) == account("33:33", lines) == Account("/var/www", 33, 33, "web")
    assert account("web:7", lines) == Account("/var/www", 33, 7, "web")
    assert account("1234", lines) == Account("/", 1234, 0)
    with pytest.raises(BackendUnavailable, match="no user 'nobody'"):
        account("nobody", lines)


# --- isolation -------------------------------------------------------------------------------------------------------


async def test_nothing_inside_has_power_or_reaches_the_channel(engine: DockerEngine) -> None:
    async with opened(backend_for(engine)) as sandbox:
        status = await output(sandbox, "grep -E '^(Cap|NoNewPrivs|Seccomp:)' /proc/self/status")
        values = dict(line.split(":\t") for line in status.splitlines())
        assert {values[f"Cap{name}"] for name in ("Inh", "Prm", "Eff", "Bnd", "Amb")} == {"0" * 16}
        assert (values["NoNewPrivs"], values["Seccomp"]) == ("1", "2")
        assert await output(sandbox, "ls /sys/class/net") == "lo"
        assert await output(sandbox, "ls -A /run/lachesis-link") == "", "no socket is there while it is connected"
        for attack in (
            "touch /.lachesis/x",
            "touch /run/lachesis-link/x",
            "cat /proc/1/environ",
            "ls -l /proc/1/fd/",
            "head -c 1 /proc/1/mem",
            "mount -t tmpfs none /mnt",
            "chown 1000 /etc/passwd",
            "mv /.lachesis /run/other",
        ):
            assert (await sandbox.exec(attack, timeout=20)).exit_code != 0, attack


async def test_sandboxes_see_nothing_of_the_host_or_of_each_other(
    engine: DockerEngine, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    secret = f"sk-{uuid.uuid4().hex}"
    for name in ("OPENAI_API_KEY", "AWS_SECRET_ACCESS_KEY", "HF_TOKEN", "SSH_AUTH_SOCK", "DOCKER_AUTH", "http_proxy"):
        monkeypatch.setenv(name, secret)
    (tmp_path / "key").write_text(secret)
    backend = backend_for(engine)
    async with opened(backend, SandboxSpec(env={"MINE": secret})) as other, opened(backend) as sandbox:
        await other.exec(f"echo {secret} > /tmp/mine; echo {secret} > /dev/shm/mine", timeout=20)
        process = await other.start(f"exec -a {secret} sleep 100")
        assert await until(lambda: bool(host_processes(secret)))
        found = await sandbox.exec(
            f"env; cat /proc/[0-9]*/environ /proc/[0-9]*/cmdline /proc/1/mountinfo | tr '\\0' '\\n'; hostname;"
            f" ls -a /tmp /dev/shm /root /run /home /mnt; ls {tmp_path};"
            f" grep -rsl {secret[:10]} /tmp /etc /root /run /home",
            timeout=60,
        )
        text = (found.stdout + found.stderr).decode(errors="replace")
        assert secret not in text
        assert "docker.sock" not in text
        assert await output(sandbox, "ls /tmp /dev/shm") == "/dev/shm:\n\n/tmp:"
        await process.kill()


# --- limits ----------------------------------------------------------------------------------------------------------


async def test_memory_processes_processors_and_disk_are_limited_and_the_sandbox_lives_on(engine: DockerEngine) -> None:
    spec = SandboxSpec(memory_bytes=96 * MIB, pids=60, cpus=0.5, disk_bytes=16 * MIB)
    async with opened(backend_for(engine), spec) as sandbox:
        greedy = await sandbox.exec("python3 -c 'x = bytearray(200 << 20); print(len(x))'", timeout=60)
        assert (greedy.exit_code, greedy.stdout) == (137, b"")
        bomb = await sandbox.exec("bomb() { bomb | bomb & }; bomb; sleep 60", timeout=2)
        assert bomb.timed_out
        assert await output(sandbox, "echo alive") == "alive"
        assert await until(lambda: len(engine.call("GET", f"/containers/{sandbox.id}/top")["Processes"]) < 5)
        full = await sandbox.exec("head -c 50000000 /dev/zero > file; stat -c %s file", timeout=60)
        assert b"No space left on device" in full.stderr
        assert int(full.stdout) <= 16 * MIB
        assert (await sandbox.exec("rm file; echo x > /usr/file", timeout=20)).exit_code != 0
        assert await output(sandbox, "echo x > ~/file; echo x > /tmp/file; cat ~/file") == "x"
        spin = "import time; b = time.time(); c = time.process_time()\nwhile time.time() < b + 1.5: pass\n"
        spin += "print(time.process_time() - c)"
        assert float(await output(sandbox, f"python3 -c '{spin}'")) < 1.3
        assert not isinstance(sandbox, SupportsSnapshot) or "in memory" in await refused(sandbox)


async def refused(sandbox: SupportsSnapshot) -> str:
    with pytest.raises(BackendUnavailable) as error:
        await sandbox.snapshot()
    return str(error.value)


async def test_a_limit_that_cannot_be_kept_is_refused_by_name(engine: DockerEngine) -> None:
    backend = backend_for(engine)
    with pytest.raises(BackendUnavailable, match=r"disk_bytes .* /usr/bin: it is part of the image.* set workdir"):
        await backend.create(SandboxSpec(disk_bytes=MIB, workdir="/usr/bin"))
    assert left(engine) == []


async def test_a_read_only_sandbox_can_write_to_its_folder_and_tmp_alone(engine: DockerEngine) -> None:
    async with opened(backend_for(engine, read_only=True), SandboxSpec(workdir="/inside/here")) as sandbox:
        assert await output(sandbox, "touch a /tmp/b; ls /inside/here; ls /tmp") == "a\nb"
        assert (await sandbox.exec("touch /opt/x", timeout=20)).exit_code == 1


async def no_work() -> None:
    pass


async def test_snapshots_are_images_for_more_sandboxes(engine: DockerEngine) -> None:
    backend = backend_for(engine)
    async with opened(backend, SandboxSpec(env={"A": "1"})) as sandbox:
        assert isinstance(sandbox, SupportsSnapshot)
        await output(sandbox, "mkdir -p /opt/kept; echo hello > /opt/kept/file; echo here > note")
        image = await sandbox.snapshot()
        await output(sandbox, "rm /opt/kept/file")
        async with opened(backend, SandboxSpec(image=image)) as other:
            assert await output(other, "cat /opt/kept/file note; echo ${A-unset}") == "hello\nhere\nunset"
            assert {info.id for info in await backend.sandboxes()} == {sandbox.id, other.id}
        lease = Lease(sandbox, give_back=no_work, lifetime=60)
        assert isinstance(lease.sandbox, SupportsSnapshot)
        await lease.release()
        with pytest.raises(LeaseOver):
            await lease.sandbox.snapshot()
    labels = engine.call("GET", f"/images/{image}/json")["Config"]["Labels"]
    assert labels["lachesis.snapshot"] == sandbox.id
    engine.call("DELETE", f"/images/{image}")


# --- what goes wrong -------------------------------------------------------------------------------------------------


async def test_a_container_that_is_removed_by_somebody_else_is_reported_soon(engine: DockerEngine) -> None:
    async with opened(backend_for(engine, grace=600)) as sandbox:
        running = asyncio.create_task(sandbox.exec("sleep 100", timeout=200))
        await asyncio.sleep(0.2)
        engine.call("DELETE", f"/containers/{sandbox.id}?force=1")
        with pytest.raises(SandboxLost, match=f"{sandbox.id} is gone: its container was killed or removed"):
            async with asyncio.timeout(30):
                await running
    assert left(engine) == []


async def test_an_engine_killed_in_mid_exec_costs_nothing_until_it_is_needed(roots: Path) -> None:
    """The command ends as ever. To close then fails with the engine's absence, but what is inside ends."""
    mark = str(uuid.uuid4().int)[:9]
    with docker_engine(roots, images=[BARE_IMAGE]) as engine:
        backend = backend_for(engine, image=BARE_IMAGE)
        sandbox = await backend.create(SandboxSpec())
        await sandbox.start(f"busybox sleep {mark}")
        running = asyncio.create_task(sandbox.exec("busybox sleep 0.5; echo done", timeout=60))
        await asyncio.sleep(0.1)
        engine.kill()
        assert (await running).stdout == b"done\n"
        with pytest.raises(BackendError, match="cannot be reached"):
            await sandbox.close()
        assert await until(lambda: host_processes(mark) == [])
        with pytest.raises(SandboxLost, match="was closed"):
            await sandbox.exec("true", timeout=5)
        await asyncio.to_thread(engine.start)
        await backend.reap(everyone=True)
        assert engine.containers() == []


HOLDER = """
import asyncio, sys
from backends import SandboxSpec
from backends.docker import DockerBackend
async def main():
    backend = DockerBackend(url=sys.argv[1], image=sys.argv[2], grace=float(sys.argv[3]))
    spec = SandboxSpec(labels={"run_id": sys.argv[4], "task_id": "t"})
    sandboxes = await asyncio.gather(*(backend.create(spec) for _ in range(int(sys.argv[5]))))
    for sandbox in sandboxes:
        await sandbox.start(f"exec -a {sys.argv[4]} sleep 1000")
    print("ready", flush=True)
    await asyncio.sleep(1000)
asyncio.run(main())
"""


@contextlib.contextmanager
def holder(engine: DockerEngine, grace: float, run: str, count: int) -> Iterator[subprocess.Popen[bytes]]:
    """Another process, with `count` sandboxes of the run `run` and a process in each; killed at the end."""
    arguments = [f"unix://{engine.socket}", FULL_IMAGE, str(grace), run, str(count)]
    process = subprocess.Popen([sys.executable, "-c", HOLDER, *arguments], stdout=subprocess.PIPE)
    try:
        assert process.stdout is not None
        assert process.stdout.readline() == b"ready\n"
        yield process
    finally:
        process.kill()
        process.wait()
        assert process.stdout is not None
        process.stdout.close()


async def test_nothing_outlives_a_killed_owner_by_more_than_the_grace(engine: DockerEngine) -> None:
    run = f"r{uuid.uuid4().hex[:8]}"
    with holder(engine, 1.0, run, 2) as process:
        assert await until(lambda: len(host_processes(run)) >= 3), "itself, and what was started in each"
        process.send_signal(signal.SIGKILL)
        assert await until(lambda: engine.containers() == [], 40)  # the default is 60
    assert await until(lambda: host_processes(run) == [])
    assert await backend_for(engine).reap() == []
    assert left(engine) == [], "reap removes the folders of sockets as well"


async def test_reap_removes_a_killed_owners_sandboxes_at_once_and_nobody_elses(engine: DockerEngine) -> None:
    run = f"r{uuid.uuid4().hex[:8]}"
    backend = backend_for(engine)
    async with opened(backend) as mine:
        with holder(engine, 600.0, run, 3) as process:
            listed = await backend.sandboxes()
            assert sorted((info.run_id, info.orphan) for info in listed) == [("", False), *[(run, False)] * 3]
            assert await backend.reap() == []
            process.send_signal(signal.SIGKILL)
            process.wait()
            assert sum(info.orphan for info in await backend.sandboxes()) == 3
            assert await backend.reap(run_id="another") == []
            reaped = await backend.reap(run_id=run)
        assert [(info.run_id, info.task_id, info.orphan) for info in reaped] == [(run, "t", True)] * 3
        assert all(abs(info.created - time.time()) < 120 for info in reaped)
        assert await until(lambda: host_processes(run) == [])
        assert left(engine) == [mine.id, mine.id]
        assert await output(mine, "echo unharmed") == "unharmed"


async def test_a_creation_that_was_broken_off_leaves_nothing(engine: DockerEngine) -> None:
    backend = backend_for(engine)
    for delay in (0.02, 0.1, 0.3):
        task = asyncio.create_task(backend.create(SandboxSpec()))
        await asyncio.sleep(delay)
        task.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await (await task).close()
        assert left(engine) == [], delay
    # A crash between the engine's work and its answer: all there is, is a container by the name chosen before.
    labels = {"lachesis.id": "lachesis-dead", "lachesis.owner": gone_owner()}
    body = json.dumps({"Image": FULL_IMAGE, "Cmd": ["x"], "Labels": labels})
    engine.call("POST", "/containers/create?name=lachesis-dead", body.encode())
    assert [info.id for info in await backend.reap()] == ["lachesis-dead"]
    assert left(engine) == []


def gone_owner() -> str:
    code = "from backends.owner import this_owner; print(this_owner())"
    return subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout.strip()


# --- a remote engine -------------------------------------------------------------------------------------------------


class Cable:
    """A TCP port of loopback before the engine's socket: to its user it is a remote engine. It can be pulled."""

    def __init__(self, engine: DockerEngine) -> None:
        self._path = str(engine.socket)
        self._writers: set[asyncio.StreamWriter] = set()
        self._tasks: set[asyncio.Task[None]] = set()

    async def __aenter__(self) -> Cable:
        self._server = await asyncio.start_server(self._serve, "127.0.0.1", 0)
        self.url = f"tcp://127.0.0.1:{self._server.sockets[0].getsockname()[1]}"
        return self

    async def __aexit__(self, *_: object) -> None:
        self._server.close()
        self.cut()
        await asyncio.gather(*self._tasks, return_exceptions=True)

    def cut(self) -> None:
        for writer in self._writers:
            writer.transport.abort()

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.current_task()
        assert task is not None
        self._tasks.add(task)
        far_reader, far_writer = await asyncio.open_unix_connection(self._path)
        pair = {writer, far_writer}
        self._writers |= pair
        try:
            await asyncio.gather(self._copy(reader, far_writer), self._copy(far_reader, writer))
        finally:
            self._writers -= pair
            for each in pair:
                each.transport.abort()

    @staticmethod
    async def _copy(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        with contextlib.suppress(OSError):
            while data := await reader.read(1 << 16):
                writer.write(data)
                await writer.drain()
            writer.write_eof()


async def test_a_remote_engine_is_reached_through_its_exec_and_a_cut_is_healed(engine: DockerEngine) -> None:
    async with Cable(engine) as cable:
        backend = backend_for(engine, url=cable.url)
        async with opened(backend) as sandbox, opened(backend, SandboxSpec(image=BARE_IMAGE)) as bare:
            assert await output(bare, "busybox id -u") == "0"
            mounts = engine.call("GET", f"/containers/{sandbox.id}/json")["HostConfig"].get("Binds")
            assert not mounts, "nothing of this machine is bound"
            assert (await sandbox.exec("touch /.lachesis/x", timeout=20)).exit_code != 0
            data = os.urandom(3_000_000)
            await sandbox.write_bytes("data", data)
            assert await sandbox.read_bytes("data") == data
            running = asyncio.create_task(
                sandbox.exec("echo ran >> log; sleep 1; head -c 2000000 data", timeout=60, max_output=4_000_000)
            )
            await asyncio.sleep(0.3)
            cable.cut()
            assert (await running).stdout == data[:2_000_000]
            assert await output(sandbox, "cat log") == "ran"
        assert await backend.sandboxes() == []


async def test_the_cache_folder_is_looked_at_beside_the_event_loop(
    engine: DockerEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It may be on a slow network file system."""
    threads: list[int] = []
    make = tempfile.TemporaryFile

    def note(*args: Any, **options: Any) -> Any:
        threads.append(threading.get_ident())
        return make(*args, **options)

    monkeypatch.setattr(tempfile, "TemporaryFile", note)
    async with opened(backend_for(engine)):
        assert threads and threading.get_ident() not in threads


async def test_folders_of_sockets_that_any_crash_left_behind_are_removed() -> None:
    def leave(name: str, owner: str | None, *, old: bool = False) -> None:
        folder = run_folder() / name
        folder.mkdir()
        if owner is not None:
            (folder / "owner").write_text(owner)
        if old:
            os.utime(folder, (1, 1))

    leave("of-a-killed-process", this_owner().rpartition(".")[0] + ".1")
    leave("of-an-earlier-boot", "0123456789abcdef-4026531836.77.12345")
    leave("half-made-long-ago", None, old=True)
    leave("being-made", None)
    leave("in-use", this_owner(), old=True)
    remove_stale_folders()
    assert {path.name for path in run_folder().iterdir()} == {"being-made", "in-use"}
    for path in run_folder().iterdir():
        shutil.rmtree(path)


async def test_clients_that_crowd_the_socket_do_not_hold_up_the_event_loop(tmp_path: Path) -> None:
    route = SocketRoute("crowded", tmp_path, lambda: asyncio.sleep(0))  # type: ignore[arg-type]
    try:
        route._peer = -1  # the executor is known, and none of these
        (path,) = route._bound.iterdir()
        clients = [socket.socket(socket.AF_UNIX) for _ in range(16)]
        for client in clients:
            client.connect(str(path))
            client.setblocking(False)
        dialling = asyncio.create_task(route.dial())
        for _ in range(4):
            await asyncio.sleep(0)
        with pytest.raises(BlockingIOError):
            clients[-1].recv(1)  # not rejected yet: others had their turn in between
        dialling.cancel()
        for client in clients:
            client.close()
    finally:
        route.close()


async def test_close_removes_the_container_also_when_the_loop_ends_its_tasks(engine: DockerEngine) -> None:
    backend = backend_for(engine)
    sandbox: Any = await backend.create(SandboxSpec())
    sandbox._end.cancel()  # as `asyncio.run` does with every task when the program fails
    await sandbox.close()
    assert await backend.sandboxes() == [] and left(engine) == []


async def test_an_upload_of_the_runtime_that_is_cancelled_holds_up_nobody(engine: DockerEngine) -> None:
    def uploads() -> list[str]:
        return [name for name in engine.containers() if name.endswith("-upload")]

    backend = backend_for(engine, transport="exec")
    for _ in range(3):  # at whichever step it is met
        creating = asyncio.create_task(backend.create(SandboxSpec()))
        while not creating.done() and not await asyncio.to_thread(uploads):
            pass
        creating.cancel()
        with pytest.raises(asyncio.CancelledError):
            await creating
        assert uploads() == []
    async with opened(backend) as sandbox:
        assert await output(sandbox, "echo made") == "made"


async def test_a_remote_engine_that_stays_away_loses_the_sandbox_after_the_grace(engine: DockerEngine) -> None:
    async with Cable(engine) as cable:
        sandbox = await backend_for(engine, url=cable.url, grace=1.0).create(SandboxSpec())
        running = asyncio.create_task(sandbox.exec("sleep 100", timeout=200))
        await asyncio.sleep(0.2)
    with pytest.raises(SandboxLost, match=f"{sandbox.id} is gone: .* within 1 s"):
        async with asyncio.timeout(30):
            await running
    with pytest.raises(BackendError, match="cannot be reached"):
        await sandbox.close()
    assert await until(lambda: engine.containers() == [], 40), "the far end has not noticed"
