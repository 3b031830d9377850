"""The ssh backend: which hosts it trusts, broken connections, and that nothing is left on the far machine."""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import socket
import subprocess
import sys
import threading
import uuid
from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from typing import Any

import asyncssh
import pytest
from sandbox_watch import host_processes, opened, output, until

from backends import BackendError, BackendUnavailable, SandboxLost, SandboxSpec
from backends.owner import start_time
from backends.ssh import SshBackend
from tests.support.ports import free_port
from tests.support.root_images import bare_root
from tests.support.ssh_engine import SshEngine, ssh_engine


@pytest.fixture(scope="session")
def engine(ssh: SshEngine) -> SshEngine:
    return ssh


@pytest.fixture(scope="module")
def crowd(engine: SshEngine) -> Iterator[SshEngine]:
    """One that lets an ordinary user in."""
    if os.geteuid() != 0:
        pytest.skip("only root can let another user in")
    with ssh_engine(ordinary_user=True) as running:
        yield running


@pytest.fixture(autouse=True)
async def tidy(engine: SshEngine) -> AsyncIterator[None]:
    """Remove what a failed test has left."""
    yield
    if any(engine.state.iterdir()):
        await SshBackend(**engine.options).reap(everyone=True)


def groups_of(engine: SshEngine, id: str = "lachesis-*") -> list[Path]:
    """Cgroups of its sandboxes."""
    return [path for parent in engine.groups for path in (parent / "lachesis").glob(f"{id}.ssh")]


def leftovers(engine: SshEngine, mark: str = "") -> tuple[list[int], list[Path], list[Path]]:
    return host_processes(mark) if mark else [], list(engine.state.glob("lachesis-*")), groups_of(engine)


NOTHING: tuple[list[int], list[Path], list[Path]] = ([], [], [])


# --- trusted hosts --------------------------------------------------------------------------------------------------


async def rejection(**options: Any) -> str:
    """The message of `check` and `create`: the same, on one line, with the next step."""
    backend = SshBackend(**options)
    availability = await backend.check()
    assert not availability.ok
    assert availability.fix
    with pytest.raises(BackendUnavailable) as raised:
        await backend.create(SandboxSpec())
    assert availability.detail in str(raised.value)
    assert "Next step: " in str(raised.value)
    assert "\n" not in str(raised.value)
    return f"{availability.detail} | {availability.fix}"


async def test_unknown_and_changed_host_keys_are_rejected_and_distinguished(engine: SshEngine, tmp_path: Path) -> None:
    known = tmp_path / "known_hosts"
    known.touch()
    said = await rejection(**{**engine.options, "known_hosts": known})
    assert "host key is unknown" in said
    assert "ssh-ed25519 SHA256:" in said
    assert f"ssh-keyscan -p {engine.port} 127.0.0.1" in said
    other = engine.new_key(f"other-{uuid.uuid4().hex}")
    known.write_text(engine.known_hosts_line(engine.port, other.name + ".pub"))
    said = await rejection(**{**engine.options, "known_hosts": known})
    assert "host key is not the one in" in said
    assert f"ssh-keygen -R '[127.0.0.1]:{engine.port}'" in said
    subprocess.run(["ssh-keygen", "-q", "-t", "rsa", "-b", "2048", "-N", "", "-f", tmp_path / "rsa"], check=True)  # noqa: ASYNC221
    known.write_text(f"[127.0.0.1]:{engine.port} {(tmp_path / 'rsa.pub').read_text()}")
    assert "host key is not the one in" in await rejection(**{**engine.options, "known_hosts": known})


async def test_a_configuration_that_trusts_any_host_is_rejected(engine: SshEngine, tmp_path: Path) -> None:
    config = tmp_path / "config"
    config.write_text("Host *\n  UserKnownHostsFile none\n")
    options = {**engine.options, "config": [config]}
    del options["known_hosts"]
    assert "any machine could impersonate it" in await rejection(**options)


async def test_rejected_keys_hosts_and_ports_are_named_with_the_next_step(engine: SshEngine, tmp_path: Path) -> None:
    stranger = engine.new_key(f"stranger-{uuid.uuid4().hex}")
    said = await rejection(**{**engine.options, "client_keys": [stranger]})
    assert "rejects this user and these keys" in said
    assert "ssh-copy-id" in said
    assert "no such host" in await rejection(**{**engine.options, "host": "no-such-host.invalid"})
    assert "cannot be reached" in await rejection(**{**engine.options, "port": free_port()})
    said = await rejection(**{**engine.options, "client_keys": [tmp_path / "absent"]})
    assert "absent" in said


async def test_the_ssh_configuration_is_used(engine: SshEngine, tmp_path: Path) -> None:
    config = tmp_path / "config"
    config.write_text(
        f"Host rollouts\n  HostName 127.0.0.1\n  Port {engine.port}\n  User {engine.user}\n"
        f"  IdentityFile {engine.options['client_keys'][0]}\n  UserKnownHostsFile {engine.options['known_hosts']}\n"
    )
    backend = SshBackend("rollouts", config=[config], folder=str(engine.state))
    availability = await backend.check()
    assert availability.ok, availability
    assert "bubblewrap" in availability.detail


# --- requirements of the far machine ----------------------------------------------------------------------------------


async def test_what_is_missing_there_is_named_with_its_package(tmp_path: Path) -> None:
    (tmp_path / "bash").symlink_to("/bin/bash")
    with ssh_engine(SetEnv=f"SHLVL=1 PATH={tmp_path}") as bare:
        said = await rejection(**bare.options)
        assert "bubblewrap is not installed" in said
        assert "apt-get install bubblewrap" in said
        assert (await SshBackend(**bare.options, isolation="none").check()).ok
        (tmp_path / "bash").unlink()
        said = await rejection(**bare.options)
        assert "apt-get install bash" in said
        said = await rejection(**bare.options, python="/usr/bin/no-such-python3")
        assert "it cannot run Python" in said
        assert "apt-get install python3" in said


def oldest_python() -> str:
    """A Python from 3.8 on, below the one that this project needs."""
    for minor in (8, 9, 10):
        pyenv = Path("~/.pyenv/versions").expanduser().glob(f"3.{minor}.*/bin/python3.{minor}")
        for path in [*map(str, pyenv), f"/usr/bin/python3.{minor}", f"/usr/local/bin/python3.{minor}"]:
            if Path(path).exists():
                return path
    pytest.skip("no Python older than 3.11 is installed")


async def test_an_old_python_there_is_enough(engine: SshEngine, roots: Path) -> None:
    bare = SandboxSpec(image=str(bare_root(roots / "bare")), pids=100 if os.geteuid() == 0 else None)
    cases: list[tuple[Any, SandboxSpec]] = [
        ("bubblewrap", SandboxSpec()),
        ("bubblewrap", bare),
        ("none", SandboxSpec()),
    ]
    for isolation, spec in cases:
        backend = SshBackend(**engine.options, python=oldest_python(), isolation=isolation)
        async with opened(backend, spec) as sandbox:
            assert await output(sandbox, "echo $((6 * 7))") == "42"
    assert leftovers(engine) == NOTHING


@pytest.mark.parametrize("ended", [False, True])
async def test_a_login_that_runs_no_commands_is_named(ended: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Also where its session has ended before anything was sent."""
    create = asyncssh.SSHClientConnection.create_process

    async def late(*args: Any, **options: Any) -> Any:
        process = await create(*args, **options)
        await process.wait_closed()
        return process

    if ended:
        monkeypatch.setattr(asyncssh.SSHClientConnection, "create_process", late)
    with ssh_engine(ForceCommand="echo This account is not available.; exit 1") as closed:
        said = await rejection(**closed.options)
        assert "it cannot run Python (This account is not available.)" in said


async def test_a_server_that_forwards_no_sockets_is_used_by_sessions_and_a_talkative_shell_is_skipped() -> None:
    talk = 'printf "Welcome!\\n\\nlachesis 0"; eval "$SSH_ORIGINAL_COMMAND"'
    with ssh_engine(AllowStreamLocalForwarding="no", ForceCommand=talk) as narrow:
        backend = SshBackend(**narrow.options)
        assert "forwards no sockets" in (await backend.check()).detail
        sandboxes = await asyncio.gather(*(backend.create(SandboxSpec()) for _ in range(3)))
        assert await asyncio.gather(*(output(sandbox, "echo $((6 * 7))") for sandbox in sandboxes)) == ["42"] * 3
        data = os.urandom(1 << 20)
        await sandboxes[0].write_bytes("data", data)
        assert await sandboxes[0].read_bytes("data") == data
        await asyncio.gather(*(sandbox.close() for sandbox in sandboxes))
        assert leftovers(narrow, sandboxes[0].id) == NOTHING


async def test_fields_that_it_cannot_honour_are_rejected(engine: SshEngine, crowd: SshEngine) -> None:
    walled, open_air = SshBackend(**crowd.options), SshBackend(**crowd.options, isolation="none")
    for backend, spec, field in (
        (walled, SandboxSpec(image="debian"), "image"),
        (open_air, SandboxSpec(image="/"), "image"),
        (open_air, SandboxSpec(disk_bytes=1 << 30), "disk_bytes"),
        (walled, SandboxSpec(memory_bytes=1 << 30), "memory_bytes"),
        (walled, SandboxSpec(cpus=1), "cpus"),
        (open_air, SandboxSpec(pids=100), "pids"),
    ):
        with pytest.raises(BackendUnavailable, match=rf"{field}.*Next step: "):
            await backend.create(spec)
    assert leftovers(crowd) == NOTHING
    with pytest.raises(ValueError, match="isolation"):
        SshBackend(**engine.options, isolation="chroot")  # type: ignore[misc]


FORKS = """python3 -c "
import os, signal, time
children = []
try:
    for i in range(200):
        children.append(os.fork())
        if children[-1] == 0:
            time.sleep(60)
except BlockingIOError:
    print(len(children))
for child in children:
    os.kill(child, signal.SIGKILL)
" """
"""How many more processes there may be."""

# --- limits ----------------------------------------------------------------------------------------------------------


async def test_cgroups_limit_memory_and_processes(engine: SshEngine) -> None:
    if os.geteuid() != 0:
        pytest.skip("only root may write cgroups")
    backend = SshBackend(**engine.options)
    sandbox = await backend.create(SandboxSpec(memory_bytes=128 << 20, pids=40, cpus=0.5))
    assert groups_of(engine, sandbox.id)
    hungry = "python3 -c 'x = bytearray(300 << 20); x[::4096] = b\"1\" * len(x[::4096])'"
    assert (await sandbox.exec(hungry, timeout=60)).exit_code == 137
    assert 20 < int(await output(sandbox, FORKS)) < 40
    assert await output(sandbox, "echo alive") == "alive"
    await sandbox.close()
    assert groups_of(engine, sandbox.id) == []


async def test_an_ordinary_user_limits_processes_without_cgroups(crowd: SshEngine) -> None:
    sandbox = await SshBackend(**crowd.options).create(SandboxSpec(pids=20))
    assert 5 < int(await output(sandbox, FORKS)) < 20
    other = await SshBackend(**crowd.options).create(SandboxSpec(pids=20))
    assert await output(other, "echo alive") == "alive", "each has its own count"
    await asyncio.gather(sandbox.close(), other.close())


# --- walls -----------------------------------------------------------------------------------------------------------


async def test_secrets_of_both_machines_are_invisible(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, engine: SshEngine
) -> None:
    monkeypatch.setenv("OPENAI_API_KEY", "planted-near-environment")
    planted = engine.folder / "planted"
    planted.write_text("planted-far-file")
    with (
        socket.socket(socket.AF_UNIX) as agent,
        ssh_engine(SetEnv=f"SHLVL=1 SSH_AUTH_SOCK={tmp_path}/agent TOKEN=planted-far-environment") as far,
    ):
        agent.bind(f"{tmp_path}/agent")
        agent.listen()
        backend = SshBackend(**far.options)
        one, two = await asyncio.gather(*(backend.create(SandboxSpec(env={"MINE": "planted-spec"})) for _ in range(2)))
        look = (
            "cat /proc/[0-9]*/environ /proc/[0-9]*/cmdline 2>/dev/null | tr '\\0' '\\n' | grep -o 'plante[d]-[-a-z]*';"
            f"ls {far.folder} {far.state} {tmp_path} {planted} /root /etc/ssh /run/sshd 2>/dev/null;"
            "cat /proc/net/unix | tail -n +2; find / -xdev -type s 2>/dev/null; env | cut -d= -f1 | sort | tr '\\n' ' '"
        )
        seen = (await output(one, look)).splitlines()
        assert set(seen[:-1]) <= {"planted-spec"}
        assert seen[-1].split() == [
            "HOME",
            "LANG",
            "LOGNAME",
            "MINE",
            "PATH",
            "PWD",
            "SHELL",
            "SHLVL",
            "TERM",
            "USER",
            "_",
        ]
        await output(one, "echo planted > ~/secret; echo planted > /tmp/secret; echo planted > secret")
        await one.start("sleep 77777")
        assert (
            await output(
                two, "cat ~/secret /tmp/secret secret 2>/dev/null; cat /proc/*/cmdline | grep -c 7777[7]; true"
            )
            == "0"
        )
        await asyncio.gather(one.close(), two.close())


# --- broken connections -----------------------------------------------------------------------------------------------


async def test_a_command_runs_once_however_the_wire_breaks_meanwhile(engine: SshEngine) -> None:
    with engine.wire() as (wire, options):
        backend = SshBackend(**options, grace=30)
        sandbox = await backend.create(SandboxSpec())
        command = "echo ran >> runs; sleep 0.6; cat runs; head -c 300000 /dev/zero | tr '\\0' x"
        for failure, pause in ((wire.reset, 0.0), (wire.cut, 1.0), (wire.stall, 1.0)):
            running = asyncio.create_task(sandbox.exec(f"rm -f runs; {command}", timeout=60))
            await asyncio.sleep(0.3)
            await asyncio.to_thread(failure)
            await asyncio.sleep(pause)
            wire.restore()
            result = await running
            assert (result.exit_code, result.stdout) == (0, b"ran\n" + b"x" * 300_000), failure
        assert await output(sandbox, "cat runs") == "ran"
        assert wire.accepted >= 3
        await sandbox.close()
        assert leftovers(engine, sandbox.id) == NOTHING


async def test_an_upload_survives_a_reset(engine: SshEngine) -> None:
    with engine.wire() as (wire, options):
        sandbox = await SshBackend(**options).create(SandboxSpec())
        data = os.urandom(20 << 20)
        wire.reset_after(7 << 20)
        await sandbox.write_bytes("data", data)
        assert await sandbox.read_bytes("data") == data
        assert wire.accepted == 2
        await sandbox.close()


async def test_a_wire_that_stays_cut_loses_the_sandbox_at_both_ends(engine: SshEngine) -> None:
    with engine.wire() as (wire, options):
        sandbox = await SshBackend(**options, grace=1.0).create(SandboxSpec(labels={"task_id": "t-9"}))
        mark = str(uuid.uuid4().int)[:9]
        running = asyncio.create_task(sandbox.exec(f"setsid sleep {mark} & sleep {mark}", timeout=100))
        assert await until(lambda: len(host_processes(mark)) >= 2)
        await asyncio.to_thread(wire.cut)
        with pytest.raises(SandboxLost, match=r"task_id=t-9.*could not be restored within 1 s"):
            await running
        assert await until(lambda: leftovers(engine, mark) == NOTHING), leftovers(engine, mark)
        wire.restore()
        await sandbox.close()


@pytest.mark.slow
async def test_thirty_sandboxes_share_one_connection_of_ten_sessions(engine: SshEngine) -> None:
    with engine.wire() as (wire, options):
        backend = SshBackend(**options)
        sandboxes = await asyncio.gather(*(backend.create(SandboxSpec()) for _ in range(30)))
        answers = await asyncio.gather(*(output(sandbox, f"echo {i}") for i, sandbox in enumerate(sandboxes)))
        assert answers == [str(i) for i in range(30)]
        assert wire.accepted == 1
        running = [sandbox.exec("echo ran >> runs; sleep 0.5; cat runs", timeout=60) for sandbox in sandboxes]
        together = asyncio.gather(*running)
        await asyncio.sleep(0.3)
        await asyncio.to_thread(wire.reset)
        assert {result.stdout for result in await together} == {b"ran\n"}
        listed = {info.id: info for info in await backend.sandboxes()}
        assert wire.accepted == 2
        assert listed.keys() == {sandbox.id for sandbox in sandboxes}
        assert not any(info.orphan for info in listed.values())
        assert await backend.reap() == []
        await asyncio.gather(*(sandbox.close() for sandbox in sandboxes))
        assert await backend.sandboxes() == []
        assert leftovers(engine) == NOTHING


# --- leftovers -------------------------------------------------------------------------------------------------------

OWNER = """
import asyncio, json, os, sys
from backends import SandboxSpec
from backends.ssh import SshBackend

async def main():
    options = json.loads(sys.argv[1])
    limited = 100 if os.geteuid() == 0 else None
    spec = SandboxSpec(pids=limited, labels={"run_id": "r", "task_id": sys.argv[2]})
    sandbox = await SshBackend(**options).create(spec)
    await sandbox.start(f"setsid sleep {sys.argv[2]}")
    print(sandbox.id, flush=True)
    await sandbox.exec(f"(trap '' TERM HUP; sleep {sys.argv[2]}); sleep {sys.argv[2]}", timeout=1000)

asyncio.run(main())
"""


@contextlib.contextmanager
def owner(mark: str, **options: Any) -> Iterator[tuple[subprocess.Popen[str], str]]:
    import json

    command = [sys.executable, "-c", OWNER, json.dumps(options), mark]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        try:
            yield process, process.stdout.readline().strip()
        finally:
            process.kill()


async def test_kill_9_of_the_owner_leaves_nothing_after_grace(engine: SshEngine) -> None:
    mark = str(uuid.uuid4().int)[:9]
    with owner(mark, **engine.options, grace=1.0) as (process, _):
        assert await until(lambda: len(set(host_processes(mark)) - {process.pid}) >= 3)
        process.kill()
    assert await until(lambda: leftovers(engine, mark) == NOTHING), leftovers(engine, mark)


@pytest.mark.parametrize("isolation", ["bubblewrap", "none"])
async def test_kill_9_of_the_owner_leaves_nothing_after_reap(engine: SshEngine, isolation: str) -> None:
    mark = str(uuid.uuid4().int)[:9]
    backend = SshBackend(**engine.options)
    with owner(mark, **engine.options, isolation=isolation) as (process, id):
        assert await until(lambda: len(set(host_processes(mark)) - {process.pid}) >= 3)
        (info,) = await backend.sandboxes()
        assert (info.id, info.run_id, info.task_id, info.orphan) == (id, "r", mark, False)
        assert "in use" in info.detail
        assert info.created > 1e9
        assert await backend.reap() == []
        process.kill()
    assert await backend.reap(run_id="another") == []
    assert [info.id for info in await backend.reap(run_id="r")] == [id]
    assert leftovers(engine, mark) == NOTHING


@pytest.mark.parametrize("isolation", ["bubblewrap", "none"])
async def test_a_killed_executor_is_a_lost_sandbox_and_leaves_nothing(engine: SshEngine, isolation: Any) -> None:
    mark = str(uuid.uuid4().int)[:9]
    sandbox = await SshBackend(**engine.options, isolation=isolation).create(SandboxSpec())
    await sandbox.start(f"setsid sleep {mark}")
    running = asyncio.create_task(sandbox.exec(f"sleep {mark}", timeout=100))
    assert await until(lambda: len(host_processes(mark)) >= 2)
    supervisor = int((engine.state / sandbox.id / "pid").read_text())
    (child,) = Path(f"/proc/{supervisor}/task/{supervisor}/children").read_text().split()
    os.kill(int(child), signal.SIGKILL)
    with pytest.raises(SandboxLost, match=rf"{sandbox.id}.*its executor died .SIGKILL"):
        await running
    await sandbox.close()
    assert leftovers(engine, mark) == NOTHING


async def test_an_executor_that_ends_by_a_signal_without_a_name_breaks_nothing_else(engine: SshEngine) -> None:
    backend = SshBackend(**engine.options, isolation="none")
    sandbox = await backend.create(SandboxSpec())
    hub = await backend._link().hub()
    number = signal.SIGRTMIN + 6
    with pytest.raises(SandboxLost, match=f"its executor died .signal {number}"):
        await sandbox.exec(f"kill -{number} $PPID; sleep 100", timeout=100)
    assert not hub.lost, "others are waiting for its answers"
    await sandbox.close()


@pytest.mark.parametrize("isolation", ["bubblewrap", "none"])
async def test_a_killed_supervisor_leaves_nothing_after_reap(engine: SshEngine, isolation: Any) -> None:
    mark = str(uuid.uuid4().int)[:9]
    backend = SshBackend(**engine.options, isolation=isolation)
    sandbox = await backend.create(SandboxSpec(pids=100 if os.geteuid() == 0 else None))
    await sandbox.start(f"setsid sleep {mark}")
    assert await until(lambda: len(host_processes(mark)) >= 1)
    supervisor = int((engine.state / sandbox.id / "pid").read_text())
    os.kill(supervisor, signal.SIGKILL)
    # A killed process takes a while to die, and until then its sandbox is no orphan. That nothing else is seen does not
    # tell its end: a look at all processes misses one that forks meanwhile, as setsid does.
    assert await until(lambda: start_time(supervisor) == "")
    assert await until(lambda: host_processes(mark) == [])
    (info,) = await backend.reap()
    assert (info.id, info.orphan) == (sandbox.id, True)
    assert leftovers(engine, mark) == NOTHING
    await sandbox.close()


async def test_where_the_last_sandbox_has_gone_there_is_none_to_list(crowd: SshEngine) -> None:
    backend = SshBackend(**{**crowd.options, "folder": ""})  # its own, which goes with the last of them
    async with opened(backend):
        assert len(await backend.sandboxes()) == 1
    assert await backend.sandboxes() == [] and await backend.reap() == []


async def test_an_ordinary_users_stubborn_folders_are_removed(crowd: SshEngine) -> None:
    backend = SshBackend(**crowd.options, isolation="none")
    sandbox = await backend.create(SandboxSpec())
    assert await output(sandbox, "mkdir -p a/b/c; touch a/b/c/d; chmod 0 a/b a; cd; pwd; id -un") == (
        f"{crowd.state}/{sandbox.id}/home\n{crowd.user}"
    )
    await sandbox.close()
    assert leftovers(crowd, sandbox.id) == NOTHING


async def test_a_creation_that_is_cancelled_at_any_time_leaves_nothing(engine: SshEngine) -> None:
    backend = SshBackend(**engine.options)
    await (await backend.create(SandboxSpec())).close()
    for delay in (0, 0.002, 0.005, 0.01, 0.02, 0.04, 0.08):
        creation = asyncio.ensure_future(backend.create(SandboxSpec()))
        await asyncio.sleep(delay)
        creation.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await (await creation).close()
    assert leftovers(engine) == NOTHING


async def test_close_finishes_although_it_is_cancelled(engine: SshEngine) -> None:
    sandbox = await SshBackend(**engine.options).create(SandboxSpec())
    closing = asyncio.ensure_future(sandbox.close())
    await asyncio.sleep(0)
    closing.cancel()
    with pytest.raises(asyncio.CancelledError):
        await closing
    assert leftovers(engine, sandbox.id) == NOTHING
    await sandbox.close()


def test_an_event_loop_that_ends_leaves_no_descriptor_and_its_sandboxes_end(engine: SshEngine) -> None:
    mark = str(uuid.uuid4().int)[:9]
    before = len(os.listdir("/proc/self/fd"))  # noqa: PTH208
    backend = SshBackend(**engine.options, grace=0.5)

    async def forget() -> None:
        sandbox = await backend.create(SandboxSpec())
        await sandbox.start(f"sleep {mark}")

    asyncio.run(forget())
    thread = threading.Thread(target=asyncio.run, args=(forget(),))
    thread.start()
    thread.join()
    assert asyncio.run(until(lambda: leftovers(engine, mark) == NOTHING)), leftovers(engine, mark)
    assert len(os.listdir("/proc/self/fd")) <= before  # noqa: PTH208


async def test_a_folder_of_somebody_else_is_rejected(crowd: SshEngine, tmp_path: Path) -> None:
    with pytest.raises(BackendUnavailable, match=r"its folder for sandboxes cannot be used.*Next step"):
        await SshBackend(**{**crowd.options, "folder": "/tmp"}).create(SandboxSpec())


async def test_a_working_directory_anywhere_is_made(engine: SshEngine, crowd: SshEngine) -> None:
    for far in (engine, crowd):
        sandbox = await SshBackend(**far.options).create(SandboxSpec(workdir="/srv/project/src"))
        assert await output(sandbox, "pwd; touch here; ls") == "/srv/project/src\nhere"
        await sandbox.close()
    with pytest.raises(BackendError):
        await SshBackend(**crowd.options).create(SandboxSpec(workdir="/usr/new"))


async def test_a_broken_connection_is_one_line_of_the_log_whoever_uses_it(
    engine: SshEngine, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level("INFO")
    with engine.wire() as (wire, options):
        backend = SshBackend(**options)
        sandboxes = await asyncio.gather(*(backend.create(SandboxSpec()) for _ in range(6)))
        commands = [asyncio.create_task(sandbox.exec("sleep 1; echo done", timeout=60)) for sandbox in sandboxes]
        await asyncio.sleep(0.5)
        caplog.clear()
        wire.reset()
        assert [result.stdout for result in await asyncio.gather(*commands)] == [b"done\n"] * 6
        said = [record.getMessage() for record in caplog.records]
        await asyncio.gather(*(sandbox.close() for sandbox in sandboxes))
    assert len(said) == 1 and "the ssh connection of 6 sandboxes broke" in said[0], said


@pytest.mark.parametrize("size", [200, 1500, 4000, 70_000])
async def test_a_connection_that_ends_while_a_sandbox_is_made_is_an_error_of_the_backend_or_none(
    engine: SshEngine, size: int
) -> None:
    with engine.wire() as (wire, options):
        backend = SshBackend(grace=2.0, **options)
        wire.reset_after(size)
        with contextlib.suppress(BackendError):  # it is made in another attempt if the connection breaks late
            await (await backend.create(SandboxSpec())).close()
        await (await backend.create(SandboxSpec())).close()
    assert await until(lambda: leftovers(engine) == NOTHING)
