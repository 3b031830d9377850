"""What runs inside may try to fool the executor, to block it, or to fill its memory: all of that comes to nothing.

Requests go over a bare stream here, as most of these are what no client of ours would send, or answers that it would
not mind.
"""

from __future__ import annotations

import asyncio
import contextlib
import functools
import json
import os
import resource
import socket
import struct
import subprocess
import sys
import tempfile
from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from typing import Any

import pytest
from executor_box import ENV, executor
from sandbox_watch import missing, until

from backends import executor_code

PYTHON = f"exec {sys.executable} -I -S -c "
PATIENCE = 90.0
"""Seconds for an answer; nothing here takes long unless it takes for ever."""


class Far:
    """An executor and its stream."""

    def __init__(self, process: asyncio.subprocess.Process, folder: Path) -> None:
        assert process.stdin is not None
        assert process.stdout is not None
        self.process, self.folder = process, folder
        self.stdin, self.stdout = process.stdin, process.stdout
        self.last = 0
        self.answers: dict[int, list[tuple[dict[str, Any], bytes]]] = {}
        self.pid = process.pid

    async def receive(self) -> None:
        header_size, size = struct.unpack("!II", await self.stdout.readexactly(8))
        header = json.loads(await self.stdout.readexactly(header_size))
        answer = (header, await self.stdout.readexactly(size))
        self.answers.setdefault(header["id"], []).append(answer)

    def post(self, op: str, payload: bytes = b"", **fields: Any) -> int:
        self.last += 1
        header = json.dumps({"id": self.last, "op": op, **fields}).encode()
        self.stdin.write(struct.pack("!II", len(header), len(payload)) + header + payload)
        return self.last

    async def answer(self, number: int) -> tuple[dict[str, Any], bytes]:
        """Of one that comes in parts, the last header and all of the payload. Without an end in sight, an error."""
        async with asyncio.timeout(PATIENCE):
            while number not in self.answers or self.answers[number][-1][0].get("more"):
                await self.receive()
        return self.answers[number][-1][0], b"".join(data for _, data in self.answers[number])

    async def ask(self, op: str, payload: bytes = b"", **fields: Any) -> tuple[dict[str, Any], bytes]:
        return await self.answer(self.post(op, payload, **fields))

    def execute(self, command: str, timeout: float = 60.0, **fields: Any) -> int:
        return self.post("exec", **{"command": command, "timeout": timeout, "max_output": 1 << 20, **fields})

    async def run(self, command: str, timeout: float = 60.0, **fields: Any) -> tuple[int, str]:
        header, data = await self.answer(self.execute(command, timeout, **fields))
        return header["exit_code"], data.decode()

    async def stopped(self, command: str, timeout: float) -> tuple[int, str]:
        """A command that says something and then meets its time limit; with more time where it came to nothing."""
        while True:
            code, output = await self.run(command, timeout)
            if output or timeout > 30:
                return code, output
            timeout *= 4

    async def start(self, command: str, **fields: Any) -> str:
        header, _ = await self.ask("start", command=command, **fields)
        return str(header["process"])

    async def output(self, process: str, lines: int = 0) -> str:
        """All that it wrote, once that is so many lines or it has ended."""
        data = b""
        ended = False
        while not ended and (not lines or data.count(b"\n") < lines):
            header, data = await self.ask("output", process=process, offset=0, wait=0.1, limit=1 << 20)
            ended = header["exit_code"] is not None
        return data.decode()

    async def is_alive(self) -> bool:
        return "processes" in (await self.ask("processes"))[0]

    def waiting(self) -> int:
        """Shells that wait for a command."""
        children = Path(f"/proc/{self.pid}/task/{self.pid}/children").read_text().split()
        found = 0
        for child in children:
            with contextlib.suppress(OSError):  # it has ended, or is not ours to look into
                found += "command" in Path(f"/proc/{child}/fd/213").readlink().name
        return found

    async def settled(self) -> int:
        """Its descriptors once two shells wait for commands; from then on they stay the same."""
        assert await until(lambda: self.waiting() == 2)
        counts = [self.descriptors()]
        while len(counts) < 10 or len(set(counts[-10:])) > 1:  # it may still be closing what it made them with
            counts.append(self.descriptors())
            await asyncio.sleep(0.02)
        return counts[-1]

    def descriptors(self) -> int:
        try:
            return len(list(Path(f"/proc/{self.pid}/fd").iterdir()))
        except PermissionError:
            missing("the executor's descriptors can be counted by root only")

    def peak(self) -> int:
        """The most memory that it ever had."""
        status = Path(f"/proc/{self.pid}/status").read_text()
        return int(status.partition("VmHWM:")[2].split()[0]) << 10


@contextlib.asynccontextmanager
async def far(*wrapper: str, source: bytes | None = None) -> AsyncIterator[Far]:
    """A running executor. `wrapper` is a command that starts it, for example in namespaces or with limits."""
    with tempfile.TemporaryDirectory(prefix="lachesis-test-") as name:
        folder = Path(name)
        code = folder / ("executor.py" if source else "executor.pyc")
        code.write_bytes(source or executor_code.executor_bytecode())
        workdir = folder / "work"
        workdir.mkdir()
        command = [*wrapper, sys.executable, "-I", "-S", str(code)]
        process = await asyncio.create_subprocess_exec(*command, stdin=-1, stdout=-1, env=ENV, cwd=workdir)
        try:
            inside = Far(process, workdir)
            while 0 not in inside.answers:
                await inside.receive()
            if wrapper[:1] == ("unshare",):
                inside.pid = int(Path(f"/proc/{process.pid}/task/{process.pid}/children").read_text())
            await inside.ask("init", workdir=str(workdir), env=ENV, lifetime=600)
            yield inside
        finally:
            inside.stdin.close()
            process._transport.get_pipe_transport(1).close()  # type: ignore[attr-defined]  # its end, read or not
            try:
                async with asyncio.timeout(5):
                    await process.wait()
            except TimeoutError:
                process.kill()
                await process.wait()


@functools.cache
def as_init() -> tuple[str, ...]:
    """Starts it as PID 1 of a new PID namespace, so that killing any process number there is safe."""
    wrapper = ["unshare", *(["-r"] if os.geteuid() else []), "-pf", "--mount-proc", "--kill-child"]
    if subprocess.run([*wrapper, "true"], capture_output=True, check=False).returncode:
        missing("PID namespaces cannot be made here")
    return tuple(wrapper)


@functools.cache
def with_own_devices() -> tuple[str, ...]:
    script = 'mount -t tmpfs none /dev && mknod -m 666 /dev/null c 1 3 && ln -s /proc/self/fd /dev/fd && exec "$@"'
    wrapper = ("unshare", "-m", "-pf", "--mount-proc", "--kill-child", "sh", "-c", script, "sh")
    if subprocess.run([*wrapper, "true"], capture_output=True, check=False).returncode:
        missing("devices cannot be made here")
    return wrapper


# --- shells that wait for a command ----------------------------------------------------------------------------------

PROWLER = """
import fcntl, os, sys, time
met = set()
def meet(shell):
    DO
while len(met) < 2:
    for name in os.listdir("/proc"):
        shell = "/proc/%s/fd/" % name
        try:
            if name.isdigit() and name not in met and "command" in os.readlink(shell + "213"):
                met.add(name)
                meet(shell)
        except OSError as error:
            print(error.strerror, flush=True)
        finally:
            if name in met:
                print(name, flush=True)
    time.sleep(0.01)
time.sleep(60)
"""


async def prowl(inside: Far, do: str) -> None:
    """Have somebody inside do something to the two shells that wait."""
    body = "\n    ".join(do.strip().splitlines())
    (inside.folder / "prowler").write_text(PROWLER.replace("DO", body))
    assert await inside.run("true") == (0, "")
    process = await inside.start(f"exec {sys.executable} -I -S prowler 2>/dev/null | grep --line-buffered '^[0-9]'")
    await inside.output(process, lines=2)


TAKE_OVER = """
command, go = os.open(shell + "213", os.O_RDWR), -1
os.pwrite(command, b"until test -e now; do sleep 0.01; done; echo 12 passed; exit 0", 0)
go = os.open(shell + "212", os.O_RDWR)
os.write(go, b"\\n")
globals().setdefault("kept", []).append(go)
"""
FILL = """
time.sleep(0.1)
os.set_blocking(go, False)
while True:
    os.write(go, b"x" * 4096)
"""


@pytest.mark.parametrize("more", ["", FILL], ids=["forge", "block"])
async def test_who_gives_waiting_shells_a_command_of_his_own_forges_no_result_and_blocks_nothing(more: str) -> None:
    async with far() as inside:
        await prowl(inside, TAKE_OVER + more)
        if not more:
            (inside.folder / "now").touch()
        assert await inside.run("echo 3 failed; exit 7") == (7, "3 failed\n")
        assert await inside.is_alive()


async def test_a_command_runs_once_whatever_is_done_to_its_report() -> None:
    async with far() as inside:
        await prowl(inside, 'fcntl.fcntl(os.open(shell + "211", os.O_RDWR), 1033, 8)')  # F_ADD_SEALS, F_SEAL_WRITE
        assert await inside.run("echo x >> count; sleep 0.1; cat count") == (0, "x\n")
        assert (inside.folder / "count").read_text() == "x\n"


async def test_what_others_wrote_before_a_command_began_is_not_in_its_output() -> None:
    async with far() as inside:
        await prowl(inside, 'os.write(os.open(shell + "1", os.O_WRONLY), b"12 passed\\n")')
        assert await inside.run("echo 3 failed") == (0, "3 failed\n")


STOPPER = """
import os, signal
counter = os.open("/proc/loadavg", os.O_RDONLY)
while True:
    last = int(os.pread(counter, 128, 0).split()[-1])
    for number in (last + 1, last + 2) * 200:
        try:
            os.kill(number, signal.SIGSTOP)
            if "python" in os.readlink("/proc/%d/exe" % number):
                print(number, flush=True)
            else:
                os.kill(number, signal.SIGCONT)
            break
        except OSError:
            pass
"""


async def test_a_shell_that_is_stopped_before_it_is_one_blocks_nothing() -> None:
    async with far(*as_init()) as inside:
        (inside.folder / "stopper").write_text(STOPPER)
        process = await inside.start(f"exec {sys.executable} -I -S stopper")
        for _ in range(100):  # until it has hit some
            number = inside.execute("true", timeout=0.1, cwd="/")
            assert await inside.is_alive()
            await inside.answer(number)
            header, _ = await inside.ask("status", process=process)
            if header["output_size"] >= 5:  # two numbers
                break
        await inside.ask("kill", process=process)
        assert await inside.run("echo fine") == (0, "fine\n")


# --- processes that are hard to catch --------------------------------------------------------------------------------

COMET = "comet() { echo >> alive; comet & exit; }; comet"


@pytest.mark.parametrize("end", ["all", "timeout"])
async def test_what_forks_and_ends_all_the_time_can_be_killed(end: str) -> None:
    async with far(*as_init()) as inside:
        trail = inside.folder / "alive"
        bystander = await inside.start("read line; echo got $line")
        crowd = "for i in {1..150}; do sleep 60 & done"  # the more there are, the longer it takes to look at them
        start = f"{crowd}; for i in 1 2 3; do setsid sh -c '{COMET}' & done; until test -s alive; do sleep 0.01; done"
        for _ in range(2):
            trail.unlink(missing_ok=True)
            if end == "all":
                await inside.run(f"({start}) > /dev/null 2>&1")
                await inside.ask("kill_all")
            else:
                limit = 0.4
                while not trail.exists():  # a busy machine takes longer to start them all
                    assert (await inside.run(f"{start}; sleep 80", timeout=limit))[0] == 124
                    limit *= 2
            size = trail.stat().st_size
            await asyncio.sleep(0.1)
            assert trail.stat().st_size == size
        if end == "timeout":
            await inside.ask("input", b"it\n", process=bystander)
            assert await inside.output(bystander) == "got it\n", "it has nothing to do with the command"


async def test_what_has_the_number_of_an_ended_process_is_not_killed_in_its_place() -> None:
    async with far(*as_init()) as inside:
        process = await inside.start("echo $$")
        number = int(await inside.output(process))
        server = "setsid bash -c 'sleep 77 & echo $$ $! > said; wait' & until test -s said; do sleep 0.01; done"
        for _ in range(20):  # another may have been quicker
            choose = f"rm -f said; echo {number - 1} > /proc/sys/kernel/ns_last_pid"
            _, output = await inside.run(f"{choose}; {server}; cat said")
            if output.startswith(f"{number} "):
                break
        else:
            missing("numbers of processes cannot be chosen here")
        await inside.ask("kill", process=process)
        assert await inside.run(f"kill -0 {output.strip()} && echo both live") == (0, "both live\n")


async def test_of_a_process_that_has_ended_nothing_more_is_kept() -> None:
    async with far() as inside:
        late = "until test -e ended; do sleep 0.01; done; echo late; touch written"
        process = await inside.start(f"({late}) & echo early")
        assert await inside.output(process) == "early\n"
        (inside.folder / "ended").touch()
        assert await until((inside.folder / "written").exists)
        assert (await inside.ask("status", process=process))[0]["output_size"] == len("early\n")
        assert await inside.output(process) == "early\n"


# --- reports of what a command exported ------------------------------------------------------------------------------


async def test_a_report_that_no_shell_writes_ends_only_itself() -> None:
    async with far() as inside:
        for value in (r"\9", r"\x", "\\", r"\777", r"\N{x}", "\\'"):
            forged = f"/\0export A=$'{value}'\n\0".encode().hex()
            command = f"printf '{forged}' | sed 's/../\\\\x&/g' | xargs -0 printf >&211; exec true"
            assert await inside.run(command) == (0, "")
            assert await inside.run("echo fine") == (0, "fine\n")


async def test_variables_of_any_size_are_read_in_little_memory() -> None:
    async with far() as inside:
        assert await inside.run("true") == (0, "")
        peak = inside.peak()
        assert (await inside.run("export A=$(head -c 15000000 /dev/zero | tr '\\0' x)"))[0] == 0
        assert inside.peak() - peak < 32 << 20
        assert await inside.run("echo ${#A}") == (0, "0\n")


async def test_variables_of_any_number_are_read_in_little_memory_and_stop_no_command() -> None:
    async with far() as inside:
        assert await inside.run("true") == (0, "")
        peak = inside.peak()
        exports = "printf '/\\0'; seq -f 'export a%.0f=\"\"' 600000; printf '\\0'"
        await inside.run(f"{{ {exports}; }} >&211; kill -9 $$")
        assert inside.peak() - peak < 160 << 20
        assert await inside.run("echo fine") == (0, "fine\n")


# --- requests that cannot be served ----------------------------------------------------------------------------------

BAD = ["a\0b", "\ud800"]


async def test_a_bad_request_has_one_answer_and_leaves_nothing_open() -> None:
    async with far() as inside:
        assert await inside.run("true") == (0, "")
        before = await inside.settled()
        numbers = []
        changes: list[dict[str, Any]] = []
        for bad in BAD:
            changes += [{"command": f"echo {bad}"}, {"env": {"A": bad}}, {"env": {bad: "x"}}, {"cwd": bad}]
        for change in changes:
            request = {"command": "true", **change}
            numbers.append(inside.execute(timeout=0.3, **request))
            numbers.append(inside.post("start", **request))
        for number in numbers:
            await inside.answer(number)
        await asyncio.sleep(0.5)  # past their time limits
        assert await inside.run("echo fine") == (0, "fine\n")
        assert [len(inside.answers[number]) for number in numbers] == [1] * len(numbers)
        assert await until(lambda: inside.descriptors() == before)


async def test_without_descriptors_requests_fail_once_and_later_ones_do_not() -> None:
    async with far("sh", "-c", 'ulimit -n 256; exec "$@"', "sh") as inside:
        assert await inside.run("true") == (0, "")
        before = await inside.settled()
        numbers = [inside.execute("sleep 100 &", timeout=0.5) for _ in range(150)]
        numbers += [inside.post("start", command="true") for _ in range(5)]
        codes = [(await inside.answer(number))[0].get("exit_code") for number in numbers]
        assert None in codes[:150], "they ran out"
        await inside.ask("kill_all")
        await asyncio.sleep(0.7)  # past the time limits
        assert await inside.run("echo fine") == (0, "fine\n")
        assert [len(inside.answers[number]) for number in numbers] == [1] * len(numbers)
        assert await until(lambda: inside.descriptors() == before)


@pytest.mark.parametrize("change", ["ln -sf /nowhere/at/all", "rm /dev/null; mkfifo"], ids=["link", "fifo"])
async def test_commands_run_whatever_becomes_of_dev_null(change: str) -> None:
    async with far(*with_own_devices()) as inside:
        await inside.run(f"{change} /dev/null", timeout=2)
        numbers = [inside.execute("echo hi", timeout=2, cwd=cwd) for cwd in ("/", None, "/")]
        assert await inside.is_alive()
        for number in numbers:
            header, data = await inside.answer(number)
            assert data.startswith(b"hi\n"), header
        await asyncio.sleep(2.2)  # past the time limits
        assert await inside.is_alive()
        assert [len(inside.answers[number]) for number in numbers] == [1, 1, 1]


@pytest.mark.parametrize(
    "bad", [{"path": "a\0b", "offset": 0}, {"path": "big", "offset": 1 << 70}], ids=["path", "offset"]
)
async def test_a_read_that_makes_no_sense_is_an_error_although_the_stream_is_full(bad: dict[str, Any]) -> None:
    async with far() as inside:
        (inside.folder / "big").touch()
        os.truncate(inside.folder / "big", 5_000_000)
        big = inside.post("read", path="big", offset=0, limit=None)
        await asyncio.sleep(0.1)  # nobody reads: files wait
        number = inside.post("read", limit=10, **bad)
        await asyncio.sleep(0.1)
        assert "error" in (await inside.answer(number))[0]
        assert len((await inside.answer(big))[1]) == 5_000_000
        assert await inside.is_alive()


async def test_what_it_says_of_a_failure_is_not_looked_up_in_files_of_others() -> None:
    async with far() as inside:
        os.mkfifo(inside.folder / "executor.py")  # where it was started, under the name that its code has
        assert "error" in (await inside.ask("nonsense"))[0]
        assert await inside.is_alive()


# --- files -----------------------------------------------------------------------------------------------------------


async def test_a_file_of_proc_is_read_whole() -> None:
    async with far() as inside:
        await inside.start("echo $$ > pid; kill -STOP $$")
        assert await until(lambda: (inside.folder / "pid").exists() and (inside.folder / "pid").read_text() != "")
        process = Path("/proc", (inside.folder / "pid").read_text().strip())
        assert await until(lambda: (process / "stat").read_text().rpartition(")")[2].split()[0] == "T")
        path = f"{process}/smaps"  # of a process that changes nothing in its memory
        size = Path(path).read_text().count("VmFlags")
        await inside.ask("open", transfer=1, kind="read", path=path)
        header, data = await inside.ask("pull", transfer=1)
        assert len(data) > 10_000
        assert (header["end"], data.count(b"VmFlags")) == (True, size)
        assert (await inside.ask("read", path=path, offset=0, limit=None))[1].count(b"VmFlags") == size


async def test_its_own_memory_and_variables_are_not_files_to_read() -> None:
    async with far() as inside:
        for folder in ("self", "thread-self", str(inside.pid), f"self/task/{inside.pid}"):
            for name in ("mem", "environ", "maps"):
                path = f"/proc/{folder}/{name}"
                for request in (
                    inside.post("read", path=path, offset=0, limit=10),
                    inside.post("open", transfer=1, kind="read", path=path),
                ):
                    header, data = await inside.answer(request)
                    assert (header["error"]["errno"], data) == (13, b""), path


async def test_no_name_that_can_be_guessed_keeps_a_file_from_being_written() -> None:
    async with far() as inside:
        for number in range(50):
            (inside.folder / f".upload-{inside.pid}-{number}").mkdir()
        assert "error" not in (await inside.ask("write", b"x", path="tests.py"))[0]
        await inside.ask("open", transfer=1, kind="write", path="other.py")
        await inside.ask("push", b"y", transfer=1)
        assert "error" not in (await inside.ask("commit", transfer=1))[0]
        assert [(inside.folder / name).read_text() for name in ("tests.py", "other.py")] == ["x", "y"]


# --- strangers -------------------------------------------------------------------------------------------------------


def processor_time(pid: int) -> float:
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return sum(map(int, fields[11:13])) / os.sysconf("SC_CLK_TCK")


@pytest.fixture
def relay(tmp_path: Path) -> Iterator[tuple[subprocess.Popen[bytes], socket.socket]]:
    """A relay, and the other end of what it relays to."""
    (tmp_path / "executor.pyc").write_bytes(executor_code.executor_bytecode())
    name = f"test-{os.urandom(8).hex()}"
    with socket.socket(socket.AF_UNIX) as server:
        server.bind(f"\0{name}")
        server.listen()
        command = [sys.executable, "-I", "-S", str(tmp_path / "executor.pyc"), "--relay", f"@{name}"]
        with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as process:
            other, _ = server.accept()
            with other:
                yield process, other
            process.kill()


def test_a_relay_whose_partner_is_gone_waits_for_its_reader_at_rest(
    relay: tuple[subprocess.Popen[bytes], socket.socket],
) -> None:
    process, other = relay
    assert process.stdout is not None
    other.settimeout(1)
    sent = 0
    with contextlib.suppress(OSError):
        while True:
            sent += other.send(bytes(1 << 16))  # until nothing more goes in
    other.close()
    before = processor_time(process.pid)
    with pytest.raises(subprocess.TimeoutExpired):
        process.wait(0.5)
    assert processor_time(process.pid) - before < 0.1
    assert len(process.stdout.read()) == sent
    assert process.wait(PATIENCE) == 0


async def test_a_flood_of_strangers_leaves_nothing_in_memory() -> None:
    async with executor("listen") as box:
        assert await until(lambda: b"\0" + box.name.encode() in names_that_listen())

        def flood(count: int) -> int:
            for _ in range(count):
                with socket.socket(socket.AF_UNIX) as stranger:
                    stranger.connect(f"\0{box.name}")
            status = Path(f"/proc/{box.process.pid}/status").read_text()
            return int(status.partition("VmHWM:")[2].split()[0]) << 10

        before = await asyncio.to_thread(flood, 500)
        assert await asyncio.to_thread(flood, 3000) - before < 2 << 20


def names_that_listen() -> set[bytes]:
    lines = Path("/proc/net/unix").read_bytes().splitlines()
    return {b"\0" + line.split()[-1][1:] for line in lines if line.split()[-1].startswith(b"@")}


# --- two ways to start a shell ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("way", ["Starter()", "_CODE.clear()"], ids=["started", "forked"])
async def test_however_a_shell_is_started_commands_do_the_same(way: str) -> None:
    main = '\nif __name__ == "__main__":\n'
    source = (
        executor_code.executor_source().decode().replace(main, f"\n{way}\n{main}")
    )  # the former fails where it cannot work
    async with far(source=source.encode()) as inside:
        work = inside.folder
        (work / "sub").mkdir()
        # A prewarmed shell and the state that it leaves for the next; the other gets variables with its call.
        assert await inside.run("cd sub; export A='a b'; B=b; echo out; echo err >&2; exit 3") == (3, "out\nerr\n")
        for env in ({}, {"C": "c"}):
            command = (
                "echo $PWD $A $B $C; cat /proc/self/oom_score_adj; ulimit -Sn; ps -o sid= -p $$ | tr -d ' '; echo $$"
            )
            code, output = await inside.run(command, env=env)
            folder, score, files, session, pid = output.splitlines()
            assert (code, folder.split()) == (0, [f"{work}/sub", "a", "b", *env.values()])
            assert (score, session) == ("1000", pid)
            assert int(files) == resource.getrlimit(resource.RLIMIT_NOFILE)[0]
        where = [("/usr", "/usr"), ("sub", f"{work}/sub"), (None, f"{work}/sub")]
        for cwd, folder in where:
            assert await inside.run("pwd", cwd=cwd, env={"C": "c"}) == (0, f"{folder}\n")
        assert await inside.run("pwd", cwd="nowhere") == (1, "bash: cd: nowhere: No such file or directory\n")
        assert await inside.run("cat; : < /dev/tty") == (1, "bash: line 1: /dev/tty: No such device or address\n")
        header, data = await inside.ask(
            "exec", b"given", command="cat; kill -9 $$", timeout=10, max_output=100, stdin=True
        )
        assert (header["exit_code"], data) == (137, b"given")
        assert await inside.stopped("echo begun; sleep 60", 0.2) == (124, "begun\n")
        assert await inside.run("yes | head -1; echo ${PIPESTATUS[0]}") == (0, "y\n141\n")
        # In the background, with pipes and with a terminal.
        process = await inside.start("read line; echo got $line; exit 5", env={"C": "c"})
        await inside.ask("input", b"it\n", process=process)
        assert await inside.output(process) == "got it\n"
        assert (await inside.ask("status", process=process))[0]["exit_code"] == 5
        terminal = await inside.start(
            "stty size; test -t 2 && echo $A > /dev/tty; ps -o stat= -p $$", terminal=[11, 22]
        )
        size, variable, state = (await inside.output(terminal)).split("\r\n")[:3]
        assert (size, variable, state.strip()[-2:]) == ("11 22", "a b", "s+")  # before it, whether it is nice
        # And its descriptors are those that it should have.
        assert await inside.run("echo /proc/self/fd/*", env={"C": "c"}) == (
            0,
            " ".join(f"/proc/self/fd/{fd}" for fd in (0, 1, 2, 211, 3)) + "\n",
        )


async def test_where_memory_files_cannot_be_run_shells_start_all_the_same() -> None:
    script = 'echo 1 > /proc/sys/vm/memfd_noexec; exec "$@"'
    async with far(*as_init(), "sh", "-c", script, "sh") as inside:
        assert await inside.run("echo fine", cwd="/") == (0, "fine\n")


@pytest.mark.parametrize("env", [{"A": "x" * 200_000}, {f"A{i}": "x" * 99_000 for i in range(30)}], ids=["one", "all"])
async def test_variables_that_are_too_large_for_a_command_are_an_error_that_says_so(env: dict[str, str]) -> None:
    async with far() as inside:
        assert await inside.run("true", env=env) == (126, "bash: bash: Argument list too long\n")


async def test_what_was_given_to_a_process_is_not_kept_while_it_runs() -> None:
    async with far() as inside:
        env = {f"A{i}": "x" * 99_000 for i in range(10)}
        await inside.start("exec sleep 60", env=env)
        before = inside.peak()
        for _ in range(60):
            await inside.start("exec sleep 60", env=env)
            await asyncio.sleep(0.01)
        assert inside.peak() - before < 40 << 20


SCORER = STOPPER.replace(
    "print(number, flush=True)",
    'open("/proc/%d/oom_score_adj" % number, "w").write("1000"); print(number, flush=True); raise SystemExit',
)


async def test_what_is_stopped_before_it_is_a_shell_does_not_pass_its_score_on() -> None:
    async with far(*as_init()) as inside:
        (inside.folder / "scorer").write_text(SCORER)
        before = Path(f"/proc/{inside.pid}/oom_score_adj").read_text()
        process = await inside.start(f"exec {sys.executable} -I -S scorer")
        for _ in range(100):
            await inside.run("true", timeout=0.1, cwd="/")
            if (await inside.ask("status", process=process))[0]["output_size"]:
                break
        assert await until(lambda: Path(f"/proc/{inside.pid}/oom_score_adj").read_text() == before)


async def test_a_timeout_takes_no_terminal_from_others() -> None:
    async with far(*as_init()) as inside:
        shell = await inside.start("exec bash --norc -i", terminal=[24, 80])
        await inside.ask("input", b"sleep 20\n", process=shell)
        await asyncio.sleep(0.3)
        for _ in range(4):
            await inside.run("sleep 60", timeout=0.1)
        await asyncio.sleep(0.2)
        _, data = await inside.ask("output", process=shell, offset=0, wait=0, limit=10_000)
        assert b"Stopped" not in data


async def test_its_own_files_are_known_by_any_name_and_others_of_proc_are_read() -> None:
    async with far() as inside:
        script = "mount -t tmpfs t /tmp && mkdir /tmp/p && mount --rbind /proc /tmp/p && echo ok $$; exec sleep 30"
        process = await inside.start(f"exec unshare -rm sh -c '{script}'")
        output = (await inside.output(process, lines=1)).split()
        if output[:1] != ["ok"]:
            missing("/proc cannot be mounted elsewhere here")
        path = f"/proc/{output[1]}/root/tmp/p/self/environ"
        assert (await inside.ask("read", path=path, offset=0, limit=10))[0]["error"]["errno"] == 13
        for path in ("/proc/mounts", "/proc/self/status", "/proc/net/dev"):
            assert (await inside.ask("read", path=path, offset=0, limit=10))[1], path


async def test_a_listening_socket_may_have_any_number(tmp_path: Path) -> None:
    (tmp_path / "executor.pyc").write_bytes(executor_code.executor_bytecode())
    with socket.socket(socket.AF_UNIX) as server:
        server.bind(str(tmp_path / "far"))
        server.listen()
        number = server.fileno()
        renumbered = ["bash", "-c", f'exec "$@" 212<&{number} {number}<&-', "bash"]  # 212 may be in use in here
        command = [*renumbered, sys.executable, "-I", "-S", str(tmp_path / "executor.pyc"), "--listen", "fd:212"]
        process = await asyncio.create_subprocess_exec(*command, stdin=-3, pass_fds=(number,))
    reader, writer = await asyncio.open_unix_connection(tmp_path / "far")
    async with asyncio.timeout(PATIENCE):
        assert await reader.read(8)
    writer.close()
    process.kill()
    await process.wait()


async def test_that_too_much_was_exported_is_said() -> None:
    async with far() as inside:
        code, output = await inside.run("export A=$(head -c 5000000 /dev/zero | tr '\\0' x)")
        assert code == 0
        assert "carry" in output
