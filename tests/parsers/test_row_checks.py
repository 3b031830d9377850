"""A wrong field of a row fails where the row is made, and the error names the field and a right value."""

from __future__ import annotations

import re
from typing import Any

import pytest

from tool_call_parsers import Format
from tool_call_parsers.channels import Harmony
from tool_call_parsers.json_blocks import JsonBlocks, NamedJson
from tool_call_parsers.python_calls import PythonCalls
from tool_call_parsers.tag_blocks import TagBlocks

JSON = JsonBlocks(opens=("<c>",))
TAGS = {"heads": "equals", "calls": ("<f=",), "ends": ("</f>",), "parameters": ("<p=",), "value_ends": ("</p>",)}
HARMONY = {"start": "<s>", "message": "<m>", "ends": ("<e>",), "call_ends": (), "inner": (), "recipients": {}}


@pytest.mark.parametrize(
    ("kind", "fields", "message"),
    [
        (JsonBlocks, {"opens": "<c>"}, "opens must be tuple[str, ...], not '<c>'"),
        (JsonBlocks, {"opens": ("<c>",), "frame": ("<c>",)}, "frame must be tuple[str, str], not ('<c>',)"),
        (NamedJson, {"opens": ("<c>",), "reading": "first"}, "reading must be Callable["),
        (PythonCalls, {"openers": ("[",), "json_containers": ("dict",)}, "json_containers must be tuple[type, ...]"),
        (TagBlocks, TAGS | {"heads": 1}, "heads must be Literal['equals', 'attributes', 'pairs'], not 1"),
        (TagBlocks, TAGS | {"json": "{}"}, "json must be JsonBlocks | None, not '{}'"),
        (
            Harmony,
            HARMONY | {"channels": {"a": "REASONING"}, "types": frozenset()},
            "channels must be dict[str, Channel]",
        ),
        (Harmony, HARMONY | {"channels": {}, "types": {"json"}}, "types must be frozenset[str], not {'json'}"),
        (Format, {"name": "f", "grammar": JsonBlocks, "models": "m"}, "grammar must be Grammar, not <class"),
        (Format, {"name": "f", "grammar": JSON, "models": "m", "aliases": "g"}, "aliases must be tuple[str, ...]"),
    ],
)
def test_a_field_of_the_wrong_type_is_a_type_error(kind: Any, fields: dict[str, Any], message: str):
    with pytest.raises(TypeError, match=re.escape(f"{kind.__name__}: {message}")):
        kind(**fields)


@pytest.mark.parametrize(
    ("kind", "fields", "message"),
    [
        (TagBlocks, TAGS | {"heads": "equal"}, "heads must be one of 'equals', 'attributes', 'pairs', not 'equal'"),
        (TagBlocks, TAGS | {"call": "<f=%(name)s>"}, "write {name}, not %(name)s"),
        (TagBlocks, TAGS | {"call": "<f={name}>"}, "lacks {parameters}"),
        (TagBlocks, TAGS | {"parameter": "<p={key}>{value}%(string)s"}, "write {string}, not %(string)s"),
        (JsonBlocks, {"opens": ("<c>",), "written": '{"tool": {name}}'}, "write %(name)s, not {name}"),
        (JsonBlocks, {"opens": ("<c>",), "written": '{"tool": %(name)s}'}, "lacks %(arguments)s"),
        (NamedJson, {"opens": ("<c>",), "call": "{id}%(arguments)s"}, "write %(id)s, not {id}"),
        (Format, {"name": "f", "grammar": JSON, "models": "m", "reasoning": "deepsek_r1"}, "did you mean deepseek_r1"),
    ],
)
def test_an_unknown_word_or_a_wrong_placeholder_is_a_value_error(kind: Any, fields: dict[str, Any], message: str):
    with pytest.raises(ValueError, match=re.escape(message)):
        kind(**fields)
