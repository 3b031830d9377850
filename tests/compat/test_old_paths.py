"""The import paths of the removed stack: found when asked for, never loaded before, and hidden by a user's own."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

NAMES = {
    "environments": "AgentResult HermesAgentBaseEnv HermesAgentEnvConfig HermesAgentLoop ToolContext",
    "environments.agent_loop": "AgentResult HermesAgentLoop ToolError resize_tool_pool _tool_executor",
    "environments.hermes_base_env": "HermesAgentBaseEnv HermesAgentEnvConfig",
    "environments.patches": "apply_patches",
    "agent.trajectory": "save_trajectory load_trajectories convert_scratchpad_to_think has_incomplete_scratchpad "
    "_convert_to_trajectory_format",
    "atropos.backends": "create_backend Backend SandboxSpec",
    "batch_runner": "main",
    "run_agent": "AIAgent",
    "tools.vision_tools": "vision_analyze_tool check_vision_requirements",
    "tools.browser_tool": "browser_navigate browser_snapshot browser_click browser_type browser_scroll browser_back "
    "browser_press browser_get_images browser_vision browser_console check_browser_requirements cleanup_browser",
    "trajectory_compressor": "main",
    "environments.tool_call_parsers": "get_parser list_parsers register_parser ToolCallParser",
    "tools.file_tools": "check_file_requirements read_file_tool write_file_tool patch_tool search_tool",
    "environments.tool_context": "ToolContext",
    "model_tools": "get_tool_definitions handle_function_call TOOL_TO_TOOLSET_MAP get_all_tool_names "
    "get_toolset_for_tool get_available_toolsets check_toolset_requirements check_tool_availability",
    "tools.budget_config": "BudgetConfig DEFAULT_BUDGET DEFAULT_RESULT_SIZE_CHARS DEFAULT_TURN_BUDGET_CHARS "
    "DEFAULT_PREVIEW_SIZE_CHARS",
    "tools.terminal_tool": "register_task_env_overrides clear_task_env_overrides cleanup_vm cleanup_all_environments "
    "get_active_env terminal_tool check_terminal_requirements",
    "toolset_distributions": "get_distribution list_distributions sample_toolsets_from_distribution "
    "validate_distribution DISTRIBUTIONS",
    "toolsets": "get_toolset resolve_toolset resolve_multiple_toolsets get_all_toolsets get_toolset_names "
    "validate_toolset get_toolset_info create_custom_toolset TOOLSETS",
}


def run(program: str, folder: Path) -> str:
    """Standard output of a program that starts in `folder`."""
    done = subprocess.run([sys.executable, "-c", program], cwd=folder, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_every_old_name_can_be_imported_outside_the_tree(tmp_path: Path) -> None:
    lines = [f"from {module} import {', '.join(names.split())}" for module, names in NAMES.items()]
    run("\n".join(lines), tmp_path)


@pytest.mark.parametrize("first", ["lachesis", "environments"])
def test_nothing_of_it_is_loaded_before_it_is_asked_for(tmp_path: Path, first: str) -> None:
    loaded = "[name for name in sys.modules if 'lachesis_compat' in name or name in ('tools', 'model_tools')]"
    program = f"import {first}, sys; print({loaded})"
    assert run(program, tmp_path).strip() == "[]"


def test_the_file_of_the_wheel_names_every_old_path(tmp_path: Path) -> None:
    from lachesis_compat.old_paths import _TOP
    from lachesis_compat.old_paths import __file__ as place

    line = (Path(place).with_name("lachesis_old_paths.pth")).read_text()
    assert line.count("\n") == 1 and line.startswith("import ")
    assert set(re.findall(r'"(\w+)"', line.partition(" in {")[2])) == _TOP
    shown = run(
        "import sys; sys.meta_path[:] = [each for each in sys.meta_path if 'OldPaths' not in repr(each)]\n"
        f"exec({line!r})\nassert 'lachesis' not in sys.modules\nimport model_tools; print(model_tools.__file__)",
        tmp_path,
    )
    assert shown.strip().endswith("compat/modules/model_tools.py")


def test_a_parser_of_the_old_form_is_one_of_ours(tmp_path: Path) -> None:
    program = """
import json, lachesis, tool_call_parsers
from environments.tool_call_parsers import ToolCallParser, get_parser, register_parser

@register_parser("at_sign")
class AtSign(ToolCallParser):
    def parse(self, text):
        calls = [{"id": f"c{at}", "type": "function", "function": {"name": line[1:], "arguments": arguments}}
                 for at, line in enumerate(text.splitlines()) if line.startswith("@")
                 for arguments in (['{"a": 1}', "{bad", "[1]"][at % 3],)]
        return "said", calls or None

parsed = tool_call_parsers.get_parser("at_sign").parse("@one\\n@two\\n@three")
calls = [(call.name, call.arguments, call.id) for call in parsed.tool_calls]
print(calls, [call.status.value for call in parsed.attempts])
print(type(get_parser("at_sign")).__name__, get_parser("at_sign").parse("no"), get_parser("deepseek").parse("text"))
"""
    first, second = run(program, tmp_path).splitlines()
    assert first == "[('one', {'a': 1}, 'c0')] ['ok', 'invalid_json', 'not_an_object']"
    assert second == "AtSign ('said', None) ('text', None)"


def test_trajectories_under_their_old_names(tmp_path: Path) -> None:
    program = """
import lachesis
from agent.trajectory import _convert_to_trajectory_format, has_incomplete_scratchpad
from agent.trajectory import load_trajectories, save_trajectory
turns = _convert_to_trajectory_format([{"role": "assistant", "content": "four"}], "2 + 2?")
save_trajectory(turns, "m", True, "a.jsonl")
print([turn["from"] for turn in turns], len(load_trajectories("a.jsonl")), load_trajectories("a.jsonl", False))
print(has_incomplete_scratchpad("<REASONING_SCRATCHPAD>x"), has_incomplete_scratchpad(None))
_convert_to_trajectory_format([{"role": "user", "content": "q"}, {"role": "assistant", "content": "", "tool_calls": [
    {"id": "a", "type": "function", "function": {"name": "f", "arguments": "{bad"}}]}], completed=False)
import batch_runner, trajectory_compressor
print(batch_runner.main(["--list_distributions"]))
from tools.terminal_tool import check_terminal_requirements
from tools.file_tools import check_file_requirements
print(check_terminal_requirements(), check_file_requirements())
"""
    done = subprocess.run([sys.executable, "-c", program], cwd=tmp_path, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    assert done.stdout.startswith("['system', 'human', 'gpt'] 1 []\nTrue False\n")
    assert done.stdout.endswith("0\nTrue True\n")
    assert "message 1: arguments of f (a) replaced by {}" in done.stderr


def test_modules_of_a_users_own_project_win(tmp_path: Path) -> None:
    (tmp_path / "toolsets.py").write_text("OWN = True\n")
    (tmp_path / "tools").mkdir()
    (tmp_path / "tools" / "__init__.py").write_text("OWN = True\n")
    (tmp_path / "tools" / "budget_config.py").write_text("OWN = True\n")
    shown = run(
        "import lachesis, toolsets, tools, tools.budget_config, tools.terminal_tool, model_tools\n"
        "print(toolsets.OWN, tools.OWN, tools.budget_config.OWN, tools.terminal_tool.cleanup_vm.__name__)",
        tmp_path,
    )
    assert shown.split() == ["True", "True", "True", "cleanup_vm"]


def test_a_name_that_the_stack_never_had_is_not_found(tmp_path: Path) -> None:
    program = (
        "import lachesis\ntry:\n    import tools.fax_tool\nexcept ModuleNotFoundError as error:\n    print(error.name)"
    )
    assert run(program, tmp_path).strip() == "tools.fax_tool"


def test_environments_beside_each_other_import_each_other(tmp_path: Path) -> None:
    """As a benchmark does that inherits from another one: the root of its folders is put on `sys.path`."""
    package = tmp_path / "environments" / "benchmarks" / "first"
    package.mkdir(parents=True)
    (package / "first_env.py").write_text("from environments.agent_loop import HermesAgentLoop\nFIRST = 1\n")
    program = (
        f"import sys; sys.path.insert(0, {str(tmp_path)!r})\n"
        "from environments.benchmarks.first.first_env import FIRST, HermesAgentLoop\nprint(FIRST)"
    )
    assert run(program, Path("/")).strip() == "1"
    (tmp_path / "environments" / "__init__.py").write_text("")  # then it hides ours
    program = program.replace("import sys;", "import sys, lachesis;")
    assert run(program, Path("/")).strip() == "1"


def test_parsers_give_the_old_pair_and_an_unknown_one_is_a_key_error() -> None:
    from environments.tool_call_parsers import get_parser  # type: ignore[import-not-found]

    content, calls = get_parser("hermes").parse(
        'I look. <tool_call>{"name": "ls", "arguments": {"path": "."}}</tool_call>'
    )
    assert content == "I look."
    assert [(call.function.name, call["function"]["arguments"]) for call in calls] == [("ls", '{"path": "."}')]
    assert calls[0].id
    assert get_parser("hermes").parse("Nothing to call.") == ("Nothing to call.", None)
    with pytest.raises(KeyError, match="hermess") as raised:
        get_parser("hermess")
    assert isinstance(raised.value, ValueError)
    assert "known: " in str(raised.value) and not str(raised.value).startswith('"')


def test_there_is_nothing_to_clean_up_where_no_run_is_open(tmp_path: Path) -> None:
    program = """
import lachesis
from tools.browser_tool import cleanup_browser
from tools.terminal_tool import cleanup_all_environments, cleanup_vm
print(cleanup_vm("x"), cleanup_browser("x"), cleanup_all_environments())
"""
    assert run(program, tmp_path).strip() == "None None 0"


def test_tools_and_toolsets_are_listed_with_what_they_lack(tmp_path: Path) -> None:
    program = """
import lachesis, toolsets
from model_tools import *
from model_tools import get_all_tool_names, get_toolset_for_tool, get_available_toolsets, check_tool_availability
toolsets.create_custom_toolset("mine", "Both.", ["todo"], ["file"])
toolsets.create_custom_toolset("web", "Not set up.", ["web_search"])
print(*toolsets.resolve_toolset("mine"))
print("read_file" in get_all_tool_names(), get_toolset_for_tool("read_file"), get_toolset_for_tool("gone"))
print(get_available_toolsets()["todo"])
available, others = check_tool_availability()
print("todo" in available, check_toolset_requirements()["todo"], others)
"""
    assert run(program, tmp_path).splitlines() == [
        "patch read_file search_files todo write_file",
        "True file None",
        "{'available': True, 'description': 'Keep a list of what is left to do.', 'tools': ['todo'], "
        "'requirements': []}",
        "True True [{'name': 'web', 'env_vars': [], 'tools': ['web_search']}]",
    ]


@pytest.mark.parametrize(
    ("name", "instead"),
    [
        ("model_tools.coerce_tool_args", "handle_function_call"),
        ("run_agent._convert_to_trajectory_format", "agent.trajectory"),
        ("atropos.backends._ModalSandboxPool", "ModalToolBackend"),
        ("atropos.backends._ModalMultiProfileManager", "ModalToolBackend.with_profiles"),
    ],
)
def test_a_name_without_a_counterpart_says_what_to_use(name: str, instead: str) -> None:
    module, _, name = name.rpartition(".")
    with pytest.raises(ImportError, match=f"{name} is not here: .*{instead}"):
        exec(f"from {module} import {name}")
    with pytest.raises(ImportError, match="cannot import name 'gone'"):
        exec(f"from {module} import gone")


def test_a_result_is_constructed_from_messages_and_every_result_is_one() -> None:
    from environments import AgentResult
    from lachesis.loop.outcome import Outcome
    from lachesis.loop.result import AgentResult as OfLoop
    from lachesis_messages.history import MessageHistory

    call = {"id": "c1", "type": "function", "function": {"name": "terminal", "arguments": "{}"}}
    messages: list[dict[str, Any]] = [
        {"role": "user", "content": "Work."},
        {"role": "assistant", "content": None, "tool_calls": [call]},
        {"role": "tool", "tool_call_id": "c1", "content": "{}"},
        {"role": "assistant", "content": "Done."},
    ]
    state = {"nodes": [{"tokens": [1], "masked_tokens": [1], "logprobs": [0.0]}]}
    result = AgentResult(
        messages=messages,
        managed_state=state,
        turns_used=2,
        finished_naturally=True,
        reasoning_per_turn=[None, None],
        tool_errors=[],
    )
    assert result.messages == messages and result.managed_state == state and result.turns_used == 2
    assert (result.final_response, len(result.ok_calls), result.outcome) == ("Done.", 1, Outcome.COMPLETED)
    assert AgentResult(messages=[]).managed_state is None and not AgentResult([]).finished_naturally
    of_loop = OfLoop(1, True, [], [], Outcome.COMPLETED, "", MessageHistory())
    assert isinstance(of_loop, AgentResult) and isinstance(result, OfLoop) and not isinstance(object(), AgentResult)


def test_a_toolset_that_somebody_adds_is_one_for_every_function(tmp_path: Path) -> None:
    program = """
import lachesis, toolsets, model_tools
from lachesis_tools import ToolsetError
toolsets.TOOLSETS["mine"] = {"tools": ["terminal"], "includes": ["file"]}
toolsets.TOOLSETS["outer"] = {"description": "Both.", "includes": ["mine", "todo"]}
toolsets.TOOLSETS["lost"] = {"tools": ["todo"], "includes": ["gone"]}
toolsets.TOOLSETS["round"] = {"tools": [], "includes": ["round"]}
print(*toolsets.resolve_toolset("mine"))
print(*map(toolsets.validate_toolset, ("mine", "outer", "lost", "round", "gone")))
print(toolsets.get_toolset_info("outer")["tool_count"], repr(toolsets.get_toolset_info("mine")["description"]))
print(*(each["function"]["name"] for each in model_tools.get_tool_definitions(["outer"], ["file"])))
for name in ("lost", "round", "gone"):
    try:
        print(model_tools.get_tool_definitions([name]))
    except ToolsetError as error:
        print(str(error).partition(";")[0])
"""
    assert run(program, tmp_path).splitlines() == [
        "patch read_file search_files terminal write_file",
        "True True False False False",
        "6 ''",
        "terminal todo",
        "unknown toolset 'gone', which 'lost' includes",
        "toolsets include each other: round -> round",
        "unknown toolset or tool 'gone'",
    ]


def test_included_toolsets_without_tools_here_are_left_out_with_a_warning(tmp_path: Path) -> None:
    program = """
import logging, sys, lachesis, toolsets, model_tools
logging.basicConfig(stream=sys.stdout, format="%(message)s")
toolsets.TOOLSETS.update({
    "web": {"tools": ["web_search", "web_extract"], "includes": []},
    "debugging": {"tools": ["terminal"], "includes": ["web"]},
    "full_stack": {"tools": [], "includes": ["web", "terminal", "vision", "browser"]},
})
print(*toolsets.resolve_toolset("full_stack"), toolsets.validate_toolset("full_stack"))
for name in ("debugging", "full_stack", "web"):
    print(*(each["function"]["name"] for each in model_tools.get_tool_definitions([name])))
model_tools.get_tool_definitions(["full_stack"], quiet_mode=True)
toolsets.TOOLSETS["mine"] = {"tools": ["terminal", "web_search"]}
try:
    print(model_tools.get_tool_definitions(["mine"]))
except lachesis.LachesisError as error:
    print(str(error).partition(",")[0])
"""
    left_out = "toolsets without tools here are left out:"
    assert run(program, tmp_path).splitlines() == [
        "process terminal web_extract web_search True",
        *(f"{left_out} web", "terminal"),
        *(f"{left_out} web, vision, browser", "terminal process"),
        *(f"{left_out} web", ""),
        "tools ['web_search'] are not in this registry",
    ]
