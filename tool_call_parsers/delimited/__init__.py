"""Calls as `call:f{k:<|"|>v<|"|>,n:3,o:{x:[1,true]}}`: strings verbatim between delimiters, the rest as JSON.

Nothing is escaped. A delimiter ends its string only before text that may follow a string; other delimiters are data.
"""

from tool_call_parsers.delimited.blocks import Delimited

__all__ = ["Delimited"]
