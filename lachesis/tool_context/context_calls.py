"""A call of a method of `ToolContext`: how it is made, written down, and whose failure it is."""

from __future__ import annotations

import asyncio
import functools
import time
from collections.abc import Awaitable, Callable, Coroutine, Iterable
from dataclasses import dataclass, field
from typing import Any, Concatenate, ParamSpec, Protocol, TypeVar

from backends import BackendError, SandboxExhausted
from backends.lease import LeaseOver
from lachesis.rewards.call_scope import CallScope, current_scope, outside_scopes, scopes_of_a_thread
from lachesis.rewards.calls import called, running_loop
from lachesis_tools import ToolSession

_LONGEST = 500
"""Characters of an argument in a `RewardCall`."""
_LONGEST_OUTPUT = 4000
"""Characters of an output: its first half and its last."""
_WRITES = ("write_file", "upload_file", "upload_dir")
_RUNS = ("terminal", "call_tool", "search")
"""Methods that run commands."""

P = ParamSpec("P")
T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class RewardCall:
    """One use of a `ToolContext` by a reward, recorded separately from the agent's calls."""

    method: str
    arguments: tuple[str, ...]
    """In short: a long value is cut, bytes are only counted."""
    seconds: float
    error: str = ""
    """Of an exception that it raised."""
    output: str = ""
    """A summary of its result: at most 4000 characters, the first half and the last."""
    exit_code: int | None = None
    """Of a command."""
    reward: str = ""
    """The function of the environment that made it; empty where that is not known, as in threads of several."""

    def to_record(self) -> dict[str, Any]:
        record: dict[str, Any] = {"method": self.method, "arguments": list(self.arguments), "seconds": self.seconds}
        found = {"output": self.output, "error": self.error, "reward": self.reward}
        exit_code = {} if self.exit_code is None else {"exit_code": self.exit_code}
        return {**record, **exit_code, **{name: text for name, text in found.items() if text}}


@dataclass(slots=True)
class SharedState:
    """The state that the contexts of a session share, including the contexts that they were sealed into."""

    calls: list[RewardCall] = field(default_factory=list)
    failure: BackendError | None = None
    scope: CallScope | None = None
    """For threads, which may have no context variables."""
    repeated: bool = False
    """The reward of the group is called again, without a rollout at fault: `seal` gives what it gave before."""
    sessions: list[ToolSession] = field(default_factory=list)
    before_agent: bool = False
    """The agent has not been there yet: nothing is its fault, and every error is raised."""
    _active: int = 0
    _since: float = 0.0
    _busy: float = 0.0

    def begin(self) -> None:
        if not self._active:
            self._since = time.monotonic()
        self._active += 1

    def end(self) -> None:
        self._active -= 1
        if not self._active:
            self._busy += time.monotonic() - self._since

    @property
    def inside(self) -> float:
        """Seconds in which a call worked in a sandbox that was there."""
        busy = self._busy + (time.monotonic() - self._since if self._active else 0.0)
        return busy - sum(session.waited for session in self.sessions)


class ContextCalls:
    """Makes the calls of one context.

    Args:
        loop: where they run; None until the context is used in one.
        blamed: says whose failure a call met, see `blame`.
        in_verifier: nothing of the agent's has run in the sandbox.
    """

    def __init__(
        self,
        session: ToolSession,
        shared: SharedState,
        loop: asyncio.AbstractEventLoop | None,
        blamed: Callable[..., Awaitable[Exception]],
        *,
        in_verifier: bool,
    ) -> None:
        self.session, self.shared, self.loop = session, shared, loop
        self._blamed, self._untouched = blamed, in_verifier

    def scope(self) -> CallScope | None:
        """What a call belongs to. A thread that a reward left behind still belongs to it."""
        scope = current_scope() or self.shared.scope
        left = scope is not None and scope.over and scope is not current_scope()
        return None if left and running_loop() is not None else scope

    async def noted(
        self,
        method: str,
        call: Callable[..., Coroutine[Any, Any, T]],
        scopes: Iterable[CallScope],
        args: Any,
        kwargs: Any,
    ) -> T:
        """Log the call, and keep a failure of the infrastructure even if the reward catches it: it is not a score."""
        begin, problem, scopes = time.monotonic(), "", tuple(scopes)
        result: Any = None
        self.shared.begin()
        own = self._untouched and method in _WRITES
        self._untouched = self._untouched and method not in _RUNS
        try:
            try:
                with outside_scopes():
                    result = await call(*args, **kwargs)
                    return result  # type: ignore[no-any-return]
            except (OSError, SandboxExhausted) as error:
                whose = await self._blamed(self.session, self.shared, method, error, args, kwargs, own=own)
                if whose is error:
                    raise
                raise whose from error
        except BaseException as error:
            cleaned_up = isinstance(error, LeaseOver) and self.session.closed  # under this call, by the reward itself
            if not cleaned_up:
                if isinstance(error, BackendError):
                    self.shared.failure = self.shared.failure or error
                for scope in scopes:
                    scope.met(error)
            problem = f"{type(error).__name__}: {error}"
            raise
        finally:
            self.shared.end()
            given = [_brief(arg) for arg in args] + [f"{name}={_brief(value, name)}" for name, value in kwargs.items()]
            seconds = round(time.monotonic() - begin, 4)
            output, exit_code = _output(result)
            _, named, by = scopes[0].name.rpartition(": ") if len(scopes) == 1 else ("", "", "")
            self.shared.calls.append(
                RewardCall(method, tuple(given), seconds, problem[:500], output, exit_code, named and by)
            )


class _Calling(Protocol):
    """What has such methods."""

    _calls: ContextCalls

    def _given(self, method: str, what: str, make: Callable[[], Any], scope: CallScope | None) -> Any: ...


C = TypeVar("C", bound=_Calling)


def context_method(
    function: Callable[Concatenate[C, P], Coroutine[Any, Any, T]],
) -> Callable[Concatenate[C, P], T]:
    """A method that is awaited on the event loop, and blocks other threads."""
    name = function.__name__

    @functools.wraps(function)
    def call(self: C, /, *args: P.args, **kwargs: P.kwargs) -> T:
        scope = self._calls.scope()
        scopes = (scope,) if scope is not None else () if running_loop() is not None else scopes_of_a_thread()
        make = functools.partial(self._calls.noted, name, functools.partial(function, self), scopes, args, kwargs)
        return self._given(name, called(f"ctx.{name}"), make, scope)  # type: ignore[no-any-return]

    return call


def _brief(value: Any, name: str = "") -> str:
    """An argument in at most a few hundred characters; of variables only the names, since values may be secrets."""
    if name == "env" and value:
        value = list(value)
    if isinstance(value, bytes):
        return f"{len(value)} bytes"
    text = value if isinstance(value, str) else repr(value)
    return text if len(text) <= _LONGEST else f"{text[:_LONGEST]}... ({len(text)} characters)"


def _output(result: Any) -> tuple[str, int | None]:
    """What a call gave back, in short, and the exit code where it ran a command."""
    exit_code = None
    if isinstance(result, dict):
        given = result.get("exit_code")
        exit_code = given if isinstance(given, int) else None
        parts = [str(part) for name in ("output", "error") if (part := result.get(name))]
        text = "\n".join(parts) if "output" in result else str(result)
    elif isinstance(result, str):
        text = str.__str__(result)
    elif isinstance(result, bytes):
        text = f"{len(result)} bytes"
    else:
        text = repr(list(result)) if isinstance(result, list | tuple) else ""
    half = _LONGEST_OUTPUT // 2
    cut = len(text) - _LONGEST_OUTPUT
    return (text if cut <= 0 else f"{text[:half]}\n... ({cut} characters) ...\n{text[-half:]}"), exit_code
