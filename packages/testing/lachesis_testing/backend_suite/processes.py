"""What background processes and terminals promise."""

from __future__ import annotations

import asyncio
import time
import uuid

import pytest

from backends import Process, Sandbox, SupportsPty

from .fixtures import FindProcesses
from .probes import output, until


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


async def test_reading_waits_for_output_no_longer_than_requested(sandbox: Sandbox) -> None:
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


async def test_kill_ends_a_process_with_all_it_started(sandbox: Sandbox, find_processes: FindProcesses) -> None:
    mark = str(uuid.uuid4().int)[:9]
    process = await sandbox.start(f"trap '' TERM; setsid sleep {mark} & (sleep {mark} &) ; sleep {mark}")
    assert await until(lambda: len(find_processes(mark)) >= 3)
    await process.kill()
    assert await until(lambda: find_processes(mark) == [])
    assert (await process.read(wait=30)).exit_code == 137
    await process.kill()
    daemon = await sandbox.start(f"sleep {mark} & exit 0")
    assert await read_all(daemon) == b""
    await daemon.kill()
    assert await until(lambda: find_processes(mark) == []), "children that outlived their shell"


async def test_old_output_is_dropped_and_offsets_stay_absolute(sandbox: Sandbox) -> None:
    process = await sandbox.start("head -c 5000000 /dev/zero; printf END")
    await read_all(process)
    assert (await process.status()).output_size == 5_000_003
    first = await process.read(0, limit=10)
    assert len(first.data) == 10
    assert 5_000_003 - first.offset <= 1 << 20
    assert (await process.read(5_000_000)).data == b"END"


async def test_stopping_all_processes_leaves_the_sandbox_usable(
    sandbox: Sandbox, find_processes: FindProcesses
) -> None:
    mark = str(uuid.uuid4().int)[:9]
    process = await sandbox.start(f"setsid sleep {mark} & trap '' TERM; sleep {mark}")
    await sandbox.exec(f"cd /; setsid sleep {mark} > /dev/null 2>&1 & (sleep {mark} &) ; export KEPT=1", timeout=20)
    running = asyncio.create_task(sandbox.exec(f"sleep {mark}; echo not reached", timeout=100))
    assert await until(lambda: len(find_processes(mark)) >= 5)
    await sandbox.stop_processes()
    assert find_processes(mark) == []
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
        """Its output up to these words: a terminal gives a line in pieces."""
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
