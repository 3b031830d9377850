"""What `SupportsForward` promises: one address can be reached from inside, by connections that lose nothing."""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import os
import socket
from collections.abc import AsyncIterator, Awaitable, Callable

import pytest

from backends import Forward, Sandbox, SandboxSpec, SupportsForward
from backends.base import Backend

from .probes import opened, output

Handler = Callable[[asyncio.StreamReader, asyncio.StreamWriter], Awaitable[None]]

ECHO = """
import socket, sys
sent = open("data", "rb").read()
with socket.create_connection(("{host}", {port})) as connection:
    import threading
    writing = threading.Thread(target=lambda: (connection.sendall(sent), connection.shutdown(socket.SHUT_WR)))
    writing.start()
    received = b""
    while part := connection.recv(1 << 16):
        received += part
    writing.join()
print(received == sent)
"""
KEPT_ALIVE = """
import socket, threading
errors = []
def talk(number):
    with socket.create_connection(("{host}", {port})) as connection:
        file = connection.makefile("rwb")
        for turn in range(10):
            line = b"%d %d\\n" % (number, turn)
            file.write(line)
            file.flush()
            if file.readline() != line:
                errors.append((number, turn))
threads = [threading.Thread(target=talk, args=(number,)) for number in range(50)]
for thread in threads: thread.start()
for thread in threads: thread.join()
print(errors)
"""
CROWD = """
import socket, resource
soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
resource.setrlimit(resource.RLIMIT_NOFILE, (min(hard, 4096), hard))
served = refused = 0
connections = []
for _ in range(1000):
    try:
        connections.append(socket.create_connection(("{host}", {port}), timeout=20))
    except ConnectionError:
        refused += 1
for connection in connections:
    try:
        connection.sendall(b"x\\n")
        served += connection.recv(2) == b"x\\n"
    except ConnectionError:
        refused += 1
print(served, served + refused)
"""
SLOW = """
import socket, sys, hashlib
with socket.create_connection(("{host}", {port})) as connection:
    print("connected", flush=True)
    input()
    digest = hashlib.sha256()
    while part := connection.recv(1 << 16):
        digest.update(part)
print(digest.hexdigest())
"""


@contextlib.asynccontextmanager
async def served(sandbox: Sandbox, handle: Handler) -> AsyncIterator[tuple[Forward, int]]:
    """The way from a sandbox to a server of this machine, and the server's port."""
    if not isinstance(sandbox, SupportsForward):
        pytest.skip("its sandboxes forward nothing")
    server = await asyncio.start_server(handle, "127.0.0.1", 0, backlog=1000)
    port = server.sockets[0].getsockname()[1]
    try:
        async with sandbox.forward("127.0.0.1", port) as inside:
            yield inside, port
    finally:
        server.close()


async def echo(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    with contextlib.suppress(ConnectionError):
        while data := await reader.read(1 << 16):
            writer.write(data)
            await writer.drain()
    writer.close()


async def run(sandbox: Sandbox, script: str, inside: Forward) -> str:
    await sandbox.write_bytes("script.py", script.format(host=inside.host, port=inside.port).encode())
    return await output(sandbox, "python3 script.py", timeout=60)


def skip_if_shared(inside: Forward, port: int) -> None:
    if inside.port == port:
        pytest.skip("its sandboxes share the network of this machine: nothing is carried")


async def test_a_forwarded_connection_carries_every_byte_and_the_end_of_each_half(sandbox: Sandbox) -> None:
    await sandbox.write_bytes("data", os.urandom(3_000_000))
    async with served(sandbox, echo) as (inside, _):
        assert await run(sandbox, ECHO, inside) == "True"


async def test_many_connections_are_forwarded_at_once_and_kept_alive(sandbox: Sandbox) -> None:
    async with served(sandbox, echo) as (inside, _):
        assert await run(sandbox, KEPT_ALIVE, inside) == "[]"


async def test_the_forwarded_address_is_the_only_one_that_can_be_reached(sandbox: Sandbox) -> None:
    connect = "(exec 3<> /dev/tcp/127.0.0.1/{}) 2> /dev/null && echo reached; true"
    with socket.create_server(("127.0.0.1", 0)) as other:
        async with served(sandbox, echo) as (inside, port):
            skip_if_shared(inside, port)
            assert await output(sandbox, connect.format(inside.port)) == "reached"
            for closed in (port, other.getsockname()[1]):
                if closed != inside.port:
                    assert await output(sandbox, connect.format(closed)) == "", "another port of this machine"
        for _ in range(20):  # each time while a shell for a later command may just be starting
            async with served(sandbox, echo) as (inside, _):
                assert await output(sandbox, connect.format(inside.port)) == "reached"
            assert await output(sandbox, connect.format(inside.port)) == "", "it is closed at the end"


async def test_too_many_connections_are_reset_and_the_next_ones_served(sandbox: Sandbox) -> None:
    async with served(sandbox, echo) as (inside, port):
        skip_if_shared(inside, port)
        served_, all_ = (await run(sandbox, CROWD, inside)).split()
        assert (served_, all_) == ("256", "1000")
        assert inside.refused == 744
        assert await run(sandbox, KEPT_ALIVE, inside) == "[]"


async def test_a_slow_reader_stops_the_writer_and_loses_nothing(sandbox: Sandbox) -> None:
    data = os.urandom(1 << 20) * 40
    written = 0
    stopped = asyncio.Event()

    async def pour(_: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        nonlocal written
        for at in range(0, len(data), 1 << 16):
            writer.write(data[at : at + (1 << 16)])
            try:
                async with asyncio.timeout(1.0):
                    await writer.drain()
            except TimeoutError:
                stopped.set()
                await writer.drain()
            written = at
        writer.close()

    async with served(sandbox, pour) as (inside, _):
        await sandbox.write_bytes("script.py", SLOW.format(host=inside.host, port=inside.port).encode())
        process = await sandbox.start("python3 script.py")
        await asyncio.wait_for(stopped.wait(), 60)
        assert written < len(data) // 2, "only what the kernel buffers is on the way"
        assert await output(sandbox, "echo still here") == "still here"
        await process.write(b"go on\n")
        text = b""
        async with asyncio.timeout(60):
            while (chunk := await process.read(len(text), wait=5)).exit_code is None or chunk.data:
                text += chunk.data
        assert text.split()[-1].decode() == hashlib.sha256(data).hexdigest()


async def test_an_address_that_does_not_answer_is_named_and_the_connection_reset(sandbox: Sandbox) -> None:
    async with served(sandbox, echo) as (inside, port):
        skip_if_shared(inside, port)
    with socket.create_server(("127.0.0.1", 0)) as closed:
        port = closed.getsockname()[1]
    async with sandbox.forward("127.0.0.1", port) as inside:  # type: ignore[attr-defined]
        command = f"exec 3<> /dev/tcp/127.0.0.1/{inside.port}; read -t 20 <&3; echo over"
        assert (await sandbox.exec(command, timeout=30)).stdout == b"over\n"
        assert f"127.0.0.1:{port} cannot be reached" in str(inside.failure)


async def test_a_sandbox_with_a_network_forwards_or_says_why_not(backend: Backend) -> None:
    from backends import BackendUnavailable

    try:
        opening = opened(backend, SandboxSpec(network=True))
        async with opening as sandbox, served(sandbox, echo) as (inside, _):
            assert await run(sandbox, KEPT_ALIVE, inside) == "[]"
    except BackendUnavailable as error:
        assert "network" in str(error)
