"""Failures to create a sandbox, each as a `BackendError` with the cause, and the next step where it is known."""

from __future__ import annotations

import errno
import functools
import resource
from collections.abc import Callable, Coroutine
from typing import Any, TypeVar

from .errors import BackendError
from .spec import SandboxSpec

B = TypeVar("B")
S = TypeVar("S")
Create = Callable[[B, SandboxSpec], Coroutine[Any, Any, S]]


def typed_failures(create: Create[B, S]) -> Create[B, S]:
    """A `Backend.create` that turns every other error into a `BackendError`."""

    @functools.wraps(create)
    async def typed(self: B, spec: SandboxSpec) -> S:
        try:
            return await create(self, spec)
        except BackendError:
            raise
        except Exception as error:
            labels = "".join(f" {key}={value}" for key, value in spec.labels.items() if value)
            text = " ".join(str(error).split())
            cause = text if isinstance(error, OSError) and text else f"{type(error).__name__}: {text}".rstrip(": ")
            step = _next_step(error)
            raise BackendError(
                f"backend {getattr(self, 'name', '?')!r} could not create a sandbox{labels and f' ({labels[1:]})'}: "
                f"{cause}" + (f". Next step: {step}" if step else "")
            ) from error

    return typed


def _next_step(error: Exception) -> str:
    number = error.errno if isinstance(error, OSError) else None
    if number in (errno.EMFILE, errno.ENFILE):
        limit = resource.getrlimit(resource.RLIMIT_NOFILE)[0]
        return f"let this process open more than {limit} files (ulimit -n), or run fewer sandboxes at once"
    if number in (errno.ENOSPC, errno.EDQUOT):
        return "free space or inodes on that disk, or set TMPDIR to a folder of a larger one"
    if number == errno.EROFS or (isinstance(error, FileNotFoundError) and "temporary" in str(error)):
        return "set TMPDIR to a folder that can be written"
    if number == errno.EAGAIN or (isinstance(error, RuntimeError) and "thread" in str(error)):
        return "let this user have more processes and threads (ulimit -u, the cgroup's pids), or run fewer sandboxes"
    if number == errno.ENOMEM or isinstance(error, MemoryError):
        return "run fewer sandboxes at once, or on a machine with more memory"
    return ""
