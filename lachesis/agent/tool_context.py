"""The sandbox that the agent worked in, for its reward, before it is released.

`ToolContext` is asynchronous. A reward that is a plain `def` runs in a worker thread and gets a `BlockingToolContext`
with the same methods, which block.
"""

from __future__ import annotations

import asyncio
import errno
import functools
import json
import shutil
import tempfile
import threading
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Concatenate, ParamSpec, TypeVar

from backends import BackendError, Sandbox
from lachesis.tools import ToolRegistry, ToolSession, call_tool

MAX_TERMINAL_OUTPUT = 10_000_000
"""Bytes of output that `terminal` hands to a reward; the model's own limit is smaller and does not apply here."""
MAX_ARTIFACT = 1 << 30
"""Bytes that `seal` takes along, in all."""
_CHUNK = 1 << 20
_LONGEST = 500
"""Characters of an argument in a `RewardCall`."""
_OURS = (errno.ENOSPC, errno.EDQUOT, errno.EMFILE, errno.ENFILE)
"""Errors of this machine. Reading the agent's files in a sandbox never raises them."""


P = ParamSpec("P")
T = TypeVar("T")


class Sealed(RuntimeError):
    """The agent's sandbox is gone since `seal`: the reward goes on with the context that `seal` returned."""


@dataclass(frozen=True, slots=True)
class RewardCall:
    """One use of a `ToolContext` by a reward, written down apart from what the agent did."""

    method: str
    arguments: tuple[str, ...]
    """In short: a long value is cut, bytes are only counted."""
    seconds: float
    error: str = ""
    """Of an exception that it raised."""

    def to_record(self) -> dict[str, Any]:
        record = {"method": self.method, "arguments": list(self.arguments), "seconds": self.seconds}
        return {**record, "error": self.error} if self.error else record


def _noted(
    method: Callable[Concatenate[ToolContext, P], Awaitable[T]],
) -> Callable[Concatenate[ToolContext, P], Awaitable[T]]:
    """Log the call, and keep a failure of the infrastructure even if the reward catches it: it is no low score."""

    @functools.wraps(method)
    async def call(self: ToolContext, /, *args: P.args, **kwargs: P.kwargs) -> T:
        begin, problem = time.monotonic(), ""
        try:
            return await method(self, *args, **kwargs)
        except BaseException as error:
            if isinstance(error, BackendError):
                self._shared.failure = self._shared.failure or error
            problem = f"{type(error).__name__}: {error}"
            raise
        finally:
            arguments = [_brief(arg) for arg in args] + [f"{name}={_brief(value)}" for name, value in kwargs.items()]
            seconds = round(time.monotonic() - begin, 4)
            self._shared.calls.append(RewardCall(method.__name__, tuple(arguments), seconds, problem[:500]))

    return call


@dataclass(slots=True)
class _Shared:
    """What a context and those that it was sealed into have in common."""

    calls: list[RewardCall]
    failure: BackendError | None = None


class ToolContext:
    """The sandbox of one rollout, for its reward.

    Every path is a path inside; relative ones start at the workspace, `~` is the agent's home. Methods raise
    `BackendError` when the sandbox is lost: the rollout is then left out or played again, whatever the reward returns.
    """

    def __init__(
        self,
        session: ToolSession,
        registry: ToolRegistry,
        *,
        open_verifier: Callable[[], ToolSession] | None = None,
        shared: _Shared | None = None,
    ) -> None:
        """`open_verifier` gives `seal` a second session, like the agent's own was at its start."""
        self.missing: tuple[str, ...] = ()
        """Of the paths given to `seal`: those that the agent left nothing at."""
        self.refused: Mapping[str, str] = {}
        """Of the paths given to `seal`: those that were not taken along, with the reason."""
        self._session = session
        self._registry = registry
        self._open_verifier = open_verifier
        self._shared = shared or _Shared([])
        self._sealed = False

    @property
    def task_id(self) -> str:
        return self._session.task_id

    @property
    def failure(self) -> BackendError | None:
        """The first failure of the infrastructure that a method met."""
        return self._shared.failure

    @property
    def calls(self) -> tuple[RewardCall, ...]:
        """What the reward has done so far, apart from what the agent did."""
        return tuple(self._shared.calls)

    @_noted
    async def terminal(self, command: str, timeout: float = 180) -> dict[str, Any]:
        """Run `command` in the workspace; `{"output", "exit_code", "error"}`, stdout before stderr in `output`.

        Every call starts in the workspace with the sandbox' first variables, wherever the agent's own `cd` went and
        whatever it exported. A command that takes longer than `timeout` seconds is killed and has exit code 124 and an
        `error`; so has output of more than `MAX_TERMINAL_OUTPUT` bytes, whose middle is missing.
        """
        sandbox = await self._sandbox()
        done = await sandbox.exec(command, timeout=timeout, fresh=True, max_output=MAX_TERMINAL_OUTPUT)
        problems = [f"the command took longer than {timeout:g} s"] if done.timed_out else []
        for stream, elided in (("stdout", done.stdout_elided), ("stderr", done.stderr_elided)):
            problems += [f"{elided} bytes are missing in the middle of {stream}"] if elided else []
        return {
            "output": (done.stdout + done.stderr).decode(errors="replace"),
            "exit_code": done.exit_code,
            "error": "; ".join(problems) or None,
        }

    @_noted
    async def read_file(self, path: str, default: str | None = "") -> str:
        """The whole text of a file. Where the agent left none that can be read, `default`; None makes that an error.

        A pipe, a loop of links, a file without permissions or of more than 256 MiB is the agent's doing, and no failure
        of the environment.
        """
        try:
            return (await (await self._sandbox()).read_bytes(await self._path(path))).decode(errors="replace")
        except OSError:
            if default is None:
                raise
            return default

    @_noted
    async def read_bytes(self, path: str) -> bytes:
        return await (await self._sandbox()).read_bytes(await self._path(path))

    @_noted
    async def write_file(self, path: str, content: str | bytes) -> None:
        """Write a file whole, making missing parent folders."""
        data = content.encode() if isinstance(content, str) else content
        await (await self._sandbox()).write_bytes(await self._path(path), data)

    async def search(self, query: str, path: str = ".") -> dict[str, Any]:
        """Lines of files below `path` that match the regular expression `query`, as the tool `search_files` does."""
        return _as_dict(await self.call_tool("search_files", {"pattern": query, "path": path}))

    @_noted
    async def upload_file(self, local_path: str | Path, remote_path: str) -> None:
        """Copy a file of this machine into the sandbox, byte for byte, in constant memory."""
        await (await self._sandbox()).write_chunks(await self._path(remote_path), _chunks(Path(local_path)))

    @_noted
    async def download_file(self, remote_path: str, local_path: str | Path) -> None:
        """Copy a file out of the sandbox, byte for byte, in constant memory. Replaces `local_path` when it is whole."""
        sandbox = await self._sandbox()
        await _write_local(Path(local_path), sandbox.read_chunks(await self._path(remote_path)))

    @_noted
    async def upload_dir(self, local_dir: str | Path, remote_dir: str) -> None:
        """Copy a folder of this machine, with everything below it, into the sandbox."""
        await (await self._sandbox()).upload_dir(local_dir, await self._path(remote_dir))

    @_noted
    async def download_dir(self, remote_dir: str, local_dir: str | Path) -> None:
        """Copy a folder out of the sandbox. Rejects members that would land outside `local_dir`."""
        await (await self._sandbox()).download_dir(await self._path(remote_dir), local_dir)

    async def web_search(self, query: str) -> dict[str, Any]:
        return _as_dict(await self.call_tool("web_search", {"query": query}))

    async def web_extract(self, urls: list[str]) -> dict[str, Any]:
        return _as_dict(await self.call_tool("web_extract", {"urls": urls}))

    async def browser_navigate(self, url: str) -> dict[str, Any]:
        return _as_dict(await self.call_tool("browser_navigate", {"url": url}))

    async def browser_snapshot(self) -> dict[str, Any]:
        return _as_dict(await self.call_tool("browser_snapshot", {}))

    @_noted
    async def call_tool(self, name: str, args: Mapping[str, Any]) -> str:
        """Call a tool as the agent does. The text says so when the tool failed or does not exist."""
        self._require_open()
        return (await call_tool(name, args, self._session, registry=self._registry)).content

    @_noted
    async def seal(self, paths: Iterable[str], *, max_bytes: int = MAX_ARTIFACT) -> ToolContext:
        """Take what the agent left at `paths` into a fresh sandbox, and end the agent's own.

        First everything that runs in the agent's sandbox is killed; then the files and folders at `paths` are copied
        out, the sandbox is removed, and a new one is made from the same base with the copies at the same places. What
        the reward puts there afterwards, tests for example, the agent has never seen, and nothing of the agent's runs
        beside it. This context refuses every later call; go on with the one that is returned, whose `missing` and
        `refused` name the paths that are not there: scoring them is the reward's part.

        Args:
            paths: files or folders; relative ones start at the workspace.
            max_bytes: of all artifacts together; what does not fit is refused.

        Raises:
            BackendError: a sandbox failed, as in any method.
        """
        self._require_open()
        if self._open_verifier is None:
            raise Sealed("this context is already the one of a verifier sandbox; it cannot be sealed again")
        wanted = [paths] if isinstance(paths, str) else list(dict.fromkeys(paths))
        agents = await self._sandbox()
        await agents.stop_processes()
        folder = Path(tempfile.mkdtemp(prefix="lachesis-seal-"))
        try:
            taken, missing, refused = await self._take(wanted, folder, max_bytes)
            self._sealed = True
            await self._session.close()
            verifier = ToolContext(self._open_verifier(), self._registry, shared=self._shared)
            for path, (inside, kept) in taken.items():
                try:
                    await _place(await verifier._sandbox(), inside, kept)
                except OSError as error:  # the agent's copy of a small disk may be large, or in a folder's way
                    refused[path] = f"it cannot be put into a fresh sandbox: {error.strerror or error}"
        finally:
            # In a thread, which also ends it if this is cancelled: it may hold as many files as the agent liked.
            await asyncio.shield(asyncio.to_thread(shutil.rmtree, folder, ignore_errors=True))
        verifier.missing, verifier.refused = missing, refused
        return verifier

    async def _take(
        self, paths: list[str], folder: Path, room: int
    ) -> tuple[dict[str, tuple[str, Path]], tuple[str, ...], dict[str, str]]:
        """By path, the artifacts' absolute paths inside with their copies; the paths that have none; the refused."""
        sandbox = await self._sandbox()
        taken: dict[str, tuple[str, Path]] = {}
        missing: list[str] = []
        refused: dict[str, str] = {}
        for number, path in enumerate(paths):
            inside, kept = await self._path(path), folder / str(number)
            if not inside.strip("/"):
                refused[path] = "the root folder is no artifact"
                continue
            try:
                try:
                    await _write_local(kept, sandbox.read_chunks(inside), room)
                    executable = await sandbox.exec('test -x "$P"', timeout=30, env={"P": inside}, fresh=True)
                    await asyncio.to_thread(kept.chmod, 0o700 if executable.exit_code == 0 else 0o600)
                except IsADirectoryError:
                    await sandbox.download_dir(inside, kept, max_bytes=room)
            except (FileNotFoundError, NotADirectoryError):
                missing.append(path)
            except OSError as error:
                if error.errno in _OURS:
                    raise BackendError(f"the artifacts cannot be kept on this machine: {error}") from error
                refused[path] = error.strerror or str(error)
                await asyncio.to_thread(shutil.rmtree, kept, ignore_errors=True)  # as far as it came
            else:
                room -= await asyncio.to_thread(_size, kept)
                taken[path] = inside, kept
        return taken, tuple(missing), refused

    @_noted
    async def cleanup(self) -> None:
        """Release the sandbox early. Called for you after the reward."""
        await self._session.close()

    def _require_open(self) -> None:
        if self._sealed:
            raise Sealed(f"the agent's sandbox of {self.task_id} is sealed; use the context that seal() returned")

    async def _sandbox(self) -> Sandbox:
        self._require_open()
        return await self._session.sandbox()

    async def _path(self, path: str) -> str:
        return await self._session.path(path)


def _brief(value: Any) -> str:
    """An argument in at most a few hundred characters."""
    if isinstance(value, bytes):
        return f"{len(value)} bytes"
    text = value if isinstance(value, str) else repr(value)
    return text if len(text) <= _LONGEST else f"{text[:_LONGEST]}... ({len(text)} characters)"


def _as_dict(text: str) -> dict[str, Any]:
    try:
        value = json.loads(text)
    except ValueError:
        return {"output": text}
    return value if isinstance(value, dict) else {"output": value}


async def _chunks(path: Path) -> AsyncIterator[bytes]:
    file = await asyncio.to_thread(path.open, "rb")
    try:
        while data := await asyncio.to_thread(file.read, _CHUNK):
            yield data
    finally:
        file.close()


async def _write_local(path: Path, chunks: AsyncIterator[bytes], room: int | None = None) -> None:
    """Write beside `path`, then move over it. More than `room` bytes are an `OSError`."""
    await asyncio.to_thread(path.parent.mkdir, parents=True, exist_ok=True)
    temporary = path.with_name(f".{path.name}.part-{threading.get_ident():x}-{time.monotonic_ns():x}")
    try:
        with temporary.open("wb") as file:  # in no thread: cancelled, it would make the file after it was removed
            written = 0
            async for chunk in chunks:
                written += len(chunk)
                if room is not None and written > room:
                    raise OSError(f"more than {room} bytes")
                await asyncio.to_thread(file.write, chunk)
        await asyncio.to_thread(temporary.replace, path)
    except BaseException:
        temporary.unlink(missing_ok=True)
        raise


async def _place(sandbox: Sandbox, inside: str, kept: Path) -> None:
    """Put an artifact where it was. Raises `OSError`, and leaves no part of it."""
    if not kept.is_dir():
        await sandbox.write_chunks(inside, _chunks(kept))
        if kept.stat().st_mode & 0o100:
            await sandbox.exec('chmod +x -- "$P"', timeout=30, env={"P": inside})
        return
    try:
        await sandbox.upload_dir(kept, inside)
    except OSError as error:
        if error.errno in (errno.ENOSPC, errno.EDQUOT):  # the room is the reward's
            await sandbox.exec('rm -rf -- "$P"', timeout=30, env={"P": inside}, fresh=True)
        raise


def _size(path: Path) -> int:
    if path.is_dir():
        return sum(member.lstat().st_size for member in path.rglob("*"))
    return path.stat().st_size
