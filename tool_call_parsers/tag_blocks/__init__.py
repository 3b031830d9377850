"""Calls as tags: `<function=f><parameter=k>v</parameter></function>`, `<invoke name="f"><parameter name="k">..`, and
`<tool_call>f<arg_key>k</arg_key><arg_value>v</arg_value></tool_call>`, with or without a wrapper around them.

`TagBlocks.block` reads one block, from its opening tag on, for any grammar that keeps such blocks in its own channels.
"""

from tool_call_parsers.tag_blocks.blocks import TagBlocks
from tool_call_parsers.tag_blocks.nested import NestedTags
from tool_call_parsers.tag_blocks.suffixed import SuffixedTags
from tool_call_parsers.tag_blocks.tags import Head

__all__ = ["Head", "NestedTags", "SuffixedTags", "TagBlocks"]
