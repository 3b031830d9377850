"""Streams that break: every request is served once and every answer arrives, or the sandbox is lost with a reason."""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import json
import os
import random
import struct
import time
import uuid

import pytest
from executor_box import Box, Mode, executor, sandbox_over
from sandbox_watch import host_processes, until

from backends import BackendError, SandboxLost, SandboxSpec
from backends.connection import ByteStream, Connection, asyncio_stream
from backends.sandbox import ExecutorSandbox

MODES: list[Mode] = ["dial", "listen", "fd", "relay"]


async def counted(sandbox: ExecutorSandbox) -> int:
    return (await sandbox.read_bytes("count")).count(b"x")


@pytest.mark.parametrize("mode", MODES)
async def test_a_command_runs_once_although_its_stream_breaks_again_and_again(mode: Mode) -> None:
    async with sandbox_over(mode, sealed=mode == "relay") as (sandbox, box, _):
        begin = len(box.streams)
        running = asyncio.create_task(sandbox.exec("printf x >> count; sleep 0.6; echo done; exit 3", timeout=20))
        for _ in range(3):
            await asyncio.sleep(0.1)
            box.cut()
        result = await running
        assert (result.exit_code, result.stdout) == (3, b"done\n")
        assert await counted(sandbox) == 1
        assert len(box.streams) > begin


@pytest.mark.parametrize("sealed", [False, True])
async def test_under_a_rain_of_cuts_nothing_is_lost_doubled_or_mixed_up(sealed: bool) -> None:
    async with sandbox_over("dial", sealed=sealed) as (sandbox, box, connection):
        data = os.urandom(3_000_000)
        moves = random.Random(7)

        def arrived() -> tuple[int, int]:
            return connection._delivery.received, connection._delivery.acknowledged

        async def rain() -> None:
            while True:
                await asyncio.sleep(moves.random() * 0.05)
                before = arrived()
                box.cut()
                if moves.random() < 0.5:  # else, on a slow machine, no attempt to attach might outlast the pauses
                    while arrived() == before:  # noqa: ASYNC110
                        await asyncio.sleep(0.001)

        async def command(number: int) -> None:
            result = await sandbox.exec(f"printf x >> count; printf {number}; cat", timeout=60, stdin=b"!" * number)
            assert result.stdout == str(number).encode() + b"!" * number

        async def file(number: int) -> None:
            await sandbox.write_bytes(f"file{number}", data)
            digest = hashlib.blake2b()
            async for part in sandbox.read_chunks(f"file{number}"):
                digest.update(part)
            assert digest.digest() == hashlib.blake2b(data).digest()
            assert await sandbox.read_bytes(f"file{number}") == data

        falling = asyncio.create_task(rain())
        rounds = 0
        while rounds == 0 or len(box.streams) <= 5:  # how many cuts fall into one round is the machine's affair
            rounds += 1
            await asyncio.gather(*(command(number) for number in range(60)), *(file(number) for number in range(3)))
        falling.cancel()
        assert await counted(sandbox) == 60 * rounds
        assert connection.lost is None


async def test_what_is_out_of_reach_for_a_while_comes_back() -> None:
    mark = str(uuid.uuid4().int)[:9]
    async with sandbox_over("fd") as (sandbox, box, _):
        process = await sandbox.start("read line; echo got $line")
        box.reachable = False
        box.cut()
        calls = [
            asyncio.create_task(sandbox.exec("echo $((6 * 7))", timeout=20)),
            asyncio.create_task(process.write(b"it\n")),
        ]
        cancelled = asyncio.create_task(sandbox.exec(f"sleep {mark}", timeout=200))
        await asyncio.sleep(0.7)
        assert not any(call.done() for call in calls)
        cancelled.cancel()
        box.reachable = True
        assert (await calls[0]).stdout == b"42\n"
        assert (await process.read(wait=20)).data == b"got it\n"
        assert await until(lambda: host_processes(mark) == []), "the command of a request that was cancelled meanwhile"


async def test_a_link_that_stays_broken_is_a_lost_sandbox_and_nothing_stays_inside() -> None:
    mark = str(uuid.uuid4().int)[:9]
    async with sandbox_over("listen", grace=0.6) as (sandbox, box, connection):
        await sandbox.start(f"setsid sleep {mark} & sleep {mark}")
        waiting = asyncio.create_task(sandbox.exec(f"sleep {mark}", timeout=100))
        assert await until(lambda: len(host_processes(mark)) >= 3)
        box.reachable = False
        box.cut()
        reason = r"sandbox b-1 is gone: its connection broke and could not be restored within 0\.6 s: out of reach"
        with pytest.raises(SandboxLost, match=reason):
            await waiting
        with pytest.raises(SandboxLost, match=reason):
            await sandbox.read_bytes("x")
        assert "could not be restored" in str(await connection.ended)
        assert await until(lambda: box.process.poll() is not None)
        assert host_processes(mark) == []
        assert not (box.folder / "work" / "left").exists()


async def test_patience_runs_while_there_is_no_connection() -> None:
    async with sandbox_over("fd") as (_, box, connection):
        box.reachable = False
        box.cut()
        begin = time.monotonic()
        with pytest.raises(SandboxLost, match=r"has not answered 'processes' for 0\.3 s"):
            await connection.request("processes", patience=0.3)
        assert time.monotonic() - begin < 15, "the grace is 20 s"


async def test_a_dial_that_knows_better_ends_it_at_once() -> None:
    async with sandbox_over("fd") as (sandbox, box, _):

        async def gone() -> ByteStream:
            raise SandboxLost("its container was removed")

        box._dial = gone  # type: ignore[method-assign]
        box.cut()
        with pytest.raises(SandboxLost, match="sandbox b-1 is gone: its container was removed"):
            await sandbox.exec("true", timeout=20)


async def test_an_executor_that_was_started_anew_does_not_pass_for_the_old_one() -> None:
    async with sandbox_over("fd") as (sandbox, box, _), executor("fd") as other:
        box._dial = other._dial  # type: ignore[method-assign]
        box.cut()
        with pytest.raises(SandboxLost, match="its executor does not know the session: it was restarted"):
            await asyncio.wait_for(sandbox.exec("true", timeout=20), 20)


async def test_who_cannot_be_reached_at_first_is_an_error_that_says_why() -> None:
    async with executor("fd") as box:
        box.reachable = False
        with pytest.raises(BackendError, match=r"sandbox b-1 could not be reached within 0\.3 s: out of reach"):
            await box.connect(start_timeout=0.3)


async def test_an_executor_ends_when_told_to_and_says_so() -> None:
    async with sandbox_over("listen") as (sandbox, box, connection):
        await sandbox.start("sleep 1000")
        connection.shut_down()
        assert await asyncio.wait_for(connection.ended, 60) == "it was shut down"
        with pytest.raises(SandboxLost, match="it was shut down"):
            await sandbox.exec("true", timeout=20)
        assert await until(lambda: box.process.poll() is not None)


async def test_an_end_that_comes_during_a_cut_is_told_to_who_comes_back() -> None:
    async with sandbox_over("fd", spec=SandboxSpec(lifetime=1.0)) as (sandbox, box, _):
        box.reachable = False
        box.cut()
        await asyncio.sleep(1.1)
        box.reachable = True
        with pytest.raises(SandboxLost, match="sandbox b-1 is gone: its lifetime of 1 s is over"):
            await sandbox.exec("true", timeout=20)


# --- people who do not belong there ----------------------------------------------------------------------------------


def frame(header: dict[str, object], payload: bytes = b"") -> bytes:
    encoded = json.dumps(header).encode()
    return struct.pack("!II", len(encoded), len(payload)) + encoded + payload


async def read_frame(stream: ByteStream) -> dict[str, object]:
    data = b""
    while len(data) < 8 or len(data) < 8 + sum(struct.unpack_from("!II", data)):
        part = await stream.read(65_536)
        if not part:
            raise EOFError
        data += part
    return json.loads(data[8 : 8 + struct.unpack_from("!II", data)[0]])  # type: ignore[no-any-return]


async def hung_up(stream: ByteStream) -> None:
    with contextlib.suppress(ConnectionResetError):  # where there was more to read
        assert await asyncio.wait_for(stream.read(1), 60) == b""


ATTACH = {"id": 0, "attach": 2, "nonce": "00" * 16, "received": 0, "sealed": 0}
INTRUSIONS = {
    "noise": os.urandom(100),
    "a request": frame({"id": 1, "op": "exec", "command": "touch intruded", "timeout": 9, "max_output": 9}),
    "no proof": frame(ATTACH),
    "another token": frame({**ATTACH, "token": "11" * 32}),
    "a made-up proof": frame({**ATTACH, "proof": "22" * 32}),
    "a proof that is none": frame({**ATTACH, "proof": [1]}),
    "too much": frame({**ATTACH, "proof": "3" * 5000}),
    "too much to come": struct.pack("!II", 20, 1 << 31),
}


@pytest.mark.parametrize("intrusion", INTRUSIONS.values(), ids=INTRUSIONS.keys())
async def test_a_stranger_is_hung_up_on_without_a_word(intrusion: bytes) -> None:
    async with sandbox_over("listen") as (sandbox, box, _):
        stranger = await box._dial()
        assert (await read_frame(stranger))["fresh"] is False
        stranger.write(intrusion)
        await hung_up(stranger)
        assert (await sandbox.exec("ls -A", timeout=20)).stdout == b""
        assert len(box.streams) == 1, "its owner did not even notice"


async def test_what_was_said_once_does_not_open_the_door_again() -> None:
    async with sandbox_over("listen") as (sandbox, box, _):
        heard: list[bytes] = []
        dial = box._dial

        async def overheard() -> ByteStream:
            stream = await dial()
            write = stream.write

            def recorded(data: bytes) -> None:
                heard.append(data)
                write(data)

            stream.write = recorded  # type: ignore[method-assign]
            return stream

        box._dial = overheard  # type: ignore[method-assign]
        box.cut()
        await sandbox.exec("touch once", timeout=20)
        assert b'"proof"' in heard[0]
        assert not any(b"token" in data for data in heard), "it travels once, at first"
        replaying = await dial()
        replaying.write(b"".join(heard))
        await read_frame(replaying)
        await hung_up(replaying)
        assert (await sandbox.exec("ls", timeout=20)).stdout == b"once\n"


async def test_a_crowd_of_silent_strangers_keeps_nobody_out() -> None:
    async with sandbox_over("listen") as (sandbox, box, _):
        crowd = [await box._dial() for _ in range(50)]
        box.cut()
        assert (await asyncio.wait_for(sandbox.exec("echo here", timeout=20), 8)).stdout == b"here\n"
        for stranger in crowd:
            stranger.abort()


IMPOSTORS = {
    "silent": None,
    "fresh": {"id": 0, "hello": 2, "nonce": "00" * 16, "fresh": True},
    "knowing": {"id": 0, "hello": 2, "nonce": "00" * 16, "fresh": False},
    "old": {"id": 0, "hello": 1},
    "rude": {"id": 0},
}


@pytest.mark.parametrize("greeting", IMPOSTORS.values(), ids=IMPOSTORS.keys())
async def test_an_impostor_on_our_socket_gets_nothing_and_delays_little(greeting: dict[str, object] | None) -> None:
    async with sandbox_over("dial") as (sandbox, box, _):
        received: list[bytes] = []

        async def pose() -> None:
            stream = asyncio_stream(*await asyncio.open_unix_connection(box.folder / "near"))
            with contextlib.suppress(OSError, EOFError):
                if greeting is not None:
                    stream.write(frame(greeting))
                received.append(json.dumps(await read_frame(stream)).encode())
                stream.write(frame({"id": 0, "attached": 2, "received": 0, "proof": "00" * 32}))
                stream.write(frame({"id": 1, "exit_code": 0}))
                received.append(await stream.read(65_536))
            stream.abort()

        posing = [asyncio.create_task(pose()) for _ in range(3)]
        await asyncio.sleep(0.05)  # they are first in the queue
        box.cut()
        result = await asyncio.wait_for(sandbox.exec("echo it is me", timeout=60), 25)  # 10 s for each would be 30
        assert result.stdout == b"it is me\n"
        for task in posing:
            task.cancel()
        await asyncio.wait(posing)
        assert not any(b"token" in text or b"exec" in text for text in received)


async def test_a_relay_that_is_tampered_with_forges_nothing() -> None:
    async with sandbox_over("relay", sealed=True) as (sandbox, box, connection):
        dial = box._dial
        spoilt: list[str] = []

        async def tampered() -> ByteStream:
            stream = await dial()
            read = stream.read

            async def reading(n: int) -> bytes:
                data = await read(n)
                if b'"exit_code": 1' in data and len(spoilt) < 2:
                    spoilt.append("answer")
                    return data.replace(b'"exit_code": 1', b'"exit_code": 0')
                return data

            stream.read = reading  # type: ignore[method-assign]
            return stream

        box._dial = tampered  # type: ignore[method-assign]
        box.cut()
        result = await sandbox.exec("printf x >> count; exit 1", timeout=20)
        assert result.exit_code == 1
        assert spoilt == ["answer"] * 2
        assert await counted(sandbox) == 1
        assert connection.lost is None


async def test_memory_for_what_is_not_acknowledged_is_bounded() -> None:
    async with sandbox_over("fd") as (sandbox, box, connection):
        await sandbox.exec("head -c 64M /dev/zero > big", timeout=20)
        box.reachable = False
        box.cut()
        writing = asyncio.create_task(sandbox.write_bytes("other", bytes(64 << 20)))
        await asyncio.sleep(0.3)
        assert connection._delivery.retained_bytes < 6 << 20
        box.reachable = True
        await writing
        size = peak(box)
        reading = asyncio.create_task(sandbox.read_bytes("big"))
        for _ in range(3):
            await asyncio.sleep(0.02)
            box.cut()
        assert len(await reading) == 64 << 20
        assert peak(box) - size < 16 << 20


def peak(box: Box) -> int:
    for line in open(f"/proc/{box.process.pid}/status"):  # noqa: SIM115, PTH123
        if line.startswith("VmHWM:"):
            return int(line.split()[1]) << 10
    raise AssertionError("no such line")


async def test_a_connection_that_is_failed_before_it_began_has_ended() -> None:
    async with executor("fd") as box:
        connection = Connection(await box._dial())
        connection.fail("enough")
        assert await asyncio.wait_for(connection.ended, 60) is None
