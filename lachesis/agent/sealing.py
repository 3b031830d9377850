"""Artifacts on their way from the agent's sandbox to the verifier's."""

from __future__ import annotations

import contextlib
import errno
import shutil
import tempfile
from collections.abc import AsyncIterator, Iterable
from dataclasses import dataclass, field
from pathlib import Path

from backends import BackendError, Sandbox
from lachesis.agent.file_copies import place, size, write_local
from lachesis.tasks import in_own_thread
from lachesis.tools import ToolSession

MAX_ARTIFACT = 1 << 30
"""Bytes that `seal` takes along, in all."""
NO_FILES = (errno.EMFILE, errno.ENFILE)
"""Errors of this machine in every method."""
OURS = (errno.ENOSPC, errno.EDQUOT, *NO_FILES)
"""Errors of this machine where files are copied out. Reading the agent's files in a sandbox never raises them."""


class Sealed(RuntimeError):
    """The agent's sandbox is gone since `seal`: the reward goes on with the context that `seal` returned."""


@dataclass(slots=True)
class Artifacts:
    """Copies of what the agent left at the paths that a reward named."""

    folder: Path
    taken: dict[str, tuple[str, Path]] = field(default_factory=dict)
    """Their absolute paths inside, and the copies, by path."""
    missing: list[str] = field(default_factory=list)
    refused: dict[str, str] = field(default_factory=dict)
    """The reasons, by path."""

    async def place(self, sandbox: Sandbox) -> None:
        """Put the copies at the same places of another sandbox."""
        for path, (inside, kept) in self.taken.items():
            try:
                await place(sandbox, inside, kept)
            except OSError as error:  # the agent's copy of a small disk may be large, or in a folder's way
                self.refused[path] = f"it cannot be put into a fresh sandbox: {error.strerror or error}"


@contextlib.asynccontextmanager
async def taken(session: ToolSession, paths: Iterable[str], room: int) -> AsyncIterator[Artifacts]:
    """End everything that runs in the agent's sandbox, and copy out what is at `paths`, up to `room` bytes."""
    wanted = [paths] if isinstance(paths, str) else list(dict.fromkeys(paths))
    sandbox = await session.sandbox()
    await sandbox.stop_processes()
    artifacts = Artifacts(Path(tempfile.mkdtemp(prefix="lachesis-seal-")))
    try:
        for number, path in enumerate(wanted):
            kept = artifacts.folder / str(number)
            room -= await _take(sandbox, path, await session.path(path), kept, artifacts, room)
        yield artifacts
    finally:
        # In a thread, which also ends it if this is cancelled: it may hold as many files as the agent liked.
        await in_own_thread(shutil.rmtree, artifacts.folder, ignore_errors=True)


async def _take(sandbox: Sandbox, path: str, inside: str, kept: Path, artifacts: Artifacts, room: int) -> int:
    """Copy out one artifact; its bytes."""
    if not inside.strip("/"):
        artifacts.refused[path] = "the root folder is no artifact"
        return 0
    try:
        try:
            await write_local(kept, sandbox.read_chunks(inside), room)
            executable = await sandbox.exec('test -x "$P"', timeout=30, env={"P": inside}, fresh=True)
            await in_own_thread(kept.chmod, 0o700 if executable.exit_code == 0 else 0o600)
        except IsADirectoryError:
            await sandbox.download_dir(inside, kept, max_bytes=room)
    except (FileNotFoundError, NotADirectoryError):
        artifacts.missing.append(path)
    except OSError as error:
        if error.errno in OURS:
            raise BackendError(f"the artifacts cannot be kept on this machine: {error}") from error
        artifacts.refused[path] = error.strerror or str(error)
        await in_own_thread(shutil.rmtree, kept, ignore_errors=True)  # as far as it came
    else:
        artifacts.taken[path] = inside, kept
        return await in_own_thread(size, kept)
    return 0
