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
from lachesis.tool_context.sealing import NO_FILES

UPLOADS, DOWNLOADS = ("upload_file", "upload_dir"), ("download_file", "download_dir")


def blamed(
    method: str, error: OSError | SandboxExhausted, local: str | None, *, own: bool
) -> OSError | BackendError | AgentFault:
    """The error, by who is at fault: the agent, this machine (`BackendError`), or the environment.

    Args:
        local: the path on this machine that the method was given.
        own: whether the reward writes into a sandbox in which nothing of the agent's has run.
    """
    if isinstance(error, AgentFault) or (isinstance(error, TimeoutError) and error.errno is None):
        return error
    if isinstance(error, SandboxExhausted):
        fault = AgentFault(errno.ENOMEM, str(error))
    else:
        full = error.errno in (errno.ENOSPC, errno.EDQUOT)
        if INSIDE not in getattr(error, "__notes__", ()):
            if error.errno in NO_FILES or (full and method in (*DOWNLOADS, "seal", "judge_pytest")):
                return BackendError(f"{method} failed on this machine: {error}")
            if method in ("seal", "judge_pytest", "cleanup"):  # what they meet inside is no error
                return error
            refused = method in DOWNLOADS and error.errno in (errno.EFBIG, errno.EPERM, errno.EIO)
            if local is not None and not refused and _is_below(error.filename, local):
                return error
        if own and not full:
            return error
        fault = AgentFault.of(error)
    return fault


def local_path(method: str, args: Sequence[Any], kwargs: Mapping[str, Any]) -> str | None:
    """The path on this machine among the arguments of a method."""
    if method not in (*UPLOADS, *DOWNLOADS):
        return None
    place = 0 if method in UPLOADS else 1
    given = args[place] if len(args) > place else kwargs.get("local_path", kwargs.get("local_dir"))
    return None if given is None else os.fspath(given)


def _is_below(path: object, local: str) -> bool:
    """Whether an error of the file system is about the path `local` on this machine, or does not say what about."""
    named = Path(os.fsdecode(path)) if isinstance(path, str | bytes) else Path()
    return not named.is_absolute() or named.is_relative_to(Path(local).absolute())
