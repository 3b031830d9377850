"""The client against Atropos' own API, and groups as bytes."""

from __future__ import annotations

import gzip
import json
import math

import orjson
import pytest
from aiohttp import web
from aiohttp.test_utils import TestServer
from hypothesis import given
from hypothesis import strategies as st

from lachesis_train.group_encoding import SLICE, GroupError, compress, encode_group, encode_json
from lachesis_train.rollout_api import ApiDown, ApiRefused, ConnectionReplaced, EnvDescription, RolloutApi, UnknownEnv
from tests.support.fake_serving import payload
from tests.support.stock_run_api import StockRunApi, Trainer

ENV = EnvDescription("fake", max_token_length=40, group_size=2, weight=0.5, min_batch_allocation=0.25)


def body(group, env_id=0):
    return compress(encode_group({**group, "env_id": env_id}))


async def test_every_route_of_the_stock_api():
    async with StockRunApi() as server, RolloutApi(server.url) as api:
        trainer = Trainer(server.url, batch_size=8, num_steps=7, max_token_len=99)
        assert await api.info() is None
        assert await api.register(ENV) is None
        await trainer.register(starting_step=3)
        info = await api.info()
        assert (info.batch_size, info.max_token_len) == (8, 99)
        assert await api.register(ENV) is None, "the trainer has not asked for a batch"
        await trainer.poll()
        registration = await api.register(ENV)
        assert (registration.env_id, registration.starting_step, registration.num_steps) == (0, 3, 7)
        status = await api.status_env(0)
        assert (status.current_step, status.self_queue_size, status.unallocated_fraction) == (3, 0, 0.75)
        assert await api.last_group_id() is None
        group = {**payload(5), "group_overrides": {"group_id": "abc"}}
        assert await api.send(body(group), connection=api.connection) == 0
        assert await api.last_group_id() == "abc"
        assert (await api.status_env(0)).self_queue_size == 1
        smaller = {**payload(6, group_size=1)}
        assert await api.send(body(smaller), connection=api.connection) == 1, "held back until it makes up a group"
        with pytest.raises(UnknownEnv):
            await api.status_env(1)
        await api.info()
        await api.disconnect(0, connection=api.connection)
        with pytest.raises(UnknownEnv):
            await api.status_env(0)


async def test_a_refused_group_is_reported_with_the_reason():
    async with StockRunApi() as server, RolloutApi(server.url) as api:
        trainer = Trainer(server.url, batch_size=8)
        await trainer.register()
        await trainer.poll()
        await api.register(ENV)
        bad = {**payload(1), "messages": [[{"role": "assistant"}]] * 2}
        with pytest.raises(ApiRefused, match="content") as refused:
            await api.send(body(bad), connection=api.connection)
        assert refused.value.status == 422


async def test_a_group_never_reaches_an_api_that_does_not_know_the_environment():
    async with StockRunApi() as server, RolloutApi(server.url) as api:
        trainer = Trainer(server.url, batch_size=2)
        await trainer.register()
        await trainer.poll()
        await api.register(ENV)
        checked = api.connection
        server.kill()
        await server.start()
        with pytest.raises(ConnectionReplaced):
            await api.send(body(payload(1)), connection=checked)
        assert await api.info() is None
        with pytest.raises(ConnectionReplaced):
            await api.send(body(payload(1)), connection=checked)
        # A group before /register would have left this process unusable.
        await trainer.register()
        await trainer.poll()
        assert (await api.register(ENV)).env_id == 0
        await api.send(body(payload(1)), connection=api.connection)
        await trainer.take(1)


async def test_an_api_that_is_not_there_is_down_and_a_wrong_address_is_refused():
    server = StockRunApi()
    async with RolloutApi(server.url) as api:
        with pytest.raises(ApiDown, match=rf"{server.port}: nothing answers there \(.*start one with `lachesis api`"):
            await api.info()
    async with RolloutApi("nonsense") as api:
        with pytest.raises(ApiRefused, match="rollout_server_url"):
            await api.info()


@pytest.mark.parametrize("status", [408, 425, 429])
async def test_a_group_that_comes_too_fast_is_not_refused_for_good(status):
    async def busy(request):
        await request.read()
        return web.json_response({"detail": "slow down"}, status=status)

    async def info(request):
        return web.json_response({"batch_size": 4, "max_token_len": 40})

    app = web.Application()
    app.add_routes([web.get("/info", info), web.post("/scored_data", busy)])
    async with TestServer(app) as server, RolloutApi(str(server.make_url(""))) as api:
        await api.info()
        with pytest.raises(ApiDown, match="slow down") as down:
            await api.send(body(payload(1)), connection=api.connection)
        assert down.value.status is None, "nothing that counts against the group"


def test_a_group_keeps_its_content_and_is_cut_into_small_pieces():
    group = payload(1, group_size=3, length=3 * SLICE + 5)
    pieces = encode_group(group)
    assert orjson.loads(b"".join(pieces)) == group
    assert max(map(len, pieces)) < 25 * SLICE, "a long piece is a long time in which no other thread runs"
    assert orjson.loads(gzip.decompress(compress(pieces))) == group


numbers = st.integers(-(2**63), 2**63 - 1) | st.floats(allow_nan=False, allow_infinity=False)
texts = st.text(st.characters(codec="utf-8"))
plain = st.recursive(
    st.none() | st.booleans() | numbers | texts,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(texts, inner, max_size=3),
    max_leaves=8,
)


@given(plain, st.lists(plain, max_size=3))
def test_any_json_rides_along_unchanged(value, values):
    group = {**payload(1), "generation_params": {"x": value}, "images": values}
    assert orjson.loads(b"".join(encode_group(group))) == group


@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
@pytest.mark.parametrize("name", ["scores", "inference_logprobs", "advantages"])
def test_a_number_that_is_not_finite_is_refused(name, bad):
    group = payload(1)
    group[name] = [0.5, bad] if name == "scores" else [[-0.5] * 39 + [bad]] * 2
    with pytest.raises(GroupError, match=f"{name} contains a number that is not finite"):
        encode_group(group)


def test_half_surrogate_pairs_do_not_poison_a_batch():
    encoded = encode_json({"content": "a\ud800b", "\udc00": [1]})
    assert json.loads(encoded) == {"content": "a�b", "�": [1]}
