"""Rows of well-known data sets as task folders: those of SWE-bench's shape, of R2E-Gym, and of humanevalpack.

The agent's work leaves its sandbox as a diff or as one file, and is graded in a fresh one with the hidden tests.
"""

from __future__ import annotations

import ast
import json
import re
import shlex
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import orjson

from .config import TaskConfig
from .errors import wrong
from .task import Files, Task
from .writing import create_task

Row = Mapping[str, Any]
INSIDE = Path(__file__).parent / "inside"


def create_row_task(row: Row, folder: Path | str, *, columns: Mapping[str, str] | None = None) -> Task:
    """Write the task of `row` into `folder`. `columns` gives our name of a column for one that the row calls otherwise:
    `{"problem_statement": "issue"}`.

    Raises:
        TaskError: the row is of no known shape, lacks a column, or cannot be written.
    """
    row = {**row, **{ours: row[theirs] for ours, theirs in (columns or {}).items() if theirs in row}}
    for needed, make in SHAPES.items():
        if all(row.get(column) is not None for column in needed):
            try:
                config, files = make(row, Path(folder))
                config = TaskConfig.model_validate(config)
            except (AttributeError, LookupError, TypeError, ValueError) as error:
                raise wrong(
                    Path(folder), f"a column has another form than it should: {error!r}", "correct the row"
                ) from error
            return create_task(folder, config, files)
    shapes = "; or ".join(", ".join(needed) for needed in SHAPES)
    raise wrong(Path(folder), f"the row has {', '.join(map(str, row))}", f"name its columns: it needs {shapes}")


def row_name(row: Row, number: int) -> str:
    """A name for the folder of the row's task: its id, else its image, else its number in the data set."""
    text = str(row.get("instance_id") or row.get("task_id") or row.get("docker_image") or "")
    return re.sub(r"[^A-Za-z0-9._-]+", "_", text).strip("._") or f"row-{number}"


def _swe(row: Row, folder: Path) -> tuple[Any, Files]:
    """Of SWE-bench's shape. The image is the row's, else SWE-bench's own; names of tests decide how they are run."""
    base, id = str(row["base_commit"]), str(row["instance_id"])
    tests = [*_names(row, "FAIL_TO_PASS", folder), *_names(row, "PASS_TO_PASS", folder)]
    image = row.get("image_name") or row.get("docker_image")
    image = image or f"swebench/sweb.eval.x86_64.{id.lower().replace('__', '_1776_')}:latest"
    form, command = _command(row, tests, folder)
    return _difference_config(row, base, {"docker_image": str(image)}), {
        "instruction.md": str(row["problem_statement"]),
        "tests/base": base,
        "tests/test.patch": _with_newline(row["test_patch"]),
        **_grader({"command": command, "format": form, "pass": tests}),
        "solution/gold.patch": _with_newline(row["patch"]),
        "solution/solve.sh": "#!/bin/bash\ncd /testbed && git apply --whitespace=nowarn /solution/gold.patch\n",
    }


def _command(row: Row, tests: list[str], folder: Path) -> tuple[str, str]:
    """How the output names tests, and the command that runs them."""
    changed = re.findall(r"^diff --git a/.* b/(.*)$", str(row["test_patch"]), re.MULTILINE)
    given = row.get("test_cmd") or (row.get("install_config") or {}).get("test_cmd")
    if tests and any("::" in name for name in tests):
        form, command = "pytest", "python -m pytest -rA --tb=short -p no:cacheprovider"
        changed = sorted({name.split("::")[0] for name in tests if "::" in name})
    elif tests and all(re.fullmatch(r"test_\w+", name) for name in tests):
        form, command = "sympy", "PYTHONWARNINGS=ignore python bin/test -C --verbose"
    elif tests and row.get("repo") == "django/django":
        form, command = "unittest", "python tests/runtests.py --verbosity 2 --settings=test_sqlite --parallel 1"
        changed = [re.sub(r"^tests/|\.py$", "", path).replace("/", ".") for path in changed if path.endswith(".py")]
    elif tests and given:
        form, command = "unittest", ""
    else:
        said = f"{tests[0]!r} is not a test of pytest, Django or SymPy" if tests else "there are no tests"
        raise wrong(folder, said, "give the column test_cmd, a command with the output of unittest -v", "PASS_TO_PASS")
    given = " && ".join(given) if isinstance(given, list) else given
    return form, f"{given or command} {' '.join(map(shlex.quote, changed))}"


def _r2e(row: Row, folder: Path) -> tuple[Any, Files]:
    """Of R2E-Gym. The image has the tests: the agent's is built without them."""
    image, base = str(row["docker_image"]), "lachesis-base"
    outcomes = _parsed(row["expected_output_json"], "expected_output_json", folder)
    commit = _parsed(row["parsed_commit_content"], "parsed_commit_content", folder)
    if not isinstance(outcomes, dict) or not isinstance(commit, dict):
        raise wrong(folder, "expected_output_json or parsed_commit_content is not an object", "correct the row")
    statement = str(row["problem_statement"])
    if issue := re.search(r"\[ISSUE\](.*)\[/ISSUE\]", statement, re.DOTALL):
        statement = issue[1].strip() + "\n"
    expected = {re.sub(r"\x1b\[\d+m", "", name).split(" - ")[0]: outcome for name, outcome in outcomes.items()}
    files: Files = {
        "instruction.md": statement,
        "environment/Dockerfile": f"FROM {image}\nWORKDIR /testbed\nRUN git tag {base} "
        "&& rm -rf /r2e_tests /testbed/r2e_tests /testbed/run_tests.sh /root/r2e_tests /root/run_tests.sh\n",
        "tests/Dockerfile": f"FROM {image}\nWORKDIR /testbed\nCOPY . /tests/\n",
        **_grader(
            {
                "command": "ln -sfn /r2e_tests r2e_tests; bash run_tests.sh",
                "format": "pytest",
                "outcomes": expected,
            }
        ),
        "solution/solve.sh": "#!/bin/bash\ncp -R /solution/files/. /testbed/\n",
    }
    for change in commit.get("file_diffs") or ():
        path, text = change["header"]["file"]["path"], change.get("new_file_content")
        if text is not None and not re.search(r"(^|/)tests?(/|_|\.)|_test\.py$", path):
            files[f"solution/files/{path}"] = str(text)
    return _difference_config(row, base, {}), files


def _difference_config(row: Row, base: str, environment: Row) -> Any:
    """Settings of a task whose result is the difference to the commit `base` of /testbed."""
    described = ("repo", "repo_name", "base_commit", "commit_hash", "version", "created_at", "difficulty")
    collect = (
        f"mkdir -p /logs/artifacts && cd /testbed && git add -A && git diff --cached --binary {shlex.quote(base)} "
        "-- . ':!r2e_tests' ':!run_tests.sh' > /logs/artifacts/model.patch"
    )
    return {
        "metadata": {key: str(row[key]) for key in described if row.get(key) is not None},
        "environment": {"workdir": "/testbed", "network_mode": "no-network", **environment},
        "agent": {"timeout_sec": 3000},
        "verifier": {"timeout_sec": 1800, "environment_mode": "separate", "collect": [{"command": collect}]},
    }


def _grader(expected: Any) -> Files:
    return {
        "tests/test.sh": INSIDE / "grade_difference.sh",
        "tests/grade.py": INSIDE / "grade.py",
        "tests/expected.json": json.dumps(expected, ensure_ascii=False, indent=1) + "\n",
    }


def _humaneval(row: Row, folder: Path) -> tuple[Any, Files]:
    """Of humanevalpack (HumanEvalFix): a function with a bug, in Python."""
    language = str(row.get("task_id", "Python/")).split("/")[0]
    if language != "Python":
        raise wrong(folder, f"the row is in {language}", "use the configuration 'python' of the data set", "task_id")
    start, name = str(row["declaration"]), str(row["entry_point"])
    tests, ids = _test_functions(row, name, folder)
    judge = {
        "kind": "pytest",
        "sources": ["solution.py"],
        "tests": "files",
        "expect": "expected.txt",
        "python": "PYTHONPATH=. python3",
        "args": ["-p", "no:cacheprovider"],
        "timeout": 60,
    }
    config = {
        "metadata": {"bug_type": str(row.get("bug_type") or ""), "lachesis": {"judge": judge}},
        "artifacts": ["/workspace/solution.py"],
        "environment": {"workdir": "/workspace", "network_mode": "no-network"},
        "agent": {"timeout_sec": 600},
        "verifier": {"timeout_sec": 60, "environment_mode": "separate"},
    }
    wanted = str(row.get("docstring") or row.get("instruction") or row.get("prompt") or "").strip()
    return config, {
        "instruction.md": f"The function `{name}` in /workspace/solution.py has a bug. Correct it in that file; hidden "
        f"tests decide whether it is right. What it should do:\n\n{wanted}\n",
        "environment/Dockerfile": (
            "FROM python:3.11\nRUN pip install --no-cache-dir pytest\nWORKDIR /workspace\nCOPY solution.py .\n"
        ),
        "environment/solution.py": f"{start}{row['buggy_solution']}",
        "solution/solution.py": f"{start}{row['canonical_solution']}",
        "solution/solve.sh": "#!/bin/bash\ncp /solution/solution.py /workspace/\n",
        "tests/expected.txt": "".join(f"{id}\n" for id in ids),
        "tests/files/tests/test_solution.py": tests,
        "tests/test.sh": (
            "#!/bin/bash\n"
            "# The solution runs in the interpreter of its tests: Lachesis takes its own judge instead.\n"
            "cd /workspace && cp -R /tests/files/. . && PYTHONPATH=. python3 -m pytest -q tests/test_solution.py\n"
            "case $? in 0) echo 1 ;; 1 | 2) echo 0 ;; esac > /logs/verifier/reward.txt\n"
        ),
    }


def _test_functions(row: Row, name: str, folder: Path) -> tuple[str, list[str]]:
    """A test function for each assertion of the row's `check`, and their ids: the judge changes some of them to see
    forged outcomes, which needs many."""
    source = "\n".join(str(row.get(column) or "") for column in ("import", "test_setup", "test"))
    try:
        module = ast.parse(source)
    except (ValueError, SyntaxError, RecursionError, MemoryError) as error:
        raise wrong(folder, f"it is not valid Python: {error}", "correct the row", "test") from None
    checks = [node for node in module.body if isinstance(node, ast.FunctionDef) and node.name == "check"]
    if len(checks) != 1 or len(checks[0].args.args) != 1:
        raise wrong(folder, "it does not define one function check(candidate)", "correct the row", "test")
    calls = [node for node in module.body if isinstance(node, ast.Expr) and ast.unparse(node).startswith("check(")]
    head = [ast.unparse(node) for node in module.body if node not in checks and node not in calls]
    lines, before = ["from solution import *", f"from solution import {name}", *head], []
    if checks[0].args.args[0].arg != name:
        before = [f"{checks[0].args.args[0].arg} = {name}"]
    count = 0
    for node in checks[0].body:
        text = ast.unparse(node)
        if any(isinstance(inner, ast.Assert) for inner in ast.walk(node)):
            body = "\n".join([*before, text]).replace("\n", "\n    ")
            lines.append(f"\n\ndef test_{count}():\n    {body}")
            count += 1
        elif not (isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant)):
            before.append(text)
    if not count:
        raise wrong(folder, "check(candidate) asserts nothing", "correct the row", "test")
    return "\n".join(lines) + "\n", [f"tests/test_solution.py::test_{number}" for number in range(count)]


SHAPES: Mapping[tuple[str, ...], Callable[[Row, Path], tuple[Any, Files]]] = {
    ("instance_id", "base_commit", "problem_statement", "patch", "test_patch", "FAIL_TO_PASS", "PASS_TO_PASS"): _swe,
    ("docker_image", "problem_statement", "parsed_commit_content", "expected_output_json"): _r2e,
    ("entry_point", "declaration", "buggy_solution", "canonical_solution", "test"): _humaneval,
}
"""Columns that a row of each shape has."""


def _names(row: Row, column: str, folder: Path) -> list[str]:
    """A list of names, also one that was written as JSON or as Python."""
    value = _parsed(row[column], column, folder)
    if not isinstance(value, list | tuple) or not all(isinstance(name, str) for name in value):
        raise wrong(folder, "it is not a list of names", "correct the row", column)
    return list(value)


def _parsed(value: Any, column: str, folder: Path) -> Any:
    if not isinstance(value, str):
        return value
    try:
        return orjson.loads(value)
    except ValueError:
        try:
            return ast.literal_eval(value)
        except (ValueError, SyntaxError, RecursionError, MemoryError):
            raise wrong(folder, "it is not JSON", "correct the row", column) from None


def _with_newline(patch: str) -> str:
    return f"{patch.rstrip(chr(10))}\n"
