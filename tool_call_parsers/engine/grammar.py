"""A wire format, as the machine sees it: its markers, its lexer, and its way to write a turn."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from enum import Enum
from typing import Any, Protocol

from tool_call_parsers.engine.run import Run
from tool_call_parsers.engine.text import Needles, Step
from tool_call_parsers.reasoning import ReasoningFormat
from tool_call_parsers.schema import ToolIndex


class Marker(Enum):
    """What a marker in free text may be."""

    OPEN = 1
    """Begins a block."""
    CLOSE = 2
    """Ends a block, and stands alone only by mistake."""
    THINK = 3
    """Opens reasoning."""
    DROP = 4
    """Markup around free text."""
    END = 5
    """Ends the turn."""


@dataclass(frozen=True, slots=True)
class Markers:
    """The markers of a grammar, ready to be looked for."""

    kinds: Mapping[str, Marker]
    all: Needles
    think_open: Needles
    think_close: Needles
    think: Needles
    """What may end free reasoning: its closing markers, openers of blocks, ends of turns."""


@dataclass(frozen=True, slots=True)
class RenderCall:
    """A call to be written."""

    id: str
    name: str
    arguments: Mapping[str, Any]
    json_text: str
    """The arguments' JSON text, as the model wrote it where it wrote JSON."""
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
    """How reasoning is written. Never None where there is reasoning."""


class Grammar(Protocol):
    """A wire format's lexer and renderer, made of data."""

    def markers(self, reasoning: ReasoningFormat | None, ends: tuple[str, ...]) -> Markers:
        """What to look for in free text; made once per parser."""
        ...

    def read(self, run: Run) -> Step[None]:
        """Take `run.text` apart, from its start to its end."""
        ...

    def render(self, turn: RenderTurn) -> str:
        """What the model writes for the turn, without the end-of-turn token."""
        ...
