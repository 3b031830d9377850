"""Files with the data that a training run trained in each step: `rollouts/step_00012.jsonl`."""

from __future__ import annotations

from pathlib import Path
from typing import Final

SCHEMA: Final = "lachesis.trained_group/1"
ROLLOUTS: Final = "rollouts"
"""The folder of a training run that holds them."""


def step_files(folder: Path) -> list[tuple[int, Path]]:
    """The files of a folder with their steps, in order."""
    found = [(path.stem.removeprefix("step_"), path) for path in folder.glob("step_*.jsonl") if path.is_file()]
    return sorted((int(number), path) for number, path in found if number.isdecimal())
