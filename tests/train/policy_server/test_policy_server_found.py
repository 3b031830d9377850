"""A URL alone is enough for a policy server: the environment asks it what it is."""

from __future__ import annotations

import asyncio
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from backends.errors import SettingsError
from lachesis.runs.command_line import read_settings
from lachesis.runs.policy_servers import policy_server_at
from lachesis_testing.fake_server import FakeServer
from tests.support.small_envs import SortWords
from tests.train.policy_server.serving import serving


async def settings(*flags: str) -> Any:
    read = partial(read_settings, SortWords, ["serve", *flags], ask=policy_server_at)
    (server,) = (await asyncio.to_thread(read))[1]["server_configs"]
    return server


async def test_a_policy_server_says_how_it_is_asked(capsys: pytest.CaptureFixture[str]) -> None:
    async with serving("hello", token="secret") as running:
        url = running.server.base_url
        server = await settings("--openai.base_url", url, "--openai.api_key", "secret")
        tokenizer = running.server._tokenizer_name
        assert (server.server_type, server.model_name, server.tokenizer_name) == (
            "vllm",
            "policy",
            tokenizer or "policy",
        )
        assert f"{url} is the policy server of a training run: server_type vllm" in capsys.readouterr().err
        own = ["--openai.model_name", "mine", "--openai.tokenizer_name", "tok", "--openai.api_key", "secret"]
        server = await settings("--openai.base_url", url, *own)
        assert (server.server_type, server.model_name, server.tokenizer_name) == ("vllm", "mine", "tok")
        server = await settings("--openai.base_url", url, *own, "--openai.server_type", "sglang")
        assert server.server_type == "sglang"
        assert await asyncio.to_thread(policy_server_at, url, "wrong") == {}


async def test_no_other_server_is_taken_for_one() -> None:
    async with FakeServer() as fake:
        assert await asyncio.to_thread(policy_server_at, fake.base_url, "x") == {}
        server = await settings("--openai.base_url", fake.base_url, "--openai.model_name", "fake")
        assert server.server_type == "openai"
    for url in ("http://127.0.0.1:9/v1", "https://api.openai.com/v1", "", "none"):
        assert policy_server_at(url, "x") == {}
    with pytest.raises(SettingsError, match="runs here and needs no URL"):
        await settings("--openai.base_url", "http://127.0.0.1:9/v1")


@pytest.mark.parametrize("of_trainer", [True, False])
def test_a_setting_that_the_trainer_reads_is_not_said_to_change_nothing(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], of_trainer: bool
) -> None:
    file = tmp_path / "run.yaml"
    file.write_text("env: {batch_size: 8}\n" + "training: {num_steps: 2}\n" * of_trainer)
    read_settings(SortWords, ["serve", "--config", str(file)])
    assert ("env.batch_size" in capsys.readouterr().err) is not of_trainer
