"""Every registered format passes the conformance suite, with cases of ours from `own_cases.jsonl`."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

from lachesis_testing.parser_suite import Case, FormatLimits, ParserSuite
from tool_call_parsers import ToolCallParser, get_parser, list_parsers

OWN_CASES = Path(__file__).with_name("own_cases.jsonl")
LIMITS: dict[str, FormatLimits] = {
    "gigachat3": FormatLimits(calls=1),  # a message holds one call
    **dict.fromkeys(
        ("bare_json", "llama3_json", "llama4_json", "pythonic", "xlam"), FormatLimits(text_beside_calls=False)
    ),
    "minimax_m3": FormatLimits(untyped=False),  # elements: the text shows only their names and nesting
    # An unclosed call whose last argument is whole may lack its end tag, or be cut between two arguments.
    **dict.fromkeys(
        ("beam", "glm45", "glm47", "iquest_q1", "ling3", "minicpm5", "poolside_v1", "step3"),
        FormatLimits(shorter_when_cut=True),
    ),
}


def own_cases() -> Iterator[Case]:
    """The cases of `own_cases.jsonl`. Its first line names arguments that many of them share."""
    shared, *rows = map(json.loads, OWN_CASES.read_text(encoding="utf-8").splitlines())
    for row in rows:
        calls = [(name, shared["arguments"][args] if isinstance(args, str) else args) for name, args in row["calls"]]
        yield Case(
            row["parser"],
            row["case"],
            row["text"],
            calls,
            row.get("content"),
            row.get("reasoning"),
            row.get("statuses"),
            row.get("ids", ()),
        )


CASES = list(own_cases())
NAMES = [name for name in list_parsers() if isinstance(get_parser(name), ToolCallParser)]
# A class for each format. The suite of a format without cases fails.
globals().update(
    {
        f"Test_{name}": type(
            f"Test_{name}",
            (ParserSuite,),
            {
                "__module__": __name__,
                "parser": name,
                "limits": LIMITS.get(name, FormatLimits()),
                "cases": [case for case in CASES if get_parser(case.parser).name == name],
            },
        )
        for name in NAMES
    }
)


def test_every_format_has_cases():
    assert len(NAMES) >= 64
    assert min(sum(get_parser(case.parser).name == name for case in CASES) for name in NAMES) >= 4
