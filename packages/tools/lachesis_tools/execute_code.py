"""The tool `execute_code`: a Python script in the sandbox, which calls the other tools as functions.

The script runs there, and its calls are answered here, with the checks and limits of calls that the model makes.
"""

from __future__ import annotations

import asyncio
import contextlib
import functools
import json
import shlex
import stat
from collections import Counter, deque
from pathlib import Path
from typing import Annotated, Any

from pydantic import Field

from backends.base import Process, Sandbox
from backends.first_use import in_turn
from backends.tasks import cancel_all
from lachesis_tools.calling_agent import OF_THE_AGENT, agent_of_call, callable_names
from lachesis_tools.dispatch import ToolResult, call_tool, callable_tools
from lachesis_tools.json_results import as_json
from lachesis_tools.terminal import MAX_TIMEOUT, OUTPUT_CHARS
from lachesis_tools.text import HeadTail, to_json, valid_utf8
from lachesis_tools.tool_registry import ToolFailure, tool
from lachesis_tools.tool_session import ToolSession

MAX_CALLS = 50
"""Calls of tools by one script."""
_READ = 1 << 20


@in_turn
@functools.cache
def _driver() -> str:
    return Path(__file__).with_name("code_driver.py").read_text(encoding="utf-8")


@tool(
    toolset="code_execution",
    time_limit=None,  # the script is killed at the timeout of the call
    max_result_chars=2 * OUTPUT_CHARS + 1000,
)
async def execute_code(
    session: ToolSession,
    code: str,
    timeout: Annotated[float | None, Field(gt=0, le=MAX_TIMEOUT)] = None,
) -> ToolResult:
    """Run a Python script that can call your other tools, for work that needs many calls or much data: only what it
    prints is shown to you. Each tool is a function of the module `tools`, with the same arguments, and returns a dict:
    `from tools import terminal; print(terminal("ls")["output"])`. A failed call raises `tools.ToolError`. Returns JSON
    with the output, the exit_code, and the calls that were made. No variables are kept.

    Args:
        code: The script, any number of lines.
        timeout: Seconds after which the script is killed.
    """
    sandbox = await session.sandbox()
    if sandbox.python is None:
        raise ToolFailure("this sandbox has no Python; use the terminal")
    command = f"exec {shlex.quote(sandbox.python)} -u -c {shlex.quote(_driver())}"
    process = await sandbox.start(command, cwd=await session.path("."))
    session.internal_processes.add(process.id)
    script = _Script(session, process)
    limit, error = timeout or session.terminal_timeout, None
    try:
        async with asyncio.timeout(limit) as deadline:
            exit_code = await script.run(code)
    except TimeoutError:
        if not deadline.expired():
            raise
        exit_code, error = 124, f"the script was killed after its timeout of {limit:g} s"
    finally:
        await process.kill()  # with everything that it started
    shown = {"output": await script.output(sandbox), "exit_code": exit_code, "tool_calls": script.calls, "error": error}
    return ToolResult(to_json(shown), error, reward=script.reward, done=script.done)


class _Script:
    """A script that runs."""

    def __init__(self, session: ToolSession, process: Process) -> None:
        self.calls: Counter[str] = Counter()
        self.reward: float | None = None
        """Of the tools that it called, if those have such."""
        self.done = False
        self._session, self._process = session, process
        self._registry = callable_tools.get().registry
        self._names = callable_names(*OF_THE_AGENT)
        self._output: str | None = None

    async def run(self, code: str) -> int:
        """Answer its calls until it ends; its exit code."""
        tools = {name.replace("-", "_"): [name, *self._registry[name].declared] for name in self._names}
        await self._write({"code": code, "tools": tools})
        position, rest = 0, b""
        reading: asyncio.Task[Any] | None = None
        answering: asyncio.Task[Any] | None = None
        waiting: deque[dict[str, Any]] = deque()  # it may have given up on the calls before
        try:
            while True:
                if answering is None and waiting:
                    answering = asyncio.create_task(self._answer(waiting.popleft()))
                if reading is None and len(waiting) <= MAX_CALLS:
                    reading = asyncio.create_task(self._process.read(position, wait=30.0, limit=_READ))
                # Both: a script that is killed, or killed itself, leaves no call of it running.
                await asyncio.wait({reading, answering} - {None}, return_when=asyncio.FIRST_COMPLETED)  # type: ignore[type-var]
                if answering is not None and answering.done():
                    await self._write(answering.result())
                    answering = None
                if reading is None or not reading.done():
                    continue
                chunk, reading = reading.result(), None
                if chunk.offset > position:
                    raise ToolFailure("a call of the script was too large; the script was killed")
                position = chunk.offset + len(chunk.data)
                *lines, rest = (rest + chunk.data).split(b"\n")
                for request in map(_parsed, lines):
                    if isinstance(request.get("output"), str):
                        self._output = request["output"]
                    elif "call" in request:
                        waiting.append(request)
                if chunk.exit_code is not None and not chunk.data:
                    return int(chunk.exit_code)
        finally:
            await cancel_all([task for task in (reading, answering) if task is not None])

    async def _answer(self, request: dict[str, Any]) -> dict[str, Any]:
        return {"number": request.get("number"), **await self._call(request["call"], request.get("arguments"))}

    async def _call(self, name: Any, arguments: Any) -> dict[str, Any]:
        agent = agent_of_call()
        if self.calls.total() >= MAX_CALLS:
            return {"error": f"Not run: a script may make {MAX_CALLS} calls of tools."}
        if agent is not None and not agent.take_call():
            return {"error": "Not run: the budget of tool calls is used up."}
        self.calls[valid_utf8(str(name)[:80])] += 1
        result = await call_tool(name, arguments, self._session, registry=self._registry, allowed=self._names)
        if result.reward is not None:
            self.reward = (self.reward or 0.0) + result.reward
        self.done = self.done or result.done
        return {"error": result.error} if result.error else {"value": json.loads(as_json(name, result.content))}

    async def _write(self, message: dict[str, Any]) -> None:
        with contextlib.suppress(ProcessLookupError, BrokenPipeError):  # its end is read
            await self._process.write(json.dumps(message).encode() + b"\n")

    async def output(self, sandbox: Sandbox) -> str:
        """What it printed; its file is removed."""
        path, kept = self._output, HeadTail(2 * OUTPUT_CHARS, 3 * OUTPUT_CHARS)
        if path is None:
            return ""
        try:
            found = await sandbox.stat(path)
            if found.mode is None or not stat.S_ISREG(found.mode):
                return ""
            kept.add(await sandbox.read_bytes(path, limit=2 * OUTPUT_CHARS))
            tail = max(2 * OUTPUT_CHARS, found.size - 3 * OUTPUT_CHARS)
            if tail > 2 * OUTPUT_CHARS:
                kept.skip(tail - 2 * OUTPUT_CHARS)
            kept.add(await sandbox.read_bytes(path, offset=tail, limit=3 * OUTPUT_CHARS))
        except OSError:
            return ""
        await sandbox.exec(f"rm -f {shlex.quote(path)}", timeout=30, fresh=True)
        return kept.text(OUTPUT_CHARS)


def _parsed(line: bytes) -> dict[str, Any]:
    """A line of the script; empty if it is none of the driver."""
    try:
        found = json.loads(line)
    except (ValueError, RecursionError):
        return {}
    return found if isinstance(found, dict) else {}
