"""A task: what its folder says, resolved as Harbor resolves it.

task.toml                           settings
instruction.md                      the prompt
environment/Dockerfile              what the agent works in, unless task.toml names a docker_image
tests/test.sh                       writes the reward
solution/solve.sh                   the reference solution
steps/NAME/{instruction.md,tests/,solution/,workdir/}    the same for each step of a task with [[steps]]
"""

from __future__ import annotations

import hashlib
import json
import os
import stat
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from backends.lazy import once_property
from backends.text import without_lone_surrogates

from .config import AgentConfig, Artifacts, EnvironmentConfig, HealthcheckConfig, TaskConfig, VerifierConfig
from .errors import wrong

Files = dict[str, str | bytes | Path]
"""Text, bytes or a file to copy, by path in a task's folder."""


@dataclass(frozen=True)
class Step:
    """One prompt with its tests. Settings are the effective ones: the step's, else the task's."""

    name: str
    """Empty if the task has no [[steps]]."""
    instruction: str
    tests: Path
    """The folder that has test.sh."""
    test_folders: tuple[Path, ...]
    """Folders whose content goes to /tests, in this order; none if the verifier's own image has the tests."""
    solution: Path | None
    """The folder with solve.sh."""
    workdir: Path | None
    """A folder whose content goes into the working directory before the agent starts."""
    workdir_setup: Path | None
    """setup.sh of `workdir`, which runs there."""
    agent: AgentConfig
    """`network_mode` is never None."""
    verifier: VerifierConfig
    """`environment_mode` and `network_mode` are never None; `environment` is that of a separate verifier, else None."""
    verifier_build: Path | None
    """The build context of a separate verifier whose environment names no image."""
    min_reward: float | dict[str, float] | None
    healthcheck: HealthcheckConfig | None
    """Of the step, in addition to that of the environment."""
    artifacts: Artifacts


@dataclass(frozen=True)
class Task:
    """A task folder that has been read."""

    folder: Path
    name: str
    """`organisation/name` of task.toml, or else the name of the folder."""
    config: TaskConfig
    steps: tuple[Step, ...]
    """At least one."""
    variables: frozenset[str] = frozenset()
    """Names of variables of this process that the task may have: `${NAME}` in its tables `env`."""

    @property
    def environment(self) -> EnvironmentConfig:
        return self.config.environment

    @property
    def build(self) -> Path | None:
        """The build context of the environment; None if it names an image."""
        return None if self.environment.docker_image else self.folder / "environment"

    @property
    def own_settings(self) -> Mapping[str, Any]:
        """The settings that are ours: `[metadata.lachesis]`."""
        own = self.config.metadata.get("lachesis", {})
        return own if isinstance(own, Mapping) else {}

    @once_property
    def digest(self) -> str:
        """SHA-256 of all that decides the verdict: the settings and the files, with their modes. README.md and hidden
        files next to task.toml do not count."""
        settings = self.config.model_dump(mode="json", exclude_defaults=True)
        found = hashlib.sha256(json.dumps(settings, sort_keys=True).encode())  # integers of any size
        entries = [path for path in self.folder.iterdir() if not path.name.startswith(".")]
        places = [path for path in entries if path.name not in ("README.md", "task.toml")]
        return content_hash([file for place in places for file in files_below(place)], self.folder, found).hexdigest()


def content_hash(files: list[Path], root: Path, found: hashlib._Hash) -> hashlib._Hash:
    """`found` after the names below `root`, the kinds and the contents of `files`."""
    for path in sorted(files):
        mode = path.lstat().st_mode
        name = os.fsencode(path.relative_to(root))
        kind = b"link" if stat.S_ISLNK(mode) else b"program" if mode & 0o111 else b"file"
        found.update(b"%s %s %d\n" % (kind, name.hex().encode(), path.lstat().st_size))
        if kind == b"link":
            found.update(os.fsencode(path.readlink()))
            continue
        with path.open("rb") as file:
            while block := file.read(1 << 20):
                found.update(block)
    return found


def files_below(path: Path) -> list[Path]:
    """Files and links at or below `path`; links are not followed."""
    found, places = list[Path](), [path]
    while places:
        place = places.pop()
        if place.is_dir() and not place.is_symlink():
            places += place.iterdir()
        elif os.path.lexists(place):
            found.append(place)
    return found


def check_files(folder: Path) -> None:
    """Whether a task can hold the files of `folder`, which is not a link.

    Raises:
        TaskError: a name of the folder is not UTF-8, as records are; a file cannot be read, is a device or a pipe, or
            is a link that leaves the folder: what that would bring into the sandbox is not the task's.
    """
    if without_lone_surrogates(str(folder)) != str(folder):
        raise wrong(folder, "its name is not UTF-8", "rename it")
    try:
        for path in files_below(folder):
            if path.is_symlink():
                if not Path(os.path.realpath(path)).is_relative_to(folder):
                    reason = f"the link leaves the task's folder ({path.readlink()})"
                    raise wrong(path, reason, "put a copy in its place")
            elif not path.is_file():
                raise wrong(path, "it is neither a file nor a folder", "delete it")
    except OSError as error:
        raise wrong(folder, f"it cannot be read: {error}", "make it readable") from None
