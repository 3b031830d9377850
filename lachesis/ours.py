"""Which modules and files are the project's own, in a checkout or installed."""

from __future__ import annotations

import functools
import importlib.util
from pathlib import Path

PACKAGES = (
    "backends",
    "lachesis",
    "lachesis_client",
    "lachesis_compat",
    "lachesis_console",
    "lachesis_data",
    "lachesis_doors",
    "lachesis_envs",
    "lachesis_messages",
    "lachesis_pools",
    "lachesis_testing",
    "lachesis_tokens",
    "lachesis_tools",
    "lachesis_train",
    "lachesis_view",
    "tool_call_parsers",
)
"""What is imported of the distributions that are released together."""


def is_ours(module: str) -> bool:
    """Whether a module of this name, such as `lachesis.loop.loop`, belongs to the project."""
    return module.partition(".")[0] in PACKAGES


@functools.cache
def folders(*names: str) -> tuple[str, ...]:
    """Those of the packages, of all where none is named, as far as they are installed; each with a slash at its end."""
    specs = filter(None, map(importlib.util.find_spec, names or PACKAGES))
    return tuple(f"{Path(place)}/" for spec in specs for place in spec.submodule_search_locations or ())
