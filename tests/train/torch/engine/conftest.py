"""An engine on the model `tiny`. These tests need torch, peft and the Tinker SDK; `make test-train` has them."""

from __future__ import annotations

import asyncio
import os
from collections.abc import Iterator
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

if TYPE_CHECKING:
    from lachesis_train.engine.model import Model
    from lachesis_train.engine.training import TrainingModel

if not os.environ.get("LACHESIS_NEED_TORCH") and not all(map(find_spec, ("torch", "peft", "tinker"))):
    collect_ignore_glob = ["test_*.py"]
os.environ["TINKER_TELEMETRY"] = "0"


@pytest.fixture(scope="session")
def folder() -> Path:
    from lachesis_tokens.prompts.model_folders import model_folder

    return model_folder("tiny")


@pytest.fixture
def model(folder: Path) -> Model:
    import torch

    from lachesis_train.engine.model import Model

    torch.set_num_threads(1)
    return Model(folder)


@pytest.fixture
def trained(model: Model) -> TrainingModel:
    """An adapter that changes the model: a fresh one does not, for its second matrix is zero."""
    from tests.support.training_models import changed_adapter

    return changed_adapter(model, "run:train:0")


@pytest.fixture(scope="session")
def state_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("state")


@pytest.fixture(scope="session")
def engine(state_dir: Path) -> Iterator[str]:
    """The base URL of an engine that all tests of the wire share."""
    from lachesis_train.engine import start_engine

    with asyncio.Runner() as runner:
        context = start_engine("tiny", state_dir=state_dir)
        yield runner.run(context.__aenter__())
        runner.run(context.__aexit__(None, None, None))


@pytest.fixture
def service(engine: str) -> Any:
    import tinker

    return tinker.ServiceClient(base_url=engine, api_key="tml-local")
