"""The offered tools' schemas, and the values of argument texts under them.

XML-like formats write every argument as bare text: only the tool's schema distinguishes the string "5" from the
number 5. A schema is reduced to the kinds of values that it allows, and these decide the value of a text.
"""

from tool_call_parsers.schema.tools import ToolIndex

__all__ = ["ToolIndex"]
