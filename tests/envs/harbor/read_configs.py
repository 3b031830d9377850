"""Run by Harbor's Python: reads the texts of task.toml files (JSON on standard input), and prints what each says."""

from __future__ import annotations

import json
import sys
import warnings

from harbor.models.task.config import TaskConfig
from harbor.models.task.verifier_mode import resolve_step_verifier_mode, resolve_task_verifier_mode

warnings.simplefilter("ignore")


def read(text: str) -> object:
    try:
        config = TaskConfig.model_validate_toml(text)
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    modes = [resolve_step_verifier_mode(config, step).value for step in config.steps or []]
    dumped = config.model_dump(mode="json")
    return {"config": dumped, "modes": modes or [resolve_task_verifier_mode(config).value]}


json.dump([read(text) for text in json.load(sys.stdin)], sys.stdout)
