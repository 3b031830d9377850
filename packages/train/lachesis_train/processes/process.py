"""One process of several: its command, its log, and the question whether it answers."""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import uuid
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final

import aiohttp

from backends.with_parent import with_parent

LONGEST_PAUSE: Final = 1.0
"""Seconds between two questions whether a process answers, at most."""
MARK: Final = "LACHESIS_PART"
"""A variable by which everything is found that a part has started."""
MAX_LINE: Final = 1 << 20
"""Bytes of a line of a log; a longer one is cut."""

Say = Callable[[str, str], None]
"""Gets the name of a process and a line of its output."""


@dataclass(frozen=True, slots=True)
class Part:
    """What is started."""

    name: str
    command: Sequence[str]
    """The first entry is the program."""
    probe: str | None = None
    """URL that answers 200 as soon as others may use the process; None: it need not be waited for."""
    environment: Mapping[str, str] = field(default_factory=dict)
    """Variables in addition to those of this process."""
    grace: float = 30.0
    """Seconds between the request to end and SIGKILL."""


class PartProcess:
    """One start of a part. It ends with this process, also after `kill -9`.

    Its group is its own, so Ctrl-C reaches this process alone, which then decides what ends when.
    """

    def __init__(self, part: Part, process: asyncio.subprocess.Process, reading: asyncio.Task[None], mark: str) -> None:
        self.part = part
        self._mark = mark
        self._process = process
        self._reading = reading

    @classmethod
    async def start(cls, part: Part, log: Path, say: Say) -> PartProcess:
        """Start it. Its output is appended to the log, and goes to `say` line by line."""
        mark = f"{MARK}={uuid.uuid4().hex}"
        process = await asyncio.create_subprocess_exec(
            *with_parent(*part.command),
            stdin=asyncio.subprocess.DEVNULL,
            stdout=asyncio.subprocess.PIPE,
            stderr=asyncio.subprocess.STDOUT,
            env={**os.environ, "PYTHONUNBUFFERED": "1", **part.environment, MARK: mark.partition("=")[2]},
            process_group=0,
            limit=MAX_LINE,
        )
        assert process.stdout is not None
        reading = asyncio.create_task(_follow(process.stdout, part.name, log, say), name=f"log of {part.name}")
        return cls(part, process, reading, mark)

    @property
    def pid(self) -> int:
        return self._process.pid

    async def ended(self) -> int:
        """Wait for its end and that of its log; the exit code, negative for a signal."""
        code = await self._exited()
        # A child of it may hold the pipe for a moment longer, or for ever.
        await asyncio.wait({self._reading}, timeout=1.0)
        self._reading.cancel()
        return code

    async def _exited(self) -> int:
        """Its exit code. `PartProcess.wait` of some versions of Python also waits for all that hold its output open."""
        waiting = asyncio.create_task(self._process.wait())
        try:
            while (code := self._process.returncode) is None:
                await asyncio.wait({waiting}, timeout=0.1)
            return code
        finally:
            waiting.cancel()

    async def answers(self) -> bool:
        """Wait until its probe is answered; False if it ends before."""
        if self.part.probe is None:
            return True
        ending = asyncio.create_task(self._exited())
        try:
            pause = 0.05
            async with aiohttp.ClientSession(timeout=aiohttp.ClientTimeout(total=5.0)) as session:
                while not ending.done():
                    with contextlib.suppress(aiohttp.ClientError, TimeoutError):
                        async with session.get(self.part.probe) as answer:
                            if answer.status == 200:
                                return True
                    await asyncio.wait({ending}, timeout=pause)
                    pause = min(1.5 * pause, LONGEST_PAUSE)
            return False
        finally:
            ending.cancel()

    def signal(self, number: signal.Signals) -> None:
        """Send a signal; nothing happens where it has ended."""
        if self._process.returncode is None:
            with contextlib.suppress(ProcessLookupError):
                self._process.send_signal(number)

    def kill(self) -> None:
        """End it and what it started, at once; also what it has left, in whichever group or session."""
        if self._process.returncode is None:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(self._process.pid, signal.SIGKILL)
        killed: set[int] = set()
        while left := set(_marked(self._mark)) - killed:  # one may have started another meanwhile
            for pid in left:
                with contextlib.suppress(ProcessLookupError, PermissionError):
                    os.kill(pid, signal.SIGKILL)
            killed |= left


def _marked(mark: str) -> Iterator[int]:
    """The processes that have this variable, as every descendant has that was not given others."""
    for entry in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError):
            if mark.encode() in (entry / "environ").read_bytes().split(b"\0"):
                yield int(entry.name)


async def _follow(stream: asyncio.StreamReader, name: str, log: Path, say: Say) -> None:
    with log.open("ab", buffering=0) as file:
        while True:
            try:
                line = await stream.readuntil(b"\n")
            except asyncio.IncompleteReadError as end:
                line = end.partial
                if not line:
                    return
            except asyncio.LimitOverrunError as over:
                line = await stream.readexactly(over.consumed) + b"\n"
            file.write(line)
            say(name, line.decode("utf-8", "replace").rstrip())
