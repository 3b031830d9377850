"""Tool backends of the removed Hermes stack, over the backend `pool`: rollouts acquire slots, and call tools in them.

A slot is a sandbox of its own, where there it was a folder of a shared one: what is released is gone, whether
`reset_workspace` asks for it or not.
"""

from __future__ import annotations

import asyncio
import base64
import hashlib
import io
import shlex
import tarfile
import tempfile
import uuid
from collections.abc import Coroutine, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import PurePosixPath
from typing import Any, Protocol

from backends import BackendError, Sandbox, SandboxLost, SandboxSpec, create_backend

OUTPUT, FILE, ARTIFACT, ENTRIES = 50_000, 100_000, 5_000_000, 5_000
"""Characters of an output and bytes of a file that a tool returns; bytes and entries of artifacts."""


@dataclass(eq=False)
class TrajectorySlot:
    """A sandbox that a trajectory has."""

    slot_id: str
    trajectory_id: str
    workspace_dir: str
    sandbox: Sandbox
    profile: str = ""
    turn: asyncio.Lock = field(default_factory=asyncio.Lock, repr=False)
    """Its tools run one after another."""


@dataclass(frozen=True)
class ExecutionResult:
    """What a tool said. `metadata["lost"]` tells that the sandbox is gone: no fault of the agent."""

    success: bool
    output: str = ""
    error: str = ""
    execution_id: str = ""
    slot_id: str = ""
    metadata: Mapping[str, Any] = field(default_factory=dict)


class SandboxExecutor:
    """Runs the tools bash, bash_stateful, read_file and write_file in the sandbox of a slot."""

    def __init__(self, timeout_s: float) -> None:
        self.timeout_s = timeout_s

    async def execute(
        self, slot: TrajectorySlot, tool: str, args: Mapping[str, Any], *, timeout_s: float | None = None
    ) -> ExecutionResult:
        """Never raises for what a tool does, or for a sandbox that is lost."""
        about: dict[str, Any] = {"execution_id": str(uuid.uuid4()), "slot_id": slot.slot_id}
        try:
            seconds = min(600.0, max(1.0, timeout_s or float(args.get("timeout") or self.timeout_s)))
            async with slot.turn:
                return await self._run(slot, tool, args, seconds, about)
        except SandboxLost as lost:
            return ExecutionResult(False, error=f"the sandbox is gone: {lost}", metadata={"lost": True}, **about)
        except (BackendError, OSError, LookupError, TypeError, ValueError, AttributeError) as error:
            return ExecutionResult(False, error=f"{tool}: {str(error) or repr(error)}", **about)

    async def _run(
        self, slot: TrajectorySlot, tool: str, args: Mapping[str, Any], seconds: float, about: dict[str, Any]
    ) -> ExecutionResult:
        sandbox = slot.sandbox
        if tool in ("bash", "bash_stateful"):
            folder = slot.workspace_dir if tool == "bash" else None  # without one, cd and variables carry over
            ran = await sandbox.exec(str(args["command"]), timeout=seconds, cwd=folder, max_output=4 * OUTPUT)
            said = (ran.stdout + ran.stderr).decode(errors="replace")[:OUTPUT]
            wrong = f"Command timed out after {seconds:g}s" if ran.timed_out else f"Exit code: {ran.exit_code}"
            done = ran.exit_code == 0 and not ran.timed_out
            return ExecutionResult(done, said, "" if done else wrong, metadata={"returncode": ran.exit_code}, **about)
        if tool == "read_file":
            data = await sandbox.read_bytes(str(args["path"]), limit=FILE)
            return ExecutionResult(True, data.decode(errors="replace"), **about)
        if tool == "write_file":
            await sandbox.write_bytes(str(args["path"]), str(args["content"]).encode())
            return ExecutionResult(True, f"wrote {args['path']}", **about)
        return ExecutionResult(False, error=f"Unknown tool: {tool}", **about)


class ToolBackend(Protocol):
    """What the removed stack asked of a pool."""

    @property
    def default_timeout_s(self) -> float | None: ...

    async def start(self) -> None: ...

    async def stop(self, *, purge: bool = False) -> None: ...

    async def acquire(self, trajectory_id: str | None = None) -> TrajectorySlot: ...

    async def release(self, slot: TrajectorySlot, *, reset_workspace: bool = False) -> None: ...

    async def execute_batch(
        self, requests: Sequence[tuple[TrajectorySlot, str, Mapping[str, Any]]], *, timeout_s: float | None = None
    ) -> list[ExecutionResult]: ...


class PoolToolBackend:
    """A pool of its own, from `start` to `stop`.

    Args:
        up: arguments of `lachesis pool up`.
        acquire_timeout_s: seconds for a slot with its sandbox.
    """

    def __init__(
        self, up: str, *, default_timeout_s: float = 30.0, acquire_timeout_s: float = 600.0, network: bool = False
    ) -> None:
        self._up, self._seconds, self._network = up, acquire_timeout_s, network
        self.executor = SandboxExecutor(default_timeout_s)
        self._backend: Any = None
        self._env: Mapping[str, Mapping[str, str]] = {}
        """Variables of the sandboxes, by profile."""
        self._slots: dict[str, TrajectorySlot] = {}

    @property
    def default_timeout_s(self) -> float | None:
        return self.executor.timeout_s

    async def start(self) -> None:
        """
        Raises:
            BackendError: the pool does not start.
        """
        self._backend = self._backend or create_backend("pool", up=self._up, start_timeout=self._seconds)
        available = await self._backend.check()
        if not available.ok:
            await self.stop()
            raise BackendError(available.detail)

    async def stop(self, *, purge: bool = False) -> None:
        """End it, and all sandboxes. With or without `purge`, nothing of it is left."""
        releasing = (self.release(slot) for slot in [*self._slots.values()])
        await asyncio.gather(*releasing, return_exceptions=True)  # the end of the pool ends them anyway
        backend, self._backend = self._backend, None
        if backend is not None:
            await backend.close()

    async def acquire(self, trajectory_id: str | None = None, profile: str = "") -> TrajectorySlot:
        """A new sandbox, of the workers of `profile`.

        Raises:
            BackendError: there is none in time, or no such profile.
        """
        if self._backend is None:
            await self.start()
        trajectory = trajectory_id or str(uuid.uuid4())
        labels = {"task_id": trajectory, **({"profile": profile} if profile else {})}
        spec = SandboxSpec(labels=labels, network=self._network, env=self._env.get(profile, {}))
        sandbox = await self._backend.create(spec)
        slot = TrajectorySlot(sandbox.id, trajectory, sandbox.workdir, sandbox, profile)
        self._slots[slot.slot_id] = slot
        return slot

    async def release(self, slot: TrajectorySlot, *, reset_workspace: bool = False) -> None:
        self._slots.pop(slot.slot_id, None)
        await slot.sandbox.close()

    async def execute_batch(
        self, requests: Sequence[tuple[TrajectorySlot, str, Mapping[str, Any]]], *, timeout_s: float | None = None
    ) -> list[ExecutionResult]:
        """The results in the order of the requests. Slots run at once; the requests of one run one after another."""
        calls = (self.executor.execute(slot, tool, args, timeout_s=timeout_s) for slot, tool, args in requests)
        return list(await asyncio.gather(*calls))

    async def read_artifact(
        self,
        slot: TrajectorySlot,
        path: str,
        *,
        encoding: str = "text",
        max_bytes: int | None = None,
        include_sha256: bool = False,
        timeout_s: float | None = None,
    ) -> dict[str, Any]:
        most = _limit(max_bytes, ARTIFACT)

        async def read() -> dict[str, Any]:
            data = await slot.sandbox.read_bytes(path, limit=most + 1)
            kept = data[:most]
            content = base64.b64encode(kept).decode() if encoding == "base64" else kept.decode(errors="replace")
            found = {"content": content, "encoding": encoding, "size_bytes": len(kept), "truncated": len(data) > most}
            return found | ({"sha256": hashlib.sha256(kept).hexdigest()} if include_sha256 else {})

        return await _answered(read(), timeout_s)

    async def list_artifacts(
        self,
        slot: TrajectorySlot,
        path: str = ".",
        *,
        recursive: bool = False,
        max_entries: int | None = None,
        timeout_s: float | None = None,
    ) -> dict[str, Any]:
        most = _limit(max_entries, ENTRIES)

        async def listed() -> dict[str, Any]:
            depth = "" if recursive else "-maxdepth 1"
            command = f"find {shlex.quote(slot_path(slot, path))} -mindepth 1 {depth} -printf '%y\\t%s\\t%T@\\t%P\\0'"
            ran = await slot.sandbox.exec(command, timeout=timeout_s or 60.0, fresh=True, max_output=1 << 22)
            if ran.exit_code != 0:
                raise OSError(ran.stderr.decode(errors="replace").strip())
            rows = sorted(row.decode(errors="replace").split("\t", 3)[::-1] for row in ran.stdout.split(b"\0")[:-1])
            entries = [
                {"path": name, "is_dir": kind == "d", "size_bytes": int(size), "mtime": float(at)}
                for name, at, size, kind in rows[:most]
            ]
            return {"entries": entries, "truncated": len(rows) > most}

        return await _answered(listed(), timeout_s)

    async def archive_artifacts(
        self,
        slot: TrajectorySlot,
        path: str = ".",
        *,
        archive_format: str = "tar.gz",
        max_bytes: int | None = None,
        max_entries: int | None = None,
        timeout_s: float | None = None,
    ) -> dict[str, Any]:
        most, members = _limit(max_bytes, ARTIFACT), _limit(max_entries, ENTRIES)

        async def archived() -> dict[str, Any]:
            if archive_format not in ("tar.gz", "tgz", "tar"):
                raise OSError(f"archive_format is tar.gz, tgz or tar, not {archive_format!r}")
            with tempfile.TemporaryDirectory() as folder:
                await slot.sandbox.download_dir(path, folder, max_bytes=most, max_members=members)
                data = await asyncio.to_thread(_packed, folder, archive_format)
            return {"content": base64.b64encode(data).decode(), "format": archive_format, "size_bytes": len(data)}

        return await _answered(archived(), timeout_s)


def _limit(given: int | None, most: int) -> int:
    return most if given is None else max(1, min(most, given))


def slot_path(slot: TrajectorySlot, path: str) -> str:
    return str(PurePosixPath(slot.workspace_dir, path))


def _packed(folder: str, kind: str) -> bytes:
    packed = io.BytesIO()
    with tarfile.open(fileobj=packed, mode="w" if kind == "tar" else "w:gz") as archive:
        archive.add(folder, arcname=".")
    return packed.getvalue()


async def _answered(call: Coroutine[Any, Any, dict[str, Any]], timeout_s: float | None) -> dict[str, Any]:
    """Raises `SandboxLost`; all else that fails is said in the answer."""
    try:
        async with asyncio.timeout(timeout_s):
            return {"success": True, **await call}
    except SandboxLost:
        raise
    except (BackendError, OSError) as error:
        return {"success": False, "error": str(error) or type(error).__name__}
