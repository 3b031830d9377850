"""What a tool raises on purpose becomes text; failures of the infrastructure and of the tool itself are raised."""

from __future__ import annotations

import asyncio
import contextlib
import json
import pickle
import sys
import time
from typing import Annotated, Any, Literal

import pytest
from hypothesis import given
from hypothesis import strategies as st
from pydantic import BaseModel, Field

from backends import tasks
from backends.base import Sandbox
from backends.errors import BackendError, SandboxLost
from lachesis_tools import (
    ToolCrashed,
    ToolFailure,
    ToolRegistry,
    ToolResult,
    ToolSession,
    call_tool,
    call_tools,
    tool,
)
from lachesis_tools.tool_session import UnusablePath


class Entry(BaseModel):
    key: str


@tool(toolset="test", concurrency_safe=True)
async def echo(
    text: str,
    count: Annotated[int, Field(ge=0, le=10)] = 1,
    flag: bool = False,
    mode: Literal["x", "y"] = "x",
    entries: list[Entry] | None = None,
    maybe: int | None = 7,
) -> dict[str, Any]:
    """Return the arguments."""
    keys = None if entries is None else [entry.key for entry in entries]
    return {"text": text, "count": count, "flag": flag, "mode": mode, "entries": keys, "maybe": maybe}


class Deep(BaseModel):
    """A parameter of any depth."""

    inner: Any


class Textless(ValueError):
    def __str__(self) -> str:
        raise AttributeError("response")


@tool(toolset="test", errors=(ArithmeticError, KeyError))
async def fail(kind: str) -> str:
    """Fail in a way of your choice."""
    match kind:
        case "fail":
            raise ToolFailure("not today")
        case "bug":
            raise SystemError("AST constructor recursion depth mismatch")
        case "declared":
            raise ZeroDivisionError("division by zero")
        case "declared group":
            raise ExceptionGroup("several", [ToolFailure("not today"), ExceptionGroup("inner", [KeyError("k")])])
        case "mixed group":
            raise ExceptionGroup("several", [ToolFailure("not today"), TypeError("a bug")])
        case "host file":
            raise FileNotFoundError(2, "No such file or directory", "/etc/of-the-host")
        case "late":
            raise TimeoutError
        case "path":
            raise UnusablePath("a path cannot contain a NUL character")
        case "exit":
            sys.exit(3)
        case "other exit":
            raise GeneratorExit
        case "group of exits":
            raise BaseExceptionGroup("several", [KeyboardInterrupt(), ToolFailure("not today")])
        case "group of an exit and a loss":
            raise BaseExceptionGroup("several", [KeyboardInterrupt(), SandboxLost("it is gone")])
        case "circle":
            first, second = ValueError("first"), ValueError("second")
            first.__cause__, second.__cause__ = second, first
            raise first
        case "no text":
            raise Textless
        case "cancel":
            raise asyncio.CancelledError
        case "lost":
            raise SandboxLost("it is gone")
        case "wrapped":
            try:
                raise SandboxLost("it is gone")
            except SandboxLost as error:
                raise RuntimeError("could not") from error
        case "hidden":
            try:
                raise SandboxLost("it is gone")
            except SandboxLost:
                raise ToolFailure("try again later")  # noqa: B904  # what a careless tool does
        case "declared for it":
            try:
                raise SandboxLost("it is gone")
            except SandboxLost as error:
                raise KeyError("no sandbox") from error
        case "group":
            raise ExceptionGroup("several", [ValueError("x"), ExceptionGroup("inner", [SandboxLost("it is gone")])])
        case "surrogate":
            return "a\ud800b"
        case "unserialisable":
            return object()  # type: ignore[return-value]
    return "no failure"


@tool(toolset="test", time_limit=0.2)
async def sleep(seconds: float, stubborn: bool = False) -> str:
    """Sleep."""
    try:
        await asyncio.sleep(seconds)
    except asyncio.CancelledError:
        if not stubborn:
            raise
    return "slept"


@tool(toolset="test", max_result_chars=200)
async def long(size: int) -> str:
    """Return much."""
    return "x" * size


REGISTRY = ToolRegistry([echo, fail, sleep, long])


async def no_sandbox() -> Sandbox:
    raise BackendError("the engine is down")


@pytest.fixture
def session() -> ToolSession:
    return ToolSession("task", no_sandbox)


async def run(session: ToolSession, name: str, arguments: Any, **options: Any) -> ToolResult:
    return await call_tool(name, arguments, session, registry=REGISTRY, **options)


def problem(result: ToolResult) -> str:
    assert result.error is not None
    assert json.loads(result.content) == {"error": result.error}
    return result.error


DEFAULTS = {"text": "a", "count": 1, "flag": False, "mode": "x", "entries": None, "maybe": 7}


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        ({"text": "a"}, {}),
        ('{"text": "a"}', {}),
        ({"text": "a", "count": "5"}, {"count": 5}),
        ({"text": "a", "count": 5.0}, {"count": 5}),
        ({"text": 12}, {"text": "12"}),
        ({"text": "a", "flag": "true"}, {"flag": True}),
        ({"text": "a", "count": None, "mode": None}, {}),
        ({"text": "a", "maybe": None}, {"maybe": None}),
        ({"text": "a", "entries": '[{"key": "k"}]'}, {"entries": ["k"]}),
        ({"text": "a", "entries": [{"key": 3}], "count": "2"}, None),
        ({"text": '["json", "text"]'}, {"text": '["json", "text"]'}),
    ],
)
async def test_harmless_slips_in_arguments_are_corrected(
    session: ToolSession, arguments: Any, expected: dict[str, Any] | None
) -> None:
    result = await run(session, "echo", arguments)
    if expected is None:
        assert "entries.0.key" in problem(result)
    else:
        assert result.error is None
        assert json.loads(result.content) == DEFAULTS | expected


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (None, "must be a JSON object such as {}, not null"),
        ("null", "not null"),
        ("[1]", "not an array"),
        ('"text"', "not a string"),
        ("5", "not a number"),
        ("true", "not a boolean"),
        ('{"text": "a"', "not valid JSON"),
        ("[" * 100_000, "arguments of echo"),
        ("", "'text' is required"),
        ({}, "'text' is required"),
        ({"text": None}, "'text'"),
        ({"text": {"a": 1}}, "'text': Input should be a valid string"),
        ({"text": "a", "count": "five"}, "'count'"),
        ({"text": "a", "count": 11}, "'count': Input should be less than or equal to 10 (got 11)"),
        ({"text": "a", "mode": "z"}, "'mode': Input should be 'x' or 'y'"),
        ({"text": "a", "cuont": 1}, "no argument 'cuont'; did you mean 'count'?"),
        ({"text": "a", "zzzzz": 1}, "no argument 'zzzzz'. Its arguments are: text, count"),
        ({"text": "a", "argument_count": 1}, "no argument 'argument_count'"),
        ({"text": "a", "entries": [{"key": "k"}, {}]}, "'entries.1.key' is required"),
        ({"text": "a", "entries": "not json"}, "'entries'"),
        ('{"text": "\\ud800"}', "'text'"),
    ],
)
async def test_bad_arguments_are_text_that_names_the_field(session: ToolSession, arguments: Any, message: str) -> None:
    assert message in problem(await run(session, "echo", arguments))


json_values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text(max_size=10),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=8), inner, max_size=3),
    max_leaves=8,
)


@given(
    st.one_of(
        st.text(max_size=40),
        json_values.map(json.dumps),
        st.fixed_dictionaries({}, optional={"text": json_values, "count": json_values, "entries": json_values}),
    )
)
def test_no_arguments_at_all_can_make_a_call_raise(arguments: Any) -> None:
    result = asyncio.run(run(ToolSession("task", no_sandbox), "echo", arguments))
    json.loads(result.content)
    result.content.encode()


@pytest.mark.parametrize(
    "value", ["\ud800", ["\ud800"], {"a": ["\ud800"]}, {"\ud800": 1}, [{"key": "\ud800"}], '["\\ud800"]']
)
async def test_half_of_a_surrogate_pair_is_no_argument_wherever_it_is(session: ToolSession, value: Any) -> None:
    """A tool that encodes it would end the rollout without a score."""

    @tool(toolset="x")
    async def deep(value: Any, model: Deep, texts: list[str]) -> str:
        """Encode."""
        return "said"

    for arguments in (
        {"value": value, "model": {"inner": 1}, "texts": []},
        {"value": 1, "model": {"inner": value}, "texts": []},
        {"value": 1, "model": {"inner": 1}, "texts": value},
    ):
        result = await call_tool("deep", json.dumps(arguments), session, registry=ToolRegistry([deep]))
        if value != '["\\ud800"]' or arguments["texts"]:  # a text that is JSON is read where a list is wanted
            assert "bad arguments for deep" in problem(result)


async def test_an_unknown_tool_is_answered_with_near_names_and_the_list(session: ToolSession) -> None:
    message = problem(await run(session, "ecko", {}))
    assert "there is no tool 'ecko'; did you mean 'echo'? The tools are: echo, fail, sleep, long" in message
    assert "The tools are: echo" in problem(await run(session, None, {}))  # type: ignore[arg-type]


async def test_a_tool_that_was_not_announced_cannot_be_called(session: ToolSession) -> None:
    message = problem(await run(session, "echo", {"text": "a"}, allowed={"long"}))
    assert message == "there is no tool 'echo'. The tools are: long"


async def test_a_tool_that_is_not_available_says_why(session: ToolSession) -> None:
    hidden = tool(toolset="x", name="hidden", check=lambda: "set KEY")(long.function)
    result = await call_tool("hidden", {"size": 1}, session, registry=ToolRegistry([hidden]))
    assert problem(result) == "the tool 'hidden' is not available here: set KEY"


@pytest.mark.parametrize(
    ("kind", "message"),
    [
        ("fail", "not today"),
        ("declared", "ZeroDivisionError: division by zero"),
        ("declared group", "not today; KeyError: 'k'"),
        ("path", "a path cannot contain a NUL character"),
    ],
)
async def test_what_a_tool_raises_on_purpose_or_declares_becomes_text(
    session: ToolSession, kind: str, message: str
) -> None:
    assert problem(await run(session, "fail", {"kind": kind})) == message


@pytest.mark.parametrize(
    ("kind", "message"),
    [
        ("bug", "SystemError: AST constructor recursion depth mismatch"),
        ("mixed group", "ExceptionGroup: several"),
        ("host file", "FileNotFoundError: "),
        ("late", "TimeoutError;"),
        ("other exit", "RuntimeError: the tool raised GeneratorExit()"),
        ("group of exits", "RuntimeError: the tool raised BaseExceptionGroup("),
        ("circle", "ValueError: first"),
        ("no text", "Textless: its text cannot be read"),
        ("exit", "RuntimeError: the tool raised SystemExit(3)"),
        ("cancel", "RuntimeError: the tool cancelled itself"),
        ("unserialisable", "PydanticSerializationError: "),
    ],
)
async def test_everything_else_is_an_error_with_the_name_of_the_tool(
    session: ToolSession, kind: str, message: str
) -> None:
    with pytest.raises(ToolCrashed) as caught:
        await run(session, "fail", {"kind": kind})
    assert str(caught.value).startswith(f"the tool 'fail' raised {message}")
    assert caught.value.tool == "fail" and caught.value.__cause__ is not None
    copied = pickle.loads(pickle.dumps(caught.value))
    assert (str(copied), copied.tool) == (str(caught.value), "fail")


async def test_text_that_no_tokenizer_takes_is_repaired(session: ToolSession) -> None:
    assert (await run(session, "fail", {"kind": "surrogate"})).content == "a?b"


@pytest.mark.parametrize(
    "kind", ["lost", "wrapped", "hidden", "declared for it", "group", "group of an exit and a loss"]
)
async def test_infrastructure_errors_are_raised_as_their_own_kind(session: ToolSession, kind: str) -> None:
    with pytest.raises(SandboxLost, match="it is gone"):
        await run(session, "fail", {"kind": kind})
    with pytest.raises(SandboxLost, match="it is gone"):
        await call_tools([("echo", {"text": "a"}), ("fail", {"kind": kind})], session, registry=REGISTRY)


@pytest.mark.parametrize("stubborn", [False, True])
async def test_a_time_limit_cancels_the_tool(session: ToolSession, stubborn: bool) -> None:
    result = await run(session, "sleep", {"seconds": 30, "stubborn": stubborn})
    assert problem(result) == "sleep was stopped after its time limit of 0.2 s"
    assert 0.2 <= result.duration < 25, "and not the 30 s of the tool"


async def test_a_tool_that_goes_on_after_its_time_limit_is_named(
    session: ToolSession, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(tasks, "GOES_ON", 0.05)

    @tool(toolset="x", time_limit=0.05)
    async def swallowing() -> str:
        """Wait."""
        with contextlib.suppress(asyncio.CancelledError):
            await asyncio.sleep(60)
        await asyncio.sleep(0.3)
        return "ended"

    result = await call_tool("swallowing", {}, session, registry=ToolRegistry([swallowing]))
    assert "time limit" in problem(result)
    assert caplog.messages[0].startswith("the tool 'swallowing' still runs")


async def test_cancelling_the_caller_cancels_the_tool(session: ToolSession) -> None:
    begun, ended = asyncio.Event(), asyncio.Event()

    @tool(toolset="x", time_limit=None)
    async def endless() -> str:
        """Wait."""
        begun.set()
        try:
            await asyncio.sleep(60)
        finally:
            ended.set()
        return ""

    task = asyncio.create_task(call_tool("endless", {}, session, registry=ToolRegistry([endless])))
    await asyncio.wait_for(begun.wait(), 60)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    assert ended.is_set()


async def test_a_slow_sandbox_start_is_not_the_tools_time(session: ToolSession) -> None:
    @tool(toolset="x", time_limit=0.2)
    async def use(session: ToolSession) -> str:
        """Use the sandbox."""
        await session.sandbox()
        return "done"

    async def slow() -> Sandbox:
        await asyncio.sleep(0.5)
        raise BackendError("the engine is down")

    with pytest.raises(BackendError, match="the engine is down"):
        await call_tool("use", {}, ToolSession("task", slow), registry=ToolRegistry([use]))


async def test_a_long_result_loses_its_middle(session: ToolSession) -> None:
    result = await run(session, "long", {"size": 1000})
    assert result.truncated and result.error is None
    assert len(result.content) <= 200
    short = await run(session, "long", {"size": 200})
    assert (short.content, short.truncated) == ("x" * 200, False)


class Recorder:
    """Tools that write down when they begin and end."""

    def __init__(self) -> None:
        self.events: list[tuple[str, str]] = []

        @tool(toolset="x", concurrency_safe=True)
        async def read(name: str, seconds: float = 0.05) -> str:
            """Read."""
            return await self.record(name, seconds)

        @tool(toolset="x")
        async def write(name: str, seconds: float = 0.05) -> str:
            """Write."""
            return await self.record(name, seconds)

        self.registry = ToolRegistry([read, write])

    async def record(self, name: str, seconds: float) -> str:
        self.events.append(("begin", name))
        await asyncio.sleep(seconds)
        self.events.append(("end", name))
        return name


async def test_results_are_in_call_order_and_safe_neighbours_overlap(session: ToolSession) -> None:
    recorder = Recorder()
    calls = [("read", {"name": "a", "seconds": 0.1}), ("read", {"name": "b", "seconds": 0.0})]
    results = await call_tools(calls, session, registry=recorder.registry)
    assert [result.content for result in results] == ["a", "b"]
    assert recorder.events == [("begin", "a"), ("begin", "b"), ("end", "b"), ("end", "a")]


@given(st.lists(st.booleans(), max_size=7))
def test_an_unsafe_call_runs_alone_and_in_order(kinds: list[bool]) -> None:
    recorder = Recorder()
    calls = [("read" if safe else "write", {"name": str(i), "seconds": 0}) for i, safe in enumerate(kinds)]
    results = asyncio.run(call_tools(calls, ToolSession("task", no_sandbox), registry=recorder.registry))
    assert [result.content for result in results] == [str(i) for i in range(len(kinds))]
    for i, safe in enumerate(kinds):
        if safe:
            continue
        begin, end = recorder.events.index(("begin", str(i))), recorder.events.index(("end", str(i)))
        assert end == begin + 1
        assert {int(name) for _, name in recorder.events[:begin]} == set(range(i))


async def test_bad_calls_of_a_turn_do_not_stop_the_others(session: ToolSession) -> None:
    calls: list[tuple[str, Any]] = [("echo", {"text": "a"}), ("nope", {}), ("echo", "null"), ("fail", {"kind": "fail"})]
    results = await call_tools([*calls, ("echo", {"text": "b"})], session, registry=REGISTRY)
    assert [result.error is None for result in results] == [True, False, False, False, True]


async def test_names_of_any_length_are_answered_at_once_and_briefly(session: ToolSession) -> None:
    began = time.process_time()
    for name, arguments in (("terminal" * 500_000, {}), ("terminal", {"command" * 500_000: 1})):
        result = await call_tool(name, arguments, session)
        assert result.error is not None
        assert len(result.error) < 400
        assert "terminal" in result.error
    assert time.process_time() - began < 5, "to compare such names letter by letter takes minutes"
