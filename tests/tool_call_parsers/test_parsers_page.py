"""A newcomer's format: the example of docs/parsers.md is registered, and passes the suite, as the page shows it."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest

PAGE = Path(__file__).parents[2] / "docs" / "parsers.md"
EXAMPLE = next(
    code
    for code in re.findall(r"^```python\n(.*?)^```", PAGE.read_text(encoding="utf-8"), re.MULTILINE | re.DOTALL)
    if "ParserSuite" in code
)


def run_suite(folder: Path, code: str, *options: str) -> subprocess.CompletedProcess[str]:
    (folder / "test_my_format.py").write_text(code, encoding="utf-8")
    command = [sys.executable, "-m", "pytest", "-p", "no:cacheprovider", "test_my_format.py", *options]
    return subprocess.run(command, cwd=folder, capture_output=True, text=True, timeout=300, check=False)


def test_the_example_passes_the_suite_outside_the_tree(tmp_path: Path):
    done = run_suite(tmp_path, EXAMPLE)
    assert re.search(r"\b10 passed", done.stdout), done.stdout + done.stderr
    assert "failed" not in done.stdout and "skipped" not in done.stdout


@pytest.mark.parametrize(
    ("line", "wrong", "failure"),
    [
        (
            'argument_keys=("input",)',
            'argument_keys=("inputs",)',
            "test_a_case_is_read_as_expected[content and a call]",
        ),
        ('statuses=["incomplete"]', 'statuses=["ok"]', "test_cases_show_plain_and_malformed_text"),
    ],
)
def test_the_suite_rejects_a_wrong_row(tmp_path: Path, line: str, wrong: str, failure: str):
    assert line in EXAMPLE
    done = run_suite(tmp_path, EXAMPLE.replace(line, wrong), "-k", "case")
    assert done.returncode == 1 and f"FAILED test_my_format.py::TestMyFormat::{failure}" in done.stdout, done.stdout
