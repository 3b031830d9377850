"""A corpus of 769 judged texts over all formats, where it is at hand: see `CORPUS`."""

from __future__ import annotations

import importlib.util
import json
import os
from pathlib import Path
from typing import Any

import pytest
from parser_cases import event_problems, facts, pieces_of, shape_problems, streamed

from tool_call_parsers import CALLABLE, ParsedCompletion, ToolCallParser, get_parser

CORPUS = Path(os.environ.get("LACHESIS_PARSER_CORPUS") or Path(__file__).parents[3] / "shared" / "parsers")
"""A folder with corpus_public.jsonl, tools.json and compare.py."""

JUDGED_WRONG: dict[tuple[str, str], str] = {}
"""Cases (parser, case) whose expectation we hold to be wrong, and why."""

AT_HAND = all((CORPUS / name).is_file() for name in ("corpus_public.jsonl", "lachesis.tools.json", "compare.py"))
pytestmark = pytest.mark.skipif(not AT_HAND, reason=f"no corpus in {CORPUS}; LACHESIS_PARSER_CORPUS names its folder")


def _rows() -> list[Any]:
    if not AT_HAND:
        return [pytest.param(None, id="no corpus")]
    lines = (CORPUS / "corpus_public.jsonl").read_text(encoding="utf-8").splitlines()
    return [
        pytest.param(
            row,
            id=f"{row['parser']}/{row['case']}",
            marks=[pytest.mark.skip(reason=JUDGED_WRONG[key])]
            if (key := (row["parser"], row["case"])) in JUDGED_WRONG
            else [],
        )
        for row in map(json.loads, lines)
    ]


ROWS = _rows()


@pytest.fixture(scope="module")
def judge() -> Any:
    """The corpus's own judgement, `compare(row, result) -> (ok, why)`."""
    spec = importlib.util.spec_from_file_location("corpus_judge", CORPUS / "compare.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.fixture(scope="module")
def toolsets() -> Any:
    """Tool schemas by the name that a row gives them."""
    return json.loads((CORPUS / "lachesis.tools.json").read_text(encoding="utf-8"))


def _parser(row: dict[str, Any]) -> ToolCallParser:
    return get_parser(row["parser"], reasoning=row.get("reasoning_parser"))


def _judged(found: ParsedCompletion) -> dict[str, Any]:
    """The result in the shape that the judge reads."""
    calls = [
        {"name": call.name, "arguments": call.arguments, "arguments_raw": call.arguments_raw, "id": call.id}
        for call in found.tool_calls
    ]
    return {"content": found.content, "reasoning": found.reasoning, "error": None, "tool_calls": calls}


@pytest.mark.parametrize("strict", [False, True], ids=["lenient", "strict"])
@pytest.mark.parametrize("row", ROWS)
def test_a_row_is_read_as_judged(row: dict[str, Any], strict: bool, judge: Any, toolsets: Any):
    opened = bool(row.get("prompt_opened_reasoning"))
    found = _parser(row).parse(row["text"], toolsets[row["tools"]], prompt_opened_reasoning=opened, strict=strict)
    assert shape_problems(found, row["text"], strict=strict) == []
    if strict and row.get("policy") == "lenient":
        expected = iter(row["expect"]["tool_calls"])  # fewer calls are an answer, different ones are not
        assert all(
            any(
                want["name"] == call.name
                and any(
                    judge.same(call.arguments, args) for args in [want["arguments"], *want.get("arguments_alt", [])]
                )
                for want in expected
            )
            for call in found.tool_calls
        )
    else:
        assert judge.compare(row, _judged(found)) == (True, "")
        if row["expect"].get("errors"):
            assert any(call.status not in CALLABLE for call in found.attempts)


@pytest.mark.parametrize("row", ROWS)
def test_pieces_of_a_row_end_in_what_the_whole_gives(row: dict[str, Any], toolsets: Any):
    text, tools, opened = row["text"], toolsets[row["tools"]], bool(row.get("prompt_opened_reasoning"))
    parser = _parser(row)
    whole = parser.parse(text, tools, prompt_opened_reasoning=opened)
    for size in (1, 7, max(1, len(text))):
        found, events = streamed(parser, pieces_of(text, range(size, len(text), size)), tools, opened=opened)
        assert facts(found) == facts(whole)
        assert event_problems(events, found) == []
