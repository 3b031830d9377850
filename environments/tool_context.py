"""What a reward may do: look into the very sandbox that the agent worked in, before it is released.

`ToolContext` is asynchronous. A reward that is a plain `def` runs in a worker thread and gets a `BlockingToolContext`
with the same methods, which wait there.
"""

from __future__ import annotations

import asyncio
import functools
import inspect
import io
import json
import tarfile
import threading
import uuid
from collections.abc import Awaitable, Callable, Mapping
from concurrent.futures import CancelledError, Future
from pathlib import Path
from typing import Any, Concatenate, ParamSpec, TypeVar

from backends import BackendError
from tools import ToolRegistry, ToolSession, call_tool

MAX_TERMINAL_OUTPUT = 10_000_000
"""Bytes of output that `terminal` hands to a reward; the model's own limit is smaller and does not apply here."""


P = ParamSpec("P")
T = TypeVar("T")


class RewardIsOver(RuntimeError):
    """A reward that ran out of time, or whose rollout was cancelled, still uses its context."""


def _noted(
    method: Callable[Concatenate[ToolContext, P], Awaitable[T]],
) -> Callable[Concatenate[ToolContext, P], Awaitable[T]]:
    """Keep a failure of the infrastructure also when the reward catches it: it must not become a low score."""

    @functools.wraps(method)
    async def call(self: ToolContext, /, *args: P.args, **kwargs: P.kwargs) -> T:
        try:
            return await method(self, *args, **kwargs)
        except BackendError as error:
            self.failure = self.failure or error
            raise

    return call


class ToolContext:
    """The sandbox of one rollout, for its reward.

    Every path is a path inside; relative ones start at the workspace, `~` is the agent's home. Methods raise
    `BackendError` when the sandbox is lost: the rollout is then left out or played again, whatever the reward returns.
    """

    def __init__(self, session: ToolSession, registry: ToolRegistry) -> None:
        self.failure: BackendError | None = None
        """The first failure of the infrastructure that a method met."""
        self._session = session
        self._registry = registry

    @property
    def task_id(self) -> str:
        return self._session.task_id

    @_noted
    async def terminal(self, command: str, timeout: float = 180) -> dict[str, Any]:
        """Run `command` in the workspace; `{"output", "exit_code", "error"}`, stdout before stderr in `output`.

        Every call starts in the workspace, wherever the agent's own `cd` went. A command that takes longer than
        `timeout` seconds is killed and has exit code 124 and an `error`.
        """
        sandbox = await self._session.sandbox()
        done = await sandbox.exec(command, timeout=timeout, cwd=sandbox.workdir, max_output=MAX_TERMINAL_OUTPUT)
        return {
            "output": (done.stdout + done.stderr).decode(errors="replace"),
            "exit_code": done.exit_code,
            "error": f"the command took longer than {timeout:g} s" if done.timed_out else None,
        }

    async def read_file(self, path: str, default: str | None = "") -> str:
        """The whole text of a file. One that the agent did not write reads as `default`; None makes that an error."""
        try:
            return (await self.read_bytes(path)).decode(errors="replace")
        except (FileNotFoundError, IsADirectoryError, NotADirectoryError):
            if default is None:
                raise
            return default

    @_noted
    async def read_bytes(self, path: str) -> bytes:
        return await (await self._session.sandbox()).read_bytes(await self._session.path(path))

    @_noted
    async def write_file(self, path: str, content: str | bytes) -> None:
        """Write a file whole, making missing parent folders."""
        data = content.encode() if isinstance(content, str) else content
        await (await self._session.sandbox()).write_bytes(await self._session.path(path), data)

    async def search(self, query: str, path: str = ".") -> dict[str, Any]:
        """Lines of files below `path` that match the regular expression `query`, as the tool `search_files` does."""
        return _as_dict(await self.call_tool("search_files", {"pattern": query, "path": path}))

    async def upload_file(self, local_path: str | Path, remote_path: str) -> None:
        """Copy a file of this machine into the sandbox."""
        data = await asyncio.to_thread(Path(local_path).read_bytes)
        await self.write_file(remote_path, data)

    async def download_file(self, remote_path: str, local_path: str | Path) -> None:
        """Copy a file out of the sandbox, byte for byte."""
        data = await self.read_bytes(remote_path)
        await asyncio.to_thread(_write_local, Path(local_path), data)

    @_noted
    async def upload_dir(self, local_dir: str | Path, remote_dir: str) -> None:
        """Copy a folder of this machine, with everything below it, into the sandbox."""
        archive = await asyncio.to_thread(_pack, Path(local_dir))
        sandbox = await self._session.sandbox()
        done = await sandbox.exec(
            'mkdir -p -- "$LACHESIS_DIR" && tar -x -C "$LACHESIS_DIR"',
            timeout=600,
            stdin=archive,
            env={"LACHESIS_DIR": await self._session.path(remote_dir)},
        )
        if done.exit_code:
            raise OSError(f"could not unpack into {remote_dir!r}: {done.stderr.decode(errors='replace').strip()}")

    @_noted
    async def download_dir(self, remote_dir: str, local_dir: str | Path) -> None:
        """Copy a folder out of the sandbox. Members that would land outside `local_dir` are refused."""
        sandbox = await self._session.sandbox()
        packed = f"/tmp/.lachesis-{uuid.uuid4().hex}.tar"
        names = {"LACHESIS_DIR": await self._session.path(remote_dir), "LACHESIS_TAR": packed}
        try:
            done = await sandbox.exec('tar -c -f "$LACHESIS_TAR" -C "$LACHESIS_DIR" .', timeout=600, env=names)
            if done.exit_code:
                raise OSError(f"could not read {remote_dir!r}: {done.stderr.decode(errors='replace').strip()}")
            archive = await sandbox.read_bytes(packed)
        finally:
            await sandbox.exec('rm -f -- "$LACHESIS_TAR"', timeout=60, env=names)
        await asyncio.to_thread(_unpack, archive, Path(local_dir))

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
        return (await call_tool(name, args, self._session, registry=self._registry)).content

    @_noted
    async def cleanup(self) -> None:
        """Release the sandbox early. Called for you after the reward."""
        await self._session.close()


class BlockingToolContext:
    """`ToolContext` for a plain `def`: every method blocks its thread until the result is there.

    On the event loop's own thread, where blocking would stop everything, a method returns its awaitable instead: a
    plain function that hands over to a coroutine works, too.
    """

    def __init__(self, context: ToolContext, loop: asyncio.AbstractEventLoop) -> None:
        self._context = context
        self._loop = loop
        self._loop_thread = threading.get_ident()
        self._pending: set[Future[Any]] = set()
        self._over = False

    @property
    def task_id(self) -> str:
        return self._context.task_id

    def __getattr__(self, name: str) -> Callable[..., Any]:
        if name.startswith("_") or not inspect.iscoroutinefunction(getattr(type(self._context), name, None)):
            raise AttributeError(f"{type(self).__name__!r} object has no attribute {name!r}")
        method = getattr(self._context, name)

        @functools.wraps(method)
        def call(*args: Any, **kwargs: Any) -> Any:
            if threading.get_ident() == self._loop_thread:
                return method(*args, **kwargs)
            return self._wait(method, args, kwargs)

        return call

    def _wait(self, method: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        if self._ended():
            raise RewardIsOver(f"the reward of {self.task_id} is over; nobody waits for its result")
        future = asyncio.run_coroutine_threadsafe(method(*args, **kwargs), self._loop)
        self._pending.add(future)
        if self._ended():  # in between
            future.cancel()
        try:
            return future.result()
        except CancelledError:
            raise RewardIsOver(f"the reward of {self.task_id} is over; nobody waits for its result") from None
        finally:
            self._pending.discard(future)

    def _ended(self) -> bool:
        return self._over

    def end(self) -> None:
        """Let a thread that nobody waits for run into an error at its next use of the context, or its present one."""
        self._over = True
        for future in tuple(self._pending):
            future.cancel()


def _as_dict(text: str) -> dict[str, Any]:
    try:
        value = json.loads(text)
    except ValueError:
        return {"output": text}
    return value if isinstance(value, dict) else {"output": value}


def _write_local(path: Path, data: bytes) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(data)


def _pack(folder: Path) -> bytes:
    if not folder.is_dir():
        raise NotADirectoryError(f"{folder} is not a folder")
    buffer = io.BytesIO()
    with tarfile.open(fileobj=buffer, mode="w") as archive:
        archive.add(folder, arcname=".")
    return buffer.getvalue()


def _unpack(archive: bytes, folder: Path) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    with tarfile.open(fileobj=io.BytesIO(archive)) as members:
        members.extractall(folder, filter="data")
