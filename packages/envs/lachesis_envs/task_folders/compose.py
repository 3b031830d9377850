"""The part of docker-compose.yaml that one image can honour: its main service, if there are no others."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import yaml

from .errors import read_text, wrong

IDLE = re.compile(r"""((/bin/)?(ba)?sh -l?c )?["']?(sleep (infinity|\d+[smhd]?)|tail -f /dev/null)["']?""")
"""Commands that only keep a container alive."""
_LARGEST = 4 << 20
KNOWN = {
    "build",
    "command",
    "container_name",
    "environment",
    "deploy",
    "image",
    "stdin_open",
    "tty",
    "volumes",
    "working_dir",
}


@dataclass
class Compose:
    """The main service."""

    workdir: str | None = None
    env: dict[str, str] = field(default_factory=dict)
    image: str | None = None
    """None where the service is built: then `image` names what is made."""
    context: str = "."
    """The build context, relative to the file."""
    dockerfile: str = "Dockerfile"
    limits: dict[str, Any] = field(default_factory=dict)
    """`cpus` and `memory_mb`, as keys of [environment]."""
    refused: list[tuple[str, str]] = field(default_factory=list)
    """Path of a key that cannot be honoured, and the reason."""


def read_compose(
    file: Path, main: str, variables: Mapping[str, str] | None = None, *, any_name: bool = False
) -> Compose:
    """What `file` says about the service `main`. `variables` are those that the file may use (`${NAME}`).
    With `any_name`, a service that is the only one is the main one.

    Raises:
        TaskError: it is not a Compose file.
    """
    found = Compose()
    data = read_yaml(file)
    services = data.get("services")
    if not isinstance(services, dict) or not services or not all(isinstance(s, dict) for s in services.values()):
        raise wrong(file, "it has no mapping of services", "correct it", "services")
    if any_name and len(services) == 1:
        (main,) = services
    found.refused += [
        (str(key), "the key is not supported") for key in data if key not in ("services", "version", "name")
    ]
    found.refused += [(f"services.{key}", "it is another service") for key in services if key != main]
    for key, value in services.get(main, {}).items():
        reason = _take(found, key, value, variables or {})
        if reason:
            found.refused.append((f"services.{main}.{key}", reason))
    if "build" in services.get(main, {}):
        found.image = None
    return found


def _take(found: Compose, key: str, value: Any, variables: Mapping[str, str]) -> str | None:
    """Take one key of the main service into `found`; the reason if that is impossible."""
    if key == "working_dir":
        found.workdir = _filled(value, variables)
        return None if found.workdir else f"{value!r} has a variable without a value"
    if key == "environment":
        if not isinstance(value, dict):
            split = [str(entry).partition("=") for entry in _list(value)]
            value = {name: text if sign else None for name, sign, text in split}
        for name, text in value.items():
            if text is None or (filled := _filled(text, variables)) is None:
                return f"{name} has no value here"
            found.env[str(name)] = filled
    elif key == "build":
        build = value if isinstance(value, dict) else {"context": value}
        found.context = str(build.get("context", "."))
        found.dockerfile = str(build.get("dockerfile", "Dockerfile"))
        if unknown := sorted(set(map(str, build)) - {"context", "dockerfile"}):
            return f"{', '.join(unknown)} of a build is not supported"
    elif key == "image":
        found.image = None if value is None or "$" in str(value) else str(value)
    elif key == "volumes":
        mounted = [v for v in _list(value) if not re.fullmatch(r"\$\{\w*LOGS_PATH\}:\$\{\w*LOGS_PATH\}", str(v))]
        return f"{mounted[0]!r} is not mounted" if mounted else None
    elif key == "deploy":
        return _take_limits(found, value)
    elif key == "command" and not IDLE.fullmatch(" ".join(map(str, _list(value)))):
        return "the command of the service is not started"
    return None if key in KNOWN else "the key is not supported"


def _take_limits(found: Compose, deploy: Any) -> str | None:
    """Take `resources: {limits: {cpus, memory}}`; the reason if there is anything else."""
    try:
        ((name, resources),) = deploy.items()
        limits = resources["limits"]
        if name != "resources" or set(resources) != {"limits"} or not set(limits) <= {"cpus", "memory"}:
            raise ValueError
        found.limits = {"cpus": float(limits["cpus"])} if "cpus" in limits else {}
        if "memory" in limits:
            size = re.fullmatch(r"([\d.]+)([kmg])b?", str(limits["memory"]).lower())
            if size is None:
                raise ValueError
            found.limits["memory_mb"] = int(float(size[1]) * {"k": 1 / 1024, "m": 1, "g": 1024}[size[2]])
    except (AttributeError, KeyError, TypeError, ValueError):
        return "only limits of cpus and memory are supported"
    return None


def _list(value: Any) -> list[Any]:
    return value if isinstance(value, list) else [] if value is None else [value]


def _filled(value: Any, variables: Mapping[str, str]) -> str | None:
    """The text with its variables; None if one has no value."""
    text = re.sub(r"\$\{(\w+)\}", lambda match: variables.get(match[1], match[0]), "" if value is None else str(value))
    return None if "$" in text else text


def read_yaml(file: Path) -> dict[Any, Any]:
    """The mapping in a YAML file.

    Raises:
        TaskError: it is missing, not YAML, or no mapping.
    """
    try:
        text = read_text(file)
        if (size := _size(yaml.compose(text, yaml.SafeLoader), {})) > _LARGEST:
            raise ValueError(f"its aliases make {size:.3g} characters of it")
        data = yaml.safe_load(text)
    except (yaml.YAMLError, ValueError, RecursionError, TypeError, AttributeError, OverflowError) as error:
        raise wrong(file, f"it is not YAML: {error}", "correct it") from None
    if not isinstance(data, dict):
        raise wrong(file, "it holds no mapping", "correct it")
    return data


def _size(node: yaml.Node | None, known: dict[int, int | None]) -> int:
    """Characters of a document without its aliases. `known` are sizes by `id`, None of a node that is being counted.

    Raises:
        ValueError: a value holds itself.
    """
    if node is None or isinstance(node, yaml.ScalarNode):
        return 1 if node is None else 1 + len(node.value)
    if id(node) not in known:
        known[id(node)] = None
        entries = node.value if isinstance(node, yaml.SequenceNode) else [part for pair in node.value for part in pair]
        known[id(node)] = 1 + sum(_size(entry, known) for entry in entries)
    size = known[id(node)]
    if size is None:
        raise ValueError("Circular reference: a value holds itself")
    return size
