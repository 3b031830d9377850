"""`environment.py serve`, Atropos' own rollout API and a trainer: what arrives is what the model sampled."""

from __future__ import annotations

import asyncio
import itertools
from pathlib import Path
from typing import Any

import pytest

from lachesis.settings.server_settings import Phase1CannotTrain, ServerConfig, ServerConfigError, token_engine
from lachesis_messages.records.jsonl import read_lines
from lachesis_testing.fake_server import Ask, FakeServer, ToolUser
from lachesis_testing.fake_server.replay import experts_of
from lachesis_tokens.samples.verification import verify_records
from tests.support.ports import free_port
from tests.support.small_envs import SortWords, lines, make
from tests.support.stock_run_api import StockRunApi, Trainer, run_api
from tests.support.training_runs import proven, serving, trained, with_tokens

__all__ = ["run_api"]


@pytest.mark.slow
@pytest.mark.model
async def test_process_has_the_tokens_of_a_model_that_runs_here_unless_it_is_asked_as_a_chat(tmp_path: Path) -> None:
    for engine, count in (("auto", 1), ("chat", 0)):
        (folder := tmp_path / engine).mkdir()
        settings = {"total_steps": 1, "group_size": 1, "enabled_toolsets": [], "max_token_length": 8}
        env = make(SortWords, None, folder, **settings)
        env.server_configs = [ServerConfig(model_name="embedded", engine=engine, context=1024)]
        await env.process_manager()
        (group,) = lines(folder / "groups.jsonl")
        assert len(group["samples"]) == count
        assert verify_records(read_lines(folder / "groups.jsonl")).ok == bool(count)


def test_which_servers_report_tokens() -> None:
    for of, engine in (
        ({"model_name": "embedded"}, "llama.cpp"),
        ({"model_name": "models/small.gguf"}, "llama.cpp"),
        ({"model_name": "models/small.gguf", "server_type": "vllm"}, "llama.cpp"),
        ({"model_name": "embedded", "engine": "chat"}, None),
        ({"model_name": "reference"}, None),
        ({"model_name": "m", "server_type": "vllm"}, "vllm"),
        ({"model_name": "m", "server_type": "vllm", "engine": "chat"}, None),
        ({"model_name": "m", "engine": "sglang"}, "sglang"),
        ({"model_name": "m"}, None),
    ):
        assert token_engine(ServerConfig(**of)) == engine, of


@pytest.mark.slow
@pytest.mark.model
async def test_serve_sends_what_the_embedded_model_sampled(tmp_path: Path, run_api: StockRunApi) -> None:
    async with run_api.wiped() as api:
        server = ServerConfig(model_name="embedded", parallel=2, context=2048)
        env = serving(tmp_path, api, server, include_messages=True)
        samples = proven(await trained(env, api, groups=2, steps=1))
    assert len({sample.rollout_id for sample in samples}) == len(samples) == 4
    for sample in samples:
        assert sample.trained > 0
        assert {span.sampling["temperature"] for span in sample.spans} == {1.0}
        assert {span.sampling["top_k"] for span in sample.spans} == {0}


async def test_serve_sends_what_a_server_recorded(tmp_path: Path, run_api: StockRunApi) -> None:
    """The trainer gets exactly the ids and the experts that the server recorded, after the same prompts."""
    shape = (3, 2, 8)
    async with run_api.wiped() as api, FakeServer(ToolUser(), experts=shape) as model:
        server = with_tokens(model, tmp_path).model_copy(update={"routed_experts": True})
        env = serving(tmp_path, api, server, max_agent_turns=6, max_token_length=120)
        samples = proven(await trained(env, api, groups=6, steps=3))
        sampled = {
            (tuple(seen.call.prompts[completion.prompt]), tuple(completion.ids))
            for seen in model.requests
            for completion in seen.completions
        }
        sessions = {seen.headers["X-Session-ID"] for seen in model.requests}
    assert {sample.rollout_id for sample in samples} <= sessions, "routers know a request's rollout"
    spans = 0
    for sample in samples:
        assert sample.experts is not None
        assert list(sample.experts.data) == experts_of(sample.tokens[:-1], shape)
        for span in sample.spans:
            spans += 1
            assert (tuple(sample.tokens[: span.start]), tuple(sample.tokens[span.start : span.end])) in sampled
    assert spans > len(samples), "rollouts of several turns"


@pytest.mark.slow
async def test_serve_says_when_the_model_unlearns_the_form_of_its_calls(tmp_path: Path, run_api: StockRunApi) -> None:
    """The calls run as they always did; that ever more of them had to be repaired is told once, and sent along."""
    asked = itertools.count()

    def unlearning(ask: Ask) -> str:
        whole = next(asked) < 24
        return '<tool_call>\n{"name": "todo", "arguments": {}}' + whole * "\n</tool_call>"

    async with run_api.wiped() as api, FakeServer(unlearning) as model:
        env = serving(tmp_path, api, with_tokens(model, tmp_path), max_agent_turns=1, enabled_toolsets=["todo"])
        trainer = await trained(env, api, groups=24, steps=12)
    told = (tmp_path / "console.txt").read_text()
    assert told.count("alarm: calls repaired by the parser: from 0.0%") == 1
    overrides = [each for group in trainer.groups for each in group["overrides"]]
    counts = [tuple(each["repaired_calls"]) for each in overrides]
    assert set(counts) == {(0, 1), (1, 1)}


@pytest.mark.parametrize(
    ("server", "settings", "error", "message"),
    [
        (ServerConfig(base_url="http://127.0.0.1:1/v1", model_name="m"), {}, Phase1CannotTrain, "server_type vllm"),
        (ServerConfig(model_name="reference"), {}, Phase1CannotTrain, "Phase 1"),
        (
            ServerConfig(base_url="http://127.0.0.1:1/v1", model_name="m", server_type="vllm"),
            {"agent_temperature": 0.7},
            ServerConfigError,
            "logprobs_mode",
        ),
        (
            ServerConfig(base_url="http://127.0.0.1:1/v1", model_name="m", server_type="vllm"),
            {"extra_body": {"top_p": 0.9}},
            ServerConfigError,
            "top_p",
        ),
    ],
)
async def test_serve_refuses_what_cannot_be_trained_on_and_says_what_to_set(
    tmp_path: Path, server: ServerConfig, settings: dict[str, Any], error: type[Exception], message: str
) -> None:
    async with FakeServer(ToolUser()) as model:
        if server.server_type == "vllm":
            server = with_tokens(model, tmp_path)
        api = StockRunApi()  # never started: nothing may be sent
        with pytest.raises(error, match=message):
            await serving(tmp_path, api, server, **settings).env_manager()


async def test_a_model_that_the_server_does_not_know_ends_the_run(tmp_path: Path, run_api: StockRunApi) -> None:
    """Every request would fail, however often it is repeated, so no rollout begins."""
    async with run_api.wiped() as api, FakeServer(ToolUser()) as model:
        server = with_tokens(model, tmp_path, name="another")
        trainer = Trainer(api.url, batch_size=4)
        await trainer.register()
        await trainer.poll()
        with pytest.raises(ServerConfigError, match="'another' is not in the list"):
            await serving(tmp_path, api, server).env_manager()


async def test_serve_waits_for_a_model_server_that_is_not_ready(tmp_path: Path, run_api: StockRunApi) -> None:
    async with run_api.wiped() as api, FakeServer(ToolUser()) as model:
        server = with_tokens(model, tmp_path)
        port = free_port()
        late = server.model_copy(update={"base_url": f"http://127.0.0.1:{port}/v1"})
        env = serving(tmp_path, api, late)
        playing = asyncio.create_task(trained(env, api, groups=2, steps=1))
        async with asyncio.timeout(60):
            while "waiting for the model server" not in (tmp_path / "console.txt").read_text():  # noqa: ASYNC110
                await asyncio.sleep(0.05)
            async with FakeServer(ToolUser(), port=port):
                assert proven(await playing)
