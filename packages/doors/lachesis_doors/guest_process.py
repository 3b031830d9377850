"""A guest in a process of its own: the code of another framework, run by an interpreter that has its packages.

It is started once in a run and has all sessions inside. It ends with the run, and with this process.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import json
import os
import re
import signal
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from backends.errors import BackendError, LachesisError

INSIDE = Path(__file__).with_name("inside")
"""The scripts that run in guests."""
_LONGEST = 1 << 26
"""Bytes of one answer."""
_LOADING = 900.0
"""Seconds that a guest has to load its environment."""
_ENDING = 5.0
"""Seconds that a guest has to end when its input is closed."""
_COLOURS = re.compile(r"\x1b\[[\d;]*m")
_LAST_WORDS = 4000
"""Bytes of standard error that are kept for messages."""


class GuestLost(BackendError):
    """The process of the guest is gone, or what the guest itself depends on: a failure of the infrastructure."""


class GuestError(LachesisError):
    """The guest's code raised an exception, or a door cannot do something: an error of the environment."""

    def __init__(self, said: str, trace: str = "") -> None:
        super().__init__(said)
        self.trace = trace
        """The guest's traceback."""

    def __str__(self) -> str:
        return f"{self.args[0]}\n{self.trace}".rstrip()


class NotLoaded(GuestError):
    """The environment cannot be loaded. In a line: what the guest printed, and its traceback, are in a file."""

    def __str__(self) -> str:
        return str(self.args[0])


def doors_folder() -> Path:
    """Of the interpreters of doors, and of the logs of their guests."""
    return Path(os.environ.get("LACHESIS_DOORS") or Path.home() / ".cache/lachesis/doors")


@contextlib.contextmanager
def broken_answers(source: str) -> Iterator[None]:
    """Reads what a server answered. An answer of another form is the server's failure, and raises GuestLost."""
    try:
        yield
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise GuestLost(f"{source} answers in another form: {type(error).__name__}: {error}") from error


class GuestProcess:
    """Calls into a guest. Any number may be under way at once; the guest decides what runs at once there."""

    def __init__(self, python: str, script: Path, target: str, arguments: Mapping[str, Any]) -> None:
        """
        Args:
            python: the interpreter.
            script: a file with a class `Guest`; see docs/doors.md.
            target: the environment's name, with `arguments`: for the guest's own code.
        """
        self.name = f"{script.stem}:{target}"
        self._command = [python, str(INSIDE / "host.py"), str(script), target, json.dumps(arguments)]
        self._numbers = itertools.count()
        self._waiting: dict[int, asyncio.Future[Any]] = {}
        self._last_words = b""
        self._process: asyncio.subprocess.Process | None = None
        self._reading: list[asyncio.Task[None]] = []
        self._starting = asyncio.Lock()
        self.about: Mapping[str, Any] = {}
        """What the guest says of itself: `size` (None: no end), `rewards` ("sum" or "last"), `sessions` (how many it
        can hold at once; None: any number) and `network` (whether it needs it; None: it does not say)."""

    async def start(self) -> None:
        """Start the process, if it does not run, and load the environment.

        Raises:
            NotLoaded: the environment cannot be loaded.
            GuestLost: the process cannot be started, ended, or takes too long to load the environment.
        """
        async with self._starting:
            if self._process is not None and self._process.returncode is None:
                return
            if self._process is not None:  # all calls of the process before are given up before there are new ones
                await asyncio.wait(self._reading[:1])
                await self._kill()
            pipe = asyncio.subprocess.PIPE
            try:
                self._process = await asyncio.create_subprocess_exec(
                    *self._command, stdin=pipe, stdout=pipe, stderr=pipe, limit=_LONGEST, start_new_session=True
                )
            except OSError as error:
                raise GuestLost(f"{self.name}: cannot start {self._command[0]}: {error.strerror or error}") from error
            self._last_words = b""
            self._reading = [asyncio.create_task(self._read()), asyncio.create_task(self._listen())]
            loaded, failed = False, None
            try:
                self.about = await asyncio.wait_for(self._ask({"call": "load"}), _LOADING)
                loaded = True
            except GuestError as error:
                failed = error
            except TimeoutError:
                raise GuestLost(f"{self.name}: not loaded after {_LOADING:g} s") from None
            finally:
                if not loaded:  # the next start begins with a new process
                    await self._kill()
            if failed is not None:
                raise self._not_loaded(failed)

    def _not_loaded(self, error: GuestError) -> NotLoaded:
        """With the first words of what the guest raised: some packages raise a page."""
        lines = (line.strip() for line in _COLOURS.sub("", error.args[0]).splitlines())
        said = " ".join([line for line in lines if re.search(r"\w", line)][:2]).rstrip(".")
        if "Next step" not in said:
            said += " " if said.endswith("?") else ". "
            said += "Next step: correct its name or its arguments, or give it what it needs"
        log = doors_folder() / "logs" / (re.sub(r"[^\w.-]", "-", self.name)[:100] + ".log")
        try:
            log.parent.mkdir(parents=True, exist_ok=True)
            log.write_text(f"{self._last_words.decode(errors='replace')}\n{error.args[0]}\n{error.trace}")
        except OSError:
            return NotLoaded(said, error.trace)
        return NotLoaded(f"{said}; what it printed is in {log}", error.trace)

    async def call(self, call: str, session: str | None = None, **arguments: Any) -> Any:
        """What the guest's method returns.

        Raises:
            GuestError: it raised something.
            GuestLost: the process has ended.
        """
        if self._process is None or self._process.returncode is not None:
            raise GuestLost(self._ended())
        return await self._ask({"call": call, "session": session, "with": arguments})

    async def _ask(self, request: Mapping[str, Any]) -> Any:
        assert self._process is not None and self._process.stdin is not None
        number = next(self._numbers)
        answer = self._waiting[number] = asyncio.get_running_loop().create_future()
        try:
            with contextlib.suppress(ConnectionError):  # the end of its output says more
                self._process.stdin.write(json.dumps({"id": number, **request}).encode() + b"\n")
                await self._process.stdin.drain()
            found = await answer
        finally:
            self._waiting.pop(number, None)
        if "error" not in found:
            return found["value"]
        said = f"{self.name}: {found['kind']}: {found['error']}"
        if found["kind"] == "lost":
            raise GuestLost(f"{self.name}: {found['error']}")
        raise GuestError(said, found["traceback"])

    async def _read(self) -> None:
        process = self._process
        assert process is not None and process.stdout is not None
        with contextlib.suppress(ValueError, ConnectionError):  # a line over the limit ends it
            async for line in process.stdout:
                found = json.loads(line)
                if (waiting := self._waiting.get(found["id"])) is not None and not waiting.done():
                    waiting.set_result(found)
        # Not killed at once: that would look whether it has ended, and asyncio would not learn how.
        with contextlib.suppress(TimeoutError):
            await asyncio.wait_for(process.wait(), _ENDING)
        with contextlib.suppress(ProcessLookupError):
            process.kill()
        await process.wait()
        await asyncio.wait(self._reading[1:], timeout=1)
        for waiting in self._waiting.values():
            if not waiting.done():
                waiting.set_exception(GuestLost(self._ended()))

    async def _listen(self) -> None:
        assert self._process is not None and self._process.stderr is not None
        while said := await self._process.stderr.read(1 << 16):  # no lines: a progress bar has none
            self._last_words = (self._last_words + said)[-_LAST_WORDS:]

    def _ended(self) -> str:
        code = self._process.returncode if self._process is not None else None
        how = (
            "is not started" if code is None else f"was killed by signal {-code}" if code < 0 else f"ended with {code}"
        )
        said = self._last_words.decode(errors="replace").strip()
        return f"{self.name}: its process {how}{': ' + said[-1000:] if said else ''}"

    async def close(self) -> None:
        """End the process, with everything that it started."""
        if self._process is None:
            return
        if self._process.stdin is not None:
            self._process.stdin.close()
        if self._reading:
            await asyncio.wait(self._reading[:1], timeout=_ENDING)
        await self._kill()

    async def _kill(self) -> None:
        assert self._process is not None
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(self._process.pid, signal.SIGKILL)
        # What left the process group may hold the pipes open.
        _, open_still = await asyncio.wait(self._reading, timeout=_ENDING)
        for task in open_still:
            task.cancel()
        if open_still:
            self._process._transport.close()  # type: ignore[attr-defined]  # asyncio has no public way
