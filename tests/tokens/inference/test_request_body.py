"""The body of a request: the JSON of its payload, in which the ids of prompts are their own text."""

from __future__ import annotations

import json
from typing import Any

import aiohttp
import pytest
from aiohttp import web
from hypothesis import given
from hypothesis import strategies as st

from lachesis_client.request_body import json_body
from lachesis_messages.tokens import TokenPrefix
from lachesis_tokens.engines.prompt_ids import PromptIds
from tests.support.token_trees import UNTIMED

WORDS = st.text(st.characters(codec="utf-8"), max_size=12) | st.sampled_from(["\0", "a\0b", "\\u0000", '"'])
PROMPTS = st.lists(st.lists(st.integers(0, 2**32 - 1), max_size=4), min_size=1, max_size=3)


def prompt(pieces: list[list[int]]) -> PromptIds:
    prefix = TokenPrefix(pieces[0])
    for piece in pieces[1:]:
        prefix = prefix.extend(piece)
    return PromptIds(prefix)


@UNTIMED
@given(st.lists(PROMPTS, max_size=3), st.dictionaries(WORDS, WORDS, max_size=3), st.integers(0, 3))
def test_it_is_the_json_of_the_payload(prompts: list[list[list[int]]], texts: dict[str, str], wide: int) -> None:
    # A number of more than 64 bits is written by another encoder.
    payload: dict[str, Any] = {"texts": texts, "seed": 2**64 if wide == 3 else 7, "top": prompt([[1]])}
    plain: dict[str, Any] = {**payload, "top": [1]}
    payload["prompts"] = [{"token_ids": prompt(pieces)} for pieces in prompts]
    plain["prompts"] = [{"token_ids": [id for piece in pieces for id in piece]} for pieces in prompts]
    body = json_body(payload)
    assert json.loads(body.decode()) == plain
    assert body.size == len(body.decode().encode())


def test_half_a_surrogate_pair_is_replaced() -> None:
    body = json_body({"prompt": prompt([[1], [2]]), "stop": "half \ud83d"})
    assert json.loads(body.decode()) == {"prompt": [1, 2], "stop": "half \ufffd"}


def test_what_is_no_json_is_rejected() -> None:
    with pytest.raises(TypeError, match="object is not JSON"):
        json_body({"x": object()})


async def test_a_server_gets_all_of_it_also_when_it_sends_the_request_elsewhere() -> None:
    got: list[tuple[str | None, Any]] = []

    async def elsewhere(request: web.Request) -> web.StreamResponse:
        got.append((request.headers.get("Content-Length"), await request.json()))
        raise web.HTTPTemporaryRedirect("/there")

    async def there(request: web.Request) -> web.StreamResponse:
        got.append((request.headers.get("Content-Length"), await request.json()))
        return web.json_response({})

    app = web.Application(client_max_size=2**26)
    app.router.add_post("/here", elsewhere)
    app.router.add_post("/there", there)
    runner = web.AppRunner(app)
    await runner.setup()
    try:
        await web.TCPSite(runner, "127.0.0.1", 0).start()
        ids = list(range(100_000, 500_000))  # more than a socket takes at once
        payload = {"model": "m", "prompt": prompt([ids[:5], ids[5:]])}
        url = f"http://127.0.0.1:{runner.addresses[0][1]}/here"
        async with aiohttp.ClientSession() as session, session.post(url, data=json_body(payload)) as response:
            assert response.status == 200
    finally:
        await runner.cleanup()
    expected = {"model": "m", "prompt": ids}
    assert got == [(str(len(json.dumps(expected, separators=(",", ":")))), expected)] * 2
