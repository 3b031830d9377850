"""A call of a method of `ToolContext`: how it is made, written down, and whose failure it is."""

from __future__ import annotations

import errno
import functools
import os
import time
from collections.abc import Callable, Coroutine
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Concatenate, ParamSpec, TypeVar

from backends import BackendError, SandboxExhausted
from backends.lease import LeaseOver
from lachesis.rewards.agent_fault import AgentFault
from lachesis.rewards.blame import DOWNLOADS, UPLOADS, blamed, local_path
from lachesis.rewards.call_scope import CallScope, outside_scopes, scopes_of_a_thread
from lachesis.rewards.calls import called, running_loop
from lachesis_tools import ToolSession

if TYPE_CHECKING:
    from lachesis.tool_context.tool_context import ToolContext

_LONGEST = 500
"""Characters of an argument in a `RewardCall`."""
_LONGEST_OUTPUT = 4000
"""Characters of an output: its first half and its last."""
_READ = ("read_file", "read_text", "read_json", "read_bytes")
_OF_AGENTS = ("/tmp/", "/home/", "/root/", "/workspace/", "/var/tmp/", "/dev/shm/")
"""Folders in which agents leave files."""
_RUN = ("terminal", "call_tool", "search")
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

    def to_record(self) -> dict[str, Any]:
        record: dict[str, Any] = {"method": self.method, "arguments": list(self.arguments), "seconds": self.seconds}
        found = {"output": self.output, "error": self.error}
        exit_code = {} if self.exit_code is None else {"exit_code": self.exit_code}
        return {**record, **exit_code, **{name: text for name, text in found.items() if text}}


def context_method(
    function: Callable[Concatenate[ToolContext, P], Coroutine[Any, Any, T]],
) -> Callable[Concatenate[ToolContext, P], T]:
    """A method that is awaited on the event loop, and blocks other threads."""

    @functools.wraps(function)
    def call(self: ToolContext, /, *args: P.args, **kwargs: P.kwargs) -> T:
        scope = self._scope()
        scopes = (scope,) if scope is not None else () if running_loop() is not None else scopes_of_a_thread()
        make = functools.partial(_noted, function, self, scopes, args, kwargs)
        return self._given(function.__name__, called(f"ctx.{function.__name__}"), make, scope)  # type: ignore[no-any-return]

    return call


async def _noted(
    function: Callable[..., Coroutine[Any, Any, T]],
    self: ToolContext,
    scopes: tuple[CallScope, ...],
    args: Any,
    kwargs: Any,
) -> T:
    """Log the call, and keep a failure of the infrastructure even if the reward catches it: it is not a score."""
    begin, problem, method = time.monotonic(), "", function.__name__
    result: Any = None
    self._shared.begin()
    own = self._is_verifier and not self._has_run and method in ("write_file", *UPLOADS)
    self._has_run = self._has_run or method in _RUN
    try:
        try:
            with outside_scopes():
                result = await function(self, *args, **kwargs)
                return result  # type: ignore[no-any-return]
        except (OSError, SandboxExhausted) as error:
            whose = blamed(method, error, local_path(method, args, kwargs), own=own)
            if isinstance(whose, AgentFault):
                if self._shared.before_agent:
                    raise
                whose.method, whose.place = method, self._shared
                whose.of_image = await _is_of_image(self._session, method, whose, args, kwargs)
            if whose is error:
                raise
            raise whose from error
    except BaseException as error:
        cleaned_up = isinstance(error, LeaseOver) and self._session.closed  # under this call, by the reward itself
        if not cleaned_up:
            if isinstance(error, BackendError):
                self._shared.failure = self._shared.failure or error
            for scope in scopes:
                scope.met(error)
        problem = f"{type(error).__name__}: {error}"
        raise
    finally:
        self._shared.end()
        arguments = [_brief(arg) for arg in args] + [f"{name}={_brief(value, name)}" for name, value in kwargs.items()]
        seconds = round(time.monotonic() - begin, 4)
        output, exit_code = _output(result)
        self._shared.calls.append(RewardCall(method, tuple(arguments), seconds, problem[:500], output, exit_code))


async def _is_of_image(session: ToolSession, method: str, fault: AgentFault, args: Any, kwargs: Any) -> bool:
    """Whether a file is missing that the image has, if it is not the agent that removed it."""
    path = os.fspath(args[0] if args else kwargs.get("path", kwargs.get("remote_path", "")))
    if fault.errno != errno.ENOENT or method not in (*_READ, *DOWNLOADS) or not isinstance(path, str):
        return False
    workspace = (await session.sandbox()).workdir.rstrip("/") + "/"
    return path.startswith("/") and not path.startswith((workspace, *_OF_AGENTS))


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
