"""A newcomer's format: the examples, rows and imports of docs/parser-plugins.md work as the page shows them."""

from __future__ import annotations

import dataclasses
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from lachesis_testing.parser_checks import shape_problems
from tool_call_parsers import get_parser

PAGE = Path(__file__).parents[2] / "docs" / "parser-plugins.md"
TEXT = PAGE.read_text(encoding="utf-8")
BLOCKS = re.findall(r"^```python\n(.*?)^```", TEXT, re.MULTILINE | re.DOTALL)
EXAMPLE = next(code for code in BLOCKS if "ParserSuite" in code)
CLASS_EXAMPLE = next(code for code in BLOCKS if '@register_parser("my_lines")' in code)
ROWS = re.findall(r"^`([\w-]+)`, .*:\n\n```python\n(from .*)\n\n([^`]*)```", TEXT, re.MULTILINE)
IMPORTS = re.findall(r"`(from tool_call_parsers\S* import [^`]+)`", TEXT)


def run_suite(folder: Path, code: str, *options: str) -> subprocess.CompletedProcess[str]:
    (folder / "test_my_format.py").write_text(code, encoding="utf-8")
    command = [sys.executable, "-m", "pytest", "-p", "no:cacheprovider", "test_my_format.py", *options]
    return subprocess.run(command, cwd=folder, capture_output=True, text=True, timeout=300, check=False)


@pytest.mark.slow
def test_the_example_passes_the_suite_outside_the_tree(tmp_path: Path):
    done = run_suite(tmp_path, EXAMPLE)
    assert re.search(r"\b10 passed", done.stdout), done.stdout + done.stderr
    assert "failed" not in done.stdout and "skipped" not in done.stdout


PLAIN, SHOWN = "test_a_case_is_read_as_expected[content and a call]", "test_cases_show_plain_and_malformed_text"


@pytest.mark.sample(1)
@pytest.mark.parametrize(
    ("line", "wrong", "failure", "message"),
    [
        ('argument_keys=("input",)', 'argument_keys=("inputs",)', PLAIN, "statuses ['repaired'], want ['ok']"),
        ('statuses=["incomplete"]', 'statuses=["ok"]', SHOWN, "write a case that is cut or malformed"),
        ('content="Look:"', 'content="Look:", rendered=True', PLAIN, "`render` writes"),
        ("    cases = (", "    parts = (", SHOWN, "write at least one case for 'my_format'"),
    ],
)
def test_the_suite_rejects_a_wrong_row(tmp_path: Path, line: str, wrong: str, failure: str, message: str):
    assert line in EXAMPLE
    done = run_suite(tmp_path, EXAMPLE.replace(line, wrong), "-k", "case")
    assert done.returncode == 1 and f"FAILED test_my_format.py::TestMyFormat::{failure}" in done.stdout, done.stdout
    assert message in done.stdout, done.stdout


@pytest.mark.long
def test_the_suite_names_the_field_without_which_a_call_has_no_text(tmp_path: Path):
    row = 'NamedJson(opens=("<call>",), closes=("</call>",), marks=("|",)),\n'
    code = re.sub(r"JsonBlocks\(.*?^        \),\n", row, EXAMPLE, count=1, flags=re.MULTILINE | re.DOTALL)
    done = run_suite(tmp_path, code.replace("JsonBlocks", "NamedJson"), "-k", "written_turn")
    assert "`render` wrote no text for call" in done.stdout, done.stdout


def test_the_class_example_keeps_the_rules_for_results():
    exec(CLASS_EXAMPLE, {"__name__": "my_lines"})
    text = "@grep\npattern := a := b\nlimit := 3\nAnd:\n@ping\n"
    found = get_parser("my_lines").parse(text, None, prompt_opened_reasoning=False)
    calls = [(call.name, call.arguments) for call in found.tool_calls]
    assert (found.content, calls) == ("And:", [("grep", {"pattern": "a := b", "limit": "3"}), ("ping", {})])
    assert shape_problems(found, text) == []


@pytest.mark.parametrize(("like", "imports", "row"), ROWS, ids=[like for like, *_ in ROWS])
def test_a_row_to_start_from_is_the_row_of_its_format(like: str, imports: str, row: str):
    names: dict[str, object] = {}
    exec(imports, names)
    made, grammar = eval(row, names), get_parser(like).format.grammar
    assert type(made) is type(grammar)
    assert vars_of(made) == vars_of(grammar)


def vars_of(grammar: Any) -> dict[str, Any]:
    return {field.name: getattr(grammar, field.name) for field in dataclasses.fields(grammar)}


def test_the_names_in_the_types_of_fields_can_be_imported():
    assert len(ROWS) == 9 and len(IMPORTS) >= 10
    for line in IMPORTS:
        exec(line, {})
