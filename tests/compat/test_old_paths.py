"""The import paths of the removed stack: found when asked for, never loaded before, and hidden by a user's own."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

NAMES = {
    "environments": "AgentResult HermesAgentBaseEnv HermesAgentEnvConfig HermesAgentLoop ToolContext",
    "environments.agent_loop": "AgentResult HermesAgentLoop ToolError resize_tool_pool _tool_executor",
    "environments.hermes_base_env": "HermesAgentBaseEnv HermesAgentEnvConfig",
    "environments.patches": "apply_patches",
    "environments.tool_call_parsers": "get_parser list_parsers ToolCallParser",
    "environments.tool_context": "ToolContext",
    "model_tools": "get_tool_definitions handle_function_call TOOL_TO_TOOLSET_MAP",
    "tools.budget_config": "BudgetConfig DEFAULT_BUDGET DEFAULT_RESULT_SIZE_CHARS DEFAULT_TURN_BUDGET_CHARS "
    "DEFAULT_PREVIEW_SIZE_CHARS",
    "tools.terminal_tool": "register_task_env_overrides clear_task_env_overrides cleanup_vm cleanup_all_environments "
    "get_active_env terminal_tool",
    "toolset_distributions": "get_distribution list_distributions sample_toolsets_from_distribution "
    "validate_distribution DISTRIBUTIONS",
    "toolsets": "get_toolset resolve_toolset resolve_multiple_toolsets get_all_toolsets get_toolset_names "
    "validate_toolset get_toolset_info TOOLSETS",
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
    loaded = "[name for name in sys.modules if 'lachesis.compat' in name or name in ('tools', 'model_tools')]"
    program = f"import {first}, sys; print({loaded})"
    assert run(program, tmp_path).strip() == "[]"


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
        "import lachesis\n"
        "try:\n    import tools.browser_tool\n"
        "except ModuleNotFoundError as error:\n    print(error.name)"
    )
    assert run(program, tmp_path).strip() == "tools.browser_tool"


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


def test_a_toolset_that_somebody_adds_is_one_for_every_function(tmp_path: Path) -> None:
    program = """
import lachesis, toolsets, model_tools
from lachesis.tools import ToolsetError
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
        "unknown toolset 'gone', which 'lost' includes,",
        "toolsets include each other: round -> round",
        "unknown toolset or tool 'gone'",
    ]
