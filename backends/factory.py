"""Backends by name, as configurations spell them."""

from __future__ import annotations

import importlib
from typing import Any, cast

from .base import Backend, BackendUnavailable

BACKENDS = {
    "local": "local:LocalBackend",
    "docker": "docker:DockerBackend",
    "singularity": "singularity:SingularityBackend",
    "ssh": "ssh:SshBackend",
    "modal": "modal:ModalBackend",
}
"""Name -> module of this package, and class. A module is imported when it is asked for: some need heavy clients."""
_CLIENTS = {"aiodocker": "docker", "asyncssh": "ssh", "modal": "modal"}
"""Package -> the extra that brings it."""


def create_backend(name: str, **options: Any) -> Backend:
    """The backend called `name`; `options` are its class' own. Whether it works here is `Backend.check`'s answer.

    Raises:
        ValueError: there is no such backend, or no such option.
        BackendUnavailable: its client is not installed.
    """
    try:
        module, _, attribute = BACKENDS[name].partition(":")
    except KeyError:
        raise ValueError(f"no backend is called {name!r}; there is: {', '.join(sorted(BACKENDS))}") from None
    try:
        make = getattr(importlib.import_module(f".{module}", __package__), attribute)
    except ModuleNotFoundError as error:
        if error.name not in _CLIENTS:
            raise
        extra = _CLIENTS[error.name]
        raise BackendUnavailable(
            f"backend {name!r} needs the package {error.name}; get it with: pip install 'lachesis-rl[{extra}]'"
        ) from error
    try:
        return cast(Backend, make(**options))
    except TypeError as error:
        raise ValueError(f"backend {name!r}: {error}") from error
