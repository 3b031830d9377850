"""What is asked for, and what is made of it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path


@dataclass(frozen=True)
class Build:
    """A Dockerfile and its context."""

    context: Path
    dockerfile: str = "Dockerfile"
    """Its path in the context."""
    args: Mapping[str, str] = field(default_factory=dict)
    """Values of ARG."""
    timeout: float = 600.0
    """Seconds for the whole build, without those that a base takes that is made for the first time."""


@dataclass(frozen=True)
class BuiltImage:
    """An image and its settings."""

    image: str
    """For `SandboxSpec.image` of the backend that it was made for."""
    env: Mapping[str, str] = field(default_factory=dict)
    workdir: str | None = None
    user: str | None = None
    root: bool = False
    """For `SandboxSpec.root`: the image's user is root, and the backend has no users of images."""
