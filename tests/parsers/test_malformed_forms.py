"""What each family of formats makes of malformed calls: `malformed_forms.jsonl` is the table.

A row is a text in one format, the status of each attempt in it, and the calls that strict and lenient parsing hand out.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from lachesis_testing.parser_checks import CASE_TOOLS, event_problems, facts, pieces_of, shape_problems, streamed
from tool_call_parsers import CallStatus, ParsedCompletion, get_parser

TABLE = Path(__file__).with_name("malformed_forms.jsonl")
ROWS = [json.loads(line) for line in TABLE.read_text(encoding="utf-8").splitlines()]
every_row = pytest.mark.parametrize("row", ROWS, ids=[f"{row['format']}: {row['form']}" for row in ROWS])
PROSE = [
    'Write `{"name": "note", "arguments": {"title": "a"}}` to take a note.',
    'The call {"name": "note", "arguments": {"title": "a"}} means that a note is taken.',
    'It is defined as {"name": "note", "description": "x", "parameters": {"type": "object", "properties": {}}}',
    "Use note(title) or ping() in Python, or [ping()](http://a.b), or ping {} for that.",
    "```python\nnote(title='x')\nprint({'name': 'note'})\n```",
    'The settings:\n{"name": "svc", "port": 80}\n```json\n{"title": "a", "body": "b"}\n```\nDone.',
    "End with </tool_call> or <|tool_call_end|>, and begin with [TOOL_CALLS] or <tool_call>.",
    "The words functions.note, [ARGS] and call:note are part of calls.",
]


def calls_in(found: ParsedCompletion) -> list[list[Any]]:
    return [[call.name, call.arguments] for call in found.tool_calls]


@pytest.mark.sample(150)
@every_row
def test_a_malformed_call_is_read_as_the_table_says(row: dict[str, Any]):
    parser = get_parser(row["format"], reasoning="auto")
    lenient, strict = (parser.parse(row["text"], CASE_TOOLS, strict=strict) for strict in (False, True))
    assert [str(call.status) for call in lenient.attempts] == row["statuses"]
    assert (calls_in(lenient), calls_in(strict)) == (row["lenient"], row["strict"])
    assert all(call.error for call in lenient.attempts if call.status is not CallStatus.OK)
    assert shape_problems(lenient, row["text"]) + shape_problems(strict, row["text"], strict=True) == []


@pytest.mark.sample(100)
@every_row
def test_a_stream_of_a_malformed_call_ends_in_the_result_for_the_whole(row: dict[str, Any]):
    parser, text = get_parser(row["format"], reasoning="auto"), row["text"]
    for strict in (False, True):
        whole = parser.parse(text, CASE_TOOLS, strict=strict)
        for size in (1, 5, 64):
            pieces = pieces_of(text, range(size, len(text), size))
            found, events = streamed(parser, pieces, CASE_TOOLS, strict=strict)
            assert facts(found) == facts(whole)
            assert event_problems(events, found) == []


@pytest.mark.sample(100)
@pytest.mark.parametrize("name", sorted({row["format"] for row in ROWS}))
@pytest.mark.parametrize("text", PROSE)
def test_prose_about_calls_is_no_attempt(name: str, text: str):
    found = get_parser(name, reasoning="auto").parse(text, CASE_TOOLS)
    assert (found.attempts, found.content) == ((), text)
