"""The tool `terminal`: a bash command in the rollout's sandbox."""

from __future__ import annotations

import shlex
from dataclasses import replace
from typing import Annotated

from pydantic import Field

from lachesis_tools.text import cap_text, printable, to_json
from lachesis_tools.tool_registry import ToolFailure, ToolRegistry, tool
from lachesis_tools.tool_session import ToolSession

OUTPUT_CHARS = 50_000
"""The most characters of a command's output that reach the model."""

_MAX_OUTPUT = 4 * OUTPUT_CHARS
"""The most bytes of output to keep: a character has at most four."""

MAX_TIMEOUT = 600
"""The longest timeout of a foreground command in seconds."""

MAX_BACKGROUND = 64
"""The most background processes of one session at a time."""


@tool(
    toolset="terminal",
    time_limit=None,  # the sandbox ends the command
    max_result_chars=2 * OUTPUT_CHARS + 1000,  # JSON at most doubles printable text: it is never cut
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
    return await _run(session, command, background, timeout, await _folder(session, workdir))


_CARRIES = "The working directory (cd) and exported variables carry over to the next command."
_STAYS = (
    "Each command starts in the initial working directory: a cd does not carry over to the next command, exported "
    "variables do."
)
assert _CARRIES in terminal.description


def without_carried_folder(tools: ToolRegistry) -> ToolRegistry:
    """The same tools, with a `terminal` of which each command starts in the sandbox's folder, and which says so.

    A tool of that name which is not the one here stays as it is.
    """
    if tools.get("terminal") is not terminal:
        return tools

    async def started_in_workdir(
        session: ToolSession,
        command: str,
        background: bool = False,
        timeout: float | None = None,
        workdir: str | None = None,
    ) -> str:
        folder = (await session.sandbox()).workdir if workdir is None else await _folder(session, workdir)
        return await _run(session, command, background, timeout, folder)

    changed = replace(terminal, function=started_in_workdir, description=terminal.description.replace(_CARRIES, _STAYS))
    return tools.replaced(changed)


async def _folder(session: ToolSession, workdir: str | None) -> str | None:
    if workdir is None:
        return None
    folder = await session.path(workdir)
    found = await (await session.sandbox()).exec(f"[ -d {shlex.quote(folder)} ]", timeout=30, cwd="/")
    if found.exit_code != 0:
        raise ToolFailure(f"workdir {workdir!r} is not a directory")
    return folder


async def _run(session: ToolSession, command: str, background: bool, timeout: float | None, cwd: str | None) -> str:
    """Run the command in `cwd`, or where the last one that was given none ended."""
    if not command.strip():
        raise ToolFailure("the command is empty")
    if "\0" in command:
        raise ToolFailure("a command cannot contain a NUL character")
    sandbox = await session.sandbox()
    if background:
        return await _start(session, command, cwd)
    limit = timeout or session.terminal_timeout
    # `eval` joins stderr, syntax errors included, to stdout without changes to the command (heredocs, comments, open
    # quotes, a trailing backslash), and `cd` and `export` run in the shell itself.
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
