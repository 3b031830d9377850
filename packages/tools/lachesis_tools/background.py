"""The tool `process`: control of the commands that `terminal` started in the background."""

from __future__ import annotations

import asyncio
import time
from typing import Annotated, Any, Literal

from pydantic import Field

from backends.base import Process
from lachesis_tools.terminal import MAX_TIMEOUT, OUTPUT_CHARS
from lachesis_tools.text import HeadTail, did_you_mean, printable, to_json
from lachesis_tools.tool_registry import ToolFailure, tool
from lachesis_tools.tool_session import ToolSession

LOG_BYTES = 20_000
"""The default number of bytes that the action `log` returns."""

WRITE_TIMEOUT = 10.0
"""Seconds to wait for a process that does not read its input; the pipe holds 64 KiB."""

KILL_WAIT = 5.0
"""Seconds to wait for the exit code of a killed process."""

_READ = 65_536


class Cursors(dict[str, int]):
    """The position in bytes up to which the model has read each process' output, by process id."""


@tool(
    toolset="terminal",
    time_limit=None,  # only `wait` takes time, and it is bounded
    max_result_chars=2 * OUTPUT_CHARS + 1000,
)
async def process(
    session: ToolSession,
    action: Literal["list", "poll", "log", "wait", "kill", "write", "submit", "close"],
    session_id: str | None = None,
    data: str = "",
    timeout: Annotated[float | None, Field(ge=0, le=MAX_TIMEOUT)] = None,
    offset: Annotated[int | None, Field(ge=0)] = None,
    limit: Annotated[int, Field(ge=1, le=OUTPUT_CHARS)] = LOG_BYTES,
) -> str:
    """Manage the background processes started by `terminal` with background=true. Returns JSON. Actions: list (all of
    them), poll (status and output since the last poll), wait (until it ends or the timeout is over; returns new
    output), log (any part of the whole output), kill, write (send data to its standard input), submit (send data and
    a newline), close (end its standard input).

    Args:
        action: What to do.
        session_id: The process, as `terminal` named it. Needed by every action but list.
        data: Text for write and submit.
        timeout: Seconds to wait at most, for wait.
        offset: First byte of the output to return, for log; without it, the last bytes are returned.
        limit: Most bytes of output to return, for log.
    """
    sandbox = await session.sandbox()
    known = {each.id: each for each in await sandbox.processes() if each.id not in session.internal_processes}
    if action == "list":
        return to_json({"processes": [await _status(each) | {"command": each.command} for each in known.values()]})
    if session_id is None:
        raise ToolFailure(f"action {action!r} needs a session_id; the processes are: {', '.join(known) or 'none'}")
    if session_id not in known:
        hint = did_you_mean(session_id, known)
        raise ToolFailure(
            f"there is no process {session_id!r}{hint or '.'} The processes are: {', '.join(known) or 'none'}"
        )
    chosen = known[session_id]
    if action == "log":
        return to_json(await _status(chosen) | await _log(chosen, offset, limit))
    if action in ("write", "submit", "close"):
        try:
            if action == "close":
                await chosen.close_stdin()
            else:
                async with asyncio.timeout(WRITE_TIMEOUT):
                    await chosen.write((data + ("\n" if action == "submit" else "")).encode())
        except TimeoutError:
            raise ToolFailure(f"process {session_id!r} has not read its input for {WRITE_TIMEOUT:g} s") from None
        except (ProcessLookupError, BrokenPipeError):
            raise ToolFailure(f"process {session_id!r} takes no more input: {to_json(await _status(chosen))}") from None
        return to_json(await _status(chosen))
    wait = 0.0
    if action == "kill":
        await chosen.kill()
        wait = KILL_WAIT
    if action == "wait":
        wait = session.terminal_timeout if timeout is None else timeout
    output = await _new_output(chosen, session.state(Cursors), wait)
    status = await _status(chosen)
    if action == "wait" and status["exit_code"] is None:
        status["error"] = f"still running after {wait:g} s"
    return to_json(status | {"output": output})


async def _status(each: Process) -> dict[str, Any]:
    code = (await each.status()).exit_code
    return {"session_id": each.id, "status": "running" if code is None else "exited", "exit_code": code}


async def _log(each: Process, offset: int | None, limit: int) -> dict[str, Any]:
    total = (await each.status()).output_size
    chunk = await each.read(max(0, total - limit) if offset is None else offset, limit=limit)
    end = chunk.offset + len(chunk.data)
    return {"output": printable(chunk.data), "offset": chunk.offset, "next_offset": end, "total": max(total, end)}


async def _new_output(each: Process, cursors: Cursors, wait: float) -> str:
    """The output since the last call; with `wait`, until the process ends or that many seconds have passed."""
    deadline = time.monotonic() + wait
    kept = HeadTail(2 * OUTPUT_CHARS, 3 * OUTPUT_CHARS)
    position = cursors.get(each.id, 0)
    # Without a target, a process that writes faster than we read would never let a poll return.
    target = (await each.status()).output_size
    while True:
        left = max(0.0, deadline - time.monotonic())
        chunk = await each.read(position, wait=left, limit=_READ)
        if chunk.offset > position:
            kept.skip(chunk.offset - position)
        kept.add(chunk.data)
        position = max(position, chunk.offset + len(chunk.data))
        cursors[each.id] = position
        drained = len(chunk.data) < _READ
        if drained and (chunk.exit_code is not None or left == 0):
            break
        if left == 0 and position >= target:
            break
    return kept.text(OUTPUT_CHARS)
