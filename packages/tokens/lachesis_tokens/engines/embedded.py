"""A small model on this machine's CPU, for tests, demos and first steps: no account, no GPU, ready in seconds.

It runs in a child process, so a crash of llama.cpp is only an error here. The child ends with its parent, also after
`kill -9`. `EmbeddedServer().settings()` are the settings of an `OpenAIServer`.
"""

from __future__ import annotations

import asyncio
import contextlib
import importlib.util
import json
import secrets
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import IO, Any

from backends.errors import ExitCode, LachesisError
from lachesis_client.client_settings import ServerSettings
from lachesis_client.lifecycle import AsyncService
from lachesis_tokens.prompts.gguf_metadata import GGUFError, read_metadata
from lachesis_tokens.prompts.smollm2_file import smollm2_file

_HERE = Path(__file__).parent
HERMES_TEMPLATE = _HERE.parent / "templates" / "files" / "hermes.jinja"
_TAIL = 2000


class EmbeddedServerError(LachesisError, RuntimeError):
    """The embedded model cannot start, or has ended. The message has the reason, the log's end and the next step."""

    def __init__(self, model: str, reason: str, next_step: str) -> None:
        super().__init__(f"embedded model {model!r}: {reason}; {next_step}")


class NoModelFile(EmbeddedServerError):
    """There is no file at the path."""

    exit_code = ExitCode.SETTINGS


class EmbeddedServer(AsyncService):
    """llama.cpp's OpenAI-compatible server around one model file, as an async context manager.

    Start it in a thread that outlives it: the child ends with that thread.

    Args:
        model: "smollm2" (SmolLM2-135M-Instruct, which `lachesis demo` downloads once), or the path of a GGUF file, of a
            whole model or of a LoRA adapter of SmolLM2.
        threads: CPU threads in all.
        parallel: slots, the number of concurrent requests.
        context: tokens per slot.
        prompt_cache: reuse the conversation's earlier tokens. The cache rounds slightly differently: without it, and
            with one request at a time, a seed always gives the same answer.
        template: the path of a chat template. The default is the model's if it shows tools, else `HERMES_TEMPLATE`.
        log: a file to which the child's log is appended.
    """

    def __init__(
        self,
        model: str | Path = "smollm2",
        *,
        threads: int = 1,
        parallel: int = 4,
        context: int = 4096,
        port: int = 0,
        prompt_cache: bool = True,
        template: str | Path | None = None,
        log: str | Path | None = None,
        start_timeout: float = 120.0,
    ) -> None:
        self.model = str(model)
        self.model_name = Path(self.model).stem
        self.threads, self.parallel, self.context, self.port = threads, parallel, context, port
        self.prompt_cache = prompt_cache
        self.api_key = secrets.token_urlsafe(24)
        """The bearer token that it asks for."""
        self.template = Path(template) if template is not None else None
        self.start_timeout = start_timeout
        self._log_path = log
        self._log: IO[bytes] | None = None
        self._process: subprocess.Popen[bytes] | None = None
        self._address: str | None = None

    @property
    def address(self) -> str:
        """`http://127.0.0.1:<port>`, the base of llama.cpp's own routes (`/props`, `/apply-template`, `/tokenize`)."""
        if self._process is None or self._address is None:
            raise self._error("it is not running", "call start(), or use it as an async context manager")
        if (status := self._process.poll()) is not None:
            raise self._error(f"its process ended with status {status}{self._log_tail()}", "start it again")
        return self._address

    @property
    def base_url(self) -> str:
        """The OpenAI-compatible API."""
        return f"{self.address}/v1"

    @property
    def model_file(self) -> Path:
        """The first of `files`: vocabulary and all weights."""
        return self.files[0]

    @property
    def files(self) -> tuple[Path, ...]:
        """The GGUF file of the whole model, and that of the adapter if one was given: together they are what plays.

        Raises `EmbeddedServerError` if one is missing.
        """
        if importlib.util.find_spec("xllamacpp") is None:
            raise self._error("the package xllamacpp is not installed", "pip install xllamacpp")
        path = None
        if self.model != "smollm2":
            path = Path(self.model).expanduser().resolve()
            if not path.is_file():
                raise NoModelFile(self.model, f"there is no file {path}", 'give the path of a GGUF file, or "smollm2"')
            if not _is_adapter(path):
                return (path,)
        try:
            return (smollm2_file(), path) if path is not None else (smollm2_file(),)
        except FileNotFoundError as error:
            raise self._error(*str(error).split("; ", 1)) from None

    @property
    def pid(self) -> int | None:
        """The child's process id while it runs."""
        return self._process.pid if self._process else None

    def settings(self, **overrides: Any) -> ServerSettings:
        """Settings for an `OpenAIServer`: the hermes parser reads tool calls, and each slot has one request."""
        defaults = {"tool_call_parser": "hermes", "max_concurrency": self.parallel, "model_name": self.model_name}
        return ServerSettings(**{"base_url": self.base_url, "api_key": self.api_key, **defaults, **overrides})

    async def start(self) -> None:
        """Start the child and wait until the model is loaded. Raises `EmbeddedServerError`."""
        model, *adapters = self.files
        order = {
            "name": self.model_name,
            "path": str(model),
            "adapters": list(map(str, adapters)),
            "threads": self.threads,
            "parallel": self.parallel,
            "context": self.context,
            "port": self.port,
            "api_key": self.api_key,
            "prompt_cache": self.prompt_cache,
            "template": await asyncio.to_thread(self._template_text, model),
        }
        if self._process is not None:
            raise self._error("it is running already", "stop() it first")
        self._log = _open_log(self._log_path)
        self._process = subprocess.Popen(  # noqa: ASYNC220  # the child ends with the thread that starts it
            [sys.executable, "-P", str(_HERE / "embedded_child.py")],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self._log,
        )
        try:
            async with asyncio.timeout(self.start_timeout):
                report = await asyncio.to_thread(_exchange, self._process, order)
            if "address" not in report:
                cause = report.get("error", "its process ended")
                step = "apt-get install libgomp1" if "libgomp" in cause else "check the model file"
                raise self._error(f"{cause}{self._log_tail()}", step)
            self._address = report["address"]
        except TimeoutError:
            tail = self._log_tail()
            await self.stop()
            raise self._error(f"not ready after {self.start_timeout:g} s{tail}", "raise start_timeout") from None
        except BaseException:
            await self.stop()
            raise

    def _template_text(self, model: Path) -> str | None:
        """What replaces the model's own template; None if nothing does."""
        if self.template is not None:
            return self.template.read_text(encoding="utf-8")
        try:
            own = [text for key, text in read_metadata(model).items() if key.startswith("tokenizer.chat_template")]
        except GGUFError:
            return None  # llama.cpp says what is wrong
        return None if any("tools" in text for text in own) else HERMES_TEMPLATE.read_text(encoding="utf-8")

    async def stop(self) -> None:
        """End the child. It can be called at any time and repeatedly."""
        process, self._process, self._address = self._process, None, None
        log, self._log = self._log, None
        try:
            if process is not None:
                await asyncio.shield(asyncio.to_thread(_end, process))
        finally:
            if log is not None:
                log.close()

    def _log_tail(self) -> str:
        if self._log is None:
            return ""
        size = self._log.seek(0, 2)
        self._log.seek(max(0, size - _TAIL))
        tail = self._log.read().decode("utf-8", "replace").strip()
        return f"; the end of its log:\n{tail}\n" if tail else ""

    def _error(self, reason: str, next_step: str) -> EmbeddedServerError:
        return EmbeddedServerError(self.model, reason, next_step)


def _is_adapter(path: Path) -> bool:
    try:
        return read_metadata(path).get("general.type") == "adapter"
    except GGUFError:
        return False  # llama.cpp says what is wrong


def _open_log(path: str | Path | None) -> IO[bytes]:
    """The given file, or an unnamed one, which leaves nothing on the disk."""
    return Path(path).open("ab+") if path else tempfile.TemporaryFile()


def _exchange(process: subprocess.Popen[bytes], order: dict[str, Any]) -> dict[str, str]:
    """Send the order to the child. Returns its one line of answer, {} if it ended before."""
    assert process.stdin and process.stdout
    try:
        process.stdin.write(json.dumps(order).encode() + b"\n")
        process.stdin.flush()
    except BrokenPipeError:
        return {}
    line = process.stdout.readline()
    report: dict[str, str] = json.loads(line) if line else {}
    if "address" not in report:
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(2.0)  # until its log is complete
    return report


def _end(process: subprocess.Popen[bytes]) -> None:
    """Close stdin, then SIGTERM, then SIGKILL, each after 2 seconds."""
    if process.stdin:
        process.stdin.close()
    for last_resort in (process.terminate, process.kill):
        try:
            process.wait(2.0)
            break
        except subprocess.TimeoutExpired:
            last_resort()
    process.wait()
    if process.stdout:
        process.stdout.close()
