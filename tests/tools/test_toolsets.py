"""Toolsets resolve to the tools that they name, or raise an error with the reason."""

from __future__ import annotations

import itertools
import re
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from lachesis_tools import (
    BUILTIN_TOOLS,
    TOOLSETS,
    Toolset,
    ToolsetError,
    ToolUnavailable,
    get_tool_definitions,
    resolve_toolset,
    tool,
    validate_toolset,
)
from lachesis_tools.toolsets import left_out_tools

NAMES = "abcdef"


@tool(toolset="web", check=lambda: "set SEARCH_KEY")
async def hidden() -> str:
    """Search the web."""
    return ""


@tool(toolset="mine")
async def own() -> str:
    """Do my own thing."""
    return ""


WITH_HIDDEN = BUILTIN_TOOLS.extended(hidden, own)


def names(*args: object, **kwargs: object) -> list[str]:
    return [each["function"]["name"] for each in get_tool_definitions(*args, **kwargs)]  # type: ignore[arg-type]


@given(st.dictionaries(st.sampled_from(NAMES), st.lists(st.sampled_from(NAMES), max_size=4), min_size=1))
def test_any_graph_resolves_to_all_reachable_tools_or_names_a_real_cycle_or_gap(graph: dict[str, list[str]]) -> None:
    toolsets = {name: Toolset(name, (f"tool_{name}", "shared"), tuple(includes)) for name, includes in graph.items()}
    for start in graph:
        reachable, stack = set(), [start]
        while stack:
            name = stack.pop()
            if name not in reachable:
                reachable.add(name)
                stack += graph.get(name, [])
        try:
            resolved = resolve_toolset(start, toolsets)
        except ToolsetError as error:
            assert not validate_toolset(start, toolsets)
            if cycle := re.search(r"(\w( -> \w)+)$", str(error)):
                path = cycle.group(1).split(" -> ")
                assert path[0] == path[-1]
                assert all(after in graph[before] for before, after in itertools.pairwise(path))
            else:
                assert re.search(r"unknown toolset '(\w)'", str(error)).group(1) not in graph  # type: ignore[union-attr]
        else:
            assert validate_toolset(start, toolsets)
            assert len(resolved) == len(set(resolved))
            assert set(resolved) == {f"tool_{name}" for name in reachable} | {"shared"}
            for name in reachable:  # so there is neither a gap nor a cycle
                assert name in graph
                assert start not in graph[name]


def test_a_cycle_is_shown_as_a_path() -> None:
    toolsets = {"a": Toolset("", includes=("b",)), "b": Toolset("", includes=("c",)), "c": Toolset("", includes=("b",))}
    with pytest.raises(ToolsetError, match=r"b -> c -> b$"):
        resolve_toolset("a", toolsets)


def test_unknown_names_are_errors_that_list_near_names() -> None:
    with pytest.raises(ToolsetError, match="unknown toolset 'termnal'; did you mean 'terminal'"):
        resolve_toolset("termnal")
    with pytest.raises(ToolsetError, match="unknown toolset or tool 'read_fil'; did you mean 'read_file'"):
        get_tool_definitions(["read_fil"])
    with pytest.raises(ToolsetError, match="unknown toolset or tool 'zzz'"):
        get_tool_definitions(None, ["zzz"])
    with pytest.raises(TypeError, match="lists of names"):
        get_tool_definitions("terminal")  # type: ignore[arg-type]


def test_composites_resolve_in_order_and_once() -> None:
    files = ["read_file", "write_file", "patch", "search_files"]
    assert resolve_toolset("coding") == ["terminal", "process", *files, "todo"]
    assert sorted(resolve_toolset("all")) == sorted(resolve_toolset("*")) == sorted(BUILTIN_TOOLS)
    assert all(validate_toolset(name) for name in TOOLSETS)


def test_a_custom_toolset_is_part_of_a_new_mapping() -> None:
    mine = {**TOOLSETS, "mine": Toolset("My own.", ("python",), ("todo",))}
    assert resolve_toolset("mine", mine) == ["python", "todo"]
    with pytest.raises(ToolsetError, match="which 'new' includes"):
        resolve_toolset("new", {"new": Toolset("", includes=("nowhere",))})
    with pytest.raises(TypeError):
        TOOLSETS["x"] = Toolset("")  # type: ignore[index]


def test_an_included_toolset_that_is_not_set_up_is_left_out_as_one_that_is_named() -> None:
    mine = {
        **TOOLSETS,
        "web": Toolset("", ("web_search", "web_extract")),
        "mine": Toolset("", ("python",), ("web", "browser", "moa")),
        "outer": Toolset("", includes=("web",)),
    }
    assert resolve_toolset("mine", mine) == ["python", "web_search", "web_extract"]
    assert [each["function"]["name"] for each in get_tool_definitions(["mine"], toolsets=mine)] == ["python"]
    left_out = left_out_tools(["mine"], toolsets=mine)
    assert "--env.web" in left_out["web_search"] and "browser_navigate" in left_out
    with pytest.raises(ToolUnavailable, match=r"--env\.web"):
        get_tool_definitions(["outer"], toolsets=mine)


def test_definitions_are_always_in_the_order_of_the_registry() -> None:
    assert names() == names(["all"]) == names(["*"]) == list(BUILTIN_TOOLS)
    assert names(["todo", "file"]) == names(["file", "todo"])
    assert names(["coding"], ["file"]) == ["terminal", "process", "todo"]
    assert names(None, ["terminal", "patch"]) == ["read_file", "write_file", "search_files", "python", "todo"]
    assert names(["read_file", "todo"]) == ["read_file", "todo"]
    assert names([]) == []


def test_a_users_tool_is_found_by_its_name_and_by_its_toolset() -> None:
    assert names(["own"], registry=WITH_HIDDEN) == names(["mine"], registry=WITH_HIDDEN) == ["own"]


def test_asking_for_a_hidden_tool_is_an_error_with_its_reason_never_silently_less() -> None:
    assert names(registry=WITH_HIDDEN) == [*BUILTIN_TOOLS, "own"]
    web = {**TOOLSETS, "research": Toolset("", ("hidden",), ("python",))}
    for asked in (["hidden"], ["web"], ["all", "hidden"], ["research", "hidden"], ["python", "web"]):
        with pytest.raises(ToolUnavailable, match="'hidden': set SEARCH_KEY") as caught:
            get_tool_definitions(asked, registry=WITH_HIDDEN, toolsets=web)
        assert caught.value.reasons == {"hidden": "set SEARCH_KEY"}
    assert names(["research"], ["hidden"], registry=WITH_HIDDEN, toolsets=web) == ["python"]


def test_a_toolset_of_which_one_tool_is_not_available_has_the_others() -> None:
    web = {**TOOLSETS, "research": Toolset("", ("hidden",), ("python",))}
    chosen: dict[str, Any] = {"registry": WITH_HIDDEN, "toolsets": web}
    assert names(["research"], **chosen) == ["python"]
    assert left_out_tools(["research"], **chosen) == {"hidden": "set SEARCH_KEY"}
    assert left_out_tools(["research"], ["hidden"], **chosen) == left_out_tools(["file"], **chosen) == {}
    assert left_out_tools(**chosen) == {"hidden": "set SEARCH_KEY"}


def test_a_toolset_that_names_a_tool_the_registry_lacks_is_an_error() -> None:
    with pytest.raises(ToolsetError, match=r"\['python'\] are not in this registry"):
        get_tool_definitions(["python"], registry=BUILTIN_TOOLS.without("python"))
