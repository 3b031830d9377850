"""Token engines: servers that sample from token ids and report the exact sampled ids (Phase 2)."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, TypeAlias

from backends.errors import LachesisError
from backends.lazy import lazy_names
from lachesis.other_packages import ENGINES, load_engine

if TYPE_CHECKING:
    from lachesis_client.client_settings import ServerSettings
    from lachesis_tokens.engines.base import Generation, TokenEngine
else:  # the command line asks for the names of the engines only
    __getattr__ = lazy_names(__name__, {f"{__name__}.base": ["Generation", "TokenEngine"]})

__all__ = ["EngineFactory", "Generation", "TokenEngine", "create_engine"]

EngineFactory: TypeAlias = "Callable[[ServerSettings], TokenEngine]"
"""An engine class, or a function that makes an engine."""


def create_engine(name: str, settings: ServerSettings) -> TokenEngine:
    """The engine with this name, or at `package.module:Class`; it connects with its first request.

    Raises:
        UnknownPlugin: no engine has this name.
        PluginBroken: the engine's module or its constructor fails.
        ValueError: the engine does not accept these settings.
    """
    factory: EngineFactory = load_engine(name)
    try:
        return factory(settings)
    except (LachesisError, ValueError):
        raise
    except Exception as error:
        raise ENGINES.broken(name, error) from error
