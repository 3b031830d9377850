"""The offered tools' schemas, and the values of argument texts under them.

XML-like formats write every argument as bare text: only the tool's schema distinguishes the string "5" from the
number 5. A schema is reduced to the kinds of values that it allows, and these decide the value of a text.
"""

from typing import TYPE_CHECKING

from tool_call_parsers.lazy import lazy_names

if TYPE_CHECKING:
    from tool_call_parsers.literals.literal import MAX_DIGITS
    from tool_call_parsers.schema.kinds import MAX_DEPTH, member
    from tool_call_parsers.schema.tools import ToolIndex
    from tool_call_parsers.schema.values import coerce
else:
    __getattr__ = lazy_names(
        __name__, {"kinds": "MAX_DEPTH member", "tools": "ToolIndex", "values": "MAX_DIGITS coerce"}
    )

__all__ = ["MAX_DEPTH", "MAX_DIGITS", "ToolIndex", "coerce", "member"]
