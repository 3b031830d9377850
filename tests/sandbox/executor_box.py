"""Executors without a backend, over streams of every kind, which tests can cut."""

from __future__ import annotations

import asyncio
import contextlib
import secrets
import shutil
import socket
import subprocess
import sys
import tempfile
from collections.abc import AsyncIterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal

from backends import SandboxSpec, executor_code
from backends.connection import ByteStream, Connection, asyncio_stream
from backends.sandbox import ExecutorSandbox, initialise

ENV = {"PATH": f"{Path(sys.executable).parent}:/usr/local/bin:/usr/bin:/bin", "HOME": "/nowhere", "LANG": "C.UTF-8"}
Mode = Literal["dial", "listen", "fd", "relay"]


@dataclass
class Box:
    """A running executor, and the streams to it."""

    folder: Path
    process: subprocess.Popen[bytes]
    relays: list[asyncio.subprocess.Process]
    streams: list[ByteStream] = field(default_factory=list)
    reachable: bool = True
    accepted: asyncio.Queue[ByteStream] = field(default_factory=asyncio.Queue)
    """Connections to our socket, in mode `dial`."""
    name: str = ""
    """The abstract socket of modes `listen` and `relay`."""

    async def dial(self) -> ByteStream:
        if not self.reachable:
            raise ConnectionRefusedError("out of reach")
        stream = await self._dial()
        self.streams.append(stream)
        return stream

    async def _dial(self) -> ByteStream:
        if (self.folder / "near").exists():
            return await self.accepted.get()
        if (self.folder / "far").exists():
            return asyncio_stream(*await asyncio.open_unix_connection(self.folder / "far"))
        if self.name.startswith("relay"):
            command = [sys.executable, "-I", "-S", str(self.folder / "executor.pyc"), "--relay", f"@{self.name}"]
            starting = asyncio.ensure_future(asyncio.create_subprocess_exec(*command, stdin=-1, stdout=-1, stderr=-3))
            starting.add_done_callback(lambda started: self.relays.append(started.result()))
            relay = await asyncio.shield(starting)  # asyncio may wait for ever for one that is cancelled half-way
            return asyncio_stream(relay.stdout, relay.stdin)
        return asyncio_stream(*await asyncio.open_unix_connection(f"\0{self.name}"))

    def cut(self) -> None:
        self.streams[-1].abort()

    async def connect(self, **options: float | bool) -> Connection:
        return await Connection.resumable(self.dial, name="sandbox b-1", **options)  # type: ignore[arg-type]


@contextlib.asynccontextmanager
async def executor(mode: Mode) -> AsyncIterator[Box]:
    """Start one; at the end it is killed if it has not ended."""
    folder = Path(tempfile.mkdtemp(prefix="lachesis-test-"))
    code = folder / "executor.pyc"
    code.write_bytes(executor_code.executor_bytecode())
    name = f"{mode}-{secrets.token_hex(8)}"
    command = [sys.executable, "-I", "-S", str(code)]
    fds: tuple[int, ...] = ()
    accepted: asyncio.Queue[ByteStream] = asyncio.Queue()
    relays: list[asyncio.subprocess.Process] = []

    async def end_relays() -> None:
        for relay in relays:
            await relay.communicate()

    async with contextlib.AsyncExitStack() as stack:
        stack.push_async_callback(end_relays)
        stack.callback(shutil.rmtree, folder, ignore_errors=True)
        if mode == "dial":
            server = await asyncio.start_unix_server(
                lambda reader, writer: accepted.put_nowait(asyncio_stream(reader, writer)), folder / "near"
            )
            stack.callback(server.close)
            command += ["--dial", str(folder / "near")]
        elif mode == "fd":
            listening = stack.enter_context(socket.socket(socket.AF_UNIX))
            listening.bind(str(folder / "far"))
            listening.listen()
            fds = (listening.fileno(),)
            command += ["--listen", f"fd:{fds[0]}"]
        else:
            command += ["--listen", f"@{name}"]
        process = await asyncio.to_thread(
            subprocess.Popen, command, stdin=subprocess.DEVNULL, env={}, pass_fds=fds, start_new_session=True
        )
        stack.callback(process.wait)
        stack.callback(process.terminate)
        yield Box(folder, process, relays, accepted=accepted, name=name)


@contextlib.asynccontextmanager
async def sandbox_over(
    mode: Mode, *, grace: float = 20.0, sealed: bool = False, spec: SandboxSpec | None = None
) -> AsyncIterator[tuple[ExecutorSandbox, Box, Connection]]:
    async with executor(mode) as box:
        connection = await box.connect(grace=grace, sealed=sealed)
        workdir = str(box.folder / "work")
        inside = await initialise(connection, spec or SandboxSpec(), workdir=workdir, env=ENV, grace=grace)
        try:
            yield ExecutorSandbox(connection, id="b-1", workdir=workdir, python=inside.python), box, connection
        finally:
            connection.fail("sandbox b-1 was closed")
