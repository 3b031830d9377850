"""What the offered tools say of their parameters, and the values that argument texts stand for under it.

XML-like formats write every argument as bare text: only the tool's schema tells the string "5" from the number 5.
A schema is reduced to the kinds of values that it allows, and these decide what a text is.
"""

from tool_call_parsers.literals.literal import MAX_DIGITS
from tool_call_parsers.schema.paths import MAX_DEPTH, member
from tool_call_parsers.schema.tools import ToolIndex
from tool_call_parsers.schema.values import coerce

__all__ = ["MAX_DEPTH", "MAX_DIGITS", "ToolIndex", "coerce", "member"]
