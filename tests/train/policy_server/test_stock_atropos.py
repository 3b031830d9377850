"""Stock Atropos clients, unchanged, against the policy server: each server type of atroposlib 0.4.0 that it serves."""

from __future__ import annotations

import asyncio
from contextlib import asynccontextmanager

import pytest
from serving import serving

from lachesis_client.sampling import Sampling
from lachesis_testing.fake_server import fake_tokenizer

ASK = {"role": "user", "content": "When is the tide high?"}


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """A tokenizer as a path, as Atropos' servers load it."""
    path = tmp_path_factory.mktemp("tokenizer")
    fake_tokenizer().save_pretrained(path)
    return str(path)


@asynccontextmanager
async def manager_of(it, server_type, folder):
    from atroposlib.envs.server_handling.server_manager import APIServerConfig, ServerManager

    config = APIServerConfig(
        model_name="policy",
        base_url=it.server.base_url,
        api_key="sesame",
        server_type=server_type,
        tokenizer_name=folder,
        timeout=30,
    )
    manager = ServerManager([config])
    try:
        yield manager
    finally:
        for server in manager.servers:
            if task := getattr(server, "check_task", None):
                task.cancel()
                await asyncio.gather(task, return_exceptions=True)
            await server.openai.close()


@pytest.mark.parametrize("server_type", ["openai", "vllm", "sglang"])
async def test_chat_and_text_completions(server_type, folder):
    async with (
        serving("At nine <b>sharp</b>.", token="sesame") as it,
        manager_of(it, server_type, folder) as manager,
    ):
        chat = await manager.chat_completion(messages=[ASK], n=3, max_tokens=40, temperature=0.7)
        assert [choice.message.content for choice in chat.choices] == ["At nine <b>sharp</b>."] * 3
        assert [choice.finish_reason for choice in chat.choices] == ["stop"] * 3
        assert chat.usage.completion_tokens == 3 * len(it.sampler.codec.encode("At nine <b>sharp</b>.<|im_end|>"))
        text = await manager.completion(prompt="The tide", n=2, max_tokens=2, stop=["never"])
        assert [choice.finish_reason for choice in text.choices] == ["length"] * 2


@pytest.mark.parametrize("server_type", ["vllm", "sglang"])
async def test_a_managed_server_has_the_tokens_and_logprobs_that_were_sampled(server_type, folder):
    """Two turns, the first with three choices: its nodes are what a stock environment gives to its trainer."""
    async with serving(token="sesame") as it, manager_of(it, server_type, folder) as manager:
        async with manager.managed_server() as managed:
            first = await managed.chat_completion(messages=[ASK], n=3, max_tokens=12, temperature=1.0, top_p=1.0)
            assert len(first.choices) == 3
            nodes = managed.get_state()["nodes"]
        assert len(nodes) == 3
        prompt = it.sampler.codec.encode(it.sampler.codec.render([ASK], None))
        for node in nodes:
            sampled = [token for token in node.masked_tokens if token != -100]
            assert node.tokens == prompt + sampled
            scores = it.sampler.model.score(prompt, sampled, Sampling(1))
            assert [value for value in node.logprobs if value != 1.0] == pytest.approx(scores)


@pytest.mark.parametrize("server_type", ["vllm", "sglang"])
async def test_the_health_checks_of_stock_servers_find_it_healthy(server_type, folder):
    async with serving("Hi.", token="sesame") as it, manager_of(it, server_type, folder) as manager:
        [server] = manager.servers
        server.server_healthy = False
        await manager.completion(prompt="hi", max_tokens=1)  # waits until a check has succeeded
        assert server.server_healthy
