"""The commands with which one goes on after a training run, for its last line and its report."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from shlex import join
from typing import Final

from lachesis_train.trainer.environments import RunEnvironment
from lachesis_train.trainer.settings import Settings

WITH_GGUF: Final = "smollm2"
"""The base model of which `lachesis export` has a GGUF file; of others it writes a folder."""
POLICY: Final = "http://127.0.0.1:8001/v1"
"""Where `lachesis policy` serves by default."""


def next_commands(
    settings: Settings,
    environments: Sequence[RunEnvironment],
    flags: Mapping[str, Mapping[str, Sequence[str]]],
    config: Sequence[str],
) -> list[tuple[str, str]]:
    """Arguments of `lachesis`, each with what it does. `flags` are those of each environment, by its name; an
    evaluation takes the templates from them, and the rest from the file of `config`."""
    run, name = str(settings.run_dir), settings.run_dir.name
    plays: list[str] = ["-m", f"{name}.gguf"]
    if settings.base_model == WITH_GGUF:
        found = [(join(["export", "--run-dir", run, "--to", plays[1]]), "writes the trained model")]
    else:
        tokenizer = settings.tokenizer or settings.base_model
        plays = ["-m", settings.served_model, "-b", POLICY, "--env.tokenizer_name", tokenizer]
        found = [(join(["policy", "--run-dir", run]), "serves the trained model")]
    for each in environments:
        own = flags[each.name].items()
        templates = [text for key, of in own if key.startswith("env.chat_template") for text in (f"--{key}", *of)]
        found.append((join(["eval", each.env, *plays, *config, *templates, "-n", "64"]), "plays it"))
    if settings.base_model != WITH_GGUF:
        found.append((join(["export", "--run-dir", run, "--to", f"{name}_model"]), "writes it as a model folder"))
    return found


def write_commands(run_dir: Path, commands: Sequence[tuple[str, str]]) -> None:
    """Write them into the folder of the run, for its report."""
    from lachesis_view.reports.training import NEXT_COMMANDS  # with the report, which begins after the first step

    run_dir.mkdir(parents=True, exist_ok=True)
    (run_dir / NEXT_COMMANDS).write_text(json.dumps(commands), encoding="utf-8")
