"""Every file in configs/ is read by the command line that its comment shows.

Files of `lachesis train`, which are for packages beyond this one, are read in tests/train/torch/test_configs.py.
"""

from __future__ import annotations

import importlib
import re
from pathlib import Path

import pytest

from lachesis import HermesAgentBaseEnv
from lachesis.runs.command_line import read_settings

ROOT = Path(__file__).resolve().parents[3]
COMMAND = re.compile(r"^#   python environments/(\w+)\.py (\w+) --config (\S+)$", re.MULTILINE)


TRAINED = re.compile(r"^#   lachesis train ", re.MULTILINE)

OF_NONE = {ROOT / "configs/trajectory_compression.yaml"}
FILES = sorted({*(ROOT / "configs").glob("*.yaml")} - OF_NONE)
CONFIGS = [path for path in FILES if COMMAND.search(text := path.read_text("utf-8")) or not TRAINED.search(text)]
"""Those of environments: all but the ones that only `lachesis train` reads."""


@pytest.mark.parametrize("path", CONFIGS, ids=lambda path: path.name)
def test_the_command_in_a_config_reads_it(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(ROOT)
    (shown,) = COMMAND.findall(path.read_text(encoding="utf-8"))
    module_name, command, config = shown
    assert ROOT / config == path
    module = importlib.import_module(f"environments.{module_name}")
    (env_cls,) = (
        value for value in vars(module).values() if isinstance(value, type) and issubclass(value, HermesAgentBaseEnv)
    )
    read, settings = read_settings(env_cls, [command, "--config", config])
    assert read == command
    assert env_cls(**settings).server_configs
