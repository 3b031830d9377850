"""The offered tools' schemas, and the values of argument texts under them.

XML-like formats write every argument as bare text: only the tool's schema distinguishes the string "5" from the
number 5. A schema is reduced to the kinds of values that it allows, and these decide the value of a text.
"""

from tool_call_parsers.literals.literal import MAX_DIGITS
from tool_call_parsers.schema.kinds import MAX_DEPTH, member
from tool_call_parsers.schema.tools import ToolIndex
from tool_call_parsers.schema.values import coerce

__all__ = ["MAX_DEPTH", "MAX_DIGITS", "ToolIndex", "coerce", "member"]
