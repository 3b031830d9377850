"""Task folders in Harbor's format to tasks."""

from __future__ import annotations

import glob
import os
import re
import tomllib
from collections.abc import Iterable
from pathlib import Path

from pydantic import ValidationError

from .compose import read_compose
from .config import AgentConfig, EnvironmentConfig, StepConfig, TaskConfig, VerifierConfig, VerifierMode
from .errors import NoTask, TaskError, TaskProblem, problem_of, read_text, wrong
from .refusals import refusals
from .task import Step, Task, check_files

_CANARY = re.compile(r"(<!--.*canary.*-->|#.*canary.*)$", re.IGNORECASE)


def read_harbor_task(folder: Path | str, *, to_play: bool = True, variables: Iterable[str] = ()) -> Task:
    """The task in `folder`, which has a task.toml.

    Args:
        variables: names of variables of this process that it may have.

    Raises:
        TaskError: a file is missing or wrong; or, where the task is read `to_play`, it needs what cannot be honoured.
    """
    folder = Path(os.path.realpath(Path(folder).expanduser()))
    check_files(folder)
    file = folder / "task.toml"
    config = parse_config(read_text(file), file)
    if to_play and (problems := list(refusals(folder, config))):
        raise TaskError(problems)
    config = _with_compose(folder, config)
    own: list[StepConfig | None] = [*(config.steps or [])] or [None]
    steps = tuple(_step(folder, config, step) for step in own)
    _check_environment(folder, config, steps)
    name = config.task.name if config.task else folder.name
    return Task(folder, name, config, steps, frozenset(variables))


def find_tasks(path: Path | str) -> list[Path]:
    """Folders of tasks at `path`: a task, a folder with tasks at any depth, or a glob of these. Sorted by path.

    Raises:
        NoTask: there is none.
    """
    path = Path(path).expanduser()
    places = [path] if path.exists() else [Path(place) for place in glob.glob(str(path), recursive=True)]  # noqa: PTH207
    found = set[Path]()
    while places:
        place = places.pop()
        if _is_task(place):
            found.add(place)
        elif place.is_dir():
            # A link to a task is one; other links may lead back.
            places += [
                entry
                for entry in place.iterdir()
                if not entry.name.startswith(".") and (not entry.is_symlink() or _is_task(entry))
            ]
    if not found:
        step = "name a folder that has a task.toml, or one with such folders in it"
        raise NoTask([TaskProblem(path, "", "no task is there", step)])
    return sorted(found)


def _is_task(folder: Path) -> bool:
    return (folder / "task.toml").is_file() or (folder / "task.yaml").is_file()


def parse_config(text: str, file: Path = Path("task.toml")) -> TaskConfig:
    """The settings in the text of a task.toml, with defaults, without checking whether they can be honoured.

    Raises:
        TaskError: it is not valid TOML, or Harbor would refuse it too.
    """
    try:
        return TaskConfig.model_validate(tomllib.loads(text))
    except ValidationError as error:
        raise TaskError([problem_of(file, one) for one in error.errors(include_url=False)]) from None
    except (ValueError, RecursionError) as error:
        raise wrong(file, f"it is not TOML: {error}", "correct it") from None


def _with_compose(folder: Path, config: TaskConfig) -> TaskConfig:
    """The settings with what docker-compose.yaml says about the main service."""
    file = folder / "environment/docker-compose.yaml"
    if not file.is_file():
        return config
    compose, environment = read_compose(file, "main"), config.environment
    builds = not environment.docker_image and (file.parent / "Dockerfile").is_file()
    update = {
        "workdir": environment.workdir or compose.workdir,
        "env": {**compose.env, **environment.env},
        **{key: value for key, value in compose.limits.items() if getattr(environment, key) is None},
        # As when Docker Compose merges the files. What is built here only has the name.
        "docker_image": None if builds else compose.image or environment.docker_image,
    }
    return config.model_copy(update={"environment": environment.model_copy(update=update)})


def _check_environment(folder: Path, config: TaskConfig, steps: tuple[Step, ...]) -> None:
    builds = [step.verifier_build for step in steps if step.verifier_build]
    if not config.environment.docker_image:
        builds.insert(0, folder / "environment")
    for build in builds:
        if not (build / "Dockerfile").is_file():
            raise wrong(build / "Dockerfile", "the file is missing", "write it, or set environment.docker_image")


def _step(folder: Path, config: TaskConfig, own: StepConfig | None) -> Step:
    """The effective settings of a step; `own` is None for a task without [[steps]]."""
    place = folder / "steps" / own.name if own else folder
    step = own or StepConfig.model_construct(name="", agent=config.agent, verifier=config.verifier)
    tests = [path for path in (folder / "tests", place / "tests") if path.is_dir()]
    tests = list(dict.fromkeys(tests))
    has_script = [path for path in reversed(tests) if (path / "test.sh").exists()]
    verifier, build, bundled = _verifier(folder, place, config, step.verifier)
    if not has_script and not bundled:
        raise wrong(place / "tests/test.sh", "the file is missing", "a task needs it to be graded")
    solutions = [path for path in (place / "solution", folder / "solution") if path.is_dir()]
    solution = solutions[0] if solutions and (solutions[0] / "solve.sh").exists() else None
    workdir = place / "workdir" if own and (place / "workdir").is_dir() else None
    setup = workdir / "setup.sh" if workdir else None
    return Step(
        name=step.name,
        instruction=strip_canary(read_text(place / "instruction.md")),
        tests=(has_script or [place / "tests"])[0],
        test_folders=() if bundled else tuple(tests),
        solution=solution,
        workdir=workdir,
        workdir_setup=setup if setup and setup.exists() else None,
        agent=_agent(config, step.agent),
        verifier=verifier,
        verifier_build=build,
        min_reward=own.min_reward if own else None,
        healthcheck=own.healthcheck if own else None,
        artifacts=[*config.artifacts, *own.artifacts] if own else config.artifacts,
    )


def _agent(config: TaskConfig, own: AgentConfig) -> AgentConfig:
    network = next((place for place in (own, config.agent) if place.network_mode), config.environment)
    return own.model_copy(
        update={
            "timeout_sec": config.agent.timeout_sec if own.timeout_sec is None else own.timeout_sec,
            "user": config.agent.user if own.user is None else own.user,
            "network_mode": network.network_mode,
            "allowed_hosts": network.allowed_hosts,
        }
    )


def verifier_mode(config: TaskConfig, own: VerifierConfig) -> VerifierMode:
    """Of the step with the settings `own`: as it says, else as its environment implies, else the same of the task."""
    for verifier in (own, config.verifier):
        if verifier.environment_mode or verifier.environment:
            return verifier.environment_mode or "separate"
    return "shared"


def _verifier(
    folder: Path, place: Path, config: TaskConfig, own: VerifierConfig
) -> tuple[VerifierConfig, Path | None, bool]:
    """The effective settings, the build context of a separate environment, and whether its image has the tests.

    `timeout_sec` is the step's even where only the task sets it: Harbor's default for a step is 600 s.
    """
    base, mode = config.verifier, verifier_mode(config, own)
    environment: EnvironmentConfig | None = None
    build, bundled = None, False
    if mode == "separate":
        environment = own.environment or base.environment or config.environment
        candidates = [(own.environment, place / "tests"), (base.environment, folder / "tests")]
        for given, tests in candidates:
            if given is not None and given.docker_image:
                environment, bundled = environment.model_copy(update={"docker_image": given.docker_image}), True
                break
            if (tests / "Dockerfile").is_file():
                environment, build, bundled = environment.model_copy(update={"docker_image": None}), tests, True
                break
        else:
            image = config.environment.docker_image
            environment = environment.model_copy(update={"docker_image": image})
            build = None if image else folder / "environment"
    network = next((v for v in (own, base) if v.network_mode), environment or config.environment)
    verifier = own.model_copy(
        update={
            "environment_mode": mode,
            "environment": environment,
            "env": {**base.env, **own.env},
            "user": base.user if own.user is None else own.user,
            "network_mode": network.network_mode,
            "allowed_hosts": network.allowed_hosts,
            "collect": base.collect if own is base else [*base.collect, *own.collect],
        }
    )
    return verifier, build, bundled


def strip_canary(text: str) -> str:
    """The text without the comments at its start that mark a benchmark ("canary"), which no agent is shown."""
    lines = text.split("\n")
    while lines and _CANARY.match(lines[0].strip()):
        lines.pop(0)
    while lines and not lines[0].strip():
        lines.pop(0)
    return "\n".join(lines)
