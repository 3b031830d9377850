"""Tools: async functions whose signature and docstring are the description for the model.

`tool` derives the OpenAI function schema and the validation of arguments from one pydantic model, so they cannot
diverge. A `ToolRegistry` is an immutable mapping; there is no global one.
"""

from __future__ import annotations

import copy
import importlib
import inspect
import re
from collections.abc import Awaitable, Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from functools import partial
from typing import Any, cast, get_type_hints

from pydantic import BaseModel

from backends.errors import BackendError, ExitCode, LachesisError
from backends.lazy import once_property
from lachesis_tools.argument_schema import (
    NOT_SENT,
    Parameters,
    arguments_model,
    arguments_schema,
    parse_docstring,
    read_parameters,
    read_schema,
)
from lachesis_tools.text import described
from lachesis_tools.tool_session import ToolSession

MAX_RESULT_CHARS = 50_000
"""The default of the most characters of a result that reach the model."""

MIN_RESULT_CHARS = 100
"""The smallest limit with room for the marker of the omitted part."""

_NAME = re.compile(r"[A-Za-z_][A-Za-z0-9_-]{0,63}")
_SESSION = "session of the rollout"
"""The keyword of the `ToolSession` of a tool with a schema: no parameter is called that."""


class ToolFailure(Exception):
    """Raised by a tool that cannot do its work. The model reads the message."""


class ToolCrashed(LachesisError, RuntimeError):
    """A tool raised something that it does not declare: an error of the environment, which no model reads.

    `__cause__` is what it raised.
    """

    def __init__(self, tool: str, error: BaseException) -> None:
        super().__init__(
            f"the tool {tool!r} raised {described(error)}; the model reads only a ToolFailure, or an exception "
            f"declared with @tool(errors=...)"
        )
        self.tool = tool
        """The name of the tool."""

    def __reduce__(self) -> Any:
        return _crashed, (str(self), self.tool)


def _crashed(message: str, tool: str) -> ToolCrashed:
    crashed = ToolCrashed.__new__(ToolCrashed, message)
    crashed.args, crashed.tool = (message,), tool
    return crashed


class ToolUnavailable(LachesisError, LookupError):
    """Tools that were enabled by name, or all of an enabled toolset, lack a requirement on this machine."""

    exit_code = ExitCode.SETTINGS

    def __init__(self, reasons: Mapping[str, str]) -> None:
        self.reasons = dict(reasons)
        listed = "; ".join(f"{name!r}: {reason}" for name, reason in self.reasons.items())
        super().__init__(f"tools not available here: {listed}. Install what is missing, or disable these tools")


@dataclass(frozen=True, eq=False)
class Tool:
    """A tool, created by the decorator `tool`. Calling it calls the function without validation or limits."""

    name: str
    toolset: str
    description: str
    function: Callable[..., Awaitable[Any]]
    declared: Parameters = field(repr=False)
    session_parameter: str | None
    """The name of the parameter for the `ToolSession`; None where the function has none."""
    concurrency_safe: bool
    time_limit: float | None
    """Seconds; None where the tool limits its time itself."""
    max_result_chars: int
    check: Callable[[], str | None] | None = field(default=None, repr=False)
    errors: tuple[type[Exception], ...] = ()
    """Exceptions whose text the model reads, in addition to `ToolFailure`."""
    schema: Mapping[str, Any] | None = field(default=None, repr=False)
    """The JSON schema of the arguments, if it was given and not derived from a signature."""
    offered: bool = True
    """Whether the prompt tells the model of it."""

    @classmethod
    def from_schema(
        cls,
        name: str,
        description: str,
        parameters: Mapping[str, Any],
        call: Callable[[dict[str, Any], Any], Awaitable[Any]],
        *,
        toolset: str = "item",
        concurrency_safe: bool = False,
        time_limit: float | None = 60.0,
        max_result_chars: int = MAX_RESULT_CHARS,
        errors: Iterable[type[Exception]] = (),
        offered: bool = True,
        in_session: bool = False,
    ) -> Tool:
        """A tool whose arguments have a JSON schema, such as a tool of another framework or of an MCP server.

        Args:
            parameters: The schema, which the model reads unchanged. Names, required ones and the types at the top are
                checked before a call; `call` checks the rest.
            call: `await call(arguments, session)`, with the arguments as the model sent them and what the
                environment's `session(item)` yielded for this rollout. It returns and raises what the function of any
                tool does.
            offered: Whether the prompt tells the model of it. If not, the model may call it all the same: a message of
                the environment describes it later, for the tools of a prompt cannot change during a rollout.
            in_session: Whether `call` gets the `ToolSession` in place of what the environment yielded.

        The other arguments are those of `tool`.

        Raises:
            TypeError: the schema is not that of an object, or `errors` has no exceptions that a tool may declare.
            ValueError: a limit or the name is invalid.
        """
        _check_limits(name, time_limit, max_result_chars)
        return cls(
            name=name,
            toolset=toolset,
            description=description,
            function=partial(_call_with_arguments, call, in_session),
            declared=read_schema(name, parameters),
            session_parameter=_SESSION,
            concurrency_safe=concurrency_safe,
            time_limit=time_limit,
            max_result_chars=max_result_chars,
            errors=_declared_errors(name, errors),
            schema=parameters,
            offered=offered,
        )

    @once_property
    def _derived(self) -> tuple[type[BaseModel], dict[str, Any]]:
        if self.schema is None:
            return arguments_schema(self.name, self.declared)  # at first use, which keeps the import of tools fast
        more = self.schema.get("additionalProperties") is not False  # as JSON Schema has it
        return arguments_model(self.name, self.declared, more=more), dict(self.schema)

    @property
    def model(self) -> type[BaseModel]:
        """The pydantic model of the arguments."""
        return self._derived[0]

    @property
    def parameters(self) -> Mapping[str, Any]:
        """The JSON schema of the arguments. Raises `TypeError` where a type has none."""
        return self._derived[1]

    def definition(self) -> dict[str, Any]:
        """A new OpenAI tool definition for `tools=`."""
        function = {"name": self.name, "description": self.description, "parameters": copy.deepcopy(self.parameters)}
        return {"type": "function", "function": function}

    def missing(self) -> str | None:
        """Why the tool cannot be used on this machine; None where it can."""
        if self.check is None:
            return None
        try:
            return self.check()
        except Exception as error:
            return f"its check failed: {type(error).__name__}: {error}"

    def __call__(self, *args: Any, **kwargs: Any) -> Awaitable[Any]:
        return self.function(*args, **kwargs)


def tool(
    *,
    toolset: str,
    name: str | None = None,
    concurrency_safe: bool = False,
    time_limit: float | None = 60.0,
    max_result_chars: int = MAX_RESULT_CHARS,
    check: Callable[[], str | None] | None = None,
    errors: Iterable[type[Exception]] = (),
) -> Callable[[Callable[..., Awaitable[Any]]], Tool]:
    """Turn an async function into a tool.

    The first paragraph of its docstring becomes the description of the tool, and the Google-style `Args:` section
    describes the parameters. A parameter annotated `ToolSession` receives the session of the rollout and is not in the
    schema. The function returns a string, or a value that pydantic can convert to JSON. It raises `ToolFailure` with a
    message for the model. Any other exception that is not in `errors` is an error of the environment: the rollout gets
    no score, and the run shows the traceback.

    Args:
        toolset: The toolset of the tool.
        name: The name for the model; by default the function's name.
        concurrency_safe: Whether a call may run at the same time as other safe calls of the same turn. Only for tools
            that change nothing.
        time_limit: Seconds after which a call is cancelled, not counting the start of the sandbox.
        max_result_chars: Results longer than this lose their middle.
        check: Called without arguments; returns why the tool cannot work on this machine, or None.
        errors: Exceptions that the model's own arguments can cause; the model gets their type and text.

    Raises:
        TypeError: the function cannot be a tool; the message names the change to make.
        ValueError: a limit or the name is invalid.
    """

    def decorate(function: Callable[..., Awaitable[Any]]) -> Tool:
        label = name or str(getattr(function, "__name__", function))
        if not inspect.iscoroutinefunction(function):
            raise TypeError(
                f"tool {label!r} must be an `async def`: a synchronous tool would block every other rollout while "
                f"it runs; put blocking work into `await asyncio.to_thread(...)`"
            )
        _check_limits(label, time_limit, max_result_chars)
        try:
            hints = get_type_hints(function, include_extras=True)
        except NameError as error:
            raise TypeError(f"tool {label!r}: its annotations must be importable names ({error})") from error
        declared_errors = _declared_errors(label, errors)
        session_parameter = next((key for key, hint in hints.items() if hint is ToolSession and key != "return"), None)
        description, documented = parse_docstring(label, inspect.getdoc(function))
        declared = read_parameters(label, function, hints, documented, skip=session_parameter)
        return Tool(
            name=label,
            toolset=toolset,
            description=description,
            function=function,
            declared=declared,
            session_parameter=session_parameter,
            concurrency_safe=concurrency_safe,
            time_limit=time_limit,
            max_result_chars=max_result_chars,
            check=check,
            errors=declared_errors,
        )

    return decorate


@dataclass(frozen=True, slots=True)
class ToolReference:
    """A tool without a `check`, whose module is imported when the tool is looked up."""

    name: str
    toolset: str
    module: str

    def load(self) -> Tool:
        """The tool."""
        return cast("Tool", getattr(importlib.import_module(self.module), self.name))


def _check_limits(label: str, time_limit: float | None, max_result_chars: int) -> None:
    if not _NAME.fullmatch(label):
        raise ValueError(f"tool name {label!r}: use letters, digits, '_' and '-', at most 64, not a digit first")
    if time_limit is not None and time_limit <= 0:
        raise ValueError(f"tool {label!r}: time_limit must be positive or None, not {time_limit}")
    if max_result_chars < MIN_RESULT_CHARS:
        raise ValueError(f"tool {label!r}: max_result_chars must be at least {MIN_RESULT_CHARS}")


def _declared_errors(label: str, errors: Iterable[type[Exception]]) -> tuple[type[Exception], ...]:
    declared = tuple(errors)
    for kind in declared:
        usable = isinstance(kind, type) and issubclass(kind, Exception)
        if not usable or issubclass(BackendError, kind) or issubclass(kind, BackendError):
            raise TypeError(
                f"tool {label!r}: errors= takes exceptions such as ValueError, not {kind!r}: a failure of the "
                "infrastructure is never an answer for the model"
            )
    return declared


async def _call_with_arguments(
    call: Callable[[dict[str, Any], Any], Awaitable[Any]], in_session: bool, /, **keywords: Any
) -> Any:
    session: ToolSession = keywords.pop(_SESSION)
    sent = {name: value for name, value in keywords.items() if value is not NOT_SENT}
    return await call(sent, session if in_session else session.rollout_session)


class ToolRegistry(Mapping[str, Tool]):
    """An immutable mapping of tools by name, in the given order."""

    def __init__(self, tools: Iterable[Tool | ToolReference] = ()) -> None:
        self._tools: dict[str, Tool | ToolReference] = {}
        each: Any  # an author may give anything
        for each in tools:
            if not isinstance(each, Tool | ToolReference):
                called = getattr(each, "__name__", each)
                raise TypeError(f"{called!r} is not a tool: decorate it with @tool(toolset=...)")
            if each.name in self._tools:
                raise ValueError(f"two tools are called {each.name!r}; remove the first with `without({each.name!r})`")
            self._tools[each.name] = each

    def extended(self, *tools: Tool) -> ToolRegistry:
        """A new registry with `tools` added.

        Raises:
            ValueError: a name is taken.
            TypeError: an argument is not a tool, or the type of a parameter has no JSON schema.
        """
        extended = ToolRegistry([*self._tools.values(), *tools])
        for each in tools:
            _ = each.parameters  # fails here, not during a rollout, for a type without a schema
        return extended

    def without(self, *names: str) -> ToolRegistry:
        """A new registry without the tools `names`. Raises `KeyError` for an unknown one."""
        for name in names:
            self._tools[name]
        return ToolRegistry(each for each in self._tools.values() if each.name not in names)

    def replaced(self, tool: Tool) -> ToolRegistry:
        """A new registry with `tool` in the place of the one of its name. Raises `KeyError` where there is none."""
        self._tools[tool.name]
        return ToolRegistry(tool if each.name == tool.name else each for each in self._tools.values())

    def definitions(self, names: Iterable[str]) -> list[dict[str, Any]]:
        """New OpenAI definitions of these tools. Raises `KeyError` for an unknown one."""
        return [self[name].definition() for name in names]

    def unavailable(self) -> dict[str, str]:
        """The unavailable tools and their missing requirements. Every call runs the checks again."""
        reasons = {name: each.missing() for name, each in self._tools.items() if isinstance(each, Tool)}
        return {name: reason for name, reason in reasons.items() if reason is not None}

    def toolsets(self) -> dict[str, str]:
        """By tool, the toolset that it declares; imports none of them."""
        return {name: each.toolset for name, each in self._tools.items()}

    def __getitem__(self, name: str) -> Tool:
        found = self._tools[name]
        return found if isinstance(found, Tool) else found.load()

    def __contains__(self, name: object) -> bool:
        return name in self._tools

    def __iter__(self) -> Iterator[str]:
        return iter(self._tools)

    def __len__(self) -> int:
        return len(self._tools)

    def __repr__(self) -> str:
        return f"ToolRegistry({', '.join(self._tools)})"
