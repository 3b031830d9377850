"""A shared corpus of 769 texts with expected results, read by every format, where it is available.

The cases that always run are ours and in the tree: `own_cases.jsonl`, which `test_every_format.py` reads.
"""

from __future__ import annotations

import importlib.util
import json
import os
from pathlib import Path
from typing import Any

import pytest

from lachesis_testing.parser_checks import event_problems, facts, pieces_of, shape_problems, streamed
from tool_call_parsers import CALLABLE, CallStatus, ParsedCompletion, ToolCallParser, get_parser

CORPUS = Path(os.environ.get("LACHESIS_PARSER_CORPUS") or Path(__file__).parents[3] / "shared" / "parsers")
"""A folder with corpus_public.jsonl, tools.json and compare.py."""
FILES = ("corpus_public.jsonl", "tools.json", "compare.py")
AVAILABLE = all((CORPUS / name).is_file() for name in FILES)
if not AVAILABLE and "LACHESIS_PARSER_CORPUS" in os.environ:
    raise FileNotFoundError(f"LACHESIS_PARSER_CORPUS: {CORPUS} must hold {', '.join(FILES)}")
needs_corpus = pytest.mark.skipif(
    not AVAILABLE,
    reason=f"no shared parser corpus in {CORPUS}: only the cases in the tree ran (set LACHESIS_PARSER_CORPUS)",
)


def _rows() -> list[Any]:
    if not AVAILABLE:
        return [pytest.param(None, id="no corpus")]
    lines = (CORPUS / "corpus_public.jsonl").read_text(encoding="utf-8").splitlines()
    return [pytest.param(row, id=f"{row['parser']}/{row['case']}") for row in map(json.loads, lines)]


ROWS = _rows()


@pytest.fixture(scope="module")
def corpus_rules() -> Any:
    """The corpus's own comparison, `compare(row, result) -> (ok, why)`."""
    spec = importlib.util.spec_from_file_location("corpus_rules", CORPUS / "compare.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.fixture(scope="module")
def toolsets() -> Any:
    """Tool schemas by the name that a row gives them."""
    return json.loads((CORPUS / "tools.json").read_text(encoding="utf-8"))


def _parser(row: dict[str, Any]) -> ToolCallParser:
    return get_parser(row["parser"], reasoning=row.get("reasoning_parser"))


def _is_repaired(row: dict[str, Any], toolsets: Any) -> bool:
    """Whether a call of a row has a form that the model's template does not write. None of the plain rows has."""
    opened = bool(row.get("prompt_opened_reasoning"))
    found = _parser(row).parse(row["text"], toolsets[row["tools"]], prompt_opened_reasoning=opened)
    return row["difficulty"] != "plain" and any(call.status is CallStatus.REPAIRED for call in found.attempts)


def _as_compared(found: ParsedCompletion) -> dict[str, Any]:
    """The result in the shape that the corpus compares."""
    calls = [
        {"name": call.name, "arguments": call.arguments, "arguments_raw": call.arguments_raw, "id": call.id}
        for call in found.tool_calls
    ]
    return {"content": found.content, "reasoning": found.reasoning, "error": None, "tool_calls": calls}


@pytest.mark.sample(400)
@needs_corpus
@pytest.mark.parametrize("strict", [False, True], ids=["lenient", "strict"])
@pytest.mark.parametrize("row", ROWS)
def test_a_row_is_read_as_expected(row: dict[str, Any], strict: bool, corpus_rules: Any, toolsets: Any):
    opened = bool(row.get("prompt_opened_reasoning"))
    found = _parser(row).parse(row["text"], toolsets[row["tools"]], prompt_opened_reasoning=opened, strict=strict)
    assert shape_problems(found, row["text"], strict=strict) == []
    if strict and (row.get("policy") == "lenient" or _is_repaired(row, toolsets)):
        expected = iter(row["expect"]["tool_calls"])  # strict mode may find fewer calls, but not different ones
        assert all(
            any(
                want["name"] == call.name
                and any(
                    corpus_rules.same(call.arguments, args)
                    for args in [want["arguments"], *want.get("arguments_alt", [])]
                )
                for want in expected
            )
            for call in found.tool_calls
        )
    else:
        assert corpus_rules.compare(row, _as_compared(found)) == (True, "")
        if row["expect"].get("errors"):
            assert any(call.status not in CALLABLE for call in found.attempts)


@pytest.mark.sample(200)
@needs_corpus
@pytest.mark.parametrize("row", ROWS)
def test_the_pieces_of_a_row_end_in_the_result_of_the_whole(row: dict[str, Any], toolsets: Any):
    text, tools, opened = row["text"], toolsets[row["tools"]], bool(row.get("prompt_opened_reasoning"))
    parser = _parser(row)
    whole = parser.parse(text, tools, prompt_opened_reasoning=opened)
    for size in (1, 7, max(1, len(text))):
        found, events = streamed(parser, pieces_of(text, range(size, len(text), size)), tools, opened=opened)
        assert facts(found) == facts(whole)
        assert event_problems(events, found) == []
