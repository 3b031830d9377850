"""SWE-ReX for comparison with our sandboxes: its local deployment, in a separate process with a Python that has it.

Its half runs there and measures times there, so that the transport costs nothing: a line of JSON names the operation
and the number of runs, and another returns the seconds of each.
"""

from __future__ import annotations

import asyncio
import importlib
import json
import os
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

RELEASE = "swe-rex==1.4.0"
MINUTES = 600.0
"""How many seconds its installation may take."""


class PeerMissing(Exception):
    """SWE-ReX is missing. The message says how to get it."""


class SweRex:
    """A running deployment. Figures are seconds."""

    def __init__(self, process: asyncio.subprocess.Process) -> None:
        self._process = process

    async def execute(self, times: int) -> list[float]:
        """`execute` of `true` with `shell=True`."""
        return await self._ask("execute", times)

    async def run_in_session(self, times: int) -> list[float]:
        return await self._ask("session", times)

    async def cold_start(self) -> tuple[float, float]:
        """A deployment with one session that has run one command, and its close."""
        ready, closed = await self._ask("start", 1)
        return ready, closed

    async def _ask(self, what: str, times: int) -> list[float]:
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._process.stdin.write(json.dumps([what, times]).encode() + b"\n")
        answer = await self._process.stdout.readline()
        if not answer:
            raise RuntimeError("the process with swe-rex has ended; its own message is above")
        seconds: list[float] = json.loads(answer)
        return seconds


@asynccontextmanager
async def swe_rex(python: str) -> AsyncIterator[SweRex]:
    """Start it with this Python and an empty home: its session is a bash that reads the user's start-up files."""
    with tempfile.TemporaryDirectory() as home:
        env = {"PATH": os.environ.get("PATH", os.defpath), "HOME": home, "SWE_REX_LOG_STREAM_LEVEL": "ERROR"}
        pipe = asyncio.subprocess.PIPE
        process = await asyncio.create_subprocess_exec(python, __file__, stdin=pipe, stdout=pipe, env=env)
        try:
            yield SweRex(process)
        finally:
            assert process.stdin is not None
            process.stdin.close()
            await process.wait()


def installed(folder: Path) -> str:
    """A Python with SWE-ReX, in a new virtual environment in `folder`.

    Raises:
        PeerMissing: the installation failed.
    """
    python = str(folder / "bin/python")
    uv = shutil.which("uv", path=str(Path(sys.executable).parent)) or shutil.which("uv")
    if uv is not None:
        steps = [[uv, "venv", "-q", "-p", sys.executable, str(folder)]]
        steps += [[uv, "pip", "install", "-q", "-p", python, RELEASE]]
    else:
        steps = [[sys.executable, "-m", "venv", str(folder)], [python, "-m", "pip", "install", "-q", RELEASE]]
    for step in steps:
        try:
            subprocess.run(step, check=True, capture_output=True, text=True, timeout=MINUTES)
        except (OSError, subprocess.SubprocessError) as error:
            reason = (getattr(error, "stderr", None) or str(error)).strip()[-300:]
            raise PeerMissing(
                f"swe-rex could not be installed: {reason}\n"
                f"Install {RELEASE} in a virtual environment and name its Python with --peer-python, or use --no-peer"
            ) from error
    return python


async def _timed(call: Callable[[], Awaitable[Any]]) -> float:
    started = time.perf_counter()
    answer = await call()
    seconds = time.perf_counter() - started
    if getattr(answer, "exit_code", 0) != 0:
        raise RuntimeError(f"swe-rex: {answer}")
    return seconds


async def _serve() -> None:
    answers = os.fdopen(os.dup(1), "w", buffering=1)
    os.dup2(2, 1)  # it logs to standard output
    deployments: Any = importlib.import_module("swerex.deployment.local")
    requests: Any = importlib.import_module("swerex.runtime.abstract")
    command = requests.Command(command="true", shell=True)
    action = requests.BashAction(command="true")

    async def ready() -> Any:
        deployment = deployments.LocalDeployment()
        await deployment.start()
        await deployment.runtime.create_session(requests.CreateBashSessionRequest())
        await deployment.runtime.run_in_session(action)
        return deployment

    async def start() -> list[float]:
        started = time.perf_counter()
        deployment = await ready()
        return [time.perf_counter() - started, await _timed(deployment.stop)]

    standing = await ready()
    for line in sys.stdin:
        what, times = json.loads(line)
        if what == "start":
            seconds = await start()
        elif what == "execute":
            seconds = [await _timed(lambda: standing.runtime.execute(command)) for _ in range(times)]
        else:
            seconds = [await _timed(lambda: standing.runtime.run_in_session(action)) for _ in range(times)]
        answers.write(json.dumps(seconds) + "\n")
    await standing.stop()


if __name__ == "__main__":
    asyncio.run(_serve())
