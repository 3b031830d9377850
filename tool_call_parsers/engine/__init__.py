"""The machine that runs all formats: it reads a completion once, from left to right, whole or in pieces.

A lexer is a generator over a growing text. It yields when it needs characters that have not arrived, and resumes after
more text is appended. Positions are absolute, and every decision depends on the characters alone and never on the cuts
between pieces, so a stream ends in the result for the whole text. On a whole text nothing is missing, and the
generators run through without a yield.
"""

from tool_call_parsers.engine.blocks import BlockGrammar, cut_off
from tool_call_parsers.engine.foreign import FOREIGN
from tool_call_parsers.engine.grammar import Grammar, RenderCall, RenderTurn
from tool_call_parsers.engine.run import Run
from tool_call_parsers.engine.text import SPACE, Marker, Markers, Needles, Step

__all__ = [
    "FOREIGN",
    "SPACE",
    "BlockGrammar",
    "Grammar",
    "Marker",
    "Markers",
    "Needles",
    "RenderCall",
    "RenderTurn",
    "Run",
    "Step",
    "cut_off",
]
