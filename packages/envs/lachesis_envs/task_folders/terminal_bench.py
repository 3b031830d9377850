"""Folders of Terminal-Bench 1 (`task.yaml`) as Harbor's. They are made when they are read, and kept in the cache."""

from __future__ import annotations

import hashlib
import os
import re
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from pydantic import BaseModel, ConfigDict, ValidationError

from backends.host.folders import user_cache

from .compose import Compose, read_compose, read_yaml
from .config import TaskConfig
from .errors import TaskError, TaskProblem, problem_of, wrong
from .reading import read_harbor_task
from .task import Files, Task, check_files, content_hash, files_below
from .writing import create_task

VARIABLES = {
    "T_BENCH_TEST_DIR": "/tests",
    "T_BENCH_CONTAINER_LOGS_PATH": "/logs",
    "T_BENCH_CONTAINER_AGENT_LOGS_PATH": "/agent-logs",
}
"""What Terminal-Bench's own harness sets for docker-compose.yaml."""

TEST = r"""#!/bin/bash
# The verdict of Terminal-Bench: no test that pytest's summary names has failed. Without a summary there is no verdict.
reward=$(bash /tests/run-tests.sh 2>&1 | sed 's/\x1b\[[0-9;]*m//g' | awk '
  { print | "cat 1>&2" }
  !seen && tolower($0) ~ /=+[ \t]*short test summary info[ \t]*=+/ { seen = 1; next }
  seen && /^(PASSED|SKIPPED|XFAIL):? ./ { good++ }
  seen && /^(FAILED|ERROR|XPASS):? ./ { bad++ }
  END { if (good + bad > 0) print (bad > 0 ? 0 : 1) }
')
[ -z "$reward" ] || echo "$reward" > /logs/verifier/reward.txt
"""
"""tests/test.sh of a task."""


class TerminalBenchTask(BaseModel):
    """`task.yaml`. What is not named here describes the task, and becomes its metadata."""

    model_config = ConfigDict(extra="allow")

    instruction: str
    parser_name: str = "pytest"
    max_agent_timeout_sec: float = 360.0
    max_test_timeout_sec: float = 60.0
    run_tests_in_same_shell: bool = False
    disable_asciinema: bool = False


def read_task(folder: Path | str, *, to_play: bool = True, variables: Iterable[str] = ()) -> Task:
    """The task in `folder`, which is one of Harbor or of Terminal-Bench 1. See `read_harbor_task`."""
    folder = Path(os.path.realpath(Path(folder).expanduser()))
    if not (folder / "task.toml").exists() and (folder / "task.yaml").exists():
        check_files(folder)
        folder = converted(folder)
    return read_harbor_task(folder, to_play=to_play, variables=variables)


def converted(folder: Path) -> Path:
    """The folder of the same task in Harbor's format. It is made once, and again when the task changes.

    Raises:
        TaskError: the folder is not a task, or needs a parser, a shell or a service that is not there.
    """
    code = hashlib.sha256(Path(__file__).read_bytes())  # another converter makes another task
    source = content_hash(files_below(folder), folder, code)
    target = user_cache() / "tasks" / source.hexdigest()[:32] / folder.name
    if not (target / "task.toml").exists():
        config, files = _convert(folder)
        try:
            create_task(target, config, files)
        except TaskError:
            if not (target / "task.toml").exists():  # else another process was faster
                raise
    return target


def _convert(folder: Path) -> tuple[TaskConfig, Files]:
    file = folder / "task.yaml"
    try:
        task = TerminalBenchTask.model_validate(read_yaml(file))
    except ValidationError as error:
        raise TaskError([problem_of(file, one) for one in error.errors(include_url=False)]) from None
    compose_file = folder / "docker-compose.yaml"
    compose = read_compose(compose_file, "client", VARIABLES, any_name=True) if compose_file.exists() else Compose()
    problems = [
        TaskProblem(compose_file, field, reason, "convert the task by hand, without it")
        for field, reason in compose.refused
    ]
    if task.parser_name != "pytest":
        problems.append(
            TaskProblem(file, "parser_name", f"{task.parser_name!r} is not known", "write tests for pytest")
        )
    if task.run_tests_in_same_shell:
        problems.append(
            TaskProblem(
                file, "run_tests_in_same_shell", "the agent's shell has ended by then", "test files, not the shell"
            )
        )
    if not (folder / "run-tests.sh").exists():
        problems.append(TaskProblem(folder / "run-tests.sh", "", "the file is missing", "a task needs it to be graded"))
    if problems:
        raise TaskError(problems)
    config = TaskConfig.model_validate(
        {
            "metadata": _toml_values(task.model_extra or {}),
            "agent": {"timeout_sec": task.max_agent_timeout_sec},
            "verifier": {"timeout_sec": task.max_test_timeout_sec},
            "environment": {
                "workdir": compose.workdir,
                "env": {"TEST_DIR": "/tests", **compose.env},
                "docker_image": compose.image,
                **compose.limits,
            },
        }
    )
    return config, {"instruction.md": task.instruction, "tests/test.sh": TEST, **_files(folder, compose)}


def _files(folder: Path, compose: Compose) -> Files:
    """Path in the new folder -> file of the old one. The build context has all that is neither test nor solution, and
    of these what the Dockerfile copies."""
    context = Path(os.path.normpath(folder / ("." if "$" in compose.context else compose.context)))
    dockerfile = Path(os.path.normpath(context / compose.dockerfile))
    if not dockerfile.is_relative_to(folder):
        raise wrong(folder / "docker-compose.yaml", "the build leaves the folder", "move it inside", "build")
    copies = (
        "\n".join(re.findall(r"(?im)^\s*(?:COPY|ADD)\s.*$", dockerfile.read_text("utf-8", "replace")))
        if dockerfile.is_file()
        else ""
    )
    files: Files = {}
    for path in files_below(folder):
        name = path.relative_to(folder)
        top = name.parts[0]
        if top in ("tests", "run-tests.sh"):
            files[str(Path("tests", *name.parts[top == "tests" :]))] = path
        elif top in ("solution.sh", "solution.yaml"):
            files["solution/solve.sh" if top == "solution.sh" else f"solution/{top}"] = path
        hidden = top in ("tests", "run-tests.sh", "solution.sh", "solution.yaml", "task.yaml", "docker-compose.yaml")
        if path.is_relative_to(context) and (not hidden or re.search(rf"\b{re.escape(top)}\b", copies)):
            files[f"environment/{path.relative_to(context)}"] = path
    if dockerfile.is_file():
        files["environment/Dockerfile"] = dockerfile
    return files


def _toml_values(value: Any) -> Any:
    """The value without nulls, which TOML has not."""
    if isinstance(value, dict):
        return {str(key): _toml_values(entry) for key, entry in value.items() if entry is not None}
    if isinstance(value, list | tuple | set):
        return [_toml_values(entry) for entry in value if entry is not None]
    return value if isinstance(value, str | int | float) or hasattr(value, "isoformat") else str(value)
