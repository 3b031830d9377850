"""A tiny random model in the shape of Qwen3 with a byte tokenizer, and GRPOTrainer over an environment."""

from __future__ import annotations

import importlib
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

for package in ("torch", "trl", "accelerate"):
    if os.environ.get("LACHESIS_NEED_TORCH"):
        importlib.import_module(package)
    else:
        pytest.importorskip(package, reason=f"{package} is not installed; `make test-train` has it")


@pytest.fixture(scope="session", autouse=True)
def one_thread() -> Iterator[None]:
    """More of them wait for each other longer than a model of this size takes."""
    import torch

    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


@pytest.fixture(scope="session")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    from lachesis_tokens.prompts.model_folders import model_folder

    return model_folder("tiny", cache=tmp_path_factory.mktemp("cache"))


@pytest.fixture
def tokenizer(folder: Path) -> Any:
    from transformers import AutoTokenizer

    return AutoTokenizer.from_pretrained(folder)


@pytest.fixture
def model(folder: Path) -> Any:
    from transformers import AutoModelForCausalLM

    return AutoModelForCausalLM.from_pretrained(folder)
