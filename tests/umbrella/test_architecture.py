"""Rules of the house that no linter knows: one door to Atropos, light leaves, no global state, no prints."""

from __future__ import annotations

import ast
import contextlib
import importlib.metadata
import json
import re
import subprocess
import sys
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import grimp
import pytest

from lachesis.ours import PACKAGES as PACKAGES_OF_OURS
from lachesis.ours import folders

ROOT = Path(__file__).resolve().parents[2]
PACKAGES = {path.parent.name: path.parent for path in ROOT.glob("packages/*/lachesis_*/__init__.py")}
ROOMS = {**{name: ROOT / name for name in ("backends", "environments", "lachesis", "tool_call_parsers")}, **PACKAGES}
HEAVY = {"atroposlib", "datasets", "math_verify", "openai", "tinker", "torch", "transformers", "wandb"}
LIGHT = (
    *("backends", "lachesis_tools", "lachesis_messages.history", "tool_call_parsers", "lachesis_client"),
    *("environments", "lachesis.loop.loop", "lachesis_view.reports.run", "lachesis_envs.gsm8k"),
    *(
        "lachesis_train.verbs.api",
        "lachesis_train.verbs.engine",
        "lachesis_train.verbs.launch_training",
        "lachesis_train.verbs.train",
    ),
    *("lachesis_train.trl", "lachesis_train.policy_server", "lachesis_view.reports.training"),
)
SOURCES = sorted(path for room in ROOMS.values() for path in room.rglob("*.py"))
TALKS = {
    "packages/console/lachesis_console/agent/callbacks.py",
    "packages/data/lachesis_data/batch/on_ray.py",
    "packages/doors/lachesis_doors/serving/command.py",
    "lachesis/runs/command_line.py",
    "packages/envs/lachesis_envs/browser_tasks/site.py",
    "packages/pools/lachesis_pools/command.py",
    "packages/envs/lachesis_envs/gsm8k/math_child.py",
    "packages/envs/lachesis_envs/task_folders/inside/grade.py",
    "packages/tools/lachesis_tools/code_driver.py",
    "packages/tools/lachesis_tools/repl_driver.py",
}
"""Modules that print: commands, an agent that is not quiet, and programs of their own whose standard output the
project reads."""


def name(path: Path) -> str:
    return path.relative_to(ROOT).as_posix()


def saying(*words: str) -> list[Path]:
    """The sources that have one of the words: to parse all of them for each rule takes most of a minute."""
    return [path for path in SOURCES if any(word in path.read_text(encoding="utf-8") for word in words)]


def nodes(path: Path) -> Iterator[ast.AST]:
    return ast.walk(ast.parse(path.read_text(encoding="utf-8")))


def imported(path: Path) -> set[str]:
    found: set[str] = set()
    for node in nodes(path):
        if isinstance(node, ast.Import):
            found.update(alias.name.split(".")[0] for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and node.module and not node.level:
            found.add(node.module.split(".")[0])
    return found


def _is_environ(node: ast.AST) -> bool:
    return isinstance(node, ast.Attribute) and node.attr == "environ"


def test_atropos_is_imported_in_one_module_only() -> None:
    assert [name(path) for path in saying("atroposlib") if "atroposlib" in imported(path)] == [
        "packages/compat/lachesis_compat/atropos/package.py"
    ]


def test_every_package_is_known_as_ours() -> None:
    """Else its frames and modules count as an author's, and nothing fails."""
    assert {*PACKAGES_OF_OURS} == {*ROOMS} - {"environments"}
    assert len(folders()) == len(PACKAGES_OF_OURS)


def test_each_public_class_name_is_defined_once() -> None:
    """A name that two modules define means two things. The names of the removed Hermes stack are its own once more: in
    `environments/`, and in `modules/` of the compatibility package. The scripts of doors are plug-ins with a `Guest`
    each."""
    defined: dict[str, list[str]] = {}
    for path in SOURCES:
        relative = path.relative_to(ROOT)
        of_a_door = relative.parts[-2:-1] == ("inside",) and "lachesis_doors" in relative.parts
        if relative.parts[0] == "environments" or "modules" in relative.parts or of_a_door:
            continue
        for node in ast.parse(path.read_text(encoding="utf-8")).body:
            if isinstance(node, ast.ClassDef) and not node.name.startswith("_"):
                defined.setdefault(node.name, []).append(name(path))
    assert len(defined) > 800
    assert {each: paths for each, paths in defined.items() if len(paths) > 1} == {}


def test_no_two_modules_of_tests_have_one_name() -> None:
    """Outside packages pytest imports them by their file names: run in one process, the second cannot be collected."""
    loose = [path.name for path in ROOT.glob("tests/**/test_*.py") if not (path.parent / "__init__.py").exists()]
    assert len(loose) > 200
    assert [each for each, count in Counter(loose).items() if count > 1] == []


def test_the_core_needs_few_distributions() -> None:
    found: set[str] = set()
    left = ["lachesis-core"]
    while left:
        name = re.split(r"[^\w.-]", left.pop())[0].lower().replace("_", "-")
        if name not in found:
            found.add(name)
            with contextlib.suppress(importlib.metadata.PackageNotFoundError):  # of another system
                left += [line for line in importlib.metadata.requires(name) or () if "extra ==" not in line]
    assert {"aiohttp", "pydantic", "lachesis-sandbox"} <= found
    assert len(found) <= 40, sorted(found)


def test_no_module_imports_itself_through_others() -> None:
    """Imports inside functions and those for type checkers are part of a circle too."""
    graph = grimp.build_graph(*ROOMS, exclude_type_checking_imports=False)
    left = {module: graph.find_modules_directly_imported_by(module) for module in graph.modules}
    while leaves := {module for module, needs in left.items() if not needs & left.keys()}:
        left = {module: needs for module, needs in left.items() if module not in leaves}
    assert sorted(left) == []


def test_importing_a_leaf_the_loop_or_the_report_loads_nothing_heavy() -> None:
    program = (
        "import importlib, json, sys\n"
        f"for module in {LIGHT!r}: importlib.import_module(module)\n"
        "print(json.dumps(sorted({module.split('.')[0] for module in sys.modules})))\n"
    )
    done = subprocess.run([sys.executable, "-c", program], cwd=ROOT, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
    loaded = set(json.loads(done.stdout))
    assert "tool_call_parsers" in loaded
    assert loaded & HEAVY == set()


def test_only_the_engine_and_the_policy_of_trl_need_torch_to_be_imported() -> None:
    """All else imports what the extra `train` brings where it is used, so that an error can say what to install."""
    extra = {"accelerate", "gguf", "peft", "tinker", "torch", "trl"}
    needing = set()
    for path in saying(*extra):
        tree = ast.parse(path.read_text(encoding="utf-8"))
        for node in tree.body:
            names = [alias.name for alias in node.names] if isinstance(node, ast.Import) else []
            names += [node.module] if isinstance(node, ast.ImportFrom) and node.module else []
            if extra & {each.split(".")[0] for each in names}:
                needing.add(name(path))
    assert {path for path in needing if not path.startswith("packages/train/lachesis_train/engine/")} == {
        "packages/train/lachesis_train/trl/policy_engine.py"
    }


def writes_environment(tree: ast.AST) -> list[int]:
    """Lines that change `os.environ`."""
    found: list[int] = []
    for node in ast.walk(tree):
        changed = False
        if isinstance(node, ast.Subscript):
            changed = _is_environ(node.value) and not isinstance(node.ctx, ast.Load)
        elif isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute):
            reads = ("get", "items", "keys", "values", "copy")
            changed = node.func.attr in ("putenv", "unsetenv")
            changed = changed or (_is_environ(node.func.value) and node.func.attr not in reads)
        elif isinstance(node, ast.Assign):
            changed = any(map(_is_environ, node.targets))
        elif isinstance(node, ast.AugAssign):
            changed = _is_environ(node.target)
        if changed:
            found.append(getattr(node, "lineno", 0))
    return found


@pytest.mark.parametrize(
    "breach", ["os.environ['A'] = 'b'", "del os.environ['A']", "os.environ.update(a='b')", "os.environ |= {}"]
)
def test_a_change_of_the_environment_is_noticed(breach: str) -> None:
    assert writes_environment(ast.parse(breach)) == [1]


def test_no_global_state_no_module_changes_the_environment_of_its_process() -> None:
    changing = saying("environ", "putenv", "unsetenv")
    assert len(changing) > 20
    written = {name(path): writes_environment(ast.parse(path.read_text(encoding="utf-8"))) for path in changing}
    assert {path: found for path, found in written.items() if found} == {}


def test_libraries_do_not_print() -> None:
    printing = {
        name(path)
        for path in saying("print")
        for node in nodes(path)
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id == "print"
    }
    assert {
        module for module in printing if not module.startswith("lachesis/cli/") and "/verb" not in module
    } - TALKS == set()


def test_no_message_advises_to_take_a_wall_down() -> None:
    advice = re.compile(
        "unsandboxed with|trusted code only|SANDBOX=none|=unconfined|userns=0|--privileged|or pass --ins"
    )
    # Of an advice that two lines have, each is a word of its own before they are joined.
    words = ("unsandboxed", "trusted", "SANDBOX", "unconfined", "userns", "privileged", "or pass")
    found = {
        f"{name(path)}: {node.value}"
        for path in saying(*words)
        for node in nodes(path)
        if isinstance(node, ast.Constant) and isinstance(node.value, str) and advice.search(node.value)
    }
    assert found == set()
