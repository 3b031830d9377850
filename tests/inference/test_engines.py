"""One suite for every token engine: the same cases against a fake of each API, and against llama.cpp itself."""

from __future__ import annotations

import asyncio
import itertools
import math
from contextlib import asynccontextmanager

import pytest
from engine_bench import ALL, FAKED, GREETING, bench, until
from hypothesis import given
from hypothesis import strategies as st

from lachesis.inference import ContextExhausted, RequestRejected, ServerUnavailable, Unauthorized
from lachesis.inference.embedded import EmbeddedServer
from lachesis.inference.engines import ENGINES, TokenEngine, create_engine
from lachesis.inference.engines.llama_cpp import align
from lachesis.inference.http_client import ServerSettings
from lachesis.inference.sampling import Sampling
from lachesis.testing.fake_server import Lengths, RandomTokens
from lachesis.trajectories.messages import FinishReason
from lachesis.trajectories.tokens import sampling_problem

FLOAT_NOISE = 5e-3
"""llama.cpp sums in another order when it reads a prompt than when it samples: Q4 weights, 16-bit cache."""


@pytest.fixture(scope="module")
def embedded(request, tmp_path_factory):
    if not any("llama.cpp" in item.name for item in request.session.items):
        yield None
        return
    runner = asyncio.Runner()
    server = EmbeddedServer(context=512, parallel=2, log=tmp_path_factory.mktemp("llama") / "log")
    runner.run(server.start())
    yield server
    runner.run(server.stop())
    runner.close()


@pytest.mark.parametrize("kind", ALL)
class TestEveryEngine:
    @pytest.fixture
    def opened(self, kind, embedded):
        @asynccontextmanager
        async def open_bench(policy=None, **server):
            async with bench(kind, embedded, policy, **server) as opened:
                yield opened

        return open_bench

    async def test_it_is_a_token_engine(self, kind, opened):
        async with opened() as it:
            assert isinstance(it.engine, TokenEngine)
            assert it.engine.kind == kind

    async def test_the_end_of_turn_token_is_the_last_id_and_has_a_logprob(self, opened):
        async with opened(GREETING) as it:
            prompt = await it.chat("Say hi.")
            result = await it.engine.generate(prompt, Sampling(max_tokens=60, temperature=0.0))
            [one] = result
            assert one.ids[-1] == it.end_of_turn
            assert one.finish_reason is FinishReason.STOP
            assert (await it.decode(one.ids)).startswith("Hello there. I'm here to help with any kind of math")
            assert one.logprobs[-1] == pytest.approx(
                (await it.score([*prompt, *one.ids[:-1]], one.ids[-1:], Sampling(1)))[0], abs=FLOAT_NOISE
            )

    async def test_every_id_has_its_own_logprob(self, opened):
        async with opened(RandomTokens(Lengths(12, 12))) as it:
            prompt, sampling = await it.chat("Tell me a story."), Sampling(max_tokens=12, temperature=0.7, seed=11)
            [one] = await it.engine.generate(prompt, sampling)
            assert len(one.ids) == len(one.logprobs) > 0
            assert all(math.isfinite(logprob) and logprob <= 0 for logprob in one.logprobs)
            expected = await it.score(prompt, one.ids, sampling)
            assert one.logprobs == pytest.approx(expected, abs=FLOAT_NOISE)

    async def test_n_completions_each_with_its_own_tokens(self, opened):
        async with opened() as it:
            prompt = await it.chat("Tell me a story.")
            result = await it.engine.generate(prompt, Sampling(max_tokens=8), n=3)
            assert len(result) == 3
            assert len({tuple(one.ids) for one in result}) > 1
            for one in result:
                assert len(one.ids) == len(one.logprobs)

    async def test_max_tokens_is_the_number_of_ids(self, opened):
        async with opened(GREETING) as it:
            sampling = Sampling(max_tokens=5, temperature=0.0)
            [one] = await it.engine.generate(await it.chat("Say hi."), sampling)
            assert len(one.ids) == len(one.logprobs) == 5
            assert one.finish_reason is FinishReason.LENGTH

    async def test_one_token_is_enough(self, opened):
        async with opened(GREETING) as it:
            [one] = await it.engine.generate(await it.chat("Say hi."), Sampling(max_tokens=1))
            assert len(one.ids) == len(one.logprobs) == 1

    @pytest.mark.parametrize("stop", [("ere t",), (" help with", "never")])
    async def test_the_tokens_of_a_stop_text_are_sampled_tokens(self, opened, stop):
        async with opened(GREETING) as it:
            prompt, sampling = await it.chat("Say hi."), Sampling(max_tokens=60, temperature=0.0, stop=stop)
            [one] = await it.engine.generate(prompt, sampling)
            whole, without_last = await it.decode(one.ids), await it.decode(one.ids[:-1])
            assert stop[0] in whole
            assert stop[0] not in without_last
            assert one.finish_reason is FinishReason.STOP
            assert len(one.ids) == len(one.logprobs)
            assert one.logprobs == pytest.approx(await it.score(prompt, one.ids, sampling), abs=FLOAT_NOISE)

    async def test_a_seed_repeats_itself_and_another_does_not(self, kind, opened):
        extra = {"cache_prompt": False} if kind == "llama.cpp" else {}
        async with opened() as it:
            prompt = await it.chat("Tell me a story.")
            seeds = [(await it.engine.generate(prompt, Sampling(8, seed=seed, extra=extra))) for seed in (7, 7, 8)]
            first, again, other = ([list(one.ids) for one in result] for result in seeds)
            assert first == again
            assert first != other

    async def test_temperature_zero_is_greedy_whatever_the_seed(self, kind, opened):
        extra = {"cache_prompt": False} if kind == "llama.cpp" else {}
        async with opened() as it:
            prompt = await it.chat("Tell me a story.")
            answers = [
                (await it.engine.generate(prompt, Sampling(8, temperature=0.0, seed=seed, extra=extra)))[0]
                for seed in (1, 2)
            ]
            assert answers[0].ids == answers[1].ids

    async def test_several_greedy_completions_are_possible_everywhere(self, opened):
        """vLLM answers 400 to `n` above 1 at temperature 0."""
        async with opened() as it:
            result = await it.engine.generate(await it.chat("Hi"), Sampling(4, temperature=0.0), n=3)
            assert len(result) == 3

    async def test_special_tokens_are_ids_like_any_other(self, opened):
        async with opened() as it:
            [start] = await it.encode("<|im_start|>")
            sampling = it.forced(start, Sampling(max_tokens=3))
            [one] = await it.engine.generate(await it.chat("Hi"), sampling)
            assert one.ids == [start] * 3
            assert len(one.logprobs) == 3

    async def test_an_end_of_turn_at_once_is_a_completion_of_one_token(self, opened):
        async with opened() as it:
            sampling = it.forced(it.end_of_turn, Sampling(max_tokens=3))
            [one] = await it.engine.generate(await it.chat("Hi"), sampling)
            assert one.ids == [it.end_of_turn]
            assert one.finish_reason is FinishReason.STOP
            assert len(one.logprobs) == 1

    async def test_tokens_of_half_a_character_are_tokens(self, opened):
        pieces = "🤖🦊🪐" * 2
        async with opened(pieces) as it:
            prompt = await it.encode("🤖🦊🪐" * 3)
            [one] = await it.engine.generate(prompt, Sampling(max_tokens=12, temperature=0.0))
            assert set(await it.decode(one.ids)) & set(pieces)
            assert len(one.ids) == len(one.logprobs) == 12
            assert list(one.logprobs) == pytest.approx(await it.look_up(prompt, one.ids), abs=FLOAT_NOISE)

    async def test_the_prompt_is_taken_as_it_is(self, opened):
        """Special tokens twice, no beginning-of-text token, an end inside a character: nothing is added or mended."""
        async with opened() as it:
            [end] = await it.encode("<|im_end|>")
            for prompt in ([end, end, *await it.encode(" x")], (await it.encode("🦊"))[:-1]):
                [one] = await it.engine.generate(prompt, Sampling(2, temperature=0.0))
                assert list(one.logprobs) == pytest.approx(await it.look_up(prompt, one.ids), abs=FLOAT_NOISE)

    async def test_a_prompt_beyond_the_context_is_context_exhausted(self, kind, opened):
        # Atropos' server answers a plain 500 to whatever vLLM refuses: there is nothing to tell it by.
        expected = ServerUnavailable if kind == "atropos" else ContextExhausted
        async with opened(context_length=512, settings={"max_retries": 0}) as it:
            with pytest.raises(expected):
                await it.engine.generate((await it.encode(" word")) * 600, Sampling(max_tokens=4))

    @pytest.mark.parametrize(
        ("prompt", "sampling", "n", "named"),
        [
            ([], Sampling(4), 1, "no tokens"),
            ([5], Sampling(0), 1, "max_tokens is 0"),
            ([5], Sampling(4), 0, "n is 0"),
            ([5], Sampling(4, extra={"stream": True}), 1, "extra_body sets stream"),
        ],
    )
    async def test_what_no_engine_answers_rightly_is_not_asked(self, opened, prompt, sampling, n, named):
        async with opened() as it:
            with pytest.raises(ValueError, match=named):
                await it.engine.generate(prompt, sampling, n=n)
            assert it.relay.request_lines == []

    async def test_a_refusal_is_asked_once(self, kind, opened):
        async with opened(settings={"max_retries": 3}) as it:
            if kind == "atropos":
                pytest.skip("it refuses nothing with a 4xx")
            with pytest.raises(RequestRejected):
                await it.engine.generate([1 << 30], Sampling(max_tokens=4))
            assert len(it.relay.request_lines) == 1

    async def test_a_cancelled_call_closes_its_connection_and_the_server_stops(self, kind, opened):
        async with opened(latency=3600.0) as it:
            sampling = Sampling(max_tokens=450, extra={"ignore_eos": True})
            call = asyncio.create_task(it.engine.generate(await it.chat("Count."), sampling))
            await until(it.busy)
            call.cancel()
            with pytest.raises(asyncio.CancelledError):
                await call
            await asyncio.wait_for(it.relay.closed_by_client.wait(), 20)
            await until(it.cancelled)

    async def test_connections_are_kept(self, opened):
        async with opened() as it:
            prompt = await it.chat("Hi")
            for _ in range(3):
                await it.engine.generate(prompt, Sampling(max_tokens=1))
            assert it.relay.connections == 1

    async def test_the_check_is_free(self, opened):
        async with opened() as it:
            assert await it.engine.check() in (["fake"], ["smollm2"])
            assert it.relay.request_lines == ["GET /v1/models"]

    async def test_how_it_was_sampled_is_told_with_everything_that_was_sent(self, opened):
        async with opened(settings={"extra_body": {"min_tokens": 1}}) as it:
            [result] = await it.engine.generate(await it.chat("Hi"), Sampling(max_tokens=2, temperature=0.5))
            assert result.sampling["temperature"] == 0.5
            assert result.sampling["min_tokens"] == 1
            assert result.sampling["logprobs"] == it.engine.logprobs
            assert (sampling_problem({**result.sampling, "min_tokens": 0}) is None) == (it.engine.logprobs != "raw")
            assert sampling_problem(result.sampling) is not None

    async def test_other_samplers_are_off(self, opened):
        """No matter what the server would do by itself: llama.cpp has top_k 40, top_p 0.95, min_p 0.05."""
        async with opened() as it:
            result = await it.engine.generate(await it.chat("Tell me a story."), Sampling(max_tokens=30, temperature=5))
            assert min(result[0].logprobs) < math.log(1e-3)

    async def test_many_at_once(self, opened):
        async with opened(settings={"max_concurrency": 2}) as it:
            prompt = await it.chat("Hi")
            results = await asyncio.gather(*(it.engine.generate(prompt, Sampling(2)) for _ in range(6)))
            assert all(len(result) == 1 for result in results)
            assert it.relay.connections <= 2

    async def test_after_closing_it_opens_again(self, opened):
        async with opened() as it:
            prompt = await it.chat("Hi")
            await it.engine.generate(prompt, Sampling(1))
            await it.engine.close()
            await it.engine.generate(prompt, Sampling(1))
            assert it.relay.connections == 2

    async def test_a_mode_that_it_does_not_have_is_refused(self, kind):
        has = set(ENGINES.load(kind).modes)
        for mode in {"raw", "temperature", "processed"} - has:
            with pytest.raises(ValueError, match=r"openai\.logprobs_mode"):
                create_engine(kind, ServerSettings("http://x/v1", "m", logprobs_mode=mode))
        for mode in has:
            assert create_engine(kind, ServerSettings("http://x/v1", "m", logprobs_mode=mode)).logprobs == mode


@pytest.mark.parametrize("kind", FAKED)
async def test_a_key_that_is_wrong_is_said_so_at_once(kind):
    async with bench(kind, None, api_key="right", settings={"api_key": "wrong", "max_retries": 5}) as it:
        with pytest.raises(Unauthorized, match="api_key") as caught:
            await it.engine.generate([5], Sampling(1))
        assert "wrong" not in str(caught.value)
        assert len(it.relay.request_lines) == 1


@pytest.mark.parametrize("kind", ["vllm", "vllm-generate", "sglang"])
async def test_the_version_of_the_weights_comes_with_the_tokens(kind):
    async with bench(kind, None, weight_version="step-7") as it:
        assert [one.model_version for one in await it.engine.generate([5], Sampling(1), n=2)] == ["step-7"] * 2
        it.server.update_weights("step-8", seed=1)
        assert [one.model_version for one in await it.engine.generate([5], Sampling(1))] == ["step-8"]


@pytest.mark.parametrize("kind", FAKED)
@pytest.mark.parametrize("mode", ["raw", "processed"])
async def test_logprobs_are_of_what_the_settings_say(kind, mode):
    if kind == "sglang":
        pytest.skip("has neither, without its own switch")
    async with bench(kind, None, logprobs_mode=mode, settings={"logprobs_mode": mode}) as it:
        sampling = Sampling(max_tokens=8, temperature=0.6, top_k=20, top_p=0.9)
        [one] = await it.engine.generate([5, 6], sampling)
        assert list(one.logprobs) == pytest.approx(it.server.model.score([5, 6], one.ids, sampling, mode))


def test_an_unknown_kind_is_told_the_known_ones():
    with pytest.raises(ValueError, match=r"'ollama'\. .*vllm, vllm-generate, sglang, atropos, llama\.cpp"):
        create_engine("ollama", ServerSettings("http://x/v1", "m"))


@given(st.lists(st.integers(0, 3), max_size=12), st.data())
def test_an_id_is_told_only_if_it_can_be_no_other(ids, data):
    kept = [place for place in range(len(ids)) if data.draw(st.booleans())]
    listed = [ids[place] for place in kept]
    told = align(ids, listed)
    ways = [way for way in itertools.combinations(range(len(ids)), len(kept)) if [ids[p] for p in way] == listed]
    for place, which in enumerate(told):
        if which is not None:
            assert all(way[which] == place for way in ways)
    for index in range(len(listed)):
        if len({way[index] for way in ways}) == 1:
            assert told[ways[0][index]] == index


def test_what_is_no_part_of_the_ids_tells_nothing():
    assert align([1, 2, 3], [2, 1]) == [None, None, None]
    assert align([1, 2], [1, 2, 3]) == [None, None]
