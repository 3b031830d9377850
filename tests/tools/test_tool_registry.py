"""The schema of a tool is derived from its function, and a registry never changes."""

from __future__ import annotations

import json
import resource
import subprocess
import sys
from typing import Annotated, Any, Literal

import pytest
from pydantic import BaseModel, Field

from backends import BackendError, SandboxLost
from backends.errors import LachesisError
from lachesis_tools import BUILTIN_TOOLS, Tool, ToolRegistry, ToolSession, tool


class Place(BaseModel):
    """Where."""

    title: str
    floor: int | None = None


@tool(toolset="test")
async def sample(
    session: ToolSession,
    title: str,
    copy: Literal["a", "b"] = "a",
    count: Annotated[int, Field(ge=1, le=9)] = 3,
    place: Place | None = None,
    many: list[Place] | None = None,
) -> str:
    """Do a thing
    in one paragraph.

    This is for programmers.

    Args:
        title: The title, which
            takes two lines.
        count (int): How many.

    Returns:
        nothing: of interest
    """
    return title


def test_the_schema_equals_signature_and_docstring() -> None:
    definition = sample.definition()
    assert definition["type"] == "function"
    function = definition["function"]
    assert function["name"] == "sample"
    assert function["description"] == "Do a thing in one paragraph."
    place = {"title": {"type": "string"}, "floor": {"type": "integer"}}
    parameters = function["parameters"]
    assert parameters == {
        "type": "object",
        "properties": {
            "title": {"type": "string", "description": "The title, which takes two lines."},
            "copy": {"type": "string", "enum": ["a", "b"], "default": "a"},
            "count": {"type": "integer", "description": "How many.", "minimum": 1, "maximum": 9, "default": 3},
            "place": {"type": "object", "description": "Where.", "properties": place, "required": ["title"]},
            "many": {
                "type": "array",
                "items": {"type": "object", "description": "Where.", "properties": place, "required": ["title"]},
            },
        },
        "required": ["title"],
        "additionalProperties": False,
    }


def test_editing_a_definition_does_not_edit_the_tool() -> None:
    first = sample.definition()
    first["function"]["parameters"]["properties"].clear()
    assert "title" in sample.definition()["function"]["parameters"]["properties"]


@pytest.mark.parametrize("each", BUILTIN_TOOLS.values(), ids=lambda each: each.name)
def test_every_builtin_tool_describes_itself_and_every_parameter(each: Tool) -> None:
    parameters = each.definition()["function"]["parameters"]
    assert each.description
    assert all(schema.get("description") for schema in parameters["properties"].values())
    text = json.dumps(parameters)
    assert "$ref" not in text and "$defs" not in text and "anyOf" not in text and '"title"' not in text
    assert "session" not in parameters["properties"]


def test_a_synchronous_function_is_rejected_with_the_way_out() -> None:
    def slow(text: str) -> str:
        """Slow."""
        return text

    with pytest.raises(TypeError, match=r"'slow' must be an `async def`.*asyncio\.to_thread"):
        tool(toolset="x")(slow)  # type: ignore[arg-type]


async def _no_docstring(text: str) -> str:
    return text


async def _star(*texts: str) -> str:
    """Words."""
    return ""


async def _untyped(text) -> str:  # type: ignore[no-untyped-def]
    """Words."""
    return ""


async def _typo(text: str) -> str:
    """Words.

    Args:
        texd: The text.
    """
    return text


async def _local(thing: threading.Lock) -> str:  # type: ignore[name-defined]  # noqa: F821
    """Words."""
    return ""


@pytest.mark.parametrize(
    ("function", "message"),
    [
        (_no_docstring, "needs a docstring"),
        (_star, "passable by name"),
        (_untyped, "needs a type annotation"),
        (_typo, r"describes \['texd'\], which are not parameters"),
        (_local, "annotations must be importable"),
    ],
)
def test_a_function_that_a_model_cannot_call_is_rejected(function: object, message: str) -> None:
    with pytest.raises(TypeError, match=message):
        tool(toolset="x")(function)  # type: ignore[arg-type]


class Tree(BaseModel):
    children: list[Tree]


async def _recursive(tree: Tree) -> str:
    """Words."""
    return ""


async def _lock(lock: ToolRegistry) -> str:
    """Words."""
    return ""


@pytest.mark.parametrize("function", [_recursive, _lock])
def test_a_type_without_a_schema_is_rejected_when_the_tool_is_registered(function: object) -> None:
    with pytest.raises(TypeError, match="no JSON schema for its parameters"):
        BUILTIN_TOOLS.extended(tool(toolset="x")(function))  # type: ignore[arg-type]


def test_bad_limits_and_names_are_rejected() -> None:
    for wrong in ({"name": "two words"}, {"time_limit": 0}, {"max_result_chars": 3}):
        with pytest.raises(ValueError, match="tool"):
            tool(toolset="x", **wrong)(sample.function)  # type: ignore[arg-type]


def test_extending_a_registry_makes_a_new_one() -> None:
    before = list(BUILTIN_TOOLS)
    mine = BUILTIN_TOOLS.extended(sample)
    assert list(mine) == [*before, "sample"]
    assert list(BUILTIN_TOOLS) == before
    assert list(mine.without("sample", "todo")) == [name for name in before if name != "todo"]
    with pytest.raises(ValueError, match="two tools are called 'sample'"):
        mine.extended(sample)
    with pytest.raises(TypeError, match="decorate it with @tool"):
        ToolRegistry([len])  # type: ignore[list-item]
    with pytest.raises(KeyError):
        mine.without("nonsense")


def test_a_missing_requirement_hides_a_tool_with_its_reason() -> None:
    def broken() -> str | None:
        raise OSError("no such device")

    one = tool(toolset="x", name="one", check=lambda: "set EXAMPLE_KEY")(sample.function)
    two = tool(toolset="x", name="two", check=broken)(sample.function)
    registry = ToolRegistry([sample, one, two])
    assert registry.unavailable() == {"one": "set EXAMPLE_KEY", "two": "its check failed: OSError: no such device"}


def test_importing_tools_takes_little_more_than_importing_its_dependencies() -> None:
    def seconds(code: str) -> float:  # of CPU: what else this machine does is no fault of ours
        before = resource.getrusage(resource.RUSAGE_CHILDREN)
        subprocess.run([sys.executable, "-c", code], check=True)
        after = resource.getrusage(resource.RUSAGE_CHILDREN)
        return after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime

    programs = ("pass", "import asyncio, json, pydantic.main", "import lachesis_tools")
    nothing, parts, whole = (min(seconds(program) for _ in range(5)) for program in programs)
    assert whole - nothing < 3 * (parts - nothing), "what it takes in seconds depends on the machine"


@pytest.mark.parametrize(
    "kind", [BackendError, SandboxLost, Exception, LachesisError, ValueError("x"), KeyboardInterrupt]
)
def test_a_tool_declares_exceptions_that_no_failure_of_the_infrastructure_is(kind: Any) -> None:
    with pytest.raises(TypeError, match="never an answer for the model"):

        @tool(toolset="x", errors=[kind])
        async def careless() -> str:
            """Do something."""
            return ""
