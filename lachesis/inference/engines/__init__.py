"""Token engines: servers that sample from token ids and report exactly what they sampled (Phase 2)."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Final, TypeAlias

from backends.errors import LachesisError
from backends.plugins import Registry
from lachesis.lazy import lazy_names

if TYPE_CHECKING:
    from lachesis.inference.engines.base import Generation, TokenEngine
    from lachesis.inference.http_client import ServerSettings
else:  # the command line asks for the names of the engines only
    __getattr__ = lazy_names(__name__, {f"{__name__}.base": ["Generation", "TokenEngine"]})

__all__ = ["ENGINES", "EngineFactory", "Generation", "TokenEngine", "create_engine", "load_engine"]

EngineFactory: TypeAlias = "Callable[[ServerSettings], TokenEngine]"
"""An engine class, or a function that makes an engine."""

ENGINES: Final[Registry[EngineFactory]] = Registry(
    "token engine",
    "lachesis.token_engines",
    {
        "vllm": "lachesis.inference.engines.vllm:VLLMCompletions",
        "vllm-generate": "lachesis.inference.engines.vllm:VLLMGenerate",
        "sglang": "lachesis.inference.engines.sglang:SGLangEngine",
        "atropos": "lachesis.inference.engines.atropos:AtroposEngine",
        "llama.cpp": "lachesis.inference.engines.llama_cpp:LlamaCppEngine",
    },
    reserved=["auto"],
)
"""The engines by the name that settings give. `docs/engines.md` shows how to add one."""


def load_engine(name: str) -> EngineFactory:
    """The engine with this name, or at `package.module:Class`.

    Raises:
        UnknownPlugin: no engine has this name.
        PluginBroken: its module fails, or a package that it needs is not installed.
    """
    try:
        return ENGINES.load(name)
    except ModuleNotFoundError as error:
        raise ENGINES.broken(name, error) from error


def create_engine(name: str, settings: ServerSettings) -> TokenEngine:
    """The engine with this name, or at `package.module:Class`; it connects with its first request.

    Raises:
        UnknownPlugin: no engine has this name.
        PluginBroken: the engine's module or its constructor fails.
        ValueError: the engine does not accept these settings.
    """
    factory = load_engine(name)
    try:
        return factory(settings)
    except (LachesisError, ValueError):
        raise
    except Exception as error:
        raise ENGINES.broken(name, error) from error
