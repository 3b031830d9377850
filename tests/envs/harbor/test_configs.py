"""Our reader of task.toml against Harbor's own, in its Python 3.12 (`make test-harbor`)."""

from __future__ import annotations

import json
import os
import subprocess
from pathlib import Path
from typing import Any

import pytest

from lachesis_envs.task_folders import TaskConfig, TaskError, parse_config, to_toml
from lachesis_envs.task_folders.reading import verifier_mode
from tests.envs.task_folders.fuzz import task_toml

HARBOR = Path(os.environ.get("LACHESIS_HARBOR", Path.home() / ".cache/lachesis/harbor/venv/bin/python"))
pytestmark = pytest.mark.skipif("LACHESIS_NEED_HARBOR" not in os.environ, reason="needs Harbor: make test-harbor")


def read(text: str) -> Any:
    try:
        config = parse_config(text)
    except TaskError as error:
        return str(error)
    modes = [verifier_mode(config, step.verifier) for step in config.steps or []]
    return {"config": config.model_dump(mode="json"), "modes": modes or [verifier_mode(config, config.verifier)]}


def without_extras(ours: Any, theirs: Any) -> Any:
    """Ours without the unknown keys, which Harbor drops and we keep in order to refuse them."""
    if isinstance(ours, dict) and isinstance(theirs, dict):
        return {key: without_extras(value, theirs[key]) for key, value in ours.items() if key in theirs}
    if isinstance(ours, list) and isinstance(theirs, list) and len(ours) == len(theirs):
        return [without_extras(*pair) for pair in zip(ours, theirs, strict=True)]
    return ours


def harbors(texts: list[str]) -> list[Any]:
    """What Harbor says about each text: the values, or its error."""
    program = Path(__file__).with_name("read_configs.py")
    ran = subprocess.run([HARBOR, program], input=json.dumps(texts), capture_output=True, text=True, check=False)
    assert ran.returncode == 0, ran.stderr
    found: list[Any] = json.loads(ran.stdout)
    return found


def test_a_thousand_fuzzed_files_are_accepted_by_both_or_by_neither_with_the_same_values() -> None:
    texts = [task_toml(seed) for seed in range(1000)]
    accepted = 0
    for text, theirs in zip(texts, harbors(texts), strict=True):
        ours = json.loads(json.dumps(read(text)))
        if isinstance(theirs, str):
            assert isinstance(ours, str), f"Harbor: {theirs}\nours: accepted\n{text}"
            continue
        assert not isinstance(ours, str), f"Harbor: accepted\nours: {ours}\n{text}"
        accepted += 1
        assert json.dumps(without_extras(ours, theirs), sort_keys=True) == json.dumps(theirs, sort_keys=True), text
    assert 250 < accepted < 750  # both outcomes are tried


def test_harbor_reads_what_we_write_as_we_do() -> None:
    configs: list[TaskConfig] = []
    for seed in range(1000, 2000):
        try:
            configs.append(parse_config(task_toml(seed)))
        except TaskError:
            continue
    texts = [to_toml(config) for config in configs]
    for config, text, theirs in zip(configs, texts, harbors(texts), strict=True):
        assert not isinstance(theirs, str), f"{theirs}\n{text}"
        ours = json.loads(json.dumps(config.model_dump(mode="json")))
        dumped = theirs["config"]
        assert json.dumps(without_extras(ours, dumped), sort_keys=True) == json.dumps(dumped, sort_keys=True), text
