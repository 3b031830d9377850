"""What every sandbox does, whatever it is made of. A backend is done when this passes for it."""

from __future__ import annotations

import asyncio
import hashlib
import os
import shlex
import time
import uuid
from collections.abc import AsyncIterator
from pathlib import Path

import pytest
import pytest_asyncio
from sandbox_watch import host_processes, output, stopped, until

from backends import Backend, ExecResult, Process, Sandbox, SandboxLost, SandboxSpec, SupportsPty

pytestmark = pytest.mark.asyncio(loop_scope="session")

RESET = """
cd {workdir} && chmod -R u+rwx . && rm -rf ..?* .[!.]* *
for name in $(compgen -e); do case " {names} " in *" $name "*) ;; *) unset "$name" ;; esac; done
"""


@pytest_asyncio.fixture(scope="module", loop_scope="session")
async def shared() -> AsyncIterator[dict[Backend, tuple[Sandbox, str]]]:
    """One sandbox of each backend for all tests that leave it usable, and the names of its variables."""
    sandboxes: dict[Backend, tuple[Sandbox, str]] = {}
    yield sandboxes
    await asyncio.gather(*(sandbox.close() for sandbox, _ in sandboxes.values()))


@pytest_asyncio.fixture(loop_scope="session")
async def sandbox(backend: Backend, shared: dict[Backend, tuple[Sandbox, str]]) -> Sandbox:
    """A sandbox as good as new: no files, no processes (but ended ones), no variables and no folder of other tests."""
    if backend not in shared:
        sandbox = await backend.create(SandboxSpec())
        shared[backend] = sandbox, (await output(sandbox, "echo $(compgen -e)"))
    sandbox, names = shared[backend]
    await sandbox.stop_processes()
    reset = await sandbox.exec(RESET.format(workdir=shlex.quote(sandbox.workdir), names=names), timeout=20)
    assert reset.exit_code == 0, reset
    return sandbox


async def test_protocols_are_met(sandbox: Sandbox, backend: Backend) -> None:
    assert isinstance(backend, Backend)
    assert isinstance(sandbox, Sandbox)


# --- exec: results ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("command", "code"),
    [
        ("true", 0),
        ("exit 3", 3),
        ("false", 1),
        ("no-such-command", 127),
        ("kill -9 $$", 137),
        ("kill -TERM $$", 143),
        ("bash -c 'kill -9 $$'; exit $?", 137),
        ("exec sh -c 'exit 7'", 7),
        ("set -e; false; true", 1),
        ("if", 2),
        ("trap 'echo bye' EXIT; exit 5", 5),
        ("exit 255", 255),
        ("", 0),
        ("# only a comment", 0),
        ("exec 211>&-; exit 4", 4),
        ("IFS=0; (exit 10)", 10),
        ("set() { :; }; exit() { :; }; bash -c 'exit 7'", 7),
        ("trap 'echo debug' DEBUG; (exit 6)", 6),
    ],
)
async def test_exit_codes_are_the_shells(sandbox: Sandbox, command: str, code: int) -> None:
    result = await sandbox.exec(command, timeout=20)
    assert (result.exit_code, result.timed_out) == (code, False), result


async def test_stdout_and_stderr_are_kept_apart(sandbox: Sandbox) -> None:
    result = await sandbox.exec("echo out; echo err >&2; echo out2", timeout=20)
    assert (result.stdout, result.stderr) == (b"out\nout2\n", b"err\n")
    assert not result.truncated


async def test_output_is_bytes(sandbox: Sandbox) -> None:
    result = await sandbox.exec(r"printf '\000\377\200\r\n'", timeout=20)
    assert result.stdout == b"\x00\xff\x80\r\n"


async def test_error_messages_are_bashs_own(sandbox: Sandbox) -> None:
    result = await sandbox.exec("\nno-such-command", timeout=20)
    assert result.stderr == b"bash: line 2: no-such-command: command not found\n"


async def test_a_command_sees_nothing_of_how_it_is_run(sandbox: Sandbox) -> None:
    assert await output(sandbox, 'echo "$0|$#|$*"; compgen -v | grep -i lachesis || true') in (
        "bash|0|",
        "bash|0|\nLACHESIS_SANDBOX",
    )
    traced = await sandbox.exec("set -x; :", timeout=20)
    assert traced.stderr == b"++ :\n"


async def test_stdin_is_what_was_given_and_else_empty(sandbox: Sandbox) -> None:
    data = os.urandom(300_000)
    assert (await sandbox.exec("cat", timeout=20, stdin=data)).stdout == data
    assert (await sandbox.exec("cat", timeout=20, stdin=b"")).stdout == b""
    assert (await sandbox.exec("cat", timeout=20)).stdout == b""
    assert (await sandbox.exec("true", timeout=20, stdin=data)).exit_code == 0, "a command need not read it"


async def test_long_commands_run(sandbox: Sandbox) -> None:
    text = "é" * 200_000
    result = await sandbox.exec(f"export LONG=1; cat > long.txt <<'EOF'\n{text}\nEOF\nexit 3", timeout=20)
    assert result.exit_code == 3
    assert (await sandbox.read_bytes("long.txt")).decode() == text + "\n"
    assert await output(sandbox, "echo $LONG") == "1"


async def test_a_command_beyond_the_kernels_limit_fails_alone(sandbox: Sandbox) -> None:
    result = await sandbox.exec(f"true {'x' * 4_000_000}", timeout=20)
    assert result.exit_code == 126
    assert b"Argument list too long" in result.stderr
    assert await output(sandbox, "echo still here") == "still here"


# --- exec: state -----------------------------------------------------------------------------------------------------


async def test_folder_and_exports_persist(sandbox: Sandbox) -> None:
    await sandbox.exec("mkdir -p sub/dir; cd sub/dir; export KEPT='yes'; NOT_EXPORTED=1", timeout=20)
    assert await output(sandbox, 'echo "$PWD $KEPT ${NOT_EXPORTED-unset}"') == f"{sandbox.workdir}/sub/dir yes unset"
    await sandbox.exec("unset KEPT; cd -", timeout=20)
    assert await output(sandbox, 'echo "$PWD ${KEPT-unset}"') == f"{sandbox.workdir} unset"


async def test_a_fresh_command_knows_nothing_of_the_others_and_leaves_them_alone(sandbox: Sandbox) -> None:
    await sandbox.exec("mkdir there; cd there; export PATH=/nowhere:$PATH WHO=agent; unset HOME", timeout=20)
    fresh = await sandbox.exec(
        'pwd; echo "${WHO-nobody}"; echo $PATH | grep -c nowhere; test -n "$HOME"; echo $?; cd /; export WHO=reward',
        timeout=20,
        fresh=True,
    )
    assert fresh.stdout.decode().split() == [sandbox.workdir, "nobody", "0", "0"]
    assert (await output(sandbox, 'pwd; echo "$WHO"')).split() == [f"{sandbox.workdir.rstrip('/')}/there", "agent"]
    given = await sandbox.exec("pwd; echo $WHO", timeout=20, fresh=True, cwd="/", env={"WHO": "me"})
    assert given.stdout.decode().split() == ["/", "me"]


async def test_exports_persist_byte_for_byte(sandbox: Sandbox) -> None:
    value = "a b\n\t\"'$`\\!é\x01\x7f{}*?\nlast\\"
    await sandbox.exec('export ODD="$(cat)"', timeout=20, stdin=value.encode())
    assert (await sandbox.exec('printf %s "$ODD"', timeout=20)).stdout == value.encode()
    await sandbox.exec(r"export RAW=$'\377\200x'; set -o posix", timeout=20)
    assert (await sandbox.exec('printf %s "$RAW"', timeout=20)).stdout == b"\xff\x80x"


@pytest.mark.parametrize(
    "command",
    [
        "cd /; export GONE=1; exit 9",
        "set -eu; cd /; export GONE=1; false",
        "trap 'echo mine' EXIT; cd /; export GONE=1",
        "set -x; cd /; export GONE=1",
        "cd /; export GONE=1 # a comment",
        "export() { :; }; cd /; declare -x GONE=1",
        "set -o posix; cd /; export GONE=1",
        "exec 1>&- 2>&-; cd /; export GONE=1",
    ],
)
async def test_state_persists_however_the_shell_ends(sandbox: Sandbox, command: str) -> None:
    await sandbox.exec(command, timeout=20)
    assert await output(sandbox, 'echo "$PWD $GONE"') == "/ 1"


@pytest.mark.parametrize("command", ["cd /; kill -9 $$", "cd /; exec true"])
async def test_a_shell_that_vanishes_leaves_the_state_as_it_was(sandbox: Sandbox, command: str) -> None:
    await sandbox.exec(command, timeout=20)
    assert await output(sandbox, "pwd") == sandbox.workdir


async def test_overrides_hold_for_one_call(sandbox: Sandbox) -> None:
    await sandbox.exec("mkdir sub; export A=old", timeout=20)
    result = await sandbox.exec(
        'echo "$PWD $A $B"; cd /; A=x B=y C=z; export C', timeout=20, cwd="sub", env={"A": "new", "B": "b"}
    )
    assert result.stdout.decode() == f"{sandbox.workdir}/sub new b\n"
    assert await output(sandbox, 'echo "$PWD $A ${B-unset} $C"') == f"{sandbox.workdir} old unset z"


async def test_a_missing_cwd_is_the_commands_failure(sandbox: Sandbox) -> None:
    result = await sandbox.exec("echo ran", timeout=20, cwd="no/such/folder")
    assert (result.exit_code, result.stdout) == (1, b"")
    assert b"no/such/folder: No such file or directory" in result.stderr


async def test_a_vanished_folder_falls_back_to_workdir(sandbox: Sandbox) -> None:
    await sandbox.exec("mkdir gone; cd gone; rmdir ../gone", timeout=20)
    assert await output(sandbox, "pwd") == sandbox.workdir


async def test_parallel_execs_run_at_once_and_merge_their_state(sandbox: Sandbox) -> None:
    meet = "until (set -- here-*; test $# = 8); do sleep 0.01; done"  # each ends only when all of them run
    commands = (f"touch here-{i}; {meet}; echo {i}; export V{i}={i}" for i in range(8))
    results = await asyncio.gather(*(sandbox.exec(command, timeout=60) for command in commands))
    assert [result.stdout.decode().strip() for result in results] == [str(i) for i in range(8)]
    assert await output(sandbox, "echo $V0$V1$V2$V3$V4$V5$V6$V7") == "01234567"


# --- exec: time ------------------------------------------------------------------------------------------------------

RUNAWAYS = {
    "foreground": "sleep {mark}",
    "background": "sleep {mark} & wait",
    "setsid": "setsid sleep {mark} & wait; sleep {mark}",
    "double fork": "(setsid bash -c 'setsid sleep {mark} & disown; exit' &); sleep {mark}",
    "deaf to TERM": "trap '' TERM INT HUP; (trap '' TERM INT HUP; sleep {mark}); sleep {mark}",
    "respawning": "while true; do sleep {mark}; done",
    "forking": "while true; do (sleep {mark} & sleep {mark} & ); sleep 0.01; done",
    "exec": "setsid sleep {mark} & exec sleep {mark}",
    "stopped": "kill -STOP $$; sleep {mark}",
    "python daemon": (
        "python3 -c 'import os,time\nif os.fork()==0:\n os.setsid()\n if os.fork()==0:\n  time.sleep({mark})\n"
        " os._exit(0)\ntime.sleep({mark})'"
    ),
}

SURVIVORS = "for f in /proc/[0-9]*/cmdline; do tr '\\0' ' ' < $f; echo; done 2>/dev/null | grep -c '[ (]{mark}'"


@pytest.mark.parametrize("command", RUNAWAYS.values(), ids=RUNAWAYS.keys())
async def test_a_timeout_leaves_nothing_of_the_command(sandbox: Sandbox, command: str) -> None:
    mark = str(uuid.uuid4().int)[:9]
    bystander = await sandbox.start("sleep 1000")
    result = await stopped(sandbox, f"echo begun; cd /; {command.format(mark=mark)}", 0.4)
    assert (result.exit_code, result.timed_out, result.stdout) == (124, True, b"begun\n")
    assert result.duration >= 0.4
    survivors = await sandbox.exec(SURVIVORS.replace("{mark}", mark[:5] + "[" + mark[5] + "]" + mark[6:]), timeout=20)
    assert survivors.stdout == b"0\n"
    assert host_processes(mark) == []
    assert (await bystander.status()).exit_code is None, "other processes are none of its business"
    assert await output(sandbox, "pwd") == sandbox.workdir


async def test_background_children_do_not_delay_the_result_and_live_on(sandbox: Sandbox) -> None:
    result = await sandbox.exec(
        "(sleep 0.5; for i in 1 2 3; do echo more $i; done; echo done > late.txt; sleep 100) & echo now", timeout=20
    )
    assert (result.exit_code, result.stdout, result.timed_out) == (0, b"now\n", False)
    end = time.monotonic() + 60
    while (await sandbox.exec("cat late.txt", timeout=20)).stdout != b"done\n":
        assert time.monotonic() < end, "a child that writes after its command has ended is killed or blocked"
        await asyncio.sleep(0.05)


async def test_cancelling_an_exec_kills_the_command(sandbox: Sandbox) -> None:
    mark = str(uuid.uuid4().int)[:9]
    task = asyncio.create_task(sandbox.exec(f"setsid sleep {mark} & sleep {mark}; touch survived", timeout=100))
    assert await until(lambda: len(host_processes(mark)) >= 2)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    assert await until(lambda: host_processes(mark) == [])
    assert await output(sandbox, "ls") == ""


# --- exec: output ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("size", [0, 999, 1000, 1001, 135_169, 1_000_001, 100_000_000])
async def test_output_is_capped_and_the_missing_bytes_counted(sandbox: Sandbox, size: int) -> None:
    result = await sandbox.exec(f"printf HEAD; head -c {size} /dev/zero; printf TAIL", timeout=60, max_output=1000)
    assert len(result.stdout) == min(1000, size + 8)
    assert result.stdout_elided == max(0, size + 8 - 1000)
    assert result.stdout.startswith(b"HEAD")
    assert result.stdout.endswith(b"TAIL")
    assert result.truncated == (result.stdout_elided > 0)


async def test_the_elided_bytes_are_the_middle(sandbox: Sandbox) -> None:
    whole = "".join(f"{i}\n" for i in range(50_000)).encode()
    result: ExecResult = await sandbox.exec("seq 0 49999 >&2", timeout=20, max_output=10_001)
    assert result.stderr == whole[:5000] + whole[-5001:]
    assert result.stderr_elided == len(whole) - 10_001


async def test_the_whole_of_a_truncated_output_can_be_read(sandbox: Sandbox) -> None:
    whole = "".join(f"{i}\n" for i in range(300_000)).encode()
    result = await sandbox.exec("seq 0 299999; echo short >&2", timeout=20, max_output=1000)
    assert result.stdout_elided == len(whole) - 1000
    assert await sandbox.read_output(result, limit=len(whole) + 10) == whole
    assert await sandbox.read_output(result, "stdout", offset=1_000_000, limit=10) == whole[1_000_000:1_000_010]
    assert await sandbox.read_output(result, offset=len(whole), limit=10) == b""
    assert await sandbox.read_output(result, "stderr", offset=1, limit=3) == b"hor"
    for _ in range(4):
        await sandbox.exec("seq 1000", timeout=20, max_output=10)
    with pytest.raises(FileNotFoundError):
        await sandbox.read_output(result, limit=10)


async def test_a_command_that_closes_its_output_and_lives_on_is_waited_for(sandbox: Sandbox) -> None:
    result = await sandbox.exec("echo seen; exec >&- 2>&-; sleep 0.5; touch late; exit 7", timeout=20)
    assert (result.exit_code, result.stdout) == (7, b"seen\n")
    assert result.duration >= 0.5
    assert await output(sandbox, "ls") == "late"


# --- background processes --------------------------------------------------------------------------------------------


async def read_all(process: Process) -> bytes:
    data, offset = b"", 0
    async with asyncio.timeout(60):
        while True:
            chunk = await process.read(offset, wait=5)
            data += chunk.data
            offset = chunk.offset + len(chunk.data)
            if chunk.exit_code is not None and not chunk.data:
                return data


async def test_a_background_process_is_started_read_and_ends(sandbox: Sandbox) -> None:
    await sandbox.exec("mkdir sub; cd sub; export A=1", timeout=20)
    process = await sandbox.start('echo "$PWD $A $B"; sleep 0.3; echo err >&2; exit 3', env={"B": "2"})
    assert await read_all(process) == f"{sandbox.workdir}/sub 1 2\nerr\n".encode()
    status = await process.status()
    assert status.exit_code == 3
    assert status.output_size == len(f"{sandbox.workdir}/sub 1 2\nerr\n")
    listed = (await sandbox.processes())[-1]
    assert (listed.id, listed.command) == (process.id, process.command)


async def test_reading_waits_for_output_no_longer_than_told(sandbox: Sandbox) -> None:
    process = await sandbox.start("read line; echo got $line; sleep 100")
    begin = time.monotonic()
    assert (await process.read(wait=0.2)).data == b""
    assert 0.2 <= time.monotonic() - begin < 60, "it lives for 100 s"
    waiting = asyncio.create_task(process.read(wait=20))
    await asyncio.sleep(0.05)
    await process.write(b"x\n")
    assert (await waiting).data == b"got x\n"
    assert (await process.read(4, limit=1)).data == b"x"
    assert (await process.read(10**9)).offset == 6


async def test_input_is_written_and_closed(sandbox: Sandbox) -> None:
    process = await sandbox.start("cat | wc -c")
    for _ in range(3):
        await process.write(b"x" * 300_000)
    await process.close_stdin()
    assert (await read_all(process)).strip() == b"900000"
    await process.close_stdin()
    with pytest.raises(ProcessLookupError):
        await process.write(b"x")


async def test_writing_to_a_process_that_ends_meanwhile_is_an_error(sandbox: Sandbox) -> None:
    process = await sandbox.start("sleep 0.5")
    with pytest.raises(ProcessLookupError):
        await process.write(b"x" * 1_000_000)


async def test_kill_ends_a_process_with_all_it_started(sandbox: Sandbox) -> None:
    mark = str(uuid.uuid4().int)[:9]
    process = await sandbox.start(f"trap '' TERM; setsid sleep {mark} & (sleep {mark} &) ; sleep {mark}")
    assert await until(lambda: len(host_processes(mark)) >= 3)
    await process.kill()
    assert await until(lambda: host_processes(mark) == [])
    assert (await process.read(wait=30)).exit_code == 137
    await process.kill()
    daemon = await sandbox.start(f"sleep {mark} & exit 0")
    assert await read_all(daemon) == b""
    await daemon.kill()
    assert await until(lambda: host_processes(mark) == []), "children that outlived their shell"


async def test_old_output_is_dropped_and_offsets_stay_absolute(sandbox: Sandbox) -> None:
    process = await sandbox.start("head -c 5000000 /dev/zero; printf END")
    await read_all(process)
    assert (await process.status()).output_size == 5_000_003
    first = await process.read(0, limit=10)
    assert len(first.data) == 10
    assert 5_000_003 - first.offset <= 1 << 20
    assert (await process.read(5_000_000)).data == b"END"


async def test_stopping_all_processes_leaves_the_sandbox_usable(sandbox: Sandbox) -> None:
    mark = str(uuid.uuid4().int)[:9]
    process = await sandbox.start(f"setsid sleep {mark} & trap '' TERM; sleep {mark}")
    await sandbox.exec(f"cd /; setsid sleep {mark} > /dev/null 2>&1 & (sleep {mark} &) ; export KEPT=1", timeout=20)
    running = asyncio.create_task(sandbox.exec(f"sleep {mark}; echo not reached", timeout=100))
    assert await until(lambda: len(host_processes(mark)) >= 5)
    await sandbox.stop_processes()
    assert host_processes(mark) == []
    assert (await running).exit_code == 137
    assert (await process.read(wait=30)).exit_code == 137
    assert await output(sandbox, "echo $PWD $KEPT") == "/ 1"


async def test_a_program_gets_a_terminal(sandbox: Sandbox) -> None:
    if not isinstance(sandbox, SupportsPty):
        pytest.skip("it gives no terminals")
    await sandbox.exec("cd /; export A=1", timeout=20)
    process = await sandbox.open_pty(
        "[ -t 0 ] && [ -t 1 ] && [ -t 2 ] && stty size && echo $PWD $A $B; read x; echo got $x; cat; exit 5",
        rows=33,
        columns=99,
        env={"B": "2"},
    )

    async def shown(process: Process, end: bytes) -> bytes:
        """What it shows up to these words: a terminal gives a line in pieces."""
        data = b""
        async with asyncio.timeout(60):
            while end not in data:
                data += (await process.read(len(data), wait=5)).data
        return data

    assert await shown(process, b"/ 1 2\r\n") == b"33 99\r\n/ 1 2\r\n"
    await process.write(b"line\n")
    await shown(process, b"got line")
    await process.close_stdin()
    assert (await read_all(process)).endswith(b"got line\r\n")
    assert (await process.status()).exit_code == 5
    interrupted = await sandbox.open_pty("trap 'echo interrupted; exit 9' INT; echo ready; while :; do sleep 1; done")
    assert await shown(interrupted, b"\n") == b"ready\r\n"
    await interrupted.write(b"\x03")
    assert (await read_all(interrupted)).endswith(b"interrupted\r\n")
    assert (await interrupted.status()).exit_code == 9


async def test_many_background_processes(sandbox: Sandbox) -> None:
    processes = await asyncio.gather(*(sandbox.start(f"echo {i}; exit {i}") for i in range(30)))
    assert await asyncio.gather(*map(read_all, processes)) == [f"{i}\n".encode() for i in range(30)]
    assert [(await process.status()).exit_code for process in processes] == list(range(30))


# --- files -----------------------------------------------------------------------------------------------------------


async def test_files_come_back_as_they_were_written(sandbox: Sandbox) -> None:
    data = os.urandom(10_000_000)
    await sandbox.write_bytes("deep/er/data.bin", data)
    assert await sandbox.read_bytes(f"{sandbox.workdir}/deep/er/data.bin") == data
    assert await sandbox.read_bytes("deep/er/data.bin", offset=5, limit=7) == data[5:12]
    assert await sandbox.read_bytes("deep/er/data.bin", offset=9_999_990) == data[-10:]
    assert await sandbox.read_bytes("deep/er/data.bin", offset=10_000_001, limit=5) == b""
    assert await output(sandbox, "ls -A deep/er") == "data.bin"
    await sandbox.write_bytes("deep/er/data.bin", b"")
    assert await sandbox.read_bytes("deep/er/data.bin") == b""


async def test_writing_keeps_the_mode_and_follows_links(sandbox: Sandbox) -> None:
    await sandbox.exec("echo old > run.sh; chmod 750 run.sh; ln -s run.sh link", timeout=20)
    await sandbox.write_bytes("link", b"echo new")
    assert await output(sandbox, "stat -c %a run.sh; readlink link; ./run.sh") == "750\nrun.sh\nnew"


async def test_file_errors_are_the_file_systems(sandbox: Sandbox) -> None:
    await sandbox.exec("mkdir folder; echo x > file; mkfifo fifo", timeout=20)
    with pytest.raises(FileNotFoundError) as missing:
        await sandbox.read_bytes("missing")
    assert str(missing.value.filename).endswith("missing")
    with pytest.raises(IsADirectoryError):
        await sandbox.read_bytes("folder")
    with pytest.raises(IsADirectoryError):
        await sandbox.write_bytes("folder", b"x")
    with pytest.raises((NotADirectoryError, FileExistsError)):
        await sandbox.write_bytes("file/below", b"x")
    with pytest.raises(OSError, match="not a regular file"):
        await sandbox.read_bytes("fifo")


async def test_a_big_file_does_not_hold_up_others(sandbox: Sandbox) -> None:
    await sandbox.exec("head -c 50000000 /dev/zero > big", timeout=20)
    reading = asyncio.create_task(sandbox.read_bytes("big"))
    await asyncio.sleep(0)
    assert await output(sandbox, "echo quick") == "quick"
    assert len(await reading) == 50_000_000


async def test_files_move_in_chunks(sandbox: Sandbox) -> None:
    block, sent, came = os.urandom(300_000), hashlib.blake2b(), hashlib.blake2b()

    async def blocks() -> AsyncIterator[bytes]:
        for _ in range(50):
            sent.update(block)
            yield block

    await sandbox.write_chunks("deep/er/data.bin", blocks())
    async for chunk in sandbox.read_chunks(f"{sandbox.workdir}/deep/er/data.bin"):
        came.update(chunk)
    assert came.digest() == sent.digest()
    assert await output(sandbox, "ls -A deep/er; wc -c < deep/er/data.bin") == "data.bin\n15000000"
    await sandbox.exec("mkdir folder", timeout=20)
    for path, error in (("missing", FileNotFoundError), ("folder", IsADirectoryError)):
        with pytest.raises(error):
            async for _ in sandbox.read_chunks(path):
                pass
    with pytest.raises(IsADirectoryError):
        await sandbox.write_chunks("folder", blocks())


async def test_folders_go_in_and_come_out_as_they_were(sandbox: Sandbox, tmp_path: Path) -> None:
    source = tmp_path / "source"
    (source / "a" / "empty").mkdir(parents=True)
    for i in range(100):
        (source / "a" / f"{i}.txt").write_text(f"{i}\n" * i)
    (source / "run.sh").write_text("echo ran")
    (source / "run.sh").chmod(0o751)
    (source / ("long" * 40)).write_bytes(os.urandom(1_500_000))
    (source / "naïve name").write_bytes(b"")
    (source / "a" / "link").symlink_to("../run.sh")
    os.mkfifo(source / "left out")
    await sandbox.exec("mkdir -p up/a; echo old > up/a/1.txt; echo stays > up/mine", timeout=20)
    await sandbox.upload_dir(source, "up")
    assert await output(
        sandbox, "cd up; ./run.sh; readlink a/link; stat -c %a run.sh; cat mine a/1.txt; ls a | wc -l"
    ) == ("ran\n../run.sh\n751\nstays\n1\n102")
    await sandbox.download_dir("up", tmp_path / "back")
    (source / "left out").unlink()
    (source / "mine").write_text("stays\n")

    def tree(folder: Path) -> dict[str, tuple[int, bytes | str | None]]:
        return {
            str(path.relative_to(folder)): (
                path.lstat().st_mode,
                os.readlink(path) if path.is_symlink() else path.read_bytes() if path.is_file() else None,  # noqa: PTH115
            )
            for path in sorted(folder.rglob("*"))
        }

    assert tree(tmp_path / "back") == tree(source)


async def test_what_would_land_or_lead_outside_is_refused_by_name(sandbox: Sandbox, tmp_path: Path) -> None:
    await sandbox.exec("mkdir out; cd out; ln -s /etc/passwd absolute; ln -s ../.. above; echo x > fine", timeout=20)
    with pytest.raises(OSError, match=r"refused above .*absolute .*everything else was copied"):
        await sandbox.download_dir(f"{sandbox.workdir}/out", tmp_path / "here")
    assert [path.name for path in (tmp_path / "here").iterdir()] == ["fine"]


async def test_folders_that_cannot_be_moved_are_errors(sandbox: Sandbox, tmp_path: Path) -> None:
    await sandbox.exec("mkdir big; head -c 2000 /dev/zero > big/one; head -c 2000 /dev/zero > big/two", timeout=20)
    with pytest.raises(OSError, match="more than 3000 bytes"):
        await sandbox.download_dir("big", tmp_path / "a", max_bytes=3000)
    assert (tmp_path / "a" / "one").stat().st_size == 2000
    with pytest.raises(FileNotFoundError):
        await sandbox.download_dir("missing", tmp_path / "b")
    with pytest.raises(NotADirectoryError):
        await sandbox.download_dir("big/one", tmp_path / "c")
    with pytest.raises(NotADirectoryError):
        await sandbox.upload_dir(tmp_path / "a", "big/one/below")
    with pytest.raises(FileNotFoundError):
        await sandbox.upload_dir(tmp_path / "missing", "up")


# --- the sandbox's own life ------------------------------------------------------------------------------------------


async def nothing() -> AsyncIterator[bytes]:
    for part in ():
        yield part


async def every_call_raises(sandbox: Sandbox, process: Process, reason: str) -> None:
    for call in (
        sandbox.exec("true", timeout=5),
        sandbox.start("true"),
        sandbox.processes(),
        sandbox.read_bytes("x"),
        sandbox.write_bytes("x", b""),
        sandbox.write_chunks("x", nothing()),
        sandbox.upload_dir(os.curdir, "x"),
        sandbox.stop_processes(),
        process.status(),
        process.read(),
        process.kill(),
    ):
        with pytest.raises(SandboxLost, match=reason):
            await call


async def test_after_close_nothing_is_left_and_every_call_raises(backend: Backend) -> None:
    mark = str(uuid.uuid4().int)[:9]
    sandbox = await backend.create(SandboxSpec(labels={"task_id": "t-17"}))
    process = await sandbox.start(f"setsid sleep {mark} & sleep {mark}")
    await sandbox.exec(f"setsid sleep {mark} > /dev/null 2>&1 &", timeout=20)
    running = asyncio.create_task(sandbox.exec(f"sleep {mark}", timeout=100))
    assert await until(lambda: len(host_processes(mark)) >= 4)
    await sandbox.close()
    assert host_processes(mark) == []
    with pytest.raises(SandboxLost):
        await running
    await every_call_raises(sandbox, process, "task_id=t-17.* was closed")
    await sandbox.close()


async def test_a_sandbox_ends_itself_after_its_lifetime(backend: Backend) -> None:
    for lifetime in (0.6, 10.0):
        sandbox = await backend.create(SandboxSpec(lifetime=lifetime))
        try:
            process = await sandbox.start("sleep 100")
            break
        except SandboxLost:  # on a busy machine it may be over before anything was started
            await sandbox.close()
    with pytest.raises(SandboxLost, match=rf"its lifetime of {lifetime:g} s is over"):
        await sandbox.exec("sleep 100", timeout=100)
    await every_call_raises(sandbox, process, "lifetime")
    await sandbox.close()


async def test_the_wall_time_of_the_spec_bounds_every_command(backend: Backend) -> None:
    for wall_time in (0.6, 10.0):
        sandbox = await backend.create(SandboxSpec(wall_time=wall_time))
        process = await sandbox.start("echo begun; sleep 100")
        result = await sandbox.exec("echo begun; sleep 100", timeout=100)
        ended = await process.read(6, wait=50)
        short = await sandbox.exec("exit 3", timeout=100)
        await sandbox.close()
        if result.stdout and short.exit_code != 124:
            break  # else this machine is too busy to do anything in so little time
    assert (result.exit_code, result.timed_out, result.stdout) == (124, True, b"begun\n")
    assert ended.exit_code == 124
    assert short.exit_code == 3


async def test_the_working_directory_of_the_spec_is_made(backend: Backend) -> None:
    sandbox = await backend.create(SandboxSpec(workdir="/tmp/made/for it"))
    assert sandbox.workdir == "/tmp/made/for it"
    assert await output(sandbox, "pwd; touch here") == "/tmp/made/for it"
    assert await sandbox.read_bytes("here") == b""
    await sandbox.exec("rm -r /tmp/made", timeout=20)
    await sandbox.close()


async def test_thirty_two_sandboxes_at_once(backend: Backend) -> None:
    sandboxes = await asyncio.gather(*(backend.create(SandboxSpec()) for _ in range(32)))
    results = await asyncio.gather(*(s.exec(f"echo {i} > me; cat me", timeout=60) for i, s in enumerate(sandboxes)))
    assert [int(result.stdout) for result in results] == list(range(32))
    assert len({sandbox.id for sandbox in sandboxes}) == 32
    await asyncio.gather(*(sandbox.close() for sandbox in sandboxes))


async def test_python_inside_is_usable(sandbox: Sandbox) -> None:
    assert sandbox.python is not None
    code = "import sys, json, ssl, sqlite3; assert sys.version_info >= (3, 8); print(json.dumps([1]))"
    assert await output(sandbox, f"{sandbox.python} -c '{code}'; python3 -c '{code}'") == "[1]\n[1]"


async def test_variables_of_the_spec_are_set_and_nothing_of_the_hosts(
    backend: Backend, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("OPENAI_API_KEY", "sk-secret")
    sandbox = await backend.create(SandboxSpec(env={"TASK": "sort me", "LANG": "C"}))
    names = set((await output(sandbox, "env | cut -d= -f1")).split())
    assert await output(sandbox, "echo $TASK $LANG") == "sort me C"
    allowed = "PATH HOME USER LOGNAME SHELL LANG TERM TASK PWD SHLVL _ TMPDIR LACHESIS_SANDBOX"
    assert names <= {*allowed.split()}
    assert await output(sandbox, "cd; pwd; touch x; cd /tmp; ls ${TMPDIR:-/tmp}") != ""
    await sandbox.close()


@pytest.mark.parametrize("end", ["", "; exit 0"])
async def test_a_debug_trap_sees_the_command_alone_and_the_state_persists(sandbox: Sandbox, end: str) -> None:
    result = await sandbox.exec(f"trap 'echo \"$BASH_COMMAND\"' DEBUG; cd /tmp{end}", timeout=20)
    assert result.stdout.decode().splitlines() == ["cd /tmp", *end.removeprefix("; ").split("\n")][: 2 if end else 1]
    assert await output(sandbox, "pwd") == "/tmp"


async def test_exports_that_no_shell_could_start_with_are_refused_by_name(sandbox: Sandbox) -> None:
    await output(sandbox, "export KEPT=1 BIG=small")
    result = await sandbox.exec("BIG=$(printf '%200000s' x); echo ${#BIG}", timeout=20)
    assert (result.exit_code, result.stdout) == (0, b"200000\n")
    assert result.stderr == b"bash: export: BIG: too large to carry over to the next command\n"
    many = "x=$(printf '%60000s' x); for i in {1..40}; do export V$i=\"$x\"; done; cd /tmp"
    result = await sandbox.exec(many, timeout=20)
    assert result.stderr.count(b"too large") > 10
    assert await output(sandbox, "pwd; echo $KEPT $BIG; env | grep -c ^V") == "/tmp\n1 small\n16"
    assert await output(sandbox, "unset ${!V*}; export SMALL=2") == ""
    assert await output(sandbox, "echo $KEPT $BIG $SMALL; env | grep -c ^V || true") == "1 small 2\n0"


async def test_a_sparse_file_cannot_fill_the_readers_memory(sandbox: Sandbox) -> None:
    await output(sandbox, "truncate -s 500G big")
    with pytest.raises(OSError, match="read it in parts"):
        await sandbox.read_bytes("big")
    assert await sandbox.read_bytes("big", offset=1 << 38, limit=3) == b"\0\0\0"


async def test_a_write_that_fails_at_its_end_leaves_nothing_and_says_why(sandbox: Sandbox) -> None:
    with pytest.raises(OSError, match="File name too long"):
        await sandbox.write_bytes("x" * 300, b"data")
    await sandbox.write_bytes("file", b"data")
    with pytest.raises(NotADirectoryError):
        await sandbox.write_bytes("file/below/it", b"data")
    assert await output(sandbox, "ls -A") == "file"
