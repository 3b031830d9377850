"""Task folders: what is read, what is refused, what is written."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from lachesis_envs.task_folders import (
    Task,
    TaskConfig,
    TaskError,
    create_task,
    find_tasks,
    parse_config,
    read_task,
    to_toml,
    write_task,
)
from lachesis_envs.task_folders.refusals import NEXT_STEPS
from tests.run import some

from .fuzz import task_toml

FILES = {"instruction.md": "Write x.\n", "environment/Dockerfile": "FROM debian\n", "tests/test.sh": "#!/bin/sh\n"}


def task(folder: Path, text: str = "", files: dict[str, Any] | None = None, **more: Any) -> Path:
    for name, content in {"task.toml": text, **(FILES if files is None else files), **more}.items():
        path = folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(content if isinstance(content, bytes) else content.encode())
    return folder


def refusal(folder: Path, **options: Any) -> str:
    with pytest.raises(TaskError) as caught:
        read_task(folder, **options)
    return str(caught.value)


def test_defaults_are_those_of_harbor(tmp_path: Path) -> None:
    read = read_task(task(tmp_path / "x"))
    step = read.steps[0]
    assert (read.name, read.config.schema_version, len(read.steps), step.name) == ("x", "1.4", 1, "")
    assert (step.agent.timeout_sec, step.agent.network_mode) == (None, "public")
    assert (step.verifier.timeout_sec, step.verifier.environment_mode) == (600, "shared")
    assert (read.environment.build_timeout_sec, read.environment.os, step.solution) == (600, "linux", None)
    assert read.build == tmp_path / "x/environment"


def test_deprecated_keys_become_those_that_took_their_place(tmp_path: Path) -> None:
    text = 'version = "1.0"\n[environment]\nmemory = "2G"\nstorage = "512M"\nallow_internet = false\n'
    environment = read_task(task(tmp_path, text)).environment
    assert (environment.memory_mb, environment.storage_mb, environment.network_mode) == (2048, 512, "no-network")
    assert read_task(tmp_path).config.schema_version == "1.0"
    assert "contradicts" in refusal(task(tmp_path, '[environment]\nmemory = "2G"\nmemory_mb = 5\n'))


def test_a_step_has_its_own_settings_and_else_the_tasks(tmp_path: Path) -> None:
    text = """
artifacts = ["/out"]
[agent]
timeout_sec = 100
user = "agent"
network_mode = "no-network"
[verifier]
timeout_sec = 50
user = "root"
env = {A = "1", B = "1"}
collect = [{command = "all"}]
[[steps]]
name = "one"
[steps.agent]
timeout_sec = 7
network_mode = "public"
[steps.verifier]
env = {B = "2"}
collect = [{command = "one"}]
[[steps]]
name = "two"
min_reward = 0.5
artifacts = [{source = "/two", destination = "x"}]
[steps.verifier]
environment_mode = "separate"
"""
    files = {
        "environment/Dockerfile": "FROM debian",
        "tests/test.sh": "shared",
        "solution/solve.sh": "shared",
        "steps/one/instruction.md": "One.",
        "steps/one/tests/test.sh": "own",
        "steps/one/solution/solve.sh": "own",
        "steps/one/workdir/setup.sh": "true",
        "steps/two/instruction.md": "<!-- canary: do not train -->\n\nTwo.",
    }
    folder = task(tmp_path, text, files)
    one, two = read_task(folder).steps
    assert (one.instruction, two.instruction) == ("One.", "Two.")
    assert (one.agent.timeout_sec, one.agent.user, one.agent.network_mode) == (7, "agent", "public")
    assert (two.agent.timeout_sec, two.agent.network_mode) == (100, "no-network")
    assert (one.tests, two.tests) == (folder / "steps/one/tests", folder / "tests")
    assert one.test_folders == (folder / "tests", folder / "steps/one/tests")
    assert (one.solution, two.solution) == (folder / "steps/one/solution", folder / "solution")
    assert one.workdir_setup == folder / "steps/one/workdir/setup.sh" and two.workdir is None
    assert (one.verifier.env, one.verifier.user) == ({"A": "1", "B": "2"}, "root")
    assert one.verifier.timeout_sec == 600  # as in Harbor: the task's applies to tasks without steps only
    assert [hook.command for hook in one.verifier.collect] == ["all", "one"]
    assert (one.verifier.environment_mode, one.verifier.environment) == ("shared", None)
    assert two.verifier.environment_mode == "separate" and two.verifier_build == folder / "environment"
    assert (two.min_reward, len(two.artifacts), len(one.artifacts)) == (0.5, 2, 1)


def test_a_verifier_with_an_image_of_its_own_gets_no_tests(tmp_path: Path) -> None:
    separate = '[verifier]\nenvironment_mode = "separate"\n'
    step = read_task(task(tmp_path / "built", separate, **{"tests/Dockerfile": "FROM debian"})).steps[0]
    assert (step.test_folders, step.verifier_build) == ((), tmp_path / "built/tests")
    text = separate + '[verifier.environment]\ndocker_image = "grader"\nnetwork_mode = "no-network"\n'
    step = read_task(task(tmp_path / "named", text)).steps[0]
    assert step.verifier.environment and step.verifier.environment.docker_image == "grader"
    assert (step.test_folders, step.verifier_build, step.verifier.network_mode) == ((), None, "no-network")


@pytest.mark.parametrize(
    ("text", "needs", "field", "reason"),
    [
        ('schema_version = "2.0"', "version", "schema_version", "'2.0' is not known"),
        ("[agent]\ntimeout_secs = 3", "unknown_keys", "agent.timeout_secs", "did you mean 'timeout_sec'?"),
        ("[verifier]\ntimeout_sec = nan", "times", "verifier.timeout_sec", "nan s"),
        ("environment.healthcheck = {command = 'x', interval_sec = nan}", "times",
         "environment.healthcheck.interval_sec", "nan s"),
        ("[environment]\ngpus = 1", "gpus", "environment.gpus", "needs a GPU"),
        ('[environment]\ntpu = {type = "v6e", topology = "2x4"}', "tpu", "environment.tpu", "needs a TPU"),
        ('[environment]\nos = "Windows"', "windows", "environment.os", "for Windows"),
        ('[environment]\nskills_dir = "/skills"', "skills", "environment.skills_dir", "has no skills"),
        ('[[environment.mcp_servers]]\nname = "m"\nurl = "u"', "mcp_servers", "environment.mcp_servers", "(m)"),
        ('[agent]\nnetwork_mode = "allowlist"', "allowlist", "agent.network_mode", "limited to some hosts"),
        ('artifacts = [{source = "/a", service = "db"}]', "services", "artifacts[0].service", "'db' is another"),
        ("[environment]\ncpus = -1", "amounts", "environment.cpus", "-1 is less than nothing"),
        ('[environment]\nstorage = "-3G"', "amounts", "environment.storage_mb", "-3072 is less"),
        ('[environment]\nworkdir = "app"', "workdir", "environment.workdir", "'app' is relative"),
        ('verifier.environment = {workdir = "."}', "workdir", "verifier.environment.workdir", "'.' is relative"),
        ('artifacts = ["//manifest.json"]', "artifacts", "artifacts", "in the place of the list"),
        ('artifacts = [{source = "/a", destination = "./manifest.json"}]', "artifacts", "artifacts", "in the place"),
        ('[[steps]]\nname = "a"\nartifacts = ["/manifest.json/x"]', "artifacts", "steps[0].artifacts", "in the place"),
        ('solution.env = {A = "\\u0000"}', "nul", "solution.env", "a NUL character"),
        ('[[verifier.collect]]\ncommand = "a\\u0000b"', "nul", "verifier.collect[0].command", "a NUL character"),
        ('[environment]\nworkdir = "/a\\u0000"', "nul", "environment.workdir", "a NUL character"),
        ('[[steps]]\nname = "a"\n[steps.verifier]\nx = 1', "unknown_keys", "steps[0].verifier.x", "not known"),
    ],
)  # fmt: skip
def test_what_cannot_be_honoured_is_refused_by_name(
    tmp_path: Path, text: str, needs: str, field: str, reason: str
) -> None:
    folder = task(tmp_path, text, **{"steps/a/instruction.md": "A."})
    message = refusal(folder)
    assert message.startswith(f"{folder / 'task.toml'}: {field}: ") and reason in message
    assert message.endswith(NEXT_STEPS[needs]) and "\n" not in message
    assert read_task(folder, to_play=False).folder == folder


@pytest.mark.parametrize(
    ("file", "content", "needs"),
    [
        ("trajectory.json", "{}", "trajectory"),
        ("tests/.harborignore", "*.pyc", "harborignore"),
        ("tests/docker-compose.yaml", "services: {main: {}}", "services"),
        ("environment/docker-compose.yaml", "services: {main: {}, db: {image: postgres}}", "services"),
        ("environment/docker-compose.yaml", "services: {main: {privileged: true}}", "services"),
        ("environment/docker-compose.yaml", "services: {main: {command: nginx}}", "services"),
        ("environment/docker-compose.yaml", "services: {main: {command: nginx && sleep infinity}}", "services"),
        ("environment/docker-compose.yaml", "services: {main: {build: {dockerfile: Other}}}", "services"),
        ("environment/docker-compose.yaml", "services: {main: {build: ../other}}", "services"),
        ("environment/docker-compose.yaml", "services: {main: {environment: [A]}}", "services"),
        ("environment/docker-compose.yaml", "services: {db: {image: postgres}}", "services"),
        ("environment/docker-compose.yaml", "services: {main: {environment: ['A=${B}']}}", "services"),
    ],
)
def test_files_that_cannot_be_honoured_are_refused_by_name(tmp_path: Path, file: str, content: str, needs: str) -> None:
    folder = task(tmp_path, **{file: content})
    message = refusal(folder)
    assert message.startswith(str(folder / file)) and message.endswith(NEXT_STEPS[needs])
    assert read_task(folder, to_play=False).folder == folder


def test_every_problem_is_named_at_once(tmp_path: Path) -> None:
    with pytest.raises(TaskError) as caught:
        read_task(task(tmp_path, "[environment]\ngpus = 1\nskills_dir = '/s'\n[agent]\nx = 1\n"))
    assert {problem.field for problem in caught.value.problems} == {
        "environment.gpus",
        "environment.skills_dir",
        "agent.x",
    }


def test_the_main_service_of_compose_becomes_settings(tmp_path: Path) -> None:
    compose = "services: {main: {working_dir: /app, environment: {A: 1, B: x}, command: [sleep, infinity]}}"
    folder = task(tmp_path, "[environment.env]\nA = 'mine'\n", **{"environment/docker-compose.yaml": compose})
    environment = read_task(folder).environment
    assert (environment.workdir, environment.env) == ("/app", {"A": "mine", "B": "x"})


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"task.toml": "[agent"}, "it is not TOML"),
        ({"task.toml": b"\xff"}, "it is not UTF-8"),
        ({"task.toml": "[agent]\ntimeout_sec = 'soon'"}, "agent.timeout_sec"),
        ({"task.toml": "[[steps]]\nname = 'a'\n[[steps]]\nname = 'A'"}, "two steps have the name"),
        ({"instruction.md": None}, "instruction.md: the file is missing"),
        ({"tests/test.sh": None}, "tests/test.sh: the file is missing"),
        ({"environment/Dockerfile": None}, "environment/Dockerfile: the file is missing"),
        ({"environment/docker-compose.yaml": "a: ["}, "it is not YAML"),
        ({"environment/docker-compose.yaml": "services: [1]"}, "no mapping of services"),
    ],
)
def test_a_wrong_folder_gets_an_error_that_names_the_file(tmp_path: Path, change: dict[str, Any], said: str) -> None:
    files = {name: content for name, content in (FILES | change).items() if content is not None}
    assert said in refusal(task(tmp_path, files=files, **{"task.toml": change.get("task.toml", "")}))


def test_a_link_that_leaves_the_folder_is_refused(tmp_path: Path) -> None:
    folder = task(tmp_path / "x")
    (folder / "tests/inside").symlink_to("../instruction.md")
    assert read_task(folder)
    (folder / "tests/outside").symlink_to("/etc/passwd")
    assert "outside: the link leaves the task's folder (/etc/passwd)" in refusal(folder)
    (tmp_path / "link").symlink_to(folder)
    assert "outside: the link leaves" in refusal(tmp_path / "link")


@pytest.mark.parametrize("name", ["task.toml", "instruction.md", "tests/pipe"])
def test_a_pipe_is_refused_and_not_read(tmp_path: Path, name: str) -> None:
    folder = task(tmp_path)
    (folder / name).unlink(missing_ok=True)
    os.mkfifo(folder / name)
    assert refusal(folder).startswith(f"{folder / name}: it is neither a file nor a folder")


def test_a_folder_whose_name_no_record_can_hold_is_refused(tmp_path: Path) -> None:
    folder = task(tmp_path / os.fsdecode(b"a\xff"))
    assert "its name is not UTF-8; rename it" in refusal(folder)


def test_a_link_to_itself_is_a_link_like_others(tmp_path: Path) -> None:
    (task(tmp_path) / "tests/loop").symlink_to("loop")
    assert read_task(tmp_path).digest


def test_tasks_are_found_in_a_folder_and_by_a_glob(tmp_path: Path) -> None:
    folders = [task(tmp_path / place) for place in ("a", "b/c", "b/d")]
    task(folders[0] / "environment/task")  # part of a task, no task
    assert find_tasks(tmp_path) == folders
    assert find_tasks(tmp_path / "b/c") == [folders[1]]
    assert find_tasks(f"{tmp_path}/b/*") == folders[1:]
    (tmp_path / ".hidden").mkdir()
    (tmp_path / ".hidden/link").symlink_to(folders[1])
    assert find_tasks(tmp_path / ".hidden") == [tmp_path / ".hidden/link"]
    assert find_tasks(tmp_path) == folders
    with pytest.raises(TaskError, match="no task is there"):
        find_tasks(tmp_path / "none")


def test_the_digest_changes_with_what_decides_the_verdict_only(tmp_path: Path) -> None:
    assert read_task(task(tmp_path, f"[metadata]\na = {10**25}\n")).digest
    folder = task(tmp_path, "[agent]\ntimeout_sec = 5\n")
    digest = read_task(folder).digest
    task(folder, "# a comment\nagent = {timeout_sec = 5.0}\n", **{"README.md": "x", ".gitignore": "x"})
    assert read_task(folder).digest == digest
    seen = {digest}
    for name, content in {"instruction.md": "Other.", "tests/more": "", "tests/test.sh": "exit"}.items():
        (folder / name).write_text(content)
        seen.add(read_task(folder).digest)
    (folder / "tests/test.sh").chmod(0o700)
    seen.add(read_task(folder).digest)
    task(folder, "[agent]\ntimeout_sec = 6\n", files={})
    assert len(seen | {read_task(folder).digest}) == 6


def same(read: Task, other: Task) -> bool:
    one, two = ((repr(t.config), t.digest, [step.instruction for step in t.steps]) for t in (read, other))
    return one == two  # as text, for NaN is not equal to itself


@settings(max_examples=some(60))
@given(seed=st.integers(0, 2**32))
def test_fuzzed_files_give_a_task_or_a_task_error_and_what_is_written_reads_the_same(
    seed: int, tmp_path_factory: pytest.TempPathFactory
) -> None:
    base = tmp_path_factory.mktemp("fuzzed")
    folder = task(base / "task", task_toml(seed))
    try:
        names = [step.name for step in parse_config((folder / "task.toml").read_text()).steps or []]
        for name in names:
            task(folder, files={}, **{"task.toml": task_toml(seed), f"steps/{name}/instruction.md": "Step."})
        read = read_task(folder, to_play=False)
    except TaskError as error:
        assert all(problem.reason and problem.next_step for problem in error.problems)
        return
    assert same(write_task(read, base / "copy"), read)
    assert same(read_task(base / "copy", to_play=False), read)


SCALARS = st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text(max_size=9) | st.datetimes() | st.times()
TOML_VALUES = st.recursive(
    SCALARS,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner | st.none(), max_size=3),
    max_leaves=5,
)


def without_nulls(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: without_nulls(entry) for key, entry in value.items() if entry is not None}
    return [without_nulls(entry) for entry in value] if isinstance(value, list) else value


@settings(max_examples=some(50))
@given(metadata=st.dictionaries(st.text(max_size=5), TOML_VALUES, max_size=4))
def test_any_metadata_is_read_as_it_was_written(metadata: dict[str, Any]) -> None:
    config = TaskConfig(metadata=metadata)
    try:
        text = to_toml(config)
    except TaskError as error:
        assert "TOML cannot express it" in str(error)
        return
    assert parse_config(text).metadata == without_nulls(metadata)


@given(
    data=st.binary(max_size=200),
    name=st.sampled_from(["task.toml", "instruction.md", "environment/docker-compose.yaml"]),
)
def test_any_bytes_in_a_file_give_a_task_or_a_task_error(
    data: bytes, name: str, tmp_path_factory: pytest.TempPathFactory
) -> None:
    folder = task(tmp_path_factory.mktemp("bytes"), **{name: data})
    try:
        assert read_task(folder).steps
    except TaskError as error:
        assert str(folder) in str(error)


def test_a_written_task_keeps_files_modes_links_and_changed_settings(tmp_path: Path) -> None:
    folder = task(tmp_path / "a", **{"tests/data.bin": b"\x00\xff"})
    (folder / "tests/test.sh").chmod(0o755)
    (folder / "tests/link").symlink_to("data.bin")
    read = read_task(folder)
    limited = read.config.model_copy(update={"agent": read.config.agent.model_copy(update={"timeout_sec": 9.5})})
    written = write_task(Task(folder, read.name, limited, read.steps), tmp_path / "b")
    assert written.config.agent.timeout_sec == 9.5
    assert os.access(written.folder / "tests/test.sh", os.X_OK)
    assert str((written.folder / "tests/link").readlink()) == "data.bin"
    assert (written.folder / "tests/data.bin").read_bytes() == b"\x00\xff"
    assert {path.name for path in tmp_path.iterdir()} == {"a", "b"}


def test_a_task_is_not_written_into_itself(tmp_path: Path) -> None:
    read = read_task(task(tmp_path))
    with pytest.raises(TaskError, match="in the task that it would copy"):
        write_task(read, tmp_path / "tests/copy")
    assert read_task(tmp_path).digest == read.digest


def test_the_image_of_compose_is_the_name_of_what_is_built_unless_there_is_a_dockerfile(tmp_path: Path) -> None:
    compose = {"environment/docker-compose.yaml": "services: {main: {image: mine, working_dir: /w}}"}
    assert read_task(task(tmp_path / "built", **compose)).environment.docker_image is None
    named = '[environment]\ndocker_image = "other"\n'
    assert read_task(task(tmp_path / "named", named, **compose)).environment.docker_image == "mine"
    files = {name: text for name, text in FILES.items() if name != "environment/Dockerfile"}
    read = read_task(task(tmp_path / "image", files=files | compose))
    assert (read.environment.docker_image, read.environment.workdir) == ("mine", "/w")


def test_a_folder_is_written_whole_or_not_at_all(tmp_path: Path) -> None:
    config = TaskConfig.model_validate({"environment": {"docker_image": "debian"}})
    with pytest.raises(TaskError) as caught:
        create_task(tmp_path / "x", config, {"instruction.md": "Do."})
    assert str(caught.value).startswith(f"{tmp_path}/x/tests/test.sh: the file is missing")
    with pytest.raises(TaskError, match="the path leaves the task's folder"):
        create_task(tmp_path / "x", config, {"../y": ""})
    assert not list(tmp_path.iterdir())
    made = create_task(tmp_path / "x", config, {"instruction.md": "Do.", "tests/test.sh": "#!/bin/sh\n"})
    assert os.access(made.steps[0].tests / "test.sh", os.X_OK)
    with pytest.raises(TaskError, match="name a new or empty folder"):
        create_task(tmp_path / "x", config, {"instruction.md": "Do.", "tests/test.sh": ""})
    assert [path.name for path in tmp_path.iterdir()] == ["x"]
