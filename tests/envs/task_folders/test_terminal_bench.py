"""Folders of Terminal-Bench 1 as Harbor's."""

from __future__ import annotations

import os
import subprocess
from pathlib import Path

import pytest

from lachesis_envs.task_folders import TaskError, find_tasks, read_task

TASK = """
instruction: |-
  Create hello.txt.
author_name: A. Author
difficulty: easy
tags: [files]
estimated_duration_sec: null
parser_name: pytest
max_agent_timeout_sec: 900.0
max_test_timeout_sec: 180.0
run_tests_in_same_shell: false
disable_asciinema: true
"""
COMPOSE = """
services:
  client:
    build: {dockerfile: Dockerfile}
    image: ${T_BENCH_TASK_DOCKER_CLIENT_IMAGE_NAME}
    container_name: ${T_BENCH_TASK_DOCKER_CLIENT_CONTAINER_NAME}
    command: [sh, -c, sleep infinity]
    working_dir: /work
    environment:
      - TEST_DIR=${T_BENCH_TEST_DIR}
      - LEVEL=3
    volumes:
      - ${T_BENCH_TASK_LOGS_PATH}:${T_BENCH_CONTAINER_LOGS_PATH}
      - ${T_BENCH_TASK_AGENT_LOGS_PATH}:${T_BENCH_CONTAINER_AGENT_LOGS_PATH}
"""
BOMB = "a0: &a0 [x]\n" + "".join(f"a{n}: &a{n} [{', '.join([f'*a{n - 1}'] * 10)}]\n" for n in range(1, 13))
FILES = {
    "task.yaml": TASK,
    "docker-compose.yaml": COMPOSE,
    "Dockerfile": "FROM ubuntu:24.04\nCOPY data /app/\nCOPY tests/public.txt /app/\n",
    "data/a.txt": "a",
    "run-tests.sh": "pytest $TEST_DIR/test_outputs.py -rA",
    "tests/test_outputs.py": "def test_a(): pass\n",
    "tests/public.txt": "seen",
    "solution.sh": "echo hi > hello.txt",
}


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    return tmp_path / "cache"


def folder(tmp_path: Path, **changes: str | None) -> Path:
    for name, content in (FILES | changes).items():
        path = tmp_path / "hello" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        if content is None:
            path.unlink(missing_ok=True)
        else:
            path.write_text(content)
    return tmp_path / "hello"


def test_a_task_is_converted_when_it_is_read(tmp_path: Path, cache: Path) -> None:
    place = folder(tmp_path)
    assert find_tasks(place.parent / "hello") == [place]
    task = read_task(place)
    step = task.steps[0]
    assert (task.name, step.instruction) == ("hello", "Create hello.txt.")
    assert (step.agent.timeout_sec, step.verifier.timeout_sec, step.agent.network_mode) == (900, 180, "public")
    assert (task.environment.workdir, task.environment.env) == ("/work", {"TEST_DIR": "/tests", "LEVEL": "3"})
    assert task.config.metadata == {"author_name": "A. Author", "difficulty": "easy", "tags": ["files"]}
    files = {str(path.relative_to(task.folder)) for path in task.folder.rglob("*") if path.is_file()}
    assert files == {
        "task.toml", "instruction.md", "solution/solve.sh", "tests/test.sh", "tests/run-tests.sh",
        "tests/test_outputs.py", "tests/public.txt", "environment/Dockerfile", "environment/data/a.txt",
        # The Dockerfile copies from tests/, so the build needs the folder.
        "environment/tests/public.txt", "environment/tests/test_outputs.py",
    }  # fmt: skip
    assert task.folder.is_relative_to(cache) and read_task(place).folder == task.folder
    assert read_task(folder(tmp_path, **{"data/a.txt": "b"})).folder != task.folder


@pytest.mark.parametrize("build", ["{dockerfile: ./docker/Agent}", "{context: docker/../docker, dockerfile: Agent}"])
def test_the_dockerfile_that_compose_names_is_the_one_that_is_built(tmp_path: Path, build: str) -> None:
    compose = f"services: {{client: {{build: {build}, image: name}}}}"
    place = folder(tmp_path, **{"docker-compose.yaml": compose, "docker/Agent": "FROM agent\n"})
    (place / "link").symlink_to("docker/Agent")
    task = read_task(place)
    assert (task.folder / "environment/Dockerfile").read_text() == "FROM agent\n"
    assert task.environment.docker_image is None


def test_the_only_service_is_the_main_one_whatever_its_name(tmp_path: Path) -> None:
    task = read_task(folder(tmp_path, **{"docker-compose.yaml": COMPOSE.replace("client:", "agent:")}))
    assert (task.environment.workdir, task.environment.env["LEVEL"]) == ("/work", "3")


def test_a_task_that_is_a_link_is_converted_again_when_its_files_change(tmp_path: Path) -> None:
    (tmp_path / "link").symlink_to(folder(tmp_path))
    before = read_task(tmp_path / "link")
    folder(tmp_path, **{"task.yaml": TASK.replace("hello.txt", "other.txt")})
    assert read_task(tmp_path / "link").steps[0].instruction == "Create other.txt." != before.steps[0].instruction


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"task.yaml": "difficulty: easy"}, "task.yaml: instruction: Field required"),
        ({"task.yaml": "a: ["}, "task.yaml: it is not YAML"),
        ({"task.yaml": "instruction: x\na: &a [*a]"}, "task.yaml: it is not YAML: Circular reference"),
        ({"task.yaml": TASK + BOMB}, "its aliases make 3.46e+12 characters of it"),
        ({"task.yaml": TASK + BOMB.replace("[", "{<<: [").replace("]", "]}").replace("x", "x: 1")}, "its aliases make"),
        ({"docker-compose.yaml": COMPOSE + BOMB}, "its aliases make"),
        ({"task.yaml": TASK.replace("pytest", "swebench")}, "parser_name: 'swebench' is not known"),
        ({"task.yaml": TASK.replace("shell: false", "shell: true")}, "run_tests_in_same_shell: "),
        ({"run-tests.sh": None}, "run-tests.sh: the file is missing"),
        ({"docker-compose.yaml": COMPOSE + "  db: {image: x}\n"}, "services.db: it is another service"),
        ({"docker-compose.yaml": COMPOSE + "    privileged: true\n"}, "services.client.privileged: "),
        ({"docker-compose.yaml": "services: {client: {build: ../other}}"}, "the build leaves the folder"),
    ],
)
def test_what_cannot_be_converted_is_refused_by_name(tmp_path: Path, changes: dict[str, str], said: str) -> None:
    with pytest.raises(TaskError) as caught:
        read_task(folder(tmp_path, **changes))
    assert said in str(caught.value)


@pytest.mark.parametrize(
    ("printed", "reward"),
    [
        ("== short test summary info ==\nPASSED test.py::test_a\nSKIPPED [1] x.py:1: why", "1\n"),
        ("=== \x1b[36mshort test summary info\x1b[0m ===\nPASSED test.py::test_a\nFAILED test.py::test_b - x", "0\n"),
        ("==== short test summary info ====\nPASSED test.py::test_a\nFAILED test.py::test_b - x", "0\n"),
        ("==== short test summary info ====\nERROR test.py - ImportError", "0\n"),
        ("PASSED test.py::test_a", None),
        ("==== short test summary info ====\n", None),
        ("could not resolve pypi.org", None),
    ],
)
def test_the_verdict_is_that_of_the_summary_and_there_is_none_without_it(
    tmp_path: Path, printed: str, reward: str | None
) -> None:
    task = read_task(folder(tmp_path, **{"run-tests.sh": "cat /tests/printed.txt; exit 0"}))
    logs, tests = tmp_path / "logs", tmp_path / "tests"
    (logs / "verifier").mkdir(parents=True)
    tests.mkdir()
    (tests / "printed.txt").write_text(printed)
    for name in ("run-tests.sh", "test.sh"):
        text = (task.folder / "tests" / name).read_text()
        (tests / name).write_text(text.replace("/tests/", f"{tests}/").replace("/logs/", f"{logs}/"))
    ran = subprocess.run(["bash", tests / "test.sh"], capture_output=True, text=True, check=False, env=os.environ)
    assert ran.stderr.splitlines()[:1] == printed.replace("\x1b[36m", "").replace("\x1b[0m", "").splitlines()[:1]
    file = logs / "verifier/reward.txt"
    assert (file.read_text() if file.exists() else None) == reward
