"""`get_logprobs`: how likely a given prompt is, in Atropos' form, or a clear error."""

from __future__ import annotations

import pytest

from lachesis_client import TokenTrackingUnavailable
from lachesis_client.errors import BadResponse
from lachesis_client.openai_server import OpenAIServer
from lachesis_client.router import Router
from lachesis_client.sampling import Sampling
from lachesis_testing.fake_server import FakeServer, fake_tokenizer
from lachesis_tokens.engines import create_engine
from lachesis_tokens.prompts.prompts import PromptBuilder
from lachesis_tokens.server.token_server import PromptsNotScored, TokenServer
from tests.support.scripted_server import ScriptedServer, say


def token_server(fake: FakeServer, engine: str) -> TokenServer:
    return TokenServer([create_engine(engine, fake.settings(max_retries=0))], PromptBuilder(fake_tokenizer()), "hermes")


async def test_every_token_of_the_prompt_is_scored_first_and_then_the_likeliest_others() -> None:
    async with FakeServer() as fake, token_server(fake, "vllm") as server:
        ids = server.prompts.tokenizer("the three spindles turn")["input_ids"]
        found = await server.get_logprobs(input_ids=ids, top_k=4, split="eval")
        by_text = await server.get_logprobs(prompt="the three spindles turn", top_logprobs=4)
    assert found == by_text
    assert found["prompt_tokens"] == ids
    listed, scores = found["prompt_topk_token_ids"], found["prompt_topk_logprobs"]
    assert (listed[0], scores[0]) == ([], [])
    assert [place[0] for place in listed[1:]] == ids[1:]
    assert all(len(place) in (4, 5) for place in listed[1:])
    assert all(place[1:] == sorted(place[1:], reverse=True) and max(place) <= 0 for place in scores[1:])
    own = fake.model.score(ids[:1], ids[1:], Sampling(temperature=0.0, max_tokens=1), "raw")
    assert [place[0] for place in scores[1:]] == pytest.approx(own)


async def test_servers_that_cannot_say_so_by_name() -> None:
    async with FakeServer() as fake, token_server(fake, "sglang") as server:
        with pytest.raises(PromptsNotScored, match=r"'sglang' does not do.*openai.engine vllm"):
            await server.get_logprobs(input_ids=[1, 2])
        with pytest.raises(TypeError, match="either input_ids or prompt"):
            await server.get_logprobs()
        with pytest.raises(TypeError, match="does not take topk"):
            await server.get_logprobs(input_ids=[1], topk=3)
    async with ScriptedServer([say("x")]) as scripted, Router([OpenAIServer(scripted.settings())]) as router:
        with pytest.raises(TokenTrackingUnavailable, match="Phase 2") as raised:
            await router.get_logprobs(input_ids=[1, 2])
    assert isinstance(raised.value, NotImplementedError)


async def test_an_answer_without_the_scores_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    from lachesis_tokens.model_routes import vllm

    monkeypatch.setattr(vllm.CompletionsRoute, "_of_prompt", lambda *_: [])  # an older server
    async with FakeServer() as fake, token_server(fake, "vllm") as server:
        with pytest.raises(BadResponse, match="prompt_logprobs of 2 tokens were requested and 1 entries came"):
            await server.get_logprobs(input_ids=[5, 6])
