"""The sandboxes of a task: image, limits, network and variables of the agent's, and of verifiers of their own."""

from __future__ import annotations

from collections.abc import AsyncIterator, Mapping, Set
from contextlib import asynccontextmanager
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path

from backends import Backend, BackendUnavailable, SandboxSpec
from lachesis.tool_context.tool_context import ToolContext
from lachesis_envs.harbor.causes import Invalid
from lachesis_envs.harbor.grading import Grading, way_of
from lachesis_envs.harbor.variables import resolved_variables
from lachesis_envs.task_folders import EnvironmentConfig, Task
from lachesis_tools import BUILTIN_TOOLS, ToolSessions

_FILES_IN_MEMORY = ("local", "ssh", "singularity")
"""Backends whose files are in memory: a task that asks for memory means it for its programs."""
_FILES_MB = 1024
"""The maximum for files, unless the run sets another."""


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
        images: False runs in the image of the run.
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
    """A sandbox for something that is not a rollout. It ends with the block, and so does the one that its grading
    opens.

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
        f"{task.folder}: network_mode is {' and '.join(sorted(map(str, modes)))} in one sandbox. Next step: run it "
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
    variables = resolved_variables(environment.env, "[environment].env", task.variables)
    spec = replace(spec, workdir=environment.workdir or spec.workdir, env={**spec.env, **variables})
    return _limited(spec, environment, backend) if limits else spec


def _limited(spec: SandboxSpec, environment: EnvironmentConfig, backend: Backend) -> SandboxSpec:
    """`spec` with the limits of the task that it leaves open."""
    cpus, memory, storage = environment.cpus, environment.memory_mb, environment.storage_mb
    if spec.cpus is None and cpus is not None:
        spec = replace(spec, cpus=float(cpus))
    files = 0
    if backend.name in _FILES_IN_MEMORY:
        files = min(storage or _FILES_MB, _FILES_MB)
        if spec.disk_bytes is None and spec.memory_bytes is None and files < _FILES_MB:
            spec = replace(spec, disk_bytes=files << 20)
    if spec.memory_bytes is None and memory:
        spec = replace(spec, memory_bytes=memory + max(files, (spec.disk_bytes or 0) >> 20) << 20)
    return spec
