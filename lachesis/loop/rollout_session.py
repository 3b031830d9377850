"""The session of a rollout: what the environment's `session(item)` yields, such as a game or a connection."""

from __future__ import annotations

import asyncio
import contextvars
import functools
import inspect
import logging
from collections.abc import Callable, Coroutine
from contextlib import AbstractAsyncContextManager
from typing import Any, TypeVar

from lachesis.authors import AuthorError, defined_at, wrong_result
from lachesis_tools import ToolSession
from lachesis_tools.dispatch import infrastructure_of

T = TypeVar("T")
log = logging.getLogger(__name__)

CLOSING_SECONDS = 30.0
"""How long a session may take to close before it is cancelled, and again until it is given up."""
_BY_PLACE = (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)
_of_this_rollout: contextvars.ContextVar[Any] = contextvars.ContextVar("lachesis_rollout_session", default=None)


def rollout_session() -> Any:
    """The session of the rollout that this code runs for: in tools, `follow_up` and rewards. None if there is none.

    A reward has it as `ctx.session` too. In `compute_group_reward`, which has several rollouts, only the contexts do.
    """
    return _of_this_rollout.get()


def session_method(env: Any) -> Callable[..., Any] | None:
    """The method `session` of the environment's class: an instance may have a `session` of its own, of HTTP for
    example."""
    own = getattr(type(env), "session", None)
    return functools.partial(own, env) if callable(own) else None


def begin_session(value: Any) -> None:
    """From here on `value` is the session of the rollout that this task plays."""
    _of_this_rollout.set(value)


class RolloutSession:
    """Keeps an asynchronous context manager open, from `open` to `close`.

    A task of its own enters and leaves it: libraries with task groups (anyio, the clients of MCP) need one task for
    both, and a rollout may be closed by another one than began it.
    """

    def __init__(self, manager: AbstractAsyncContextManager[Any], name: str) -> None:
        self._manager = manager
        self._name = name
        self._closing = asyncio.Event()
        self._ready: asyncio.Future[Any] = asyncio.get_running_loop().create_future()
        self._task: asyncio.Task[None] | None = None

    @property
    def host(self) -> asyncio.Future[None] | None:
        """The task that keeps it open. It ends before `close` only where something in the session broke."""
        return self._task

    async def open(self) -> Any:
        """What the context manager yields. Raises what entering it raises."""
        self._task = asyncio.create_task(self._hold(), name=self._name)
        try:
            value = await asyncio.shield(self._ready)
        except asyncio.CancelledError:
            await self.close()
            raise
        return value

    async def _hold(self) -> None:
        try:
            async with self._manager as value:
                self._ready.set_result(value)
                await self._closing.wait()
        except BaseException as error:
            if self._ready.done():
                raise
            if isinstance(error, asyncio.CancelledError):
                self._ready.cancel()
                raise
            self._ready.set_exception(error)

    async def close(self) -> None:
        """Leave the context manager. A failure is logged: the rollout has been scored by then."""
        if self._task is None:
            return
        self._closing.set()
        if not self._ready.done():
            self._task.cancel()
        await asyncio.wait({self._task}, timeout=CLOSING_SECONDS)
        if not self._task.done():
            log.warning("%s took longer than %g s to close and is cancelled", self._name, CLOSING_SECONDS)
            self._task.cancel()
            await asyncio.wait({self._task}, timeout=CLOSING_SECONDS)
        if not self._task.done():
            log.warning("%s goes on: it was closed and cancelled", self._name)
        elif not self._task.cancelled() and (error := self._task.exception()) is not None:
            log.warning("%s could not be closed: %s: %s", self._name, type(error).__name__, error)


async def opened_session(function: Callable[..., Any], item: Any, tools: ToolSession) -> Any:
    """What the context manager of `session(item)` yields; it is left before the sandbox of `tools` is removed.

    Raises:
        AuthorError: the function returned something else.
    """
    named = [each for each in inspect.signature(function).parameters.values() if each.kind in _BY_PLACE]
    takes_both = len(named) > 1 and (named[1].name == "tools" or named[1].default is inspect.Parameter.empty)
    manager = function(item, tools) if takes_both else function(item)
    if not isinstance(manager, AbstractAsyncContextManager):
        raise wrong_result(None, function, manager, "decorate it with @asynccontextmanager")
    if inspect.iscoroutine(given := getattr(manager, "gen", None)):
        given.close()
        raise AuthorError(f"session(){defined_at(function)} has no `yield`; yield what its tools and rewards need")
    session = RolloutSession(manager, f"the session of {tools.task_id}")
    tools.before_close.append(session.close)
    value = await session.open()
    tools.session_host = session.host
    return value


class SessionEnded(Exception):
    """The session of a rollout ended while that was played or scored: an error of the environment."""


async def while_open(work: Coroutine[Any, Any, T], tools: ToolSession) -> T:
    """The result of `work`, which is cancelled if the rollout's session ends before: a tool may wait for ever then.

    Raises:
        BackendError: the infrastructure failed, and so the session ended.
        SessionEnded: it ended for another reason, which is the `__cause__`.
    """
    host = tools.session_host
    if host is None:
        return await work
    task = asyncio.ensure_future(work)
    both: set[asyncio.Future[Any]] = {task, host}
    try:
        await asyncio.wait(both, return_when=asyncio.FIRST_COMPLETED)
    finally:
        if not task.done():
            task.cancel()
            await asyncio.wait({task})
    if not host.done():
        return task.result()
    if not task.cancelled():
        task.exception()  # a consequence
    error = None if host.cancelled() else host.exception()
    if error is not None and (infrastructure := infrastructure_of(error)) is not None:
        raise infrastructure from error
    why = "" if error is None else f": {type(error).__name__}: {error}"
    raise SessionEnded(f"the session ended before the rollout did{why}") from error
