"""Where requests go: the load in tokens, the caches of rollouts and groups, ranks, and the headers for routers."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from random import Random
from typing import Any

import pytest

from lachesis_client import BadResponse, OpenAIServer, RequestRejected, Router, ServerUnavailable
from lachesis_client.affinity import Demand, ExpectedTokens
from lachesis_client.balancer import Balancer
from lachesis_client.client_settings import ServerSettings
from lachesis_client.sampling import Sampling
from lachesis_messages.history import MessageHistory
from lachesis_messages.messages import FinishReason
from lachesis_messages.tokens import TokenPrefix
from lachesis_testing.fake_server import FakeServer, Fault, Lengths, RandomWords, fake_tokenizer
from lachesis_tokens.engines import create_engine
from lachesis_tokens.engines.base import Generation
from lachesis_tokens.prompts.prompts import PromptBuilder
from lachesis_tokens.server.token_server import TokenServer

SAMPLING = Sampling(max_tokens=16)


async def until(condition):
    async with asyncio.timeout(60):
        while not condition():  # noqa: ASYNC110 - the server has no event for every state
            await asyncio.sleep(0.002)


@asynccontextmanager
async def farm(
    count: int, engine: str = "vllm", *, settings: dict[str, Any] | None = None, **options: Any
) -> AsyncIterator[tuple[list[FakeServer], TokenServer]]:
    """Fake servers with one tokenizer, and a `TokenServer` over them."""
    tokenizer = fake_tokenizer()
    async with AsyncExitStack() as stack:
        fakes = [
            await stack.enter_async_context(FakeServer(RandomWords(Lengths(8, 8)), tokenizer=tokenizer, **options))
            for _ in range(count)
        ]
        engines = [create_engine(engine, fake.settings(**(settings or {}))) for fake in fakes]
        yield fakes, await stack.enter_async_context(TokenServer(engines, PromptBuilder(tokenizer), "hermes"))


def prompt(length: int, first: int = 5) -> TokenPrefix:
    return TokenPrefix([first, *([7] * (length - 1))])


async def test_the_load_of_a_server_is_counted_in_tokens():
    async with farm(2, latency=0.1) as (fakes, server):
        # One at a time, so that each sees the requests before it in flight.
        lengths = [3000, 10, 3000, 10, 3000, 10, 3000, 10]
        calls = []
        for number, length in enumerate(lengths):
            calls.append(asyncio.create_task(server.generate(prompt(length, 5 + number), SAMPLING)))
            await asyncio.sleep(0)
        await asyncio.gather(*calls)
    sums = [sum(len(seen.call.prompts[0]) for seen in fake.requests) for fake in fakes]
    assert min(sums) > 0.9 * max(sums), f"prompt tokens by server: {sums}"


async def begin(server: TokenServer, groups: Sequence[str], siblings: int, *, length: int = 600) -> None:
    """The first requests of all rollouts, at once. Siblings have the same prompt."""
    calls = [
        server.generate(prompt(length, 5 + place), SAMPLING, affinity=server.for_rollout(group=group).affinity)
        for place, group in enumerate(groups)
        for _ in range(siblings)
    ]
    await asyncio.gather(*calls)


def prompts_of(fake: FakeServer) -> list[int]:
    """The first id of each prompt that the server got: the number of its group."""
    return [seen.call.prompts[0][0] for seen in fake.requests]


async def test_siblings_begin_where_the_prompt_of_their_group_is():
    async with farm(4, latency=0.05, prefix_cache=50_000) as (fakes, server):
        await begin(server, ["a", "b", "c", "d"], 4)
        assert [len(fake.requests) for fake in fakes] == [4, 4, 4, 4]
        assert all(len(set(prompts_of(fake))) == 1 for fake in fakes), list(map(prompts_of, fakes))
        # Each prompt is computed once, except for its last block.
        assert sum(fake.stats["cached_tokens"] for fake in fakes) == 4 * 3 * 592


async def test_a_group_does_not_pile_up_on_one_server_while_others_are_idle():
    async with farm(4, latency=0.05) as (fakes, server):
        await begin(server, ["a"], 16)
        counts = sorted(len(fake.requests) for fake in fakes)
    assert sum(counts) == 16
    assert counts[-1] <= 6, counts
    assert counts[-3] > 0, counts


@pytest.mark.parametrize("phase", [1, 2])
async def test_a_rollout_stays_with_its_server_and_names_itself_to_routers(phase):
    async with farm(3, prefix_cache=50_000) as (fakes, tokens):
        router = Router([OpenAIServer(fake.settings()) for fake in fakes])
        async with router:
            for number in range(3):
                model = (tokens, router)[phase == 1].for_rollout(group=str(number), session=f"rollout {number}")
                history = MessageHistory([{"role": "user", "content": f"{number}. " + "Tell me more. " * 40}])
                cached = []
                for _ in range(4):
                    response = await model.chat(history, max_tokens=16)
                    cached.append(response.usage.cached_tokens)
                    history.append(response)
                    history.append({"role": "user", "content": "And then?"})
                assert cached[0] == 0
                assert sorted(cached) == cached and cached[1] > 100, "the server reports what it had"
    by_rollout = {}
    for fake in fakes:
        for seen in fake.requests:
            by_rollout.setdefault(seen.headers["X-Session-ID"], set()).add(id(fake))
    assert {name: len(urls) for name, urls in by_rollout.items()} == {f"rollout {n}": 1 for n in range(3)}


@pytest.mark.parametrize(
    ("engine", "setting", "name"),
    [
        ("vllm", None, "X-Session-ID"),
        ("vllm-generate", None, "X-Session-ID"),
        ("sglang", None, "X-SMG-Routing-Key"),
        ("atropos", None, "X-Session-ID"),
        ("vllm", "x-user-id", "x-user-id"),
        ("sglang", "", None),
    ],
)
async def test_the_session_header_is_the_routers(engine, setting, name):
    async with farm(1, engine, settings={"session_header": setting}) as ([fake], server):
        managed = server.for_rollout(session="one")
        await server.generate(prompt(20), SAMPLING, affinity=managed.affinity)
        named = {key for key, value in fake.requests[0].headers.items() if value == "one"}
        assert named == ({name} if name else set())


@pytest.mark.parametrize("name", ["a b", "x:y", "é", "a\nb", "Authorization", "content-length"])
def test_a_session_header_that_cannot_name_a_rollout_is_refused(name):
    with pytest.raises(ValueError, match=r"openai\.session_header"):
        create_engine("vllm", ServerSettings("http://127.0.0.1:9/v1", "m", session_header=name))


@pytest.mark.parametrize("headers", [{"a b": "x"}, {"": "x"}, {"X-A": "one\ntwo"}, {"Content-Type": "x"}])
def test_a_header_that_cannot_be_sent_is_refused_by_name(headers):
    with pytest.raises(
        ValueError, match=rf"openai\.headers has '{next(iter(headers))}': no header has this name or value"
    ):
        create_engine("vllm", ServerSettings("http://127.0.0.1:9/v1", "m", headers=headers))


@pytest.mark.parametrize("engine", ["vllm", "vllm-generate", "sglang", "atropos"])
async def test_headers_of_the_settings_are_sent_with_every_request(engine):
    async with farm(1, engine, settings={"headers": {"X-Team": "blue"}}) as ([fake], server):
        await server.generate(prompt(20), SAMPLING)
        assert [seen.headers["X-Team"] for seen in fake.requests] == ["blue"]


@pytest.mark.parametrize("name", ["a b", "a\nb", "Authorization", "content-length", ""])
def test_headers_that_the_client_sets_itself_are_refused(name):
    with pytest.raises(ValueError, match=r"openai\.headers"):
        create_engine("vllm", ServerSettings("http://127.0.0.1:9/v1", "m", headers={name: "x"}))


@pytest.mark.parametrize("engine", ["vllm", "vllm-generate", "sglang"])
async def test_a_rollout_stays_with_its_data_parallel_rank(engine):
    ranked = {"data_parallel_size": 3}
    async with farm(2, engine, settings=ranked, latency=0.05, prefix_cache=50_000, **ranked) as (fakes, server):
        rollouts = [(server.for_rollout(group=str(n)), prompt(300 + n, 5 + n)) for n in range(6)]
        for _ in range(3):
            answers = await asyncio.gather(
                *(server.generate(prefix, SAMPLING, affinity=managed.affinity) for managed, prefix in rollouts)
            )
            rollouts = [
                (managed, prefix.extend([*answer[0].ids, *range(10, 40)]))
                for (managed, prefix), answer in zip(rollouts, answers, strict=True)
            ]
    assert min(answer[0].cached_tokens for answer in answers) > 300
    places = {(id(fake), seen.rank, seen.call.prompts[0][0]) for fake in fakes for seen in fake.requests}
    assert len(places) == len({place[:2] for place in places}) == 6, "one rollout on each rank"


async def test_a_rank_that_does_not_exist_is_an_error_with_the_servers_words():
    async with farm(1, settings={"data_parallel_size": 4}, data_parallel_size=2) as (_, server):
        with pytest.raises(RequestRejected, match=r"out of range \[0, 2\)"):
            await asyncio.gather(*(server.generate(prompt(20), SAMPLING) for _ in range(4)))


async def test_a_group_moves_together_when_its_server_dies_and_counts_on_no_cache_of_the_past():
    async with farm(3, latency=0.1, prefix_cache=50_000, settings={"max_retries": 0}) as (fakes, server):
        server.cooldown = 0.2
        rollouts = [(server.for_rollout(group="a"), prompt(900)) for _ in range(3)]

        async def turn() -> list[str]:
            answers = await asyncio.gather(
                *(server.generate(prefix, SAMPLING, affinity=managed.affinity) for managed, prefix in rollouts)
            )
            rollouts[:] = [
                (managed, prefix.extend([*answer[0].ids, *range(10, 40)]))
                for (managed, prefix), answer in zip(rollouts, answers, strict=True)
            ]
            return [answer[0].server for answer in answers]

        [first] = set(await turn())
        dead = next(fake for fake in fakes if fake.base_url == first)
        dead.faults = {Fault.UNAVAILABLE: 1.0}
        [second] = set(await turn())
        assert second != first
        dead.faults = {}
        await asyncio.sleep(0.3)
        assert set(await turn()) == {second}, "the old server is back, and what it had is gone"
        assert all(not place.tokens for member in server._members for place in member.places)


async def test_a_failed_request_does_not_hide_the_load_of_its_server():
    async with farm(2, settings={"max_retries": 0}, retry_after=0.0) as (fakes, server):
        for fake in fakes:
            await fake.pause()
        busy = [asyncio.create_task(server.generate(prompt(500, 5 + number), SAMPLING)) for number in range(20)]
        await until(lambda: sum(len(fake.requests) for fake in fakes) == 20)
        [place] = server._members[0].places
        tokens = place.tokens
        fakes[0].faults = {Fault.RATE_LIMITED: 1.0}
        busy.append(asyncio.create_task(server.generate(prompt(10), SAMPLING)))
        await until(lambda: len(fakes[1].requests) == 11)
        assert fakes[0].stats["status.429"]
        assert server._members[0].places == [place]
        assert place.tokens == tokens
        for fake in fakes:
            fake.resume()
        await asyncio.gather(*busy)
        assert all(not place.tokens for member in server._members for place in member.places)


class Unreliable:
    """A server for a `Balancer`: it answers late or not at all, and notes a limit that is not held."""

    def __init__(self, name: str, rng: Random, **settings: Any) -> None:
        self.settings, self.base_url, self.rng = ServerSettings(name, "m", **settings), name, rng
        self.in_flight = dict.fromkeys(("train", "eval"), 0)
        self.broken = ""

    async def answer(self, split: str) -> list[Generation]:
        self.in_flight[split] += 1
        limits = self.settings.max_concurrency, self.settings.max_eval_concurrency
        if sum(self.in_flight.values()) > limits[0] or self.in_flight["eval"] > limits[1] or not self.settings.weight:
            self.broken = f"{self.settings}: {self.in_flight}"
        try:
            await asyncio.sleep(self.rng.choice([0, 0, 0.001, 0.003]))
            if self.rng.random() < 0.15:
                raise self.rng.choice([ServerUnavailable(self.base_url, "down", 1), BadResponse(self.base_url, "bad")])
            return [Generation([1], [-1.0], FinishReason.STOP)]
        finally:
            self.in_flight[split] -= 1

    async def check(self) -> list[str]:
        return []

    async def close(self) -> None: ...


@pytest.mark.parametrize("seed", range(8))
async def test_limits_hold_and_nothing_stays_reserved_whatever_fails_or_is_cancelled(seed):
    rng = Random(seed)
    servers = [
        Unreliable(
            f"http://{number}",
            rng,
            max_concurrency=rng.randint(1, 5),
            max_eval_concurrency=rng.randint(1, 3),
            weight=rng.choice([1.0, 0.3]) if number else 0.0,
            data_parallel_size=rng.choice([1, 3]),
        )
        for number in range(rng.randint(2, 4))
    ]
    balancer = Balancer(servers, cooldown=0.005, unavailable_wait=rng.choice([0.01, 0.1]))
    rollouts = [balancer._affinity(str(number % 3), None) for number in range(9)]

    async def request() -> None:
        split, demand = rng.choice(["train", "eval"]), Demand(rng.randint(0, 3000), 100, rng.choice(rollouts))
        await asyncio.sleep(0.03 * rng.random())
        await balancer._run(lambda server, *_: server.answer(split), split, asked=lambda: 0, demand=demand)

    requests = [asyncio.create_task(request()) for _ in range(100)]
    for _ in range(30):
        await asyncio.sleep(0.002 * rng.random())
        rng.choice(requests).cancel()
    async with asyncio.timeout(60):
        ended = await asyncio.gather(*requests, return_exceptions=True)
    assert {type(each) for each in ended} <= {type(None), ServerUnavailable, BadResponse, asyncio.CancelledError}
    assert not any(server.broken for server in servers), [server.broken for server in servers]
    assert {(m.in_flight, m.in_flight_eval, sum(p.tokens for p in m.places)) for m in balancer._members} == {(0, 0, 0)}
    assert not any(balancer._waiting.values())


def test_the_expected_length_is_the_mean_also_of_the_first_completions():
    expected = ExpectedTokens()
    assert (expected.of(None), expected.of(64, n=2)) == (2048, 128)
    for length in [20_000, *[100] * 99]:
        expected.add(length)
    assert expected.of(None) == 299
    assert expected.of(200) == 200


async def test_a_rollout_that_waits_for_room_gets_its_own_server():
    async with farm(2, latency=0.02, prefix_cache=50_000, settings={"max_concurrency": 1}) as (fakes, server):
        rollouts = [(server.for_rollout(), prompt(400, 5 + n)) for n in range(6)]
        for _ in range(3):
            answers = await asyncio.gather(
                *(server.generate(prefix, SAMPLING, affinity=managed.affinity) for managed, prefix in rollouts)
            )
            rollouts = [
                (managed, prefix.extend([*answer[0].ids, *range(10, 40)]))
                for (managed, prefix), answer in zip(rollouts, answers, strict=True)
            ]
        hits = sum(fake.stats["cached_tokens"] for fake in fakes) / sum(fake.stats["prompt_tokens"] for fake in fakes)
    assert hits > 0.3
