"""Artifacts on their way from the agent's sandbox to the verifier's.

Where an artifact goes is decided by the path that the reward named and by the fresh sandbox, before anything of the
agent's is in it. No program of the agent's sandbox has a part in it.
"""

from __future__ import annotations

import asyncio
import contextlib
import errno
import os
import posixpath
import shutil
import tempfile
from collections.abc import AsyncIterator, Awaitable, Callable, Iterable
from dataclasses import dataclass, field
from pathlib import Path

from backends import BackendError, Sandbox
from backends.errors import INSIDE
from backends.executor.trees import remove_tree
from backends.extraction import MODE
from backends.tasks import in_own_thread
from lachesis.tool_context.file_copies import NO_FILES, HostDiskFull, size, write_local
from lachesis.tool_context.own_folder import own_folder
from lachesis_tools import ToolSession

_REMOVAL = 60.0
"""Seconds for the removal of artifacts, which are bounded by `MAX_ARTIFACT` and the bounds of a download."""
OURS = (errno.ENOSPC, errno.EDQUOT, *NO_FILES)
"""Errors of this machine where files are copied out. Reading the agent's files in a sandbox never raises them."""


@dataclass(slots=True)
class Artifacts:
    """Copies of the agent's files at the paths that a reward named."""

    folder: Path
    taken: dict[str, Path] = field(default_factory=dict)
    """The copies, by path."""
    modes: dict[str, dict[str, int]] = field(default_factory=dict)
    """By path: the modes of what is below it, and its own (`.`). The copies are readable for this process."""
    missing: list[str] = field(default_factory=list)
    refused: dict[str, str] = field(default_factory=dict)
    """The reasons, by path."""

    async def place(self, fresh: ToolSession, allow: Iterable[str] = (), *, exactly: bool = False) -> None:
        """Put the copies at the same paths of a fresh sandbox.

        Args:
            allow: absolute paths of files and folders that may be replaced besides workspace and home.
            exactly: whether a folder contains nothing else afterwards, and missing paths are removed.
        """
        sandbox = await fresh.sandbox()
        # All of them before anything is placed: an artifact may be a folder with links.
        targets = await resolved([*self.taken, *(self.missing if exactly else ())], fresh, allow)
        # The deepest first: a folder that gets its mode may not be changed any more.
        for path, (inside, problem) in sorted(targets.items(), key=lambda target: -target[1][0].count("/")):
            kept, modes = self.taken.get(path), dict(self.modes.get(path, {}))
            if inside in (sandbox.workdir, sandbox.home):  # commands of the reward start there
                modes.pop(".", None)
            if problem:
                self.refused[path] = problem
                continue
            try:
                if exactly and inside != sandbox.workdir:
                    await _remove(sandbox, inside, kept)
                if kept is not None:
                    await _place(sandbox, inside, kept, modes)
            except OSError as error:  # the agent's copy of a small disk may be large, or in a folder's way
                self.refused[path] = f"it cannot be copied into a fresh sandbox: {error.strerror or error}"


async def resolved(paths: Iterable[str], fresh: ToolSession, allow: Iterable[str]) -> dict[str, tuple[str, str]]:
    """By path: where it is in a fresh sandbox, without links, and why nothing may be put there, or an empty text."""
    sandbox = await fresh.sandbox()
    named = [name for name in (sandbox.workdir, sandbox.home) if name.strip("/")]
    named += [await fresh.path(name) for name in ([allow] if isinstance(allow, str) else allow)]
    roots = {(await sandbox.stat(name)).path for name in named}
    found = {}
    for path in paths:
        real = (await sandbox.stat(await fresh.path(path))).path
        within = any(real == root or real.startswith(root.rstrip("/") + "/") for root in roots)
        found[path] = real, "" if within else f"{real} is not in the workspace or the home folder; name it in `allow`"
    return found


@contextlib.asynccontextmanager
async def taken(
    session: ToolSession, paths: Iterable[str], room: int, *, partly: bool = False
) -> AsyncIterator[Artifacts]:
    """End everything that runs in the agent's sandbox, and copy out what is at `paths`, up to `room` bytes.

    Args:
        partly: whether a folder with links that lead out of it is taken without them.
    """
    wanted = [paths] if isinstance(paths, str) else list(dict.fromkeys(paths))
    sandbox = await session.sandbox()
    await sandbox.stop_processes()
    folder = await in_own_thread(own_folder)
    artifacts = Artifacts(Path(tempfile.mkdtemp(prefix="seal-", dir=folder)))
    try:
        async with _room_for(room, artifacts.folder.parent):
            for number, path in enumerate(wanted):
                kept = artifacts.folder / str(number)
                room -= await _take(sandbox, path, await session.path(path), kept, artifacts, room, partly)
        yield artifacts
    finally:
        # In a thread, which also ends it if this is cancelled: it may hold as many files as the agent liked.
        await in_own_thread(remove_tree, str(artifacts.folder), _REMOVAL)


_promised = 0
"""Bytes that seals of this process may still write."""


@contextlib.asynccontextmanager
async def _room_for(size: int, folder: Path) -> AsyncIterator[None]:
    """Wait until there is room for `size` more bytes in addition to what other seals may write.

    The agent's files do not matter: otherwise the agent could decide when a run stops.

    Raises: HostDiskFull: there is no room, and nothing to wait for.
    """
    global _promised
    while (free := shutil.disk_usage(folder).free) < _promised + size:
        if not _promised:
            raise HostDiskFull(
                f"a seal may copy {size} bytes to {folder} of this machine, which has {free} bytes free. Next step: "
                "make room there, set TMPDIR to a folder on another disk, or give `seal` a smaller max_bytes"
            )
        await asyncio.sleep(0.1)
    _promised += size
    try:
        yield
    finally:
        _promised -= size


async def _take(
    sandbox: Sandbox, path: str, inside: str, kept: Path, artifacts: Artifacts, room: int, partly: bool
) -> int:
    """Copy out one artifact; its bytes."""
    if not inside.strip("/"):
        artifacts.refused[path] = "the root folder is not an artifact"
        return 0
    modes = artifacts.modes.setdefault(path, {})
    try:
        facts = await sandbox.stat(inside)
        if facts.mode is not None:
            modes["."] = facts.mode & MODE
        try:
            await write_local(kept, sandbox.read_chunks(inside), room)
            with contextlib.suppress(OSError, OverflowError):  # out of range for this machine
                await in_own_thread(os.utime, kept, None if facts.mtime is None else (facts.mtime, facts.mtime))
        except IsADirectoryError:
            await sandbox.download_dir(inside, kept, max_bytes=room, modes=modes)
    except (FileNotFoundError, NotADirectoryError):
        artifacts.missing.append(path)
        return 0
    except OSError as error:
        if error.errno in OURS:
            kind = BackendError if error.errno in NO_FILES else HostDiskFull
            raise kind(f"the artifacts cannot be kept on this machine: {error}") from error
        artifacts.refused[path] = error.strerror or str(error)
        if not (partly and error.errno == errno.EPERM and kept.is_dir()):  # else: all but what it names
            await in_own_thread(remove_tree, str(kept), _REMOVAL)  # as far as it came
            return 0
    artifacts.taken[path] = kept
    return await in_own_thread(size, kept)


async def _place(sandbox: Sandbox, inside: str, kept: Path, modes: dict[str, int]) -> None:
    """Put an artifact where it was. Raises `OSError`, and leaves no part of it."""
    try:
        if kept.is_dir():
            await sandbox.upload_dir(kept, inside, modes=modes)
            return
        folder, name = posixpath.split(inside)
        with tempfile.TemporaryDirectory(dir=kept.parent) as alone:
            try:
                await in_own_thread(os.link, kept, Path(alone, name))
            except OSError:  # this machine's file system may have no hard links
                await in_own_thread(shutil.copy2, kept, Path(alone, name))
            await sandbox.upload_dir(alone, folder, modes={name: modes["."]} if "." in modes else None)
    except OSError as error:
        if error.errno in (errno.ENOSPC, errno.EDQUOT):  # the room is the reward's
            await _remove(sandbox, inside)
        raise


_CLEAR = """declare -A kept
while IFS= read -r -d '' folder; do kept["$folder"]=1; done
if [ ! -d "$P" ] || [ -L "$P" ] || [ ${#kept[@]} = 0 ] || ! command -v find > /dev/null; then rm -rf -- "$P"; exit; fi
find "$P" ! -type d -exec rm -f -- {} +
find "$P" -mindepth 1 -depth -type d -print0 | while IFS= read -r -d '' folder; do
  [ -n "${kept["${folder#"$P"/}"]}" ] || rm -rf -- "$folder"
done"""
"""Removes what is at P. Folders that the copy has too stay, empty: where an overlay is mounted without privileges, as
by singularity, a folder of the image that was removed cannot be made again (EIO)."""


async def _remove(sandbox: Sandbox, inside: str, kept: Path | None = None) -> None:
    """Remove what is at `inside`, and leave the folders that its copy `kept` has."""
    folders = await in_own_thread(_folders, kept) if kept is not None else []
    listed = b"".join(os.fsencode(folder) + b"\0" for folder in folders)
    await sandbox.exec(_CLEAR, timeout=60, env={"P": inside}, stdin=listed, fresh=True)


def _folders(kept: Path) -> list[str]:
    """The folders below a copy, and `.` for itself; none where it is a file."""
    return [os.path.relpath(root, kept) for root, _, _ in os.walk(kept)]


_IN_THE_WAY = frozenset(
    (errno.ENOTDIR, errno.EISDIR, errno.EEXIST, errno.ELOOP, errno.ENOENT, errno.ENOTEMPTY, errno.EACCES)
)
_MAKE_WAY = """set -f; IFS=/
while builtin read -r -d '' kind && builtin read -r -d '' path; do
  at=
  for part in ${path%/*}; do
    [ -z "$part" ] || { at="$at/$part"; [ -d "$at" ] || rm -f -- "$at"; }
    [ ! -d "$at" ] || { [ -w "$at" ] && [ -x "$at" ]; } || chmod u+wx -- "$at"
  done
  if [ "$kind" = f ]; then [ ! -d "$path" ] || rm -rf -- "$path"; [ -e "$path" ] || rm -f -- "$path"
  else [ -d "$path" ] || rm -f -- "$path"; fi
done"""
"""Removes what is in the place where a folder (d) or a file (f) is to be written, and lets it be written into folders
above; reads pairs of a kind and a path."""


async def placed(
    sandbox: Sandbox, write: Callable[[], Awaitable[None]], wanted: Callable[[], Iterable[tuple[str, str]]]
) -> None:
    """`write` into a verifier. What is in the way is replaced.

    Args:
        wanted: the folders (d) and files (f) that are written, as absolute paths inside.
    """
    try:
        await write()
    except OSError as error:
        if error.errno not in _IN_THE_WAY or INSIDE not in getattr(error, "__notes__", ()):
            raise
        listed = "".join(f"{kind}\0{path}\0" for kind, path in wanted())
        await sandbox.exec(_MAKE_WAY, timeout=60, stdin=listed.encode(errors="surrogateescape"), fresh=True)
        await write()
