"""Additions of the project's other packages to the core.

They register what they add by entry points, so the core imports none of them and works without them.
"""

from __future__ import annotations

from typing import Any, Final

from backends.plugins import Registry

TOKENS: Final[Registry[Any]] = Registry("part of runs with tokens", "lachesis.tokens", {}, package="lachesis-tokens")
"""`check`, `embedded_server`, `fetch_model`, `named_tokenizer`, `samples`, `start`."""

COMPAT: Final[Registry[Any]] = Registry("part for other frameworks", "lachesis.compat", {}, package="lachesis-compat")
"""Groups that environments collect themselves, Atropos' base class, and guests."""

DATA: Final[Registry[Any]] = Registry("part of training data", "lachesis.data", {}, package="lachesis-data")
"""`context_compression`."""

VIEW: Final[Registry[Any]] = Registry("part of the view of runs", "lachesis.view", {}, package="lachesis-view")
"""`report` takes a path, `title` and `groups`, and returns the `Summary`; `tracker` makes what logs a run to W&B."""

POOLS: Final[Registry[Any]] = Registry("part of pools", "lachesis.pools", {}, package="lachesis-pools")
"""`statuses` returns what each pool that is known here says of itself."""

ENGINES: Final[Registry[Any]] = Registry(
    "token engine", "lachesis.token_engines", {}, reserved=["auto", "chat"], package="lachesis-tokens"
)
"""Engine classes, or functions that make an engine, by the name that settings give. `docs/engines.md` shows how to add
one."""


def load_engine(name: str) -> Any:
    """The engine with this name, or at `package.module:Class`.

    Raises:
        UnknownPlugin: no engine has this name.
        PluginBroken: its module fails, or a package that it needs is not installed.
    """
    try:
        return ENGINES.load(name)
    except ModuleNotFoundError as error:
        raise ENGINES.broken(name, error) from error
