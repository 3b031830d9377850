"""Connections that are carried out of a sandbox: over streams that break, for crowds, and for programs that flood."""

from __future__ import annotations

import asyncio
import contextlib
import random
import resource
from collections.abc import AsyncIterator

import pytest
from executor_box import Mode, sandbox_over

from backends import (
    BackendError,
    BackendUnavailable,
    Forward,
    Lease,
    LeaseOver,
    SandboxLost,
    create_backend,
    forwarding,
)
from backends.sandbox import ExecutorSandbox
from backends.spec import SandboxSpec
from tests.support.ports import free_port

TALK = """
import socket, threading
wrong = []
def talk(number):
    text = bytes([65 + number]) * 20_000
    with socket.create_connection(("127.0.0.1", {port})) as connection:
        file = connection.makefile("rwb")
        for _ in range({turns}):
            file.write(text)
            file.flush()
            if file.read(len(text)) != text:
                wrong.append(number)
        connection.shutdown(socket.SHUT_WR)
        if file.read():
            wrong.append(number)
threads = [threading.Thread(target=talk, args=(number,)) for number in range({talkers})]
for thread in threads: thread.start()
for thread in threads: thread.join()
print(wrong)
"""
FLOOD = """
import socket
for _ in range(10_000):
    try:
        connection = socket.create_connection(("127.0.0.1", {port}), timeout=20)
        connection.sendall(b"\\x00\\xff garbage")
        connection.close()
    except ConnectionError:
        pass
"""
HOLD = """python3 -c '
import socket, time
held = [socket.create_connection(("127.0.0.1", {port})) for _ in range(100)]
served = 0
for each in held:
    try:
        each.sendall(b"x")
        served += each.recv(1) == b"x"
    except ConnectionError:
        pass
print(served, flush=True)
time.sleep(60)
'"""


async def echo(reader: asyncio.StreamReader, writer: asyncio.StreamWriter, heard: asyncio.Event | None = None) -> None:
    with contextlib.suppress(ConnectionError):
        while data := await reader.read(1 << 16):
            if heard:
                heard.set()
            writer.write(data)
            await writer.drain()
    writer.close()


@contextlib.asynccontextmanager
async def carried(sandbox: ExecutorSandbox, heard: asyncio.Event | None = None) -> AsyncIterator[Forward]:
    """`heard` is set whenever the server has read something."""

    async def answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await echo(reader, writer, heard)

    server = await asyncio.start_server(answer, "127.0.0.1", 0, backlog=1000)
    try:
        async with sandbox.forward("127.0.0.1", server.sockets[0].getsockname()[1]) as inside:
            yield inside
    finally:
        server.close()


async def talk(sandbox: ExecutorSandbox, inside: Forward, *, talkers: int = 20, turns: int = 20) -> bytes:
    script = TALK.format(port=inside.port, talkers=talkers, turns=turns)
    result = await sandbox.exec("python3 -", stdin=script.encode(), timeout=100)
    return result.stdout + result.stderr


@pytest.mark.parametrize(("mode", "sealed"), [("dial", False), ("fd", False), ("relay", True)])
async def test_connections_outlive_the_streams_that_carry_them(mode: Mode, sealed: bool) -> None:
    heard = asyncio.Event()
    async with sandbox_over(mode, sealed=sealed) as (sandbox, box, connection), carried(sandbox, heard) as inside:
        moves = random.Random(11)

        async def rain() -> None:
            """Cuts a stream that has carried something, so that a slow machine gets on as well."""
            while True:
                await asyncio.sleep(0.02 + moves.random() * 0.1)
                heard.clear()
                await heard.wait()
                box.cut()

        falling = asyncio.create_task(rain())
        rounds = 0
        while rounds == 0 or len(box.streams) <= 5:
            rounds += 1
            assert await talk(sandbox, inside) == b"[]\n"
        falling.cancel()
        assert connection.lost is None


async def test_ten_thousand_connections_are_carried_or_reset_and_leave_nothing() -> None:
    async with sandbox_over("fd") as (sandbox, _, connection), carried(sandbox) as inside:
        flood = asyncio.create_task(
            sandbox.exec("python3 -", stdin=FLOOD.format(port=inside.port).encode(), timeout=100)
        )
        meanwhile = 0
        while not flood.done():
            assert (await sandbox.exec("echo on", timeout=100)).stdout == b"on\n"
            meanwhile += 1
        assert (await flood).exit_code == 0
        assert meanwhile >= 3, "commands go on meanwhile"
        # The last of the flood are carried first; while they are as many as may be, others are reset.
        async with asyncio.timeout(60):
            while await talk(sandbox, inside) != b"[]\n":
                assert inside.refused
        assert len(connection._pending) <= 4, "what waits for the next connections"


async def test_floods_leave_descriptors_and_every_sandbox_a_few_connections(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(forwarding, "_most_carried", lambda: 30)
    async with sandbox_over("fd") as (flooding, _, _), sandbox_over("fd") as (other, _, _):
        async with carried(flooding) as inside, carried(other) as elsewhere:
            flood = await flooding.start(HOLD.format(port=inside.port))
            assert (await flood.read(wait=20)).data == b"30\n"
            assert (inside.refused, inside.failure) == (70, None)
            assert await talk(other, elsewhere, talkers=8) == b"[]\n"
            assert (elsewhere.refused, elsewhere.failure) == (0, None)
        async with carried(other) as again:
            assert await talk(other, again) == b"[]\n", "the descriptors of the flood are free"


async def test_when_the_block_ends_connections_are_reset_and_none_can_be_made() -> None:
    async with sandbox_over("fd") as (sandbox, _, connection):
        async with carried(sandbox) as inside:
            process = await sandbox.start(
                f"exec 3<> /dev/tcp/127.0.0.1/{inside.port}; echo hi >&3; head -1 <&3; cat <&3"
            )
            assert (await process.read(wait=20)).data == b"hi\n"
        text = b""
        while (chunk := await process.read(3 + len(text), wait=20)).exit_code is None:
            text += chunk.data
        assert b"reset" in text + chunk.data
        refused = await sandbox.exec(f"exec 3<> /dev/tcp/127.0.0.1/{inside.port}", timeout=20)
        assert b"refused" in refused.stderr
        assert connection._pending == {}


async def test_a_lost_sandbox_ends_what_it_carried() -> None:
    async with sandbox_over("fd", grace=0.3) as (sandbox, box, _):
        async with carried(sandbox) as inside:
            await sandbox.start(f"exec 3<> /dev/tcp/127.0.0.1/{inside.port}; sleep 100")
            box.process.kill()
            with pytest.raises(SandboxLost):
                await sandbox.exec("sleep 100", timeout=100)
        with pytest.raises(SandboxLost):
            async with carried(sandbox):
                pass


async def test_a_lease_that_is_over_carries_nothing() -> None:
    sandbox = await create_backend("local").create(SandboxSpec())
    lease = Lease(sandbox, sandbox.close, lifetime=100)
    leased = lease.sandbox
    assert isinstance(leased, ExecutorSandbox)
    async with carried(leased) as inside:
        assert await talk(leased, inside) == b"[]\n"
        await lease.release()
    with pytest.raises(LeaseOver):
        async with carried(leased):
            pass


async def test_where_others_share_the_network_nothing_is_carried() -> None:
    async with sandbox_over("fd") as (sandbox, _, _):
        sandbox.shared_network = "another machine"
        with pytest.raises(BackendUnavailable, match="every user there could use the way"):
            async with carried(sandbox):
                pass


async def test_a_listening_socket_that_cannot_be_had_is_an_error_of_the_sandbox() -> None:
    async with sandbox_over("fd") as (sandbox, box, connection):
        resource.prlimit(box.process.pid, resource.RLIMIT_NOFILE, (3, 3))
        with pytest.raises(BackendError, match="cannot listen on its loopback address"):
            async with sandbox.forward("127.0.0.1", free_port()):
                pass
        assert connection._pending == {}
