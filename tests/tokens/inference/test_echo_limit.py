"""Long prompts need not come back: the completion is the same."""

from __future__ import annotations

from typing import Any

import aiohttp
import pytest

from lachesis_client.sampling import Sampling
from lachesis_testing.fake_server import Ask, FakeServer
from lachesis_tokens.engines import create_engine

LONG, SHORT = [5, 6, 7, 8], [5, 6, 7]
KINDS = {"vllm": "/v1/completions", "vllm-generate": "/inference/v1/generate", "sglang": "/generate"}


def say(ask: Ask) -> Any:
    return ask.ended(ask.codec.encode('"tokens":["token_id:7"] Zürich 🙂'))


@pytest.mark.parametrize("kind", KINDS)
async def test_the_server_repeats_no_longer_prompt(kind: str) -> None:
    async with FakeServer(say) as fake:
        limited = create_engine(kind, fake.settings(echo_limit=3))
        plain = create_engine(kind, fake.settings())
        try:
            for prompt in (LONG, SHORT):
                expected = await plain.generate(prompt, Sampling(40, seed=1), n=2)
                found = await limited.generate(prompt, Sampling(40, seed=1), n=2)
                for one, same in zip(found, expected, strict=True):
                    assert (one.ids, one.logprobs, one.finish_reason) == (same.ids, same.logprobs, same.finish_reason)
                    assert one.model_version == same.model_version
                assert ("prompt_token_ids" in await repeated(fake, kind)) is (prompt is SHORT)
        finally:
            await limited.close()
            await plain.close()


async def repeated(fake: FakeServer, kind: str) -> dict[str, Any]:
    """The fields of the answer to the last request, sent again, that have a value."""
    root = fake.settings().base_url.removesuffix("/v1")
    body = dict(fake.requests[-1].body)
    async with aiohttp.ClientSession() as session, session.post(root + KINDS[kind], json=body) as response:
        answer = await response.json()
    answer = answer[0] if isinstance(answer, list) else answer
    both = {**answer, **answer.get("choices", [{}])[0]}
    return {name: value for name, value in both.items() if value is not None}
