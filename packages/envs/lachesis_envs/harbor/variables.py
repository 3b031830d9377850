"""Variables of this process that tasks ask for: `${NAME}` and `${NAME:-default}` in the tables `env` of task.toml.

A task may be anybody's, and what its sandbox has the agent can read and, with the network, send away. So a task gets
the variables that the run allows, by name, and no others.
"""

from __future__ import annotations

import logging
import os
import re
from collections.abc import Collection, Iterator, Mapping

from lachesis_envs.harbor.causes import Invalid
from lachesis_envs.task_folders import Task, TaskProblem

_VARIABLE = re.compile(r"\$\{([^}:]+)(?::-(.*))?\}")
log = logging.getLogger(__name__)


def resolved_variables(wanted: Mapping[str, str], where: str, allowed: Collection[str]) -> dict[str, str]:
    """Variables with references replaced by those of this process, where they are `allowed`.

    Raises:
        Invalid: one is not set here, or not allowed, and has no default.
    """
    found = {}
    for name, value in wanted.items():
        template = _VARIABLE.fullmatch(value)
        if template is not None:
            own = os.environ.get(template[1]) if template[1] in allowed else None
            given = template[2] if own is None else own
            if given is None:
                raise Invalid("variable", f"{where}: {name} = {value!r}. Next step: {_step(template[1], allowed)}")
            value = given
        found[name] = value
    return found


def problems_of(task: Task, allowed: Collection[str], *, solves: bool) -> list[TaskProblem]:
    """The variables that keep the task from being run. Those that take their default are logged.

    Args:
        solves: whether its solution is run.
    """
    found = []
    for field, wanted in _tables(task, solves):
        for name, value in wanted.items():
            template = _VARIABLE.fullmatch(value)
            if template is None or template[1] in allowed:
                continue
            reason = f"{value} is a variable of this process, which the run does not let the task have"
            step = _step(template[1], allowed)
            if template[2] is None:
                found.append(TaskProblem(task.folder / "task.toml", f"{field}.{name}", reason, step))
            elif template[1] in os.environ:
                log.warning(
                    "%s: %s.%s takes its default: %s; to change that, %s", task.folder, field, name, reason, step
                )
    return found


def _tables(task: Task, solves: bool) -> Iterator[tuple[str, Mapping[str, str]]]:
    yield "environment.env", task.environment.env
    for step in task.steps:
        before = f"steps.{step.name}." if step.name else ""
        yield f"{before}verifier.env", step.verifier.env
        if step.verifier.environment is not None:
            yield f"{before}verifier.environment.env", step.verifier.environment.env
    if solves:
        yield "solution.env", task.config.solution.env


def _step(name: str, allowed: Collection[str]) -> str:
    if name in allowed:
        return f"set {name}"
    return f"--env.task_variables '[{name}]' allows it (tasks verify: --variable {name})"
