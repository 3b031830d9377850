"""The machine that all formats run on: one completion, read once from left to right, whole or as it comes.

A lexer is a generator over a growing text. Where it needs characters that have not come yet it yields; more text is
appended and it goes on from where it stood. Positions are absolute and every decision depends on the characters alone,
never on how they were cut, so that a stream ends in exactly what one look at the whole text gives. For a whole text
nothing is ever missing and the generators run through without a single yield.
"""

from tool_call_parsers.engine.blocks import BlockGrammar, cut_off
from tool_call_parsers.engine.grammar import Grammar, Marker, Markers, RenderCall, RenderTurn
from tool_call_parsers.engine.run import Run
from tool_call_parsers.engine.text import SPACE, Needles, Step

__all__ = [
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
