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
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from backends.errors import BackendError, LachesisError
from lachesis_tools.tool_session import waiting

INSIDE = Path(__file__).with_name("inside")
"""The scripts that run in guests."""
_LONGEST = 1 << 26
"""Bytes of one answer."""
_LOADING = 900.0
"""Seconds that a guest has to load its environment."""
_ENDING = 5.0
"""Seconds that a guest has to end when its input is closed."""
_PINGS = 10
"""As often, a guest is asked whether it is there, before it is given up."""
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


BROKEN = (ValueError, LookupError, TypeError, AttributeError, RecursionError, OverflowError)
"""What reading an answer raises: of another form, too deep, with a number too large, or of an unknown charset."""


@contextlib.contextmanager
def broken_answers(source: str) -> Iterator[None]:
    """Reads what a server answered. An answer of another form is the server's failure, and raises GuestLost."""
    try:
        yield
    except BROKEN as error:
        raise GuestLost(f"{source} answers in another form: {type(error).__name__}: {error}") from error


def _future() -> asyncio.Future[Any]:
    return asyncio.get_running_loop().create_future()


@dataclass(frozen=True)
class _Call:
    session: str | None
    begun: asyncio.Future[Any] = field(default_factory=_future)
    """Others may keep the guest busy until then."""
    answer: asyncio.Future[Any] = field(default_factory=_future)


class GuestProcess:
    """Calls into a guest. Any number may be under way at once; the guest decides what runs at once there."""

    def __init__(
        self, python: str, script: Path, target: str, arguments: Mapping[str, Any], *, patience: float = 240.0
    ) -> None:
        """
        Args:
            python: the interpreter.
            script: a file with a class `Guest`; see docs/doors.md.
            target: the environment's name, with `arguments`: for the guest's own code.
            patience: seconds for which one call may keep the guest from answering anything. Then the process is killed.
        """
        self.name = f"{script.stem}:{target}"
        self._command = [python, str(INSIDE / "host.py"), str(script), target, json.dumps(arguments)]
        self._numbers = itertools.count()
        self._calls: dict[int, _Call] = {}
        """Without an answer yet, also those for which nobody waits any more."""
        self._patience = patience
        self._watching: asyncio.Task[None] | None = None
        self._answers = 0
        self._gave_up = ""
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
            self._last_words, self._gave_up = b"", ""
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
            self._watching = asyncio.create_task(self._watch())

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
            GuestError: it raised something, or did not end and was all that ran there, so the process had to be killed.
            GuestLost: the process has ended.
        """
        if self._process is None or self._process.returncode is not None:
            raise GuestLost(self._ended())
        return await self._ask({"call": call, "session": session, "with": arguments})

    async def _ask(self, request: Mapping[str, Any]) -> Any:
        assert self._process is not None and self._process.stdin is not None
        number, call = next(self._numbers), _Call(request.get("session"))
        self._calls[number] = call
        try:
            with contextlib.suppress(ConnectionError):  # the end of its output says more
                self._process.stdin.write(json.dumps({"id": number, **request}).encode() + b"\n")
                await self._process.stdin.drain()
            with waiting():  # for others, whose doing is not the agent's
                await asyncio.wait({call.begun, call.answer}, return_when=asyncio.FIRST_COMPLETED)
            found = await call.answer
        finally:
            call.answer.cancel()
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
                self._answers += 1
                if (call := self._calls.get(found["id"])) is None:  # a ping
                    continue
                if "begun" not in found:
                    del self._calls[found["id"]]
                waited_for = call.begun if "begun" in found else call.answer
                if not waited_for.done():
                    waited_for.set_result(found)
        # Not killed at once: that would look whether it has ended, and asyncio would not learn how.
        with contextlib.suppress(TimeoutError):
            await asyncio.wait_for(process.wait(), _ENDING)
        with contextlib.suppress(ProcessLookupError):
            process.kill()
        await process.wait()
        await asyncio.wait(self._reading[1:], timeout=1)
        self._fail(self._calls.values(), GuestLost, self._ended())
        self._calls.clear()

    @staticmethod
    def _fail(calls: Iterable[_Call], kind: type[Exception], said: str) -> None:
        for call in calls:
            if not call.answer.done():
                call.answer.set_exception(kind(said))

    async def _watch(self) -> None:
        """Kill the process once it answers nothing at all, not even a ping, while calls wait.

        Looks are counted and not seconds: where this process was late itself, the answers are there to be read.
        """
        process = self._process
        assert process is not None and process.stdin is not None
        silent, answers = 0, self._answers
        while silent < _PINGS:
            if process.returncode is not None:
                return
            with contextlib.suppress(ConnectionError, RuntimeError):
                process.stdin.write(b'{"id": null, "call": "ping"}\n')
            await asyncio.sleep(self._patience / _PINGS)
            silent = silent + 1 if self._calls and self._answers == answers else 0
            answers = self._answers
        self._gave_up = f" after {self._patience:g} s in which it answered nothing"
        running = [call for call in self._calls.values() if call.begun.done()]
        if len(running) == 1:  # of several, nobody knows which it was
            said = f"{self.name}: a call did not end in {self._patience:g} s and kept all others waiting"
            own = (call for call in self._calls.values() if call.session == running[0].session)
            self._fail(own, GuestError, said)
        self._kill_group()

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
        return f"{self.name}: its process {how}{self._gave_up}{': ' + said[-1000:] if said else ''}"

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
        if self._watching is not None:
            self._watching.cancel()
        self._kill_group()
        # What left the process group may hold the pipes open.
        _, open_still = await asyncio.wait(self._reading, timeout=_ENDING)
        for task in open_still:
            task.cancel()
        if open_still:
            self._process._transport.close()  # type: ignore[attr-defined]  # asyncio has no public way

    def _kill_group(self) -> None:
        assert self._process is not None
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(self._process.pid, signal.SIGKILL)
