"""Calls as tags: `<function=f><parameter=k>v</parameter></function>`, `<invoke name="f"><parameter name="k">..`, and
`<tool_call>f<arg_key>k</arg_key><arg_value>v</arg_value></tool_call>`, with or without a wrapper around them.

Grammars with channels use `TagBlocks.block` to read one block from its opening tag on.
"""

from tool_call_parsers.tag_blocks.blocks import TagBlocks
from tool_call_parsers.tag_blocks.nested import NestedTags
from tool_call_parsers.tag_blocks.parameters import Parameters
from tool_call_parsers.tag_blocks.suffixed import SuffixedTags
from tool_call_parsers.tag_blocks.tags import Head

__all__ = ["Head", "NestedTags", "Parameters", "SuffixedTags", "TagBlocks"]
