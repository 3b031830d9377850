"""Whose failure it is that a method of `ToolContext` met: the agent's, this machine's, or the environment's."""

from __future__ import annotations

import errno
import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from backends import BackendError, SandboxExhausted
from backends.errors import INSIDE
from lachesis.rewards.agent_fault import AgentFault
from lachesis.tool_context.context_calls import SharedState
from lachesis.tool_context.file_copies import NO_FILES
from lachesis_tools import ToolSession

_UPLOADS, _DOWNLOADS = ("upload_file", "upload_dir"), ("download_file", "download_dir")
_READS = ("read_file", "read_text", "read_json", "read_bytes", *_DOWNLOADS)
_OF_AGENTS = ("/tmp/", "/home/", "/root/", "/workspace/", "/var/tmp/", "/dev/shm/")
"""Folders in which agents leave files."""


async def blamed(
    session: ToolSession,
    shared: SharedState,
    method: str,
    error: OSError | SandboxExhausted,
    args: Sequence[Any],
    kwargs: Mapping[str, Any],
    *,
    own: bool,
) -> OSError | BackendError | AgentFault:
    """The error, by who is at fault: the agent, this machine (`BackendError`), or the environment.

    Args:
        args, kwargs: of the method.
        own: whether the reward writes into a sandbox in which nothing of the agent's has run.
    """
    found = _fault(method, error, _local_path(method, args, kwargs), own=own)
    if isinstance(found, AgentFault):
        if shared.before_agent:
            return error
        found.method, found.place = method, shared
        found.of_image = await _is_of_image(session, method, found, args, kwargs)
    return found


def _fault(
    method: str, error: OSError | SandboxExhausted, local: str | None, *, own: bool
) -> OSError | BackendError | AgentFault:
    if isinstance(error, AgentFault) or (isinstance(error, TimeoutError) and error.errno is None):
        return error
    if isinstance(error, SandboxExhausted):
        return AgentFault(errno.ENOMEM, str(error))
    full = error.errno in (errno.ENOSPC, errno.EDQUOT)
    if INSIDE not in getattr(error, "__notes__", ()):
        if error.errno in NO_FILES or (full and method in (*_DOWNLOADS, "seal", "judge_pytest")):
            return BackendError(f"{method} failed on this machine: {error}")
        if method in ("seal", "judge_pytest", "cleanup"):  # what they meet inside is no error
            return error
        refused = method in _DOWNLOADS and error.errno in (errno.EFBIG, errno.EPERM, errno.EIO)
        if local is not None and not refused and _is_below(error.filename, local):
            return error
    return error if own and not full else AgentFault.of(error)


async def _is_of_image(session: ToolSession, method: str, fault: AgentFault, args: Any, kwargs: Any) -> bool:
    """Whether a file is missing that the image has, if it is not the agent that removed it."""
    if fault.errno != errno.ENOENT or method not in _READS:
        return False
    path = os.fspath(args[0] if args else kwargs.get("path", kwargs.get("remote_path", "")))
    if not isinstance(path, str):
        return False
    workspace = (await session.sandbox()).workdir.rstrip("/") + "/"
    return path.startswith("/") and not path.startswith((workspace, *_OF_AGENTS))


def _local_path(method: str, args: Sequence[Any], kwargs: Mapping[str, Any]) -> str | None:
    """The path on this machine among the arguments of a method."""
    if method not in (*_UPLOADS, *_DOWNLOADS):
        return None
    place = 0 if method in _UPLOADS else 1
    given = args[place] if len(args) > place else kwargs.get("local_path", kwargs.get("local_dir"))
    return None if given is None else os.fspath(given)


def _is_below(path: object, local: str) -> bool:
    """Whether an error of the file system is about the path `local` on this machine, or does not say what about."""
    named = Path(os.fsdecode(path)) if isinstance(path, str | bytes) else Path()
    return not named.is_absolute() or named.is_relative_to(Path(local).absolute())
