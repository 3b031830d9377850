"""Rules for every regular expression of the parsers."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

import tool_call_parsers

FOLDER = Path(tool_call_parsers.__file__).parent
SOURCES = sorted(FOLDER.rglob("*.py"))


@pytest.mark.parametrize("source", SOURCES, ids=lambda path: str(path.relative_to(FOLDER)))
def test_no_group_is_repeated_possessively(source: Path) -> None:
    """Python 3.11.0 to 3.11.4, also Debian 12's, match such groups incorrectly. `(?>(?:...)*)` is equivalent."""
    found = re.findall(r"(?<!\\)\)[*+?]\+.*", source.read_text())
    assert found == []
