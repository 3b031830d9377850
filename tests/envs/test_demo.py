"""The end of `lachesis demo` says what to do next, and the demo's own flags."""

from __future__ import annotations

import io
import re

import pytest
from rich.console import Console

from lachesis_envs.verbs import demo
from lachesis_view import verb


def shown(*, terminal: bool) -> str:
    console = Console(file=io.StringIO(), force_terminal=terminal, width=60, color_system=None)
    demo._say_what_is_next(console, "'data/my demo'")
    assert isinstance(console.file, io.StringIO)
    return console.file.getvalue()


def test_a_terminal_gets_the_command_of_the_viewer_with_its_address(capsys: pytest.CaptureFixture[str]) -> None:
    lines = shown(terminal=True).splitlines()
    assert "  lachesis view 'data/my demo'  these rollouts in a browser, at http://127.0.0.1:7007" in lines
    assert any(line.startswith("  lachesis new ") for line in lines)
    with pytest.raises(SystemExit):
        verb.main(["--help"])
    (port,) = re.findall(r"default:\s+(\d+)\)", capsys.readouterr().out)
    assert f"http://127.0.0.1:{port}" == demo.VIEWER


def test_a_file_gets_one_line() -> None:
    (line,) = shown(terminal=False).strip().splitlines()
    assert line.startswith("next: lachesis view 'data/my demo', or a larger model: lachesis eval gsm8k")
