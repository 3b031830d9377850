"""The example of docs/trl.md runs as it is shown, with a smaller model and fewer steps."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

pytest.importorskip("trl.trainer.grpo_trainer", reason="trl or torch is not installed; `make test-train` has them")

PAGE = Path(__file__).resolve().parents[4] / "docs" / "trl.md"


@pytest.mark.filterwarnings("ignore::UserWarning", "ignore::FutureWarning")
def test_the_example_of_the_page_trains(folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    code = re.findall(r"^```py\n(.*?)^```", PAGE.read_text(encoding="utf-8"), re.MULTILINE | re.DOTALL)[0]
    smaller = code.replace("HuggingFaceTB/SmolLM2-135M-Instruct", str(folder))
    smaller = smaller.replace("max_steps=100", "max_steps=2, use_cpu=True, bf16=False, report_to=[]")
    smaller = smaller.replace("max_completion_length=128", "max_completion_length=24")
    assert smaller.count("\n") == code.count("\n") <= 24
    scope: dict[str, object] = {}
    exec(compile(smaller, str(PAGE), "exec"), scope)
    trainer = scope["trainer"]
    assert trainer.state.global_step == 2  # type: ignore[attr-defined]
    assert scope["rollouts"].totals["rollouts"] == 2 * 8  # type: ignore[attr-defined]
