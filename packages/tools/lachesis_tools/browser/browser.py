"""The browser of one rollout. It runs in the rollout's sandbox and ends with it.

agent-browser keeps a process beside Chromium; each call runs its program once, which asks that process. Whatever a
page does is an answer for the model: one that hangs, crashes or keeps opening dialogs costs the browser with its
cookies, and the next call starts another. A browser that does not start is tried in a new sandbox: if it starts there,
this sandbox was spoilt from inside, which the model reads; if not, the infrastructure has failed.
"""

from __future__ import annotations

import asyncio
import json
import secrets
import shlex
from collections.abc import Mapping, Sequence
from typing import Any

from backends.base import Process, Sandbox
from backends.errors import BackendError
from lachesis_tools.browser.program import INSTALL, agent_browser, chromium
from lachesis_tools.text import printable, shortened
from lachesis_tools.tool_registry import ToolFailure
from lachesis_tools.tool_session import ToolSession

COMMAND_SECONDS = 40.0
"""How long a page may take to answer. agent-browser itself waits 25 s for a page that a dialog keeps from loading."""
START_SECONDS = 120.0
MAX_DIALOGS = 5
"""Dialogs in a row that are answered."""
_MAX_OUTPUT = 8_000_000
_ARGUMENTS = (
    *("--no-sandbox", "--disable-gpu", "--disable-dev-shm-usage", "--no-first-run"),  # it is in a sandbox already
    *("--disable-background-networking", "--disable-component-update", "--disable-sync"),
)
_CLEAN_UP = """
for process in /proc/[0-9]*; do
  [ $process != /proc/$$ ] && grep -qsF -e "=$FOLDER" $process/cmdline $process/environ && kill -9 ${process#/proc/}
done
rm -rf "$FOLDER"
"""
"""Ends what agent-browser's process left: it is not a child of `_process` where one of the calls started it again."""
Command = Sequence[str]


class _NotStarted(Exception):
    pass


class Browser:
    """The browser of a session (`session.state(Browser)`), started by the first command."""

    def __init__(self) -> None:
        self._process: Process | None = None
        self._sandbox: Sandbox | None = None
        self._folder = ""
        self._program = ""
        self.dialogs: list[str] = []
        """Dialogs that were answered, until a tool tells the model of them."""

    @property
    def screenshot(self) -> str:
        """A path in the sandbox for pictures."""
        return f"{self._folder}/screenshot.png"

    async def run(self, session: ToolSession, *commands: Command, annotate: bool = False) -> list[Any]:
        """The results of commands of agent-browser, one after the other. Dialogs are answered with OK.

        Args:
            annotate: screenshots have the numbers of refs.

        Raises:
            ToolFailure: a command failed, or the page did not answer; later commands have not run.
            BackendError: no browser starts, also in a new sandbox.
        """
        await self._ready(session)
        replies = await self._exec(session, *commands, annotate=annotate)
        if not replies[-1]["success"] and await self._answered_dialogs(session):
            # One that opened before the command blocked it; one that opened while a page loads made that late.
            *done, last = replies
            replies = [*done, {**last, "success": True}] if "Timed out" in last["error"] else done
            if rest := commands[len(replies) :]:
                replies += await self._exec(session, *rest)
        if any(reply.get("warning") or (reply.get("result") or {}).get("dialogOpened") for reply in replies):
            await self._answered_dialogs(session)
        if not replies[-1]["success"]:
            raise ToolFailure(str(replies[-1]["error"]))
        return [reply["result"] for reply in replies]

    async def close(self) -> None:
        """End the browser, and remove its files. The next command starts another."""
        process, self._process, self.dialogs = self._process, None, []
        if process is not None and self._sandbox is not None:
            await process.kill()
            await self._sandbox.exec(_CLEAN_UP, timeout=30, cwd="/", env={"FOLDER": self._folder}, fresh=True)

    async def _exec(self, session: ToolSession, *commands: Command, annotate: bool = False) -> list[dict[str, Any]]:
        sandbox = await session.sandbox()
        done = await sandbox.exec(
            f"{shlex.quote(self._program)} --json {'--annotate' if annotate else ''} batch --bail",
            timeout=COMMAND_SECONDS,
            cwd=self._folder,
            env=self._variables(),
            stdin=json.dumps(commands).encode(),
            max_output=_MAX_OUTPUT,
            fresh=True,
        )
        if done.timed_out:
            raise await self._lost(f"the page did not answer within {COMMAND_SECONDS:g} s")
        if done.stdout_elided:
            raise ToolFailure(f"the page is too large: its answer has {len(done.stdout) + done.stdout_elided} bytes")
        try:
            replies = json.loads(done.stdout)
            if not isinstance(replies, list) or not replies:
                raise ValueError
        except ValueError:
            raise await self._lost(f"the browser ended ({shortened(printable(done.stdout + done.stderr))!r})") from None
        if "no response came back" in str(replies[-1].get("error")):  # agent-browser's own limit
            raise await self._lost("the page did not answer")
        found: list[dict[str, Any]] = replies
        return found

    async def _lost(self, why: str) -> ToolFailure:
        failure = ToolFailure(
            f"{why}, so the browser was closed. The next call starts another, with an empty page and without cookies: "
            "use browser_navigate"
        )
        await self.close()
        return failure

    async def _answered_dialogs(self, session: ToolSession) -> bool:
        """Answer dialogs with OK. Whether there were any."""
        for answered in range(MAX_DIALOGS):
            (status,) = await self._exec(session, ("dialog", "status"))
            about = status["result"] or {}
            if not about.get("hasDialog"):
                return answered > 0
            self.dialogs.append(f"{about['type']}: {shortened(str(about['message']))} (answered with OK)")
            await self._exec(session, ("dialog", "accept"))
        raise await self._lost(f"the page opened {MAX_DIALOGS} dialogs in a row, the last one {self.dialogs[-1]!r}")

    async def _ready(self, session: ToolSession) -> None:
        if self._process is not None and (await self._process.status()).exit_code is None:
            return
        await self.close()
        try:
            await self._start(session)
        except _NotStarted as failed:
            fresh, another = session.another(), Browser()
            try:
                await another._start(fresh)
            except _NotStarted as again:
                raise BackendError(
                    f"the browser does not start, also in a new sandbox: {again}. Next step: see that the sandbox has "
                    f"{chromium()}, 1 GiB of memory and 300 processes ({INSTALL})"
                ) from None
            finally:
                await fresh.close()
            raise ToolFailure(
                f"no browser starts in this sandbox, where one does in a new sandbox: {failed}. Look for what uses up "
                "its memory, disk or processes"
            ) from None

    async def _start(self, session: ToolSession) -> None:
        """Raises `_NotStarted`."""
        self._sandbox = sandbox = await session.sandbox()
        self._folder = f"/tmp/browser-{secrets.token_hex(4)}"
        try:
            self._program = await self._placed(sandbox)
        except OSError as error:
            raise _NotStarted(f"agent-browser cannot be copied into the sandbox: {error}") from None
        folder, program = shlex.quote(self._folder), shlex.quote(self._program)
        # The process ends when agent-browser's does, and to kill it ends the browser.
        command = (
            f"mkdir -p {folder} && cd {folder} && "
            f"{program} --json open about:blank && while kill -0 $(cat {folder}/s.pid); do sleep 1; done 2>/dev/null"
        )
        self._process = process = await sandbox.start(command, cwd="/", env=self._variables())
        session.internal_processes.add(process.id)
        started = False
        try:
            output, ends = b"", asyncio.get_running_loop().time() + START_SECONDS
            while b"\n" not in output and (left := ends - asyncio.get_running_loop().time()) > 0:
                chunk = await process.read(len(output), wait=left)
                output += chunk.data
                if chunk.exit_code is not None:
                    break
            started = b'"success":true' in output
        finally:
            if not started:
                await self.close()
        if not started:
            said = shortened(printable(output).strip())
            raise _NotStarted(said or f"it did not answer within {START_SECONDS:g} s")

    async def _placed(self, sandbox: Sandbox) -> str:
        """The path of agent-browser in the sandbox, which sees that of this machine or gets a copy."""
        binary = agent_browser()
        if binary is None:  # it was there when the tools were chosen
            raise BackendError(f"agent-browser is gone from this machine. Next step: {INSTALL}")
        seen = await sandbox.exec(f"test -x {shlex.quote(str(binary))}", timeout=30, cwd="/", fresh=True)
        if seen.exit_code == 0:
            return str(binary)
        inside = "/tmp/agent-browser"
        data = await asyncio.to_thread(binary.read_bytes)
        if (await sandbox.stat(inside)).size != len(data):
            await sandbox.write_bytes(inside, data, mode=0o755)
        return inside

    def _variables(self) -> Mapping[str, str]:
        return {
            "AGENT_BROWSER_ARGS": ",".join(_ARGUMENTS),
            "AGENT_BROWSER_DEFAULT_TIMEOUT": "5000",
            "AGENT_BROWSER_EXECUTABLE_PATH": chromium(),
            "AGENT_BROWSER_NO_AUTO_DIALOG": "1",
            "AGENT_BROWSER_NO_VERSION_CHECK": "1",
            "AGENT_BROWSER_SESSION": "s",
            "AGENT_BROWSER_SOCKET_DIR": self._folder,
            "HOME": self._folder,
            "TMPDIR": self._folder,
        }
