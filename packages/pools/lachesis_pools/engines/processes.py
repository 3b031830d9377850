"""Workers as processes: of this machine, or of others that ssh reaches. Each ends with its standard input."""

from __future__ import annotations

import asyncio
import contextlib
import os
import shlex
import signal
from collections import Counter
from collections.abc import Collection, Mapping, Sequence
from pathlib import Path

from backends.errors import BackendError
from lachesis_pools.engines.engine import WorkerCommand

_END = 30.0
"""Seconds that a worker has to end."""


class ProcessEngine:
    """Workers on this machine."""

    name = "processes"

    def __init__(self, worker: WorkerCommand) -> None:
        self._worker = worker
        self._running: dict[str, asyncio.subprocess.Process] = {}
        self._said: dict[str, bytes] = {}
        self._reading: set[asyncio.Task[None]] = set()

    def _line(self, name: str) -> Sequence[str]:
        return [*self._worker.arguments(name), "--end-with-input"]

    async def start(self, base: str, count: int) -> str:
        """See `WorkerEngine.start`."""
        for number in range(1, count + 1):
            name = f"{base}.{number}"
            try:
                process = await asyncio.create_subprocess_exec(
                    *self._line(name),
                    stdin=asyncio.subprocess.PIPE,
                    stdout=asyncio.subprocess.DEVNULL,
                    stderr=asyncio.subprocess.PIPE,
                    start_new_session=True,
                )
            except OSError as error:
                raise BackendError(f"worker {name} could not be started: {error}") from error
            self._running[name] = process
            assert process.stdin is not None
            process.stdin.write(f"{self._worker.token}\n".encode())
            reading = asyncio.create_task(self._listen(name, process))
            self._reading.add(reading)
            reading.add_done_callback(self._reading.discard)
        return ""

    async def _listen(self, name: str, process: asyncio.subprocess.Process) -> None:
        assert process.stderr is not None
        said = b""
        while data := await process.stderr.read(4096):  # no lines: one may be longer than a reader takes
            said = (said + data)[-4096:]
            self._said[name] = said

    async def ended(self, names: Collection[str]) -> Mapping[str, str]:
        """See `WorkerEngine.ended`."""
        found = {}
        for name in names:
            process = self._running.get(name)
            if process is not None and process.returncode is not None:
                lines = self._said.get(name, b"").decode(errors="replace").strip().splitlines()
                said = lines[-1][:500] if lines else ""
                found[name] = said or f"exit code {process.returncode}"
        return found

    async def stop(self, names: Collection[str]) -> None:
        """See `WorkerEngine.stop`."""
        await asyncio.gather(*(self._stop(name) for name in names))

    async def _stop(self, name: str) -> None:
        process = self._running.pop(name, None)
        if process is None:
            return
        assert process.stdin is not None
        process.stdin.close()
        try:
            async with asyncio.timeout(_END):
                await process.wait()
        except TimeoutError:
            with contextlib.suppress(ProcessLookupError):
                process.kill()
            await process.wait()

    async def reap(self, base: str, note: str) -> None:
        """See `WorkerEngine.reap`. They end with the process that has started them; this ends those that hang."""
        await self.stop([name for name in self._running if name.rpartition(".")[0] == base])
        for place in Path("/proc").glob("[0-9]*"):
            with contextlib.suppress(OSError):
                words = (place / "cmdline").read_bytes().split(b"\0")
                at = words.index(b"--name") if b"--name" in words else -2
                if words[at + 1].rpartition(b".")[0] == base.encode() and b"lachesis_pools" in words:
                    os.kill(int(place.name), signal.SIGKILL)

    async def close(self) -> None:
        """End all."""
        await self.stop([*self._running])


class SshEngine(ProcessEngine):
    """Workers on machines that `ssh HOST` reaches without a question, and where Lachesis is installed."""

    name = "ssh"

    def __init__(self, worker: WorkerCommand, *, hosts: str, options: str = "") -> None:
        """
        Args:
            hosts: their names, with commas between them.
            options: of the command ssh, such as `-p 2222 -i KEY`.
        """
        super().__init__(worker)
        self._hosts = [host.strip() for host in hosts.split(",") if host.strip()]
        self._options = shlex.split(options)
        self._places: dict[str, str] = {}
        if not self._hosts:
            raise BackendError("engine 'ssh' needs hosts. Next step: --engine-option hosts=a,b")

    def _line(self, name: str) -> Sequence[str]:
        living = [each for each, process in self._running.items() if process.returncode is None]
        used = Counter(self._places[each] for each in living)
        host = self._places[name] = min(self._hosts, key=lambda each: used[each])
        command = f"exec {shlex.join(super()._line(name))}"
        return ["ssh", "-o", "BatchMode=yes", "-o", "ServerAliveInterval=15", *self._options, host, command]

    async def reap(self, base: str, note: str) -> None:
        """See `WorkerEngine.reap`. A worker ends with its ssh connection."""
        await self.stop([name for name in self._running if name.rpartition(".")[0] == base])
