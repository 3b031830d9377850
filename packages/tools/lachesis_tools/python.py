"""The tool `python`: one Python interpreter for a session, which keeps its variables between calls.

The result is plain text, as in a notebook: printed output, the value of the last expression, a traceback. Small models
read that better than JSON.
"""

from __future__ import annotations

import asyncio
import contextlib
import functools
import json
import secrets
import shlex
import time
from pathlib import Path
from typing import Annotated

from pydantic import Field

from backends.base import Process
from backends.first_use import in_turn
from lachesis_tools.terminal import MAX_TIMEOUT, OUTPUT_CHARS
from lachesis_tools.text import HeadTail
from lachesis_tools.tool_registry import ToolFailure, tool
from lachesis_tools.tool_session import ToolSession

_NOTE_CHARS = 500
_READ = 65_536


@in_turn
@functools.cache
def _driver() -> str:
    return Path(__file__).with_name("repl_driver.py").read_text(encoding="utf-8")


class Repl:
    """The interpreter of one session: a background process in its sandbox that executes one cell at a time.

    The output of the process, subprocesses included, is the output of the cell. A new nonce for every cell marks its
    end, so that no printed text can be mistaken for the mark.
    """

    def __init__(self) -> None:
        self._process: Process | None = None
        self._position = 0
        self._lock = asyncio.Lock()

    async def run(self, session: ToolSession, code: str, timeout: float) -> str:
        """Execute a cell; returns its output, with a note in brackets if the interpreter ended."""
        async with self._lock:
            process = self._process or await self._start(session)
            nonce = secrets.token_hex(16)
            finished = False
            try:
                text = await self._cell(process, nonce, code, timeout)
                finished = True
                return text
            finally:
                if not finished:  # cancelled or failed: the cell must not go on running
                    self._process = None
                    await process.kill()

    async def _start(self, session: ToolSession) -> Process:
        sandbox = await session.sandbox()
        if sandbox.python is None:
            raise ToolFailure("this sandbox has no Python; use the terminal")
        command = f"exec {shlex.quote(sandbox.python)} -u -c {shlex.quote(_driver())}"
        self._process = await sandbox.start(command, cwd=await session.path("."))
        self._position = 0
        session.internal_processes.add(self._process.id)
        return self._process

    async def _cell(self, process: Process, nonce: str, code: str, timeout: float) -> str:
        deadline = time.monotonic() + timeout
        kept = HeadTail(2 * OUTPUT_CHARS, 3 * OUTPUT_CHARS)
        # An interpreter that ended between two cells takes no input; the loop below sees its exit code.
        with contextlib.suppress(ProcessLookupError, BrokenPipeError, TimeoutError):
            async with asyncio.timeout(timeout):
                await process.write((json.dumps({"nonce": nonce, "code": code}) + "\n").encode())
        mark = nonce.encode()
        pending = b""  # output that may be the beginning of the mark
        while True:
            left = max(0.0, deadline - time.monotonic())
            chunk = await process.read(self._position, wait=left, limit=_READ)
            if chunk.offset > self._position:
                kept.add(pending)
                kept.skip(chunk.offset - self._position)
                pending = b""
            pending += chunk.data
            self._position = chunk.offset + len(chunk.data)
            found = pending.find(mark)
            if found >= 0 and len(pending) >= found + len(mark) + 2:
                # Output of threads and children after the end of the cell belongs to the next one.
                self._position -= len(pending) - (found + len(mark) + 2)
                kept.add(pending[:found])
                return kept.text(OUTPUT_CHARS - _NOTE_CHARS).removesuffix("\n") or "[no output]"
            if chunk.exit_code is not None and len(chunk.data) < _READ:
                kept.add(pending)
                self._process = None
                return self._lost(kept, f"[Python exited with code {chunk.exit_code}.")
            safe = max(0, len(pending) - len(mark) - 2)
            kept.add(pending[:safe])
            pending = pending[safe:]
            if time.monotonic() >= deadline:
                kept.add(pending)
                self._process = None
                await process.kill()
                return self._lost(kept, f"[The code was stopped after its timeout of {timeout:g} s.")

    @staticmethod
    def _lost(kept: HeadTail, what: str) -> str:
        output = kept.text(OUTPUT_CHARS - _NOTE_CHARS).removesuffix("\n")
        note = f"{what} All variables are lost; the next call starts a new interpreter.]"
        return f"{output}\n{note}" if output else note


@tool(toolset="python", time_limit=None)  # the interpreter is killed at the timeout of the call
async def python(
    session: ToolSession,
    code: str,
    timeout: Annotated[float | None, Field(gt=0, le=MAX_TIMEOUT)] = None,
) -> str:
    """Run Python code in an interpreter that keeps its variables between calls. Returns what the code prints and the
    value of its last expression, or the traceback. If the code exits or runs out of time, the variables are lost.

    Args:
        code: The code, any number of lines.
        timeout: Seconds after which the code is stopped.
    """
    return await session.state(Repl).run(session, code, timeout or session.terminal_timeout)
