"""A wire format as the machine sees it: markers, lexer and renderer."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Protocol, runtime_checkable

from tool_call_parsers.engine.run import Run
from tool_call_parsers.engine.text import Markers, Step
from tool_call_parsers.reasoning import ReasoningFormat
from tool_call_parsers.schema import ToolIndex


@dataclass(frozen=True, slots=True)
class RenderCall:
    """A call to be written."""

    id: str
    name: str
    arguments: Mapping[str, Any]
    json_text: str
    """The arguments' JSON text, as the model wrote it if it wrote JSON."""
    index: int
    """Its place in the turn, from 0."""


@dataclass(frozen=True, slots=True)
class RenderTurn:
    """An assistant turn to be written."""

    content: str
    reasoning: str | None
    calls: tuple[RenderCall, ...]
    tools: ToolIndex
    shape: ReasoningFormat | None
    """The form of the reasoning. Never None if there is reasoning."""


@runtime_checkable
class Grammar(Protocol):
    """A wire format's lexer and renderer, made of data."""

    def markers(self, reasoning: ReasoningFormat, ends: tuple[str, ...]) -> Markers:
        """The markers of free text, made once a parser."""
        ...

    def read(self, run: Run) -> Step[None]:
        """Read `run.text` from start to end."""
        ...

    def render(self, turn: RenderTurn) -> str:
        """The turn as the model writes it, without the end-of-turn token."""
        ...
