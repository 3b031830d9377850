"""The engine as a subprocess that ends with its parent, however that ends."""

from __future__ import annotations

import asyncio
import contextlib
import json
import signal
import subprocess
import sys
import tempfile
from collections.abc import AsyncIterator
from pathlib import Path

from lachesis_train.engine.errors import EngineStartError

_STOP_SECONDS = 15.0


@contextlib.asynccontextmanager
async def start_engine(
    model: str,
    *,
    state_dir: str | Path | None = None,
    dtype: str = "float32",
    device: str = "cpu",
    threads: int = 1,
    lora_layers: int | None = None,
    full_finetuning: bool = False,
    port: int = 0,
    log: str | Path | None = None,
    start_timeout: float = 600.0,
) -> AsyncIterator[str]:
    """Run `lachesis engine` and yield its base URL once it answers; the engine has ended when the context has.

    `model` is `tiny`, `smollm2` or a model folder, `state_dir` where checkpoints are kept, `log` the file that gets the
    engine's output (it is appended to). Raises EngineStartError, with the end of the log, if the engine does not start.
    """
    arguments = ["--model", model, "--port", str(port), "--dtype", dtype, "--device", device, "--threads", str(threads)]
    if state_dir is not None:
        arguments += ["--state-dir", str(state_dir)]
    if lora_layers is not None:
        arguments += ["--lora-layers", str(lora_layers)]
    if full_finetuning:
        arguments.append("--full-finetuning")
    with contextlib.ExitStack() as files:
        if log is None:
            where = Path(files.enter_context(tempfile.TemporaryDirectory(prefix="lachesis-engine-"))) / "engine.log"
        else:
            where = Path(log)
            where.parent.mkdir(parents=True, exist_ok=True)
        output = files.enter_context(where.open("ab"))  # noqa: ASYNC230
        process = await asyncio.create_subprocess_exec(
            sys.executable,
            "-m",
            "lachesis",
            "engine",
            *arguments,
            "--child",
            stdin=subprocess.PIPE,  # its end is the end of this process
            stdout=subprocess.PIPE,
            stderr=output,
            process_group=0,  # Ctrl-C reaches the parent alone, which then ends the engine
        )
        try:
            yield await _address(process, where, start_timeout)
        finally:
            await _stop(process)


async def _address(process: asyncio.subprocess.Process, log: Path, timeout: float) -> str:
    """The line that the engine prints once it listens and its model is loaded."""
    assert process.stdout is not None
    try:
        line = await asyncio.wait_for(process.stdout.readline(), timeout)
    except TimeoutError:
        raise EngineStartError(f"the engine is not ready after {timeout:.0f} s; its log, {_end(log)}") from None
    if not line:
        status = await process.wait()
        raise EngineStartError(f"the engine ended with status {status} before it was ready; its log, {_end(log)}")
    return str(json.loads(line)["base_url"])


def _end(log: Path) -> str:
    text = log.read_text(encoding="utf-8", errors="replace")[-2000:].strip()
    return f"{log}, ends:\n{text or '(it is empty)'}"


async def _stop(process: asyncio.subprocess.Process) -> None:
    if process.returncode is None:
        with contextlib.suppress(ProcessLookupError):
            process.send_signal(signal.SIGTERM)
        try:
            await asyncio.wait_for(asyncio.shield(process.wait()), _STOP_SECONDS)
        except TimeoutError:
            process.kill()
            await process.wait()
    if process.stdin is not None:
        process.stdin.close()
