"""Tests against a real vLLM: some GB and some minutes, so they run where this folder is named, and nowhere else."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from real_vllm import FOLDER, OneVLLM, RealVLLM

HERE = Path(__file__).parent
QUESTIONS = ("Say hello.", "What is 17*23?", "List three fruits.", "Où est la gare ?", "Count to ten.")


def pytest_ignore_collect(collection_path: Path, config: pytest.Config) -> bool | None:
    named = [(config.invocation_params.dir / argument.split("::")[0]).resolve() for argument in config.args]
    return None if any(path.is_relative_to(HERE) for path in named) else True


@pytest.fixture(scope="session")
def one_vllm() -> Iterator[OneVLLM]:
    vllm = OneVLLM()
    yield vllm
    vllm.stop()


@pytest.fixture
def raw(one_vllm: OneVLLM) -> RealVLLM:
    """vLLM with its default logprobs, of raw logits at temperature 1, and with `/inference/v1/generate`."""
    return one_vllm.running("--enable-scale-out")


@pytest.fixture
def processed(one_vllm: OneVLLM) -> RealVLLM:
    """vLLM with logprobs of the final distribution, and without `/inference/v1/generate`."""
    return one_vllm.running("--logprobs-mode", "processed_logprobs")


@pytest.fixture(scope="session")
def tokenizer(one_vllm: OneVLLM) -> Any:
    """That of the model folder, which is there once a server ran."""
    from transformers import AutoTokenizer

    one_vllm.prepare()
    return AutoTokenizer.from_pretrained(FOLDER)


@pytest.fixture(scope="session")
def prompts(tokenizer: Any) -> list[list[int]]:
    """Token ids of a few questions, generation prompt included."""
    return [
        tokenizer.apply_chat_template(
            [{"role": "user", "content": question}], add_generation_prompt=True, return_dict=False
        )
        for question in QUESTIONS
    ]
