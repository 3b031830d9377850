"""The tutorials: their commands run one after the other on the file of the first one, and print what the pages show."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from tests.run import ALL

DOCS = Path(__file__).resolve().parents[2] / "docs"
TUTORIALS = sorted(DOCS.glob("tutorial-*.md"))
FILE = re.compile(r"^```py\n# (\w+\.py)\n(.*?)^```", re.MULTILINE | re.DOTALL)
STEP = re.compile(r"^```console\n(.*?)^```(?:\n\n(?:[^`\n].*\n|\n)*```text\n(.*?)^```)?", re.MULTILINE | re.DOTALL)
OF_THE_MODEL = ("lachesis eval sort_words.py -n 4 -t 16", "data/small", "lachesis eval tool_result -n 64")
"""In commands that sample from the embedded model, which takes long, or that read what it made."""
CUT = "…"
"""Stands for the lines of an output that a page leaves out."""
LONGEST = 95
"""Lines of a tutorial without those of the environment."""


def words(text: str) -> list[str]:
    """The lines, whatever the widths of their columns."""
    return [" ".join(line.split()) for line in text.splitlines() if line.strip()]


@pytest.mark.sample(1)
@pytest.mark.model
@pytest.mark.parametrize("page", TUTORIALS, ids=lambda page: page.stem)
def test_a_tutorial_does_what_it_shows(page: Path, tmp_path: Path) -> None:
    for name, code in FILE.findall((DOCS / "tutorial-write.md").read_text(encoding="utf-8")):
        (tmp_path / name).write_text(code)
    steps = STEP.findall(page.read_text(encoding="utf-8"))
    assert steps
    path = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"
    for commands, shown in steps:
        printed = ""
        for command in (line.removeprefix("$ ") for line in commands.splitlines()):
            if not ALL and any(part in command for part in OF_THE_MODEL):
                shown = ""
                continue
            done = subprocess.run(
                ["bash", "-c", command],
                cwd=tmp_path,
                env={**os.environ, "PATH": path, "COLUMNS": "80"},
                capture_output=True,
                text=True,
                timeout=300,
            )
            assert done.returncode == 0, f"{command}\n{done.stdout}\n{done.stderr}"
            printed += done.stdout
        lines = [line for line in words(shown) if line != CUT]
        assert [line for line in lines if line not in words(printed)] == [], f"{commands}\n{printed}"


def test_the_commands_of_the_model_are_in_a_tutorial() -> None:
    text = "".join(page.read_text(encoding="utf-8") for page in TUTORIALS)
    assert [part for part in OF_THE_MODEL if part not in text] == []


@pytest.mark.parametrize("page", TUTORIALS, ids=lambda page: page.stem)
def test_a_tutorial_is_short(page: Path) -> None:
    assert FILE.sub("", page.read_text(encoding="utf-8")).count("\n") <= LONGEST
