"""Rows of data sets as tasks. Their own scripts run here, with the paths of a sandbox replaced by those of a folder."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from lachesis.cli import main
from lachesis_envs.swe.environment import scripted_calls
from lachesis_envs.task_folders import Task, TaskError, create_row_task, read_task
from lachesis_envs.task_folders.inside.grade import outcomes_of

INSIDE = ("/testbed", "/tests", "/logs", "/solution", "/r2e_tests", "/workspace")
WRONG, RIGHT = "def add(a, b):\n    return a - b\n", "def add(a, b):\n    return a + b\n"
HIDDEN = "from calc import add\n\n\ndef test_add():\n    assert add(2, 3) == 5\n"
VISIBLE = "from calc import add\n\n\ndef test_zero():\n    assert add(2, 0) == 2\n"


QUICK = {**os.environ, "PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1", "PYTHONDONTWRITEBYTECODE": "1"}


class Machine:
    """A folder that stands for the root of a sandbox with a repository in /testbed."""

    def __init__(self, root: Path):
        self.root = root
        for place in ("testbed/tests", "logs/verifier", "logs/artifacts", "bin"):
            (root / place).mkdir(parents=True)
        (root / "bin/python").write_text(f'#!/bin/sh\nexec {sys.executable} "$@"\n')
        (root / "bin/python").chmod(0o755)
        self.environment = {**QUICK, "HOME": str(root), "PATH": f"{root}/bin:{os.environ['PATH']}"}
        for name in ("NAME", "EMAIL"):
            self.environment |= {f"GIT_AUTHOR_{name}": "a", f"GIT_COMMITTER_{name}": "a"}

    def run(self, command: str) -> str:
        """The output of a command inside; its paths are those of the sandbox."""
        for path in INSIDE:
            command = command.replace(path, f"{self.root}{path}")
        ran = subprocess.run(
            ["bash", "-c", command], capture_output=True, text=True, check=False, env=self.environment, cwd=self.root
        )
        return ran.stdout + ran.stderr

    def repository(self) -> str:
        """The first commit of /testbed; there is another one on top of it, as in the images of SWE-bench."""
        (self.root / "testbed/calc.py").write_text(WRONG)
        (self.root / "testbed/tests/test_calc.py").write_text(VISIBLE)
        self.run("cd /testbed && git init -q && git add -A && git commit -qm base")
        (self.root / "testbed/setup.cfg").write_text("[metadata]\n")
        self.run("cd /testbed && git add -A && git commit -qm image")
        return self.run("git -C /testbed rev-parse HEAD~1").strip()

    def upload(self, folder: Path, place: str) -> None:
        """Copy a folder of a task to `place`, with the paths of the sandbox replaced in its scripts."""
        for path in folder.rglob("*"):
            if path.is_file():
                target = self.root / place / path.relative_to(folder)
                target.parent.mkdir(parents=True, exist_ok=True)
                text = path.read_text()
                for name in INSIDE:
                    text = text.replace(name, f"{self.root}{name}") if path.suffix in (".sh", ".py", ".json") else text
                target.write_text(text)

    def reward(self) -> str | None:
        file = self.root / "logs/verifier/reward.txt"
        return file.read_text() if file.exists() else None


def graded(task: Task, tmp_path: Path, agent: str) -> str | None:
    """The reward after the agent's commands, or the solution (`oracle`), as a separate verifier gives it."""
    played, fresh = Machine(tmp_path / "played"), Machine(tmp_path / "fresh")
    for machine in (played, fresh):
        shutil.rmtree(machine.root / "testbed")
        shutil.copytree(tmp_path / "image/testbed", machine.root / "testbed", symlinks=True)
    step = task.steps[0]
    assert step.solution
    if agent == "oracle":
        played.upload(step.solution, "solution")
        agent = "bash /solution/solve.sh"
    played.run(f"cd /testbed; {agent}")
    for hook in step.verifier.collect:
        played.run(hook.command)
    if (patch := played.root / "logs/artifacts/model.patch").exists():
        shutil.copy(patch, fresh.root / "logs/artifacts")
    fresh.upload(step.tests, "tests")
    output = fresh.run("bash /tests/test.sh")
    assert "Traceback (most" not in output, output
    return fresh.reward()


def swe_row(tmp_path: Path) -> dict[str, Any]:
    machine = Machine(tmp_path / "image")
    base = machine.repository()
    patches = {}
    for name, path, text in (("patch", "calc.py", RIGHT), ("test_patch", "tests/test_calc.py", VISIBLE + HIDDEN)):
        (machine.root / "testbed" / path).write_text(text)
        patches[name] = machine.run("git -C /testbed diff")
        machine.run("git -C /testbed checkout -q .")
    return {
        "instance_id": "calc__calc-1", "repo": "calc/calc", "base_commit": base, "problem_statement": "It subtracts.",
        "FAIL_TO_PASS": '["tests/test_calc.py::test_add"]', "PASS_TO_PASS": ["tests/test_calc.py::test_zero"],
        "version": "1.0", **patches,
    }  # fmt: skip


@pytest.mark.parametrize(
    ("agent", "reward"),
    [
        ("oracle", "1"),
        ("true", "0"),
        ("printf 'def test_add(): pass\\ndef test_zero(): pass\\n' > tests/test_calc.py; git commit -qam x", "0"),
        ("sed -i 's/-/+/' calc.py; git add -A; git commit -qm done", "1"),
        ("rm -rf .git", None),
    ],
)
def test_a_row_of_swe_bench_is_graded_by_the_difference_in_a_fresh_copy(
    tmp_path: Path, agent: str, reward: str | None
) -> None:
    task = create_row_task(swe_row(tmp_path), tmp_path / "task")
    assert graded(task, tmp_path, agent) == reward
    assert task.environment.docker_image == "swebench/sweb.eval.x86_64.calc_1776_calc-1:latest"
    assert (task.environment.workdir, task.environment.network_mode) == ("/testbed", "no-network")
    assert task.steps[0].verifier.environment_mode == "separate"


def test_columns_can_have_other_names(tmp_path: Path) -> None:
    row = swe_row(tmp_path)
    row |= {"fail": row.pop("FAIL_TO_PASS"), "issue": row.pop("problem_statement"), "image_name": "mine:1"}
    with pytest.raises(TaskError, match="name its columns: it needs instance_id, base_commit"):
        create_row_task(row, tmp_path / "task")
    task = create_row_task(row, tmp_path / "task", columns={"FAIL_TO_PASS": "fail", "problem_statement": "issue"})
    assert (task.steps[0].instruction, task.environment.docker_image) == ("It subtracts.", "mine:1")


def test_names_of_tests_decide_how_they_are_run(tmp_path: Path) -> None:
    row = swe_row(tmp_path)

    def command(number: int, **changes: Any) -> str:
        made = create_row_task({**row, **changes}, tmp_path / str(number))
        text: str = json.loads((made.folder / "tests/expected.json").read_text())["command"]
        return text

    django = {"repo": "django/django", "FAIL_TO_PASS": ["test_a (x.tests.A)"], "PASS_TO_PASS": []}
    assert command(1).endswith("-p no:cacheprovider tests/test_calc.py")
    assert command(2, **django).endswith("--parallel 1 test_calc")
    assert "bin/test" in command(3, FAIL_TO_PASS=["test_a"], PASS_TO_PASS=[])
    assert command(4, install_config={"test_cmd": "pytest -rA"}) == "pytest -rA tests/test_calc.py"
    with pytest.raises(
        TaskError, match="'adds numbers' is not a test of pytest, Django or SymPy; give the column test_cmd"
    ):
        command(5, FAIL_TO_PASS=["adds numbers"], PASS_TO_PASS="[]")
    with pytest.raises(TaskError, match="FAIL_TO_PASS: it is not JSON"):
        command(6, FAIL_TO_PASS="[a")


@pytest.mark.parametrize(
    "change",
    [{"patch": {"a": 1}}, {"install_config": "x"}, {"test_cmd": [5]}, {"problem_statement": "\ud800"}],
)
def test_a_column_of_another_form_is_an_error_of_its_row(tmp_path: Path, change: dict[str, Any]) -> None:
    with pytest.raises(TaskError, match=r"row: (a column has another form|cannot be written)"):
        create_row_task(swe_row(tmp_path) | change, tmp_path / "row")


def test_outcomes_are_read_as_each_runner_prints_them() -> None:
    pytests = "PASSED a.py::b[x y]\nFAILED a.py::c - assert 1\nXFAIL a.py::d\nSKIPPED [2] a.py:3: no\n"
    assert outcomes_of(pytests, "pytest") == {"a.py::b[x y]": "PASSED", "a.py::c": "FAILED", "a.py::d": "XFAIL"}
    django = "test_a (x.A) ... ok\ntest_b (x.A) ... FAIL\nIt adds. ... skipped 'no'\n"
    assert outcomes_of(django, "unittest") == {
        "test_a (x.A)": "PASSED",
        "test_b (x.A)": "FAILED",
        "It adds.": "SKIPPED",
    }
    assert outcomes_of("test_a ok\ntest_b F\ntest_c E\n", "sympy") == {
        "test_a": "PASSED", "test_b": "FAILED", "test_c": "ERROR",
    }  # fmt: skip


def test_a_row_of_r2e_needs_exactly_the_expected_outcomes(tmp_path: Path) -> None:
    image = Machine(tmp_path / "image")
    image.repository()
    (image.root / "testbed/run_tests.sh").write_text("python -m pytest -rA -p no:cacheprovider r2e_tests\n")
    (image.root / "testbed/r2e_tests").mkdir()
    text = (
        HIDDEN.replace("add(2, 3) == 5", "add(2, 3) == 5, 'wrong'") + "\n\ndef test_bad():\n    assert add(1, 1) == 3\n"
        "\n\nimport pytest\n\n\n@pytest.mark.parametrize('x', ['a b'])\ndef test_word(x): pass\n\n\n"
        "@pytest.mark.xfail\ndef test_known(): assert False\n"
    )
    (image.root / "testbed/r2e_tests/test_1.py").write_text(f"class TestCalc:\n    x = 1\n{text}")
    row = {
        "docker_image": "namanjain12/calc_final:abc", "repo_name": "calc", "commit_hash": "abc",
        "problem_statement": "[ISSUE]\nIt subtracts.\n[/ISSUE]",
        "expected_output_json": json.dumps(
            {"test_add": "PASSED", "test_bad - assert 2 == 3": "FAILED", "test_word[a b]": "PASSED"}
        ),
        "parsed_commit_content": json.dumps({
            "file_diffs": [
                {"header": {"file": {"path": "calc.py"}}, "new_file_content": RIGHT},
                {"header": {"file": {"path": "tests/test_calc.py"}}, "new_file_content": HIDDEN},
            ]
        }),
    }  # fmt: skip
    task = create_row_task(row, tmp_path / "task")
    assert task.steps[0].instruction == "It subtracts.\n" and task.steps[0].test_folders == ()
    dockerfile = (task.folder / "environment/Dockerfile").read_text()
    assert "git tag lachesis-base" in dockerfile and "rm -rf /r2e_tests" in dockerfile
    assert [path.name for path in (task.folder / "solution").rglob("*.py")] == ["calc.py"]
    image.run("git -C /testbed tag lachesis-base")
    for name in ("played", "fresh"):
        shutil.copytree(image.root / "testbed/r2e_tests", tmp_path / name / "r2e_tests")
    shutil.rmtree(image.root / "testbed/r2e_tests")
    assert graded(task, tmp_path, "oracle") == "1"


FIX = {
    "task_id": "Python/0", "entry_point": "add", "docstring": "The sum.", "bug_type": "operator misuse",
    "declaration": "from typing import List\n\n\ndef add(a: int, b: int) -> int:\n",
    "canonical_solution": "    return a + b\n", "buggy_solution": "    return a - b\n", "test_setup": "", "import": "",
    "test": "\n\nMETADATA = {}\n\ndef check(add):\n    assert add(1, 2) == 3\n    big = 10 ** 9\n"
    "    for n in range(3):\n        assert add(big, n) == big + n, 'a\\nb'\n    assert add(4, 0) == 4\n\ncheck(add)",
}  # fmt: skip


def test_a_row_of_humanevalpack_becomes_a_test_function_for_each_assertion(tmp_path: Path) -> None:
    task = create_row_task(FIX, tmp_path / "task")
    ids = (task.folder / "tests/expected.txt").read_text().split()
    assert ids == [f"tests/test_solution.py::test_{number}" for number in range(3)]
    for source, passed in (("environment", 1), ("solution", 3)):
        place = tmp_path / source
        shutil.copytree(task.folder / "tests/files", place)
        shutil.copy(task.folder / source / "solution.py", place)
        command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "-c", os.devnull, "--rootdir", place]
        ran = subprocess.run(
            command, cwd=place, env={**QUICK, "PYTHONPATH": "."}, capture_output=True, text=True, check=False
        )
        assert f"{passed} passed" in ran.stdout, ran.stdout
    assert task.config.metadata["lachesis"]["judge"]["sources"] == ["solution.py"]
    read, patch = scripted_calls(task)  # there are no tests that it could run
    assert read[1]["path"] == patch[1]["path"] == "solution.py"
    for change in ({"task_id": "Go/0"}, {"test": "x = 1"}, {"test": "def check("}, {"test": "def check(a):\n  1"}):
        with pytest.raises(TaskError, match=r"the row is in Go|check\(candidate\)|not valid Python"):
            create_row_task({**FIX, **change}, tmp_path / "other")


def test_rows_whose_names_make_the_same_folder_get_one_each(tmp_path: Path) -> None:
    rows, target = tmp_path / "rows.jsonl", tmp_path / "tasks"
    rows.write_text(
        "".join(json.dumps({**FIX, "task_id": name}) + "\n" for name in ("Python/a b", "Python/a_b", "Python/c"))
    )
    assert main(["tasks", "convert", str(rows), str(target)]) == 0
    assert sorted(path.name for path in target.iterdir()) == ["Python_a_b", "Python_a_b-2", "Python_c"]


def test_the_command_converts_rows_and_shows_tasks(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    rows, target = tmp_path / "rows.jsonl", tmp_path / "tasks"
    renamed = {("key" if name == "task_id" else name): value for name, value in FIX.items()}
    lines = [{**renamed, "key": f"Python/{number}"} for number in range(3)] + [{"other": 1}]
    rows.write_text("".join(json.dumps(row) + "\n" for row in lines))
    assert main(["tasks", "convert", str(rows), str(target), "--columns", "{task_id: key}"]) == 1
    said = capsys.readouterr().err
    assert "row-3: the row has other" in said and "3 tasks written" in said
    assert sorted(path.name for path in target.iterdir()) == ["Python_0", "Python_1", "Python_2"]
    assert main(["tasks", "convert", str(target), str(tmp_path / "copy"), "--limit", "1"]) == 0
    assert read_task(tmp_path / "copy/Python_0").digest == read_task(target / "Python_0").digest
    assert main(["tasks", "show", str(target)]) == 0
    assert "Python_1  1 step  Dockerfile  no-network  600 s  separate verifier" in capsys.readouterr().out
    assert main(["tasks", "show", "--json", str(target / "Python_0")]) == 0
    assert json.loads(capsys.readouterr().out)["config"]["environment"]["workdir"] == "/workspace"
    (target / "Python_0/task.toml").write_text("[environment]\ngpus = 1\n")
    assert main(["tasks", "show", str(target)]) == 1
    assert "environment.gpus: the task needs a GPU" in capsys.readouterr().err
