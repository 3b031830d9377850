"""Several processes as one: started in order, started again where they die, and none left behind."""

from __future__ import annotations

import asyncio
import os
import select
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from lachesis_train.processes.ports import free_ports
from lachesis_train.processes.process import Part
from lachesis_train.processes.supervisor import Supervisor

SERVER = """
import http.server, pathlib, sys
pathlib.Path(sys.argv[2]).exists() or sys.exit("the one before is not ready")
http.server.ThreadingHTTPServer(("127.0.0.1", int(sys.argv[1])), http.server.SimpleHTTPRequestHandler).serve_forever()
"""


def part(name: str, code: str, *arguments: str, port: int | None = None) -> Part:
    probe = None if port is None else f"http://127.0.0.1:{port}/"
    return Part(name, [sys.executable, "-c", code, *arguments], probe=probe, grace=5.0)


def supervised(folder: Path, *parts: Part, max_restarts: int = 3) -> tuple[Supervisor, list[str]]:
    lines: list[str] = []
    say = lambda name, line: lines.append(f"{name}: {line}")  # noqa: E731
    return Supervisor(parts, main="main", logs=folder / "logs", say=say, max_restarts=max_restarts), lines


async def test_a_process_starts_when_the_one_before_it_answers_and_all_end_with_the_main_one(tmp_path: Path) -> None:
    (port,) = free_ports(1)
    server = part("server", SERVER, str(port), str(tmp_path), port=port)
    ask = f"import urllib.request as r; print(r.urlopen('http://127.0.0.1:{port}/').status)"
    supervisor, lines = supervised(tmp_path, server, part("main", ask))
    assert await supervisor.run() == 0
    assert "main: 200" in lines
    assert (tmp_path / "logs" / "main.log").read_text() == "200\n"
    assert not _alive(supervisor.running["server"].pid)


async def test_what_dies_is_started_again_and_the_reason_is_said(tmp_path: Path) -> None:
    mark = tmp_path / "mark"
    code = "import os, pathlib, sys; p = pathlib.Path(sys.argv[1]); p.exists() or (p.touch(), os.kill(os.getpid(), 9))"
    supervisor, lines = supervised(tmp_path, part("main", code, str(mark)))
    assert await supervisor.run() == 0
    assert supervisor.restarts == {"main": 1}
    assert "lachesis: main was ended by SIGKILL; it is started again (1 of 3)" in lines


async def test_restarts_are_bounded_and_the_exit_code_is_that_of_what_failed(tmp_path: Path) -> None:
    supervisor, lines = supervised(tmp_path, part("main", "import sys; sys.exit(7)"), max_restarts=2)
    assert await supervisor.run() == 7
    assert supervisor.restarts == {"main": 2}
    assert "ended with exit code 7, after 2 restarts" in lines[-1]


@pytest.mark.parametrize("code", [1, 2])
async def test_a_process_that_reported_an_error_is_not_tried_again(tmp_path: Path, code: int) -> None:
    supervisor, lines = supervised(tmp_path, part("main", f"import sys; print('why'); sys.exit({code})"))
    assert await supervisor.run() == code
    assert supervisor.restarts == {"main": 0}
    assert lines[0] == "main: why"
    assert lines[1].startswith(f"lachesis: main ended with exit code {code}: see its last lines above, or ")


async def test_a_process_that_failed_because_another_was_killed_is_tried_again(tmp_path: Path) -> None:
    (port,) = free_ports(1)
    server = part("server", SERVER, str(port), str(tmp_path), port=port)
    code = """
import os, pathlib, signal, sys, time, urllib.request
mark = pathlib.Path(sys.argv[1])
if not mark.exists():
    mark.touch()
    os.kill(int(pathlib.Path(sys.argv[2]).read_text()), signal.SIGKILL)
    try:
        while True:
            urllib.request.urlopen(f"http://127.0.0.1:{sys.argv[3]}/").close()
    except OSError:
        time.sleep(0.5)
        sys.exit(1)
"""
    pid = tmp_path / "pid"
    supervisor, _ = supervised(tmp_path, server, part("main", code, str(tmp_path / "mark"), str(pid), str(port)))
    supervisor.say = lambda name, line: pid.write_text(str(supervisor.running["server"].pid))
    assert await supervisor.run() == 0
    assert supervisor.restarts == {"server": 1, "main": 1}


ENDING = """
import pathlib, signal, sys, time
folder, name = pathlib.Path(sys.argv[1]), sys.argv[2]
def wait_for(*others):
    while not all((folder / other).exists() for other in others):
        time.sleep(0.01)
def end(*_):
    signal.signal(signal.SIGTERM, lambda *_: (folder / f"{name} told again").touch())
    (folder / f"{name} told").touch()
    wait_for(*sys.argv[3:])
    (folder / f"{name} ended").touch()
    print("ended", flush=True)
    sys.exit(0)
signal.signal(signal.SIGTERM, end)
print("ready", flush=True)
while True: time.sleep(60)
"""


async def test_ctrl_c_ends_the_main_part_with_those_after_it_and_then_what_they_need(tmp_path: Path) -> None:
    last = ("main ended", "one ended", "two ended")
    supervisor, lines = supervised(
        tmp_path,
        part("before", ENDING, str(tmp_path), "before", *last),
        part("main", ENDING, str(tmp_path), "main", "one told", "two told"),
        part("one", ENDING, str(tmp_path), "one", "main told", "one told again"),
        part("two", ENDING, str(tmp_path), "two", "main told", "two told again"),
    )
    run = asyncio.create_task(supervisor.run())
    async with asyncio.timeout(60):
        while sum(line.endswith(": ready") for line in lines) < 4:  # noqa: ASYNC110 - of other processes
            await asyncio.sleep(0.01)
    os.kill(os.getpid(), signal.SIGINT)
    assert await run == 130
    ended = [line for line in lines if line.endswith(": ended")]
    assert (ended[0], ended[-1]) == ("main: ended", "before: ended")
    assert sorted(ended[1:-1]) == ["one: ended", "two: ended"], "told again when main had ended, which they need"


STUBBORN = """
import os, signal, subprocess, sys, time
for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
    signal.signal(number, signal.SIG_IGN)
children = [subprocess.Popen(["sleep", "600"], start_new_session=own) for own in (False, True)]
orphan = subprocess.check_output("setsid sleep 600 > /dev/null 2>&1 & echo $!", shell=True, text=True).strip()
print(os.getpid(), *(each.pid for each in children), orphan, flush=True)
if sys.argv[1:] == ["dies"]:
    os.kill(os.getpid(), signal.SIGKILL)
time.sleep(600)
"""


async def test_a_second_ctrl_c_ends_every_process_at_once_and_those_that_they_started(tmp_path: Path) -> None:
    supervisor, lines = supervised(tmp_path, part("other", STUBBORN), part("main", STUBBORN))
    run = asyncio.create_task(supervisor.run())
    async with asyncio.timeout(60):
        while len(lines) < 2:  # noqa: ASYNC110 - of other processes
            await asyncio.sleep(0.01)
        pids = [int(pid) for line in lines for pid in line.split()[1:]]
        assert len(pids) == 8 and all(map(_alive, pids))
        for _ in range(2):
            os.kill(os.getpid(), signal.SIGINT)
            await asyncio.sleep(0)
        assert await run == 130
    await _all_end(pids)


async def test_what_a_process_leaves_that_died_is_ended_before_it_is_started_again(tmp_path: Path) -> None:
    supervisor, lines = supervised(tmp_path, part("main", STUBBORN, "dies"), max_restarts=1)
    assert await supervisor.run() != 0
    pids = [int(pid) for line in lines if line.startswith("main:") for pid in line.split()[1:]]
    assert len(pids) == 8
    await _all_end(pids)


async def _all_end(pids: list[int]) -> None:
    """Wait until the last of them has; a process that was killed is there for a moment."""
    async with asyncio.timeout(60):
        while any(map(_alive, pids)):  # noqa: ASYNC110 - of other processes
            await asyncio.sleep(0.01)


def test_no_process_outlives_one_that_is_killed(tmp_path: Path) -> None:
    code = f"""
import asyncio, pathlib, sys
from lachesis_train.processes.process import Part
from lachesis_train.processes.supervisor import Supervisor
part = Part("main", [sys.executable, "-c", "import os, time; print(os.getpid(), flush=True); time.sleep(600)"])
say = lambda name, line: print(line, flush=True)
supervisor = Supervisor([part], main="main", logs=pathlib.Path({str(tmp_path)!r}), say=say)
asyncio.run(supervisor.run())
"""
    process = subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, text=True)
    assert process.stdout is not None
    child = int(process.stdout.readline())
    descriptor = os.pidfd_open(child)
    process.kill()
    process.wait()
    process.stdout.close()
    try:
        ended, _, _ = select.select([descriptor], [], [], 60)  # readable when it has ended
        assert ended
    finally:
        os.close(descriptor)


def _alive(pid: int) -> bool:
    try:  # what nobody has waited for yet is no process any more
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False
