"""Settings of a task that cannot be honoured here. They are rejected by name, and never ignored."""

from __future__ import annotations

import difflib
import math
import re
from collections.abc import Iterator
from pathlib import Path, PurePosixPath

from .compose import read_compose
from .config import EnvironmentConfig, Section, TaskConfig
from .errors import TaskProblem
from .task import files_below

NEXT_STEPS = {
    "amounts": "correct it, or leave it out",
    "artifacts": "give it another destination",
    "allowlist": "use a backend that enforces an allowlist, or set network_mode to 'no-network' or 'public'",
    "gpus": "no backend gives GPUs: run the task with Harbor, or set gpus to 0",
    "harborignore": "delete the files that it names, and the .harborignore",
    "nul": "delete the character",
    "mcp_servers": "MCP servers are not started yet: run the task with Harbor, or delete them",
    "services": "only the service 'main' runs: run the task with Harbor, or put all into one image",
    "skills": "put what the agent must know into instruction.md, and delete skills_dir",
    "times": "give a number of seconds",
    "tpu": "no backend gives TPUs: run the task with Harbor",
    "trajectory": "earlier messages are not replayed yet: put what matters into instruction.md, and delete the file",
    "unknown_keys": "correct the spelling, or move it to [metadata]",
    "version": "versions up to 1.4 are supported: write the task in version 1.4, if it needs nothing newer",
    "workdir": "write the whole path, beginning with /",
    "windows": "no backend runs Windows: run the task with Harbor",
}
"""By kind of need."""


def refusals(folder: Path, config: TaskConfig) -> Iterator[TaskProblem]:
    """Everything that the task in `folder` needs and that nothing here can honour."""
    for needs, file, field, reason in _needs(folder, config):
        yield TaskProblem(file, field, reason, NEXT_STEPS[needs])


def _needs(folder: Path, config: TaskConfig) -> Iterator[tuple[str, Path, str, str]]:
    file = folder / "task.toml"
    if not re.fullmatch(r"1\.[0-4](\.\d+)?", config.schema_version):
        yield "version", file, "schema_version", f"{config.schema_version!r} is not known"
    for path, model in _sections(config, ""):
        for key in model.model_extra or ():
            near = difflib.get_close_matches(key, type(model).model_fields, n=1)
            hint = f" (did you mean {near[0]!r}?)" if near else ""
            yield "unknown_keys", file, f"{path}.{key}".removeprefix("."), f"the key is not known{hint}"
        for needs, key, reason in _needs_of(model):
            yield needs, file, f"{path}.{key}".removeprefix("."), reason
    places = [folder, *(folder / "steps" / step.name for step in config.steps or ())]
    for place in places:
        if (place / "trajectory.json").exists():
            yield "trajectory", place / "trajectory.json", "", "the task has earlier messages of the agent"
        if (compose := place / "tests/docker-compose.yaml").exists():
            yield "services", compose, "", "the verifier needs Docker Compose"
    for entry in files_below(folder):
        if entry.name == ".harborignore":
            yield "harborignore", entry, "", "rules for files that are left out are not followed"
    if (compose := folder / "environment/docker-compose.yaml").is_file():
        main = read_compose(compose, "main")
        if main.context not in (".", "./", "${CONTEXT_DIR}") or main.dockerfile not in ("Dockerfile", "./Dockerfile"):
            main.refused.append(("services.main.build", "only environment/Dockerfile is built"))
        for field, reason in main.refused:
            yield "services", compose, field, reason


def _sections(model: Section, path: str) -> Iterator[tuple[str, Section]]:
    """Every table with its path."""
    yield path, model
    for key in type(model).model_fields:
        value = getattr(model, key)
        entries = enumerate(value) if isinstance(value, list) else [(None, value)]
        for number, entry in entries:
            if isinstance(entry, Section):
                place = f"{path}.{key}".removeprefix(".") + ("" if number is None else f"[{number}]")
                yield from _sections(entry, place)


def _needs_of(model: Section) -> Iterator[tuple[str, str, str]]:
    if getattr(model, "network_mode", None) == "allowlist":
        yield "allowlist", "network_mode", "the network is limited to some hosts"
    service = getattr(model, "service", None)
    if service not in (None, "main"):
        yield "services", "service", f"{service!r} is another service of Docker Compose"
    for key in type(model).model_fields:
        time = getattr(model, key)
        if not key.endswith("_sec") or time is None:
            continue
        if not (time > 0 if "timeout" in key else 0 <= time < math.inf):  # nan is neither
            yield "times", key, f"{time:g} s are no time to wait"
    for key, value in model:
        if key != "metadata" and any("\0" in text for text in _texts(value)):
            yield "nul", key, "it has a NUL character, which no command, path or variable can have"
    for artifact in getattr(model, "artifacts", ()):
        source = artifact if isinstance(artifact, str) else artifact.destination or artifact.source
        if [part for part in PurePosixPath(source).parts if part.strip("/")][:1] == ["manifest.json"]:
            yield "artifacts", "artifacts", f"{source!r} would be kept in the place of the list of artifacts"
    if not isinstance(model, EnvironmentConfig):
        return
    for key in ("cpus", "memory_mb", "storage_mb"):
        amount = getattr(model, key)
        if amount is not None and amount < 0:
            yield "amounts", key, f"{amount:g} is less than nothing"
    if model.workdir and not model.workdir.startswith("/"):
        yield "workdir", "workdir", f"{model.workdir!r} is relative, and nothing says to what"
    if model.os == "windows":
        yield "windows", "os", "the task is for Windows"
    if model.gpus or model.gpu_types:
        yield "gpus", "gpus" if model.gpus else "gpu_types", "the task needs a GPU"
    if model.tpu:
        yield "tpu", "tpu", "the task needs a TPU"
    if model.mcp_servers:
        names = ", ".join(server.name for server in model.mcp_servers)
        yield "mcp_servers", "mcp_servers", f"the task needs MCP servers ({names})"
    if model.skills_dir:
        yield "skills", "skills_dir", "the agent has no skills"


def _texts(value: object) -> Iterator[str]:
    """The texts of a value that are no table of their own."""
    if isinstance(value, str):
        yield value
    elif isinstance(value, dict):
        yield from (text for pair in value.items() for entry in pair for text in _texts(entry))
    elif isinstance(value, list):
        yield from (text for entry in value for text in _texts(entry))
