"""The folder of a run, in the command as a user starts it: it looks for the packages of training first."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest

from lachesis_train.trainer.checkpoints import alone_in
from lachesis_train.verbs.launch_training import main


async def test_a_second_trainer_in_the_folder_of_a_run_is_refused(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    flags = ["--training.base_model", "m", "--training.num_steps", "1", "--training.run_dir", str(tmp_path)]
    with alone_in(tmp_path):
        assert await asyncio.to_thread(main, flags) == 1
    assert "another process trains in" in " ".join(capsys.readouterr().err.split())
