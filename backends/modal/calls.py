"""Calls to Modal: transient failures, retries, and why a sandbox has ended."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import random
import time
from collections.abc import Awaitable, Callable, Coroutine, Iterable
from typing import TYPE_CHECKING, Any, TypeVar

from backends.errors import BackendError, BackendUnavailable
from backends.tasks import has_failed, seen

if TYPE_CHECKING:
    import modal

T = TypeVar("T")
_log = logging.getLogger(__name__)

FIX = "run `modal token new`, or set MODAL_TOKEN_ID and MODAL_TOKEN_SECRET"
ENDING = 60.0
"""Seconds for which ending a sandbox is retried."""


class ModalShared:
    """State that the sandboxes of one event loop share."""

    def __init__(self, concurrency: int) -> None:
        self.turns = asyncio.Semaphore(concurrency)
        self._tasks: dict[tuple[str, Any], asyncio.Task[Any]] = {}

    async def once(self, key: tuple[str, Any], make: Callable[[], Coroutine[Any, Any, T]]) -> T:
        """The result of `make`, which is called once for all callers, and again only after a failure."""
        task = self._tasks.get(key)
        if task is None or has_failed(task):
            task = self._tasks[key] = asyncio.create_task(make())
            task.add_done_callback(seen)
        result: T = await asyncio.shield(task)
        return result


def text_of(error: BaseException) -> str:
    return " ".join(str(error).split()) or type(error).__name__


def is_rejected(error: BaseException) -> bool:
    from modal import exception

    return isinstance(error, exception.AuthError | exception.PermissionDeniedError)


def is_transient(error: BaseException) -> bool:
    """Whether the same call may succeed later."""
    from modal import exception

    passing = (
        *(exception.ServiceError, exception.InternalError, exception.ResourceExhaustedError),
        *(exception.ConnectionError, exception.TimeoutError, OSError),
    )
    return isinstance(error, passing) or type(error).__name__ == "StreamTerminatedError"


async def retried(
    call: Callable[[], Awaitable[T]],
    what: str,
    *,
    again: Callable[[], Awaitable[T]] | None = None,
    patience: float = 60.0,
) -> T:
    """Call until it succeeds, first `call` and then `again`, while failures are transient.

    Raises:
        BackendUnavailable: another failure: `what` and why. The exception of the SDK is the cause.
        BackendError: it still failed after `patience` seconds.
    """
    end = time.monotonic() + patience
    delay = 0.25
    while True:
        try:
            return await call()
        except BackendError:
            raise
        except Exception as error:
            if is_rejected(error):
                raise BackendUnavailable(f"{what}: {text_of(error)}. Next step: {FIX}") from error
            if not is_transient(error):
                raise BackendUnavailable(f"{what}: {text_of(error)}") from error
            if time.monotonic() + delay > end:
                raise BackendError(f"{what}: {text_of(error)} (tried for {patience:g} s)") from error
        await asyncio.sleep(delay * random.uniform(0.75, 1.25))
        delay = min(8.0, 2 * delay)
        call = again or call


async def bounded(work: Iterable[Awaitable[T]], limit: int = 16) -> list[T]:
    """Run all, `limit` at a time; returns the results. Raises the first failure when all have ended."""
    turns = asyncio.Semaphore(limit)

    async def one(awaitable: Awaitable[T]) -> T:
        async with turns:
            return await awaitable

    results = await asyncio.gather(*(one(awaitable) for awaitable in work), return_exceptions=True)
    for result in results:
        if isinstance(result, BaseException):
            raise result
    return [result for result in results if not isinstance(result, BaseException)]


async def terminate(sandbox: modal.Sandbox, name: str) -> None:
    """End a sandbox and wait for its end. Raises `BackendError` when that fails."""
    from modal import exception

    async def end() -> None:
        # The SDK raises these for a sandbox that has ended already.
        with contextlib.suppress(exception.SandboxTimeoutError, exception.SandboxTerminatedError):
            await sandbox.terminate.aio(wait=True)

    try:
        await retried(end, f"{name} could not be terminated", patience=ENDING)
    except BackendUnavailable as error:
        if not isinstance(error.__cause__, exception.NotFoundError | exception.ConflictError | exception.ClientClosed):
            raise
    except BackendError as error:
        _log.warning("%s; it ends by itself", error)
        raise
    with contextlib.suppress(Exception):
        await sandbox.detach.aio()  # type: ignore[no-untyped-call]


async def why_ended(sandbox: modal.Sandbox, lifetime: float) -> str | None:
    """Why the sandbox has ended, None if it runs or Modal does not answer."""
    try:
        code = await sandbox.poll.aio()
    except Exception as error:
        return f"Modal no longer knows it ({text_of(error)})" if type(error).__name__ == "NotFoundError" else None
    if code is None:
        return None
    status, detail = _result(sandbox)
    detail = f": {detail}" if detail else ""
    if status == "TIMEOUT" or (not status and code == 124):
        return f"its lifetime of {lifetime:g} s is over (Modal's timeout)"
    if status == "TERMINATED" or (not status and code == 137):
        return f"it was terminated at Modal{detail}"
    if status in ("", "SUCCESS", "FAILURE"):
        return f"its executor ended with exit code {code}{detail}"
    return f"Modal ended it with {status}{detail}"


def _result(sandbox: modal.Sandbox) -> tuple[str, str]:
    """Modal's status and message, empty if unknown. The SDK receives them, but offers the exit code only."""
    try:
        from modal._utils.async_utils import synchronizer

        result = synchronizer._translate_in(sandbox)._impl.result  # type: ignore[no-untyped-call]
        status = type(result).GenericStatus.Name(result.status)
        return status.removeprefix("GENERIC_STATUS_"), " ".join(result.exception.split())
    except Exception:
        return "", ""


async def post_mortem(sandbox: modal.Sandbox, reason: str) -> str:
    """`reason`, and the standard error of a sandbox that ended too early."""
    written = ""
    with contextlib.suppress(Exception):
        async with asyncio.timeout(5):
            written = " ".join((await sandbox.stderr.read.aio()).split())[-500:]
    if "python3" in written + reason and "not found" in written + reason:
        fix = "use an image with Python 3.8 or later, or set `add_python`"
        return f"its image has no python3. Next step: {fix}"
    return f"{reason}: {written}" if written else reason
