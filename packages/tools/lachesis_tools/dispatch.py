"""Dispatch of tool calls: from the call that the model wrote to the text that it reads.

Exceptions that a tool raises on purpose are returned as text: `ToolFailure`, bad arguments, its time limit, and the
exceptions that it declares. Failures of the infrastructure (`BackendError`) are raised unchanged: the loop ends the
rollout as `infra_error` and retries it. Everything else is an error of the environment, raised as `ToolCrashed`: the
rollout is not scored, and the run shows the traceback. So no model is trained on our failures.
"""

from __future__ import annotations

import asyncio
import contextvars
import itertools
import math
import time
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from backends.errors import BackendError
from backends.tasks import name_if_it_goes_on, run_all
from lachesis_tools.argument_schema import BadArguments, validate
from lachesis_tools.builtin import BUILTIN_TOOLS
from lachesis_tools.json_results import as_json
from lachesis_tools.text import cap_text, described, did_you_mean, shortened, to_json, valid_utf8
from lachesis_tools.tool_registry import Tool, ToolCrashed, ToolFailure, ToolRegistry
from lachesis_tools.tool_session import SessionClosed, ToolSession, ToolSessions, UnusablePath, waiting_of

Arguments = Mapping[str, Any] | str | None
"""The arguments of a call: an object, or JSON text, possibly invalid."""


@dataclass(frozen=True, slots=True)
class ToolResult:
    """The answer to one call."""

    content: str
    """The text that the model reads."""
    error: str | None = None
    """Why the call failed: unknown tool, bad arguments, time limit, `ToolFailure` or an exception that the tool
    declares. A command that exits with 1 is not a failed call."""
    duration: float = 0.0
    """Seconds of wall-clock time, including the start of a sandbox."""
    truncated: bool = False
    images: tuple[str, ...] = ()
    """Data URLs of images that the model sees after the text. A tool that shows any returns a `ToolResult`."""
    reward: float | None = None
    """The reward of this step, if the tool is an environment that has such."""
    done: bool = False
    """Whether the task is over: later calls of the turn are not run, and the agent has no further turn."""
    chat: Any = None
    """The `MessageHistory` of the sub-agent that made this answer, whose samples belong to the rollout."""

    @property
    def parts(self) -> str | tuple[Mapping[str, Any], ...]:
        """The content of the message for the model."""
        if not self.images:
            return self.content
        shown = [{"type": "image_url", "image_url": {"url": url}} for url in self.images]
        return {"type": "text", "text": self.content}, *shown


@dataclass(frozen=True, slots=True)
class CallableTools:
    """The tools that the caller of a tool may call; `allowed` is None for all of the registry."""

    registry: ToolRegistry
    allowed: Collection[str] | None


callable_tools: contextvars.ContextVar[CallableTools] = contextvars.ContextVar("callable_tools")
"""Set in every call of a tool."""
calling_agent: contextvars.ContextVar[Any] = contextvars.ContextVar("calling_agent", default=None)
"""A function that returns the `CallingAgent` in calls by an agent loop."""


class _TimeLimit(Exception):
    pass


async def call_tool(
    name: str,
    arguments: Arguments,
    session: ToolSession,
    *,
    registry: ToolRegistry = BUILTIN_TOOLS,
    allowed: Collection[str] | None = None,
) -> ToolResult:
    """Run one tool call.

    Args:
        name: The name that the model wrote.
        arguments: The arguments that the model sent; they are validated.
        session: The session of the rollout.
        registry: The known tools.
        allowed: Names of the tools that the rollout announced; None allows all tools of the registry.

    Raises:
        BackendError: the infrastructure failed, also where a tool raised another error for that, or from a task group.
        ToolCrashed: the tool raised an undeclared exception, or returned a value that is not JSON.
        asyncio.CancelledError: the caller was cancelled; the tool is cancelled as well.
    """
    began = time.perf_counter()
    tool: Tool | None = None
    try:
        tool = _find(name, registry, allowed)
        keywords = validate(tool.name, tool.model, arguments)
        session.require_open()
        if tool.session_parameter is not None:
            keywords[tool.session_parameter] = session
        value = await _run(tool, keywords, session, CallableTools(registry, allowed))
        if not isinstance(value, ToolResult):
            value = ToolResult(value if isinstance(value, str) else to_json(value))
        if value.reward is not None and not math.isfinite(value.reward):
            raise ValueError(f"its reward is {value.reward}")
    except BackendError:
        raise
    except Exception as error:
        if (infrastructure := infrastructure_of(error)) is not None:
            raise infrastructure from error
        message = _on_purpose(error, tool)
        if message is None:
            raise ToolCrashed(tool.name if tool is not None else str(name), error) from error
        return _failed(message, began)
    content, elided = cap_text(valid_utf8(value.content), tool.max_result_chars)
    return replace(value, content=content, duration=time.perf_counter() - began, truncated=elided > 0)


async def call_tools(
    calls: Sequence[tuple[str, Arguments]],
    session: ToolSession,
    *,
    registry: ToolRegistry = BUILTIN_TOOLS,
    allowed: Collection[str] | None = None,
) -> list[ToolResult]:
    """Run the calls of one turn; results are in the order of the calls.

    Neighbouring calls of `concurrency_safe` tools run concurrently. Any other call runs alone, after all calls before
    it and before all calls after it, so that a turn has the effect of its calls one by one.

    Raises:
        BackendError, ToolCrashed: as in `call_tool`; concurrent calls of the failing one are cancelled.
    """
    results: list[ToolResult] = []
    for batch in _batches(calls, registry):
        if any(result.done for result in results):
            over = "Not run: the task is over."
            results += [ToolResult(to_json({"error": over}), over) for _ in batch]
            continue
        running = [call_tool(name, arguments, session, registry=registry, allowed=allowed) for name, arguments in batch]
        results += [await running[0]] if len(running) == 1 else await run_all(running)
    return results


async def handle_function_call(
    name: str,
    args: Arguments,
    *,
    task_id: str,
    sessions: ToolSessions,
    registry: ToolRegistry = BUILTIN_TOOLS,
    allowed: Collection[str] | None = None,
) -> str:
    """`call_tool` for callers that identify a rollout by its task id. Returns JSON, errors included.

    Raises:
        BackendError, ToolCrashed: as in `call_tool`. No other error is raised.
    """
    try:
        session = sessions.get(task_id)
    except KeyError as error:
        return to_json({"error": str(error.args[0])})
    result = await call_tool(name, args, session, registry=registry, allowed=allowed)
    return to_json(result.parts) if result.images else as_json(name, result.content)


def _find(name: str, registry: ToolRegistry, allowed: Collection[str] | None) -> Tool:
    names = [known for known in registry if allowed is None or known in allowed]
    tool = registry.get(name) if isinstance(name, str) else None
    if tool is None or tool.name not in names:
        hint = did_you_mean(str(name), names)
        raise ToolFailure(
            f"there is no tool {shortened(name)!r}{hint or '.'} The tools are: {', '.join(names) or 'none'}"
        )
    if (reason := tool.missing()) is not None:
        raise ToolFailure(f"the tool {name!r} is not available here: {reason}")
    return tool


async def _run(tool: Tool, keywords: dict[str, Any], session: ToolSession, tools: CallableTools) -> Any:
    """Run the tool in a separate task, so that its own cancellations and exits do not reach the caller."""
    context = contextvars.copy_context()
    context.run(callable_tools.set, tools)
    context.run(waiting_of.set, session.waiting)
    task = asyncio.get_running_loop().create_task(_contained(tool, keywords), context=context)
    clock = asyncio.get_running_loop().time
    began = clock()
    try:
        while not task.done():
            left = None if tool.time_limit is None else max(0.0, began + tool.time_limit - clock())
            await asyncio.wait({task}, timeout=left)
            if task.done():
                break
            await session.wait_start_ended()
            if session.start_ended > began:  # the start of the sandbox does not count: restart the clock
                began = session.start_ended
                continue
            await _cancel(task, tool)
            if task.cancelled() or not isinstance(task.exception(), BackendError):
                raise _TimeLimit
    except asyncio.CancelledError:
        await _cancel(task, tool)
        raise
    if task.cancelled():
        raise RuntimeError("the tool cancelled itself")
    return task.result()


async def _cancel(task: asyncio.Task[Any], tool: Tool) -> None:
    task.cancel()
    late = name_if_it_goes_on(task, f"the tool {tool.name!r}", asyncio.get_running_loop().time())
    try:
        await asyncio.wait({task})
    finally:
        late.cancel()


async def _contained(tool: Tool, keywords: dict[str, Any]) -> Any:
    try:
        return await tool.function(**keywords)
    except (Exception, asyncio.CancelledError):
        raise
    except BaseException as error:  # exits, which would end the program
        raise RuntimeError(f"the tool raised {error!r}") from error


def infrastructure_of(error: BaseException) -> BackendError | None:
    """The BackendError that `error` is, contains, or was raised for, if any."""
    known, left = {id(error)}, [error]
    while left:  # no recursion: libraries that raise what they have caught make circles
        error = left.pop()
        if isinstance(error, BackendError):
            return error
        earlier = error.__cause__ or (None if error.__suppress_context__ else error.__context__)
        parts = error.exceptions if isinstance(error, BaseExceptionGroup) else ()
        new = [each for each in (earlier, *reversed(parts)) if each is not None and id(each) not in known]
        known.update(map(id, new))
        left += new
    return None


def _on_purpose(error: BaseException, tool: Tool | None) -> str | None:
    """The model's text about the error; None if it is not for the model."""
    if isinstance(error, BadArguments | ToolFailure | SessionClosed | UnusablePath):
        return str(error)
    if tool is None:
        return None
    if isinstance(error, _TimeLimit):
        return f"{tool.name} was stopped after its time limit of {tool.time_limit:g} s"
    if isinstance(error, tool.errors):
        return described(error)
    if isinstance(error, BaseExceptionGroup):
        messages = [_on_purpose(each, tool) for each in error.exceptions]
        return None if None in messages else "; ".join(filter(None, messages))
    return None


def _batches(calls: Sequence[tuple[str, Arguments]], registry: ToolRegistry) -> Iterator[list[tuple[str, Arguments]]]:
    def safe(call: tuple[str, Arguments]) -> bool:
        tool = registry.get(call[0]) if isinstance(call[0], str) else None
        return tool is None or tool.concurrency_safe  # an unknown tool has no effect

    for together, neighbours in itertools.groupby(calls, safe):
        if together:
            yield list(neighbours)
        else:
            yield from ([call] for call in neighbours)


def _failed(message: str, began: float) -> ToolResult:
    message, elided = cap_text(valid_utf8(message), 4000)
    return ToolResult(to_json({"error": message}), message, time.perf_counter() - began, truncated=elided > 0)
