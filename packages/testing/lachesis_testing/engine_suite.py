"""The conformance suite of token engines, for pytest with pytest-asyncio.

    class TestMyEngine(EngineSuite):
        engine = "my_engine:MyEngine"

By default the engine talks to a `FakeServer`. Override the fixture `opened` for an engine with another API: it opens a
`Bench`, your engine with its server.
"""

from __future__ import annotations

import asyncio
import math
from collections.abc import Mapping
from contextlib import AbstractAsyncContextManager
from typing import Any, ClassVar, Final

import pytest

from lachesis.other_packages import ENGINES
from lachesis_client.client_settings import ServerSettings
from lachesis_client.errors import ContextExhausted, RequestRejected, ServerUnavailable
from lachesis_client.sampling import LogprobsKind, Sampling
from lachesis_messages.messages import FinishReason
from lachesis_messages.records.sampling_record import sampling_problem
from lachesis_testing.engine_bench import Bench, OpenBench, fake_bench, until
from lachesis_testing.fake_server import Lengths, RandomTokens
from lachesis_tokens.engines import TokenEngine, create_engine
from lachesis_tokens.engines.base import ServerTokenizer

GREETING: Final = "Hello there. I'm here to help with any kind of math."
KINDS: Final[frozenset[LogprobsKind]] = frozenset({"raw", "temperature", "processed"})
FLOAT_NOISE: Final = 5e-3
"""llama.cpp adds in another order when it reads a prompt than when it samples: Q4 weights, 16-bit cache."""


class EngineSuite:
    """The tests that every token engine passes. Subclass it and set `engine`."""

    engine: ClassVar[str]
    """Its name, or `package.module:Class`."""
    constraint: ClassVar[Mapping[str, Any]] = {"min_tokens": 1}
    """A field of `extra_body` that the server takes, and that a trainer cannot follow."""
    pytestmark = pytest.mark.asyncio

    @pytest.fixture
    def engine_name(self) -> str:
        return self.engine

    @pytest.fixture
    def opened(self, engine_name: str) -> OpenBench:
        def open_bench(policy: Any = None, **server: Any) -> AbstractAsyncContextManager[Bench]:
            return fake_bench(engine_name, policy, **server)

        return open_bench

    async def test_it_is_a_token_engine(self, opened: OpenBench) -> None:
        async with opened() as it:
            assert isinstance(it.engine, TokenEngine)
            assert it.engine.kind and set(it.engine.modes) <= KINDS

    async def test_the_end_of_turn_token_is_the_last_id_and_has_a_logprob(self, opened: OpenBench) -> None:
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

    async def test_the_server_confirms_the_prompt(self, opened: OpenBench) -> None:
        async with opened() as it:
            for n in (1, 2):
                for one in await it.engine.generate(await it.chat("Hi"), Sampling(max_tokens=2), n=n):
                    assert one.prompt_checked in ("ids", "length"), "call check_prompt with what the answer says of it"

    async def test_what_it_says_of_text_is_what_the_server_makes_of_it(self, opened: OpenBench) -> None:
        async with opened() as it:
            if not isinstance(it.engine, ServerTokenizer):
                pytest.skip("an engine may have no tokenize()")
            text = "Largest <|im_start|>: 東京, 37 million\n"
            assert await it.engine.tokenize(text) in (None, await it.encode(text))

    async def test_every_id_has_its_own_logprob(self, opened: OpenBench) -> None:
        async with opened(RandomTokens(Lengths(12, 12))) as it:
            prompt, sampling = await it.chat("Tell me a story."), Sampling(max_tokens=12, temperature=0.7, seed=11)
            [one] = await it.engine.generate(prompt, sampling)
            assert len(one.ids) == len(one.logprobs) > 0
            assert all(math.isfinite(logprob) and logprob <= 0 for logprob in one.logprobs)
            expected = await it.score(prompt, one.ids, sampling)
            assert one.logprobs == pytest.approx(expected, abs=FLOAT_NOISE)

    async def test_n_completions_each_with_its_own_tokens(self, opened: OpenBench) -> None:
        async with opened() as it:
            prompt = await it.chat("Tell me a story.")
            result = await it.engine.generate(prompt, Sampling(max_tokens=8), n=3)
            assert len(result) == 3
            assert len({tuple(one.ids) for one in result}) > 1
            for one in result:
                assert len(one.ids) == len(one.logprobs)

    async def test_max_tokens_is_the_number_of_ids(self, opened: OpenBench) -> None:
        async with opened(GREETING) as it:
            sampling = Sampling(max_tokens=5, temperature=0.0)
            [one] = await it.engine.generate(await it.chat("Say hi."), sampling)
            assert len(one.ids) == len(one.logprobs) == 5
            assert one.finish_reason is FinishReason.LENGTH

    async def test_one_token_is_enough(self, opened: OpenBench) -> None:
        async with opened(GREETING) as it:
            [one] = await it.engine.generate(await it.chat("Say hi."), Sampling(max_tokens=1))
            assert len(one.ids) == len(one.logprobs) == 1

    @pytest.mark.parametrize("stop", [("ere t",), (" help with", "never")])
    async def test_the_tokens_of_a_stop_text_are_sampled_tokens(self, opened: OpenBench, stop: tuple[str, ...]) -> None:
        async with opened(GREETING) as it:
            prompt, sampling = await it.chat("Say hi."), Sampling(max_tokens=60, temperature=0.0, stop=stop)
            [one] = await it.engine.generate(prompt, sampling)
            whole, without_last = await it.decode(one.ids), await it.decode(one.ids[:-1])
            assert stop[0] in whole
            assert stop[0] not in without_last
            assert one.finish_reason is FinishReason.STOP
            assert len(one.ids) == len(one.logprobs)
            assert one.logprobs == pytest.approx(await it.score(prompt, one.ids, sampling), abs=FLOAT_NOISE)

    async def test_a_seed_repeats_itself_and_another_does_not(self, opened: OpenBench) -> None:
        async with opened() as it:
            prompt, extra = await it.chat("Tell me a story."), it.repeatable
            seeds = [(await it.engine.generate(prompt, Sampling(8, seed=seed, extra=extra))) for seed in (7, 7, 8)]
            first, again, other = ([list(one.ids) for one in result] for result in seeds)
            assert first == again
            assert first != other

    async def test_temperature_zero_is_greedy_whatever_the_seed(self, opened: OpenBench) -> None:
        async with opened() as it:
            prompt, extra = await it.chat("Tell me a story."), it.repeatable
            answers = [
                (await it.engine.generate(prompt, Sampling(8, temperature=0.0, seed=seed, extra=extra)))[0]
                for seed in (1, 2)
            ]
            assert answers[0].ids == answers[1].ids

    async def test_several_greedy_completions_are_possible_everywhere(self, opened: OpenBench) -> None:
        """vLLM answers 400 for `n` above 1 at temperature 0."""
        async with opened() as it:
            result = await it.engine.generate(await it.chat("Hi"), Sampling(4, temperature=0.0), n=3)
            assert len(result) == 3

    async def test_special_tokens_are_ids_like_any_other(self, opened: OpenBench) -> None:
        async with opened() as it:
            [start] = await it.encode("<|im_start|>")
            sampling = it.forced(start, Sampling(max_tokens=3))
            [one] = await it.engine.generate(await it.chat("Hi"), sampling)
            assert one.ids == [start] * 3
            assert len(one.logprobs) == 3

    async def test_an_end_of_turn_at_once_is_a_completion_of_one_token(self, opened: OpenBench) -> None:
        async with opened() as it:
            sampling = it.forced(it.end_of_turn, Sampling(max_tokens=3))
            [one] = await it.engine.generate(await it.chat("Hi"), sampling)
            assert one.ids == [it.end_of_turn]
            assert one.finish_reason is FinishReason.STOP
            assert len(one.logprobs) == 1

    async def test_tokens_of_half_a_character_are_tokens(self, opened: OpenBench) -> None:
        pieces = "🤖🦊🪐" * 2
        async with opened(pieces) as it:
            prompt = await it.encode("🤖🦊🪐" * 3)
            [one] = await it.engine.generate(prompt, Sampling(max_tokens=12, temperature=0.0))
            assert set(await it.decode(one.ids)) & set(pieces)
            assert len(one.ids) == len(one.logprobs) == 12
            assert list(one.logprobs) == pytest.approx(await it.look_up(prompt, one.ids), abs=FLOAT_NOISE)

    async def test_the_prompt_is_taken_as_it_is(self, opened: OpenBench) -> None:
        """Special tokens twice, no beginning-of-text token, an end inside a character: nothing is added or repaired."""
        async with opened() as it:
            [end] = await it.encode("<|im_end|>")
            for prompt in ([end, end, *await it.encode(" x")], (await it.encode("🦊"))[:-1]):
                [one] = await it.engine.generate(prompt, Sampling(2, temperature=0.0))
                assert list(one.logprobs) == pytest.approx(await it.look_up(prompt, one.ids), abs=FLOAT_NOISE)

    async def test_a_prompt_beyond_the_context_is_context_exhausted(self, opened: OpenBench) -> None:
        async with opened(context_length=512, settings={"max_retries": 0}) as it:
            with pytest.raises(ContextExhausted if it.rejects else ServerUnavailable):
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
    async def test_a_request_that_no_engine_answers_rightly_is_not_sent(
        self, opened: OpenBench, prompt: list[int], sampling: Sampling, n: int, named: str
    ) -> None:
        async with opened() as it:
            with pytest.raises(ValueError, match=named):
                await it.engine.generate(prompt, sampling, n=n)
            assert it.relay.request_lines == []

    async def test_a_rejected_request_is_sent_once(self, opened: OpenBench) -> None:
        async with opened(settings={"max_retries": 3}) as it:
            if not it.rejects:
                pytest.skip("the server answers no 4xx")
            with pytest.raises(RequestRejected):
                await it.engine.generate([1 << 30], Sampling(max_tokens=4))
            assert len(it.relay.request_lines) == 1

    async def test_a_cancelled_call_closes_its_connection_and_the_server_stops(self, opened: OpenBench) -> None:
        async with opened(latency=3600.0) as it:
            sampling = Sampling(max_tokens=450, extra={"ignore_eos": True})
            call = asyncio.create_task(it.engine.generate(await it.chat("Count."), sampling))
            await until(it.busy)
            call.cancel()
            with pytest.raises(asyncio.CancelledError):
                await call
            await asyncio.wait_for(it.relay.closed_by_client.wait(), 20)
            await until(it.cancelled)

    async def test_connections_are_kept(self, opened: OpenBench) -> None:
        async with opened() as it:
            prompt = await it.chat("Hi")
            for _ in range(3):
                await it.engine.generate(prompt, Sampling(max_tokens=1))
            assert it.relay.connections == 1

    async def test_the_check_requests_no_completion(self, opened: OpenBench) -> None:
        async with opened() as it:
            assert await it.engine.check() == [it.engine.settings.model_name]
            assert it.relay.request_lines == ["GET /v1/models"]

    async def test_the_record_of_sampling_has_everything_that_was_sent(self, opened: OpenBench) -> None:
        [(name, value)] = self.constraint.items()
        async with opened(settings={"extra_body": self.constraint}) as it:
            [result] = await it.engine.generate(await it.chat("Hi"), Sampling(max_tokens=2, temperature=0.5))
            assert result.sampling["temperature"] == 0.5
            assert result.sampling[name] == value
            assert result.sampling["logprobs"] == it.engine.logprobs
            assert (sampling_problem({**result.sampling, name: 0}) is None) == (it.engine.logprobs != "raw")
            assert sampling_problem(result.sampling) is not None

    async def test_other_samplers_are_off(self, opened: OpenBench) -> None:
        """Whatever the server's defaults are: llama.cpp has top_k 40, top_p 0.95, min_p 0.05."""
        async with opened() as it:
            result = await it.engine.generate(await it.chat("Tell me a story."), Sampling(max_tokens=30, temperature=5))
            assert min(result[0].logprobs) < math.log(1e-3)

    async def test_many_at_once(self, opened: OpenBench) -> None:
        async with opened(settings={"max_concurrency": 2}) as it:
            prompt = await it.chat("Hi")
            results = await asyncio.gather(*(it.engine.generate(prompt, Sampling(2)) for _ in range(6)))
            assert all(len(result) == 1 for result in results)
            assert it.relay.connections <= 2

    async def test_after_closing_it_opens_again(self, opened: OpenBench) -> None:
        async with opened() as it:
            prompt = await it.chat("Hi")
            await it.engine.generate(prompt, Sampling(1))
            await it.engine.close()
            await it.engine.generate(prompt, Sampling(1))
            assert it.relay.connections == 2

    async def test_a_mode_that_it_does_not_have_is_rejected(self, engine_name: str) -> None:
        has = set(ENGINES.load(engine_name).modes)
        for mode in KINDS - has:
            with pytest.raises(ValueError, match=r"openai\.logprobs_mode"):
                create_engine(engine_name, ServerSettings("http://x/v1", "m", logprobs_mode=mode))
        for mode in has:
            settings = ServerSettings("http://x/v1", "m", logprobs_mode=mode)
            assert create_engine(engine_name, settings).logprobs == mode
