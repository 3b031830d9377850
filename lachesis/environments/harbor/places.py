"""The sandboxes of a task: image, limits, network and variables of the agent's, and of verifiers of their own."""

from __future__ import annotations

from collections.abc import AsyncIterator, Mapping, Set
from contextlib import asynccontextmanager
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path

from backends import Backend, BackendUnavailable, SandboxSpec
from lachesis.agent.tool_context import ToolContext
from lachesis.environments.harbor.causes import Invalid
from lachesis.environments.harbor.grading import Grading, resolved_variables, way_of
from lachesis.task_folders import EnvironmentConfig, Task
from lachesis.tools import BUILTIN_TOOLS, ToolSessions


@dataclass(frozen=True, slots=True)
class Places:
    """Specifications of sandboxes."""

    agent: SandboxSpec
    verifiers: Mapping[str, SandboxSpec] = field(default_factory=dict)
    """By the name of a step, of those whose verifier is `separate`."""


async def places_of(
    task: Task, backend: Backend, spec: SandboxSpec, *, images: bool = True, limits: bool = True, grading: Grading
) -> Places:
    """The sandboxes of `task`, with images that are made, or found, now.

    Args:
        spec: of the run. A limit that it has is kept. The network is on where it has it and the task asks for it.
        images: False plays in the image of the run.
        limits: whether sandboxes have the task's processors and memory.

    Raises:
        Invalid: an image, a network or a variable cannot be had.
    """
    modes = {step.agent.network_mode for step in task.steps}
    for step in task.steps:
        if way_of(task, step, grading) != "separate":
            modes.add(step.verifier.network_mode)
    network = _network(task, modes, spec)
    agent = await _place(task.config.environment, task.build, backend, spec, images, limits, task)
    agent = replace(agent, network=network)
    verifiers = {}
    for step in task.steps:
        environment = step.verifier.environment
        if way_of(task, step, grading) == "separate" and environment is not None:
            place = await _place(environment, step.verifier_build, backend, spec, images, limits, task)
            verifiers[step.name] = replace(place, network=_network(task, {step.verifier.network_mode}, spec))
    return Places(agent, verifiers)


@asynccontextmanager
async def opened(sessions: ToolSessions, name: str, spec: SandboxSpec | None = None) -> AsyncIterator[ToolContext]:
    """A sandbox for what is no rollout. It ends with the block, and so does the one that its grading opens.

    Args:
        spec: None: that of `sessions`.
    """
    verifier = f"{name}-verifier"
    try:
        session = sessions.open(name, spec=spec)
        yield ToolContext(session, BUILTIN_TOOLS, open_verifier=partial(sessions.open, verifier, spec=spec))
    finally:
        await sessions.close(verifier)
        await sessions.close(name)


def _network(task: Task, modes: Set[str | None], spec: SandboxSpec) -> bool:
    """Whether a sandbox has the network: the task asks for it, and the run allows it."""
    if not spec.network:
        return False
    if modes <= {"public", "no-network"} and len(modes) == 1:
        return modes == {"public"}
    raise Invalid(
        "network",
        f"{task.folder}: network_mode is {' and '.join(sorted(map(str, modes)))} in one sandbox. Next step: play it "
        "with --env.terminal_network false",
    )


async def _place(
    environment: EnvironmentConfig,
    build: Path | None,
    backend: Backend,
    spec: SandboxSpec,
    images: bool,
    limits: bool,
    task: Task,
) -> SandboxSpec:
    if images:
        from backends.images import Build, image_for

        source = environment.docker_image or Build(build or task.folder, timeout=environment.build_timeout_sec)
        try:
            made = await image_for(source, backend)
        except BackendUnavailable as error:
            raise Invalid("image_failed", f"{task.folder}: {error}") from error
        spec = replace(spec, image=made.image, workdir=made.workdir or spec.workdir, env={**made.env, **spec.env})
        spec = replace(spec, root=made.root)
    variables = resolved_variables(environment.env, "[environment].env")
    spec = replace(spec, workdir=environment.workdir or spec.workdir, env={**spec.env, **variables})
    if limits:
        cpus, memory = environment.cpus, environment.memory_mb
        spec = replace(
            spec,
            cpus=spec.cpus if cpus is None or spec.cpus is not None else float(cpus),
            memory_bytes=spec.memory_bytes if memory is None or spec.memory_bytes is not None else memory << 20,
        )
    return spec
