"""Backends by name, and the options that each one declares."""

from __future__ import annotations

import inspect
import re
import sys
from collections.abc import Callable
from dataclasses import dataclass
from difflib import get_close_matches
from pathlib import Path
from types import UnionType
from typing import Any, Union, get_args, get_origin

from backends.plugins import Registry

from .base import Backend
from .errors import BackendUnavailable

BACKENDS: Registry[Callable[..., Backend]] = Registry(
    "backend",
    "lachesis.backends",
    {
        "local": "backends.local:LocalBackend",
        "docker": "backends.docker:DockerBackend",
        "singularity": "backends.singularity:SingularityBackend",
        "ssh": "backends.ssh:SshBackend",
        "modal": "backends.modal:ModalBackend",
    },
)
"""Every backend class. Add your own with `BACKENDS.register(name, class)`, or with an entry point."""
_EXTRAS = {"aiodocker": "docker", "asyncssh": "ssh", "modal": "modal"}
"""Package -> the extra of this project that installs it."""


@dataclass(frozen=True, slots=True)
class BackendOption:
    """One option of a backend, as its class declares it; see `Backend`."""

    name: str
    annotation: Any
    """The type of its values, as evaluated from the constructor's annotation."""
    default: Any
    """`inspect.Parameter.empty` when the option is required."""
    help: str
    """One paragraph, empty when the class does not document the option."""


def backend_names() -> list[str]:
    """Names of all known backends, this project's first. Imports none of them."""
    return BACKENDS.names()


def backend_options(name: str) -> list[BackendOption]:
    """The options of the backend `name` that a configuration can set; see `Backend`. Imports its class.

    Raises:
        ValueError: the backend does not exist.
        BackendUnavailable: a package that it needs is not installed.
    """
    make = _load(name)
    documented = _documented_arguments(make)
    scope = dict(vars(sys.modules[make.__module__]))
    options = []
    for parameter in inspect.signature(make).parameters.values():
        annotation = parameter.annotation
        if isinstance(annotation, str):
            try:
                annotation = eval(annotation, scope)
            except NameError:  # imported for type checkers only: an object that no configuration can hold
                continue
        if "Callable" not in str(annotation):
            help = documented.get(parameter.name, "")
            options.append(BackendOption(parameter.name, annotation, parameter.default, help))
    return options


def create_backend(name: str, **options: Any) -> Backend:
    """The backend called `name`, made with `options`. `Backend.check` says whether it works on this machine.

    Args:
        name: one of `backend_names()`, or `package.module:Class`.
        options: arguments of the backend's class.

    Raises:
        ValueError: the backend or the option does not exist, or the option has another type.
        BackendUnavailable: a package that it needs is not installed.
    """
    make = _load(name)
    if options.get("profile") == "hardened" and "profile" not in inspect.signature(make).parameters:
        others = ", ".join(other for other in ("docker", "local", "singularity", "ssh") if other != name)
        step = f"leave it out (sandbox_profile), or use {others}"
        raise ValueError(f"backend {name!r} has no profile 'hardened'. Next step: {step}")
    try:
        inspect.signature(make).bind(**options)
    except TypeError as error:
        known = list(inspect.signature(make).parameters)
        near = [match for option in options if option not in known for match in get_close_matches(option, known, n=1)]
        hint = f" Did you mean {near[0]!r}?" if near else ""
        raise ValueError(f"backend {name!r}: {error}.{hint} Its options are: {', '.join(known) or 'none'}") from error
    for option in backend_options(name):
        if option.name in options and not _fits(options[option.name], option.annotation):
            kind = option.annotation.__name__ if isinstance(option.annotation, type) else option.annotation
            raise ValueError(f"backend {name!r}: {option.name} takes {kind}, not {options[option.name]!r}")
    return make(**options)


def _fits(value: Any, annotation: Any) -> bool:
    """Whether `value` can be an option of this type. Types that no configuration can write are not checked."""
    if get_origin(annotation) in (Union, UnionType):
        return any(_fits(value, part) for part in get_args(annotation))
    if get_origin(annotation) is list:
        return isinstance(value, list | tuple) and all(_fits(item, get_args(annotation)[0]) for item in value)
    if annotation in (int, float):
        return isinstance(value, int | annotation) and not isinstance(value, bool)
    if annotation in (str, Path):
        return isinstance(value, str | Path)
    return annotation not in (bool, type(None)) or isinstance(value, annotation)


def _load(name: str) -> Callable[..., Backend]:
    try:
        return BACKENDS.load(name)
    except ModuleNotFoundError as error:
        package = (error.name or "").partition(".")[0]
        wanted = f"lachesis-rl[{_EXTRAS[package]}]" if package in _EXTRAS else package
        raise BackendUnavailable(
            f"backend {name!r} needs the package {package}; install it with: pip install '{wanted}'"
        ) from error


def _documented_arguments(make: Callable[..., Any]) -> dict[str, str]:
    """Argument -> text, from the `Args:` section of the constructor's docstring."""
    docstring = inspect.getdoc(getattr(make, "__init__", make)) or ""
    _, _, section = docstring.partition("Args:\n")
    found: dict[str, str] = {}
    names: list[str] = []
    for line in section.splitlines():
        entry = re.match(r" {4}(\w+(?:, \w+)*): (.*)", line)
        if entry is not None:
            names = entry[1].split(", ")
            found.update(dict.fromkeys(names, entry[2]))
        elif line.startswith(" " * 8):
            found.update({name: f"{found[name]} {line.strip()}" for name in names})
        elif line.strip():
            break
    return found
