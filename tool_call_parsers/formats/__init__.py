"""The table of formats, one module a family. A new model is a new row."""

from tool_call_parsers.formats import channels, delimited, json_blocks, python_calls, tag_blocks

FORMATS = (
    *json_blocks.FORMATS,
    *tag_blocks.FORMATS,
    *python_calls.FORMATS,
    *channels.FORMATS,
    *delimited.FORMATS,
)
