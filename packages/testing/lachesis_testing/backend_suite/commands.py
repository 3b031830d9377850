"""What `Sandbox.exec` promises: results, the shell's state, time limits, output."""

from __future__ import annotations

import asyncio
import os
import time

import pytest

from backends import ExecResult, Sandbox

from .probes import output

# --- results ---------------------------------------------------------------------------------------------------------


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


# --- state -----------------------------------------------------------------------------------------------------------


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


# --- time ------------------------------------------------------------------------------------------------------------


async def test_background_children_do_not_delay_the_result_and_live_on(sandbox: Sandbox) -> None:
    result = await sandbox.exec(
        "(sleep 0.5; for i in 1 2 3; do echo more $i; done; echo done > late.txt; sleep 100) & echo now", timeout=20
    )
    assert (result.exit_code, result.stdout, result.timed_out) == (0, b"now\n", False)
    end = time.monotonic() + 60
    while (await sandbox.exec("cat late.txt", timeout=20)).stdout != b"done\n":
        assert time.monotonic() < end, "a child that writes after its command has ended is killed or blocked"
        await asyncio.sleep(0.05)


# --- output ----------------------------------------------------------------------------------------------------------


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
