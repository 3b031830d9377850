"""Token engines: servers that sample from token ids and report exactly what they sampled (Phase 2)."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from types import MappingProxyType
from typing import Final

from lachesis.inference.engines.atropos import AtroposEngine
from lachesis.inference.engines.base import Generated, Generation, TokenEngine
from lachesis.inference.engines.llama_cpp import LlamaCppEngine
from lachesis.inference.engines.sglang import SGLangEngine
from lachesis.inference.engines.vllm import VLLMCompletions, VLLMGenerate
from lachesis.inference.http_client import ServerSettings

__all__ = [
    "ENGINES",
    "AtroposEngine",
    "Generated",
    "Generation",
    "LlamaCppEngine",
    "SGLangEngine",
    "TokenEngine",
    "VLLMCompletions",
    "VLLMGenerate",
    "create_engine",
]

ENGINES: Final[Mapping[str, Callable[[ServerSettings], TokenEngine]]] = MappingProxyType(
    {engine.kind: engine for engine in (VLLMCompletions, VLLMGenerate, SGLangEngine, AtroposEngine, LlamaCppEngine)}
)
"""The engines by the kind that settings name."""


def create_engine(kind: str, settings: ServerSettings) -> TokenEngine:
    """The engine of this kind, unconnected. Raises `ValueError` for an unknown kind or settings it cannot hold."""
    if kind not in ENGINES:
        raise ValueError(f"there is no token engine {kind!r}; set openai.engine to one of {', '.join(ENGINES)}")
    return ENGINES[kind](settings)
