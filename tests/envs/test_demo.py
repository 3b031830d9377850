"""`lachesis demo`: the trained model succeeds where the other one fails, and the end says what to do next."""

from __future__ import annotations

import io
import re
from pathlib import Path

import pytest
from rich.console import Console

from lachesis.cli import main
from lachesis_envs.verbs import demo
from lachesis_messages.records.jsonl import read_lines
from lachesis_view import verb


def shown(*, terminal: bool) -> str:
    console = Console(file=io.StringIO(), force_terminal=terminal, width=60, color_system=None)
    demo._say_what_is_next(console, "'data/my demo'")
    assert isinstance(console.file, io.StringIO)
    return console.file.getvalue()


def test_a_terminal_gets_the_command_of_the_viewer_with_its_address(capsys: pytest.CaptureFixture[str]) -> None:
    lines = shown(terminal=True).splitlines()
    assert any(line.startswith("  lachesis new ") for line in lines)
    with pytest.raises(SystemExit):
        verb.main(["--help"])
    (port,) = re.findall(r"default:\s+(\d+)\)", capsys.readouterr().out)
    assert f"  lachesis view 'data/my demo'  these rollouts in a browser, at http://127.0.0.1:{port}" in lines


def test_a_file_gets_one_line() -> None:
    (line,) = shown(terminal=False).strip().splitlines()
    assert line.startswith("next: lachesis view 'data/my demo', or a larger model: lachesis eval gsm8k")


@pytest.mark.slow
@pytest.mark.model
def test_a_trained_adapter_finds_what_the_model_alone_does_not(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of 64 held-out items the model solves none, and with the adapter 62."""
    monkeypatch.setattr(demo, "ACTS", [play for play in demo.ACTS if play.task == demo.LOOK_UP])
    assert demo.main(["--items", "6", "--group-size", "1", "--output", str(tmp_path)]) == 0
    rewards = {
        play.folder: [group["rollouts"][0]["reward"] for group in read_lines(tmp_path / play.folder / "groups.jsonl")]
        for play in demo.ACTS
    }
    assert sum(each == 1.0 for each in rewards["stock-base"]) <= 1
    assert sum(each == 1.0 for each in rewards["stock-trained"]) >= 4
    shown = " ".join(capsys.readouterr().out.split())
    assert "on items that the training has not seen" in shown and "calls look_up:" in shown


@pytest.mark.slow
@pytest.mark.model
def test_an_evaluation_is_not_continued_with_another_adapter_of_the_same_name(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    content = demo.ADAPTER.read_bytes()
    (adapter := tmp_path / "mine.gguf").write_bytes(content)
    play = ["eval", "tool_result", "-m", str(adapter), "-t", "4", "-o", str(tmp_path / "run"), "-n"]
    assert main([*play, "1"]) == 0
    adapter.write_bytes(content[:-2] + bytes(2))
    assert main([*play, "2"]) == 2
    assert "was started with other settings (model_file:" in " ".join(capsys.readouterr().err.split())
