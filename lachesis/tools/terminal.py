"""The tool `terminal`: a bash command in the rollout's sandbox."""

from __future__ import annotations

import shlex
from typing import Annotated

from pydantic import Field

from lachesis.tools.text import cap_text, printable, to_json
from lachesis.tools.tool_registry import ToolFailure, tool
from lachesis.tools.tool_session import ToolSession

OUTPUT_CHARS = 50_000
"""Characters of a command's output that reach the model."""

_MAX_OUTPUT = 4 * OUTPUT_CHARS
"""Bytes to keep of it: a character has at most four. More would only keep the event loop busy."""

MAX_TIMEOUT = 600
"""Seconds that a foreground command may ask for."""

MAX_BACKGROUND = 64
"""Background processes of one session that may run at the same time."""


@tool(
    toolset="terminal",
    time_limit=None,  # the sandbox ends the command
    max_result_chars=2 * OUTPUT_CHARS + 1000,  # JSON at most doubles what `printable` lets through: it is never cut
)
async def terminal(
    session: ToolSession,
    command: str,
    background: bool = False,
    timeout: Annotated[float | None, Field(gt=0, le=MAX_TIMEOUT)] = None,
    workdir: str | None = None,
) -> str:
    """Run a bash command and return JSON with its output (stdout and stderr together), exit_code and error. The
    working directory (cd) and exported variables carry over to the next command. Commands cannot ask for input. Start
    servers and other long work with background=true and follow them with the tool `process`.

    Args:
        command: The command, as typed into bash; it may have several lines.
        background: Return at once with a session_id while the command keeps running.
        timeout: Seconds after which a foreground command is killed.
        workdir: Directory to run this one command in, instead of the current one.
    """
    if not command.strip():
        raise ToolFailure("the command is empty")
    if "\0" in command:
        raise ToolFailure("a command cannot contain a NUL character")
    sandbox = await session.sandbox()
    cwd = None
    if workdir is not None:
        cwd = await session.path(workdir)
        found = await sandbox.exec(f"[ -d {shlex.quote(cwd)} ]", timeout=30, cwd="/")
        if found.exit_code != 0:
            raise ToolFailure(f"workdir {workdir!r} is not a directory")
    if background:
        return await _start(session, command, cwd)
    limit = timeout or session.terminal_timeout
    # `eval` joins stderr to stdout and leaves the command as it is: heredocs, comments, open quotes, a trailing
    # backslash. Its syntax errors join, too, and `cd` and `export` happen in the shell itself.
    done = await sandbox.exec(f"eval {shlex.quote(command)} 2>&1", timeout=limit, cwd=cwd, max_output=_MAX_OUTPUT)
    output, _ = cap_text(printable(done.stdout + done.stderr), OUTPUT_CHARS, already_elided=done.stdout_elided)
    error = None
    if done.timed_out:
        error = (
            f"the command was killed after its timeout of {limit:g} s; the output up to then is kept. "
            f"For longer work use timeout (up to {MAX_TIMEOUT}) or background=true"
        )
    return to_json({"output": output, "exit_code": done.exit_code, "error": error})


async def _start(session: ToolSession, command: str, cwd: str | None) -> str:
    sandbox = await session.sandbox()
    mine = [each for each in await sandbox.processes() if each.id not in session.internal_processes]
    if len(mine) >= MAX_BACKGROUND:
        running = [each for each in mine if (await each.status()).exit_code is None]
        if len(running) >= MAX_BACKGROUND:
            raise ToolFailure(f"{len(running)} background processes are running already; kill some with `process`")
    process = await sandbox.start(command, cwd=cwd)
    return to_json({"output": "started in the background", "session_id": process.id, "exit_code": None, "error": None})
