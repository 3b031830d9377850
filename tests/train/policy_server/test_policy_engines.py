"""The conformance suite of token engines against the policy server: each engine whose API it speaks."""

from __future__ import annotations

from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import Any

import pytest

from lachesis_client.sampling import Sampling
from lachesis_testing.engine_bench import Bench, relayed_engine
from lachesis_testing.engine_suite import EngineSuite
from lachesis_testing.fake_server import Scripted
from lachesis_train.policy import CurrentPolicy, PolicyVersion
from lachesis_train.policy_server import PolicyServer
from tests.support.sampler import FakeSampler


@dataclass
class PolicyBench(Bench):
    sampler: FakeSampler

    async def encode(self, text: str) -> list[int]:
        return self.sampler.codec.encode(text)

    async def decode(self, ids: Sequence[int]) -> str:
        return self.sampler.codec.decode(ids)

    async def score(self, prompt: Sequence[int], ids: Sequence[int], sampling: Sampling) -> list[float]:
        return self.sampler.model.score(prompt, ids, sampling, self.engine.logprobs)

    async def busy(self) -> bool:
        return bool(self.sampler.busy)

    async def cancelled(self) -> bool:
        return bool(self.sampler.cancelled)

    @property
    def end_of_turn(self) -> int:
        return min(self.sampler.model.end_ids)

    def forced(self, token: int, sampling: Sampling) -> Sampling:
        self.sampler.policy = Scripted([token] * sampling.max_tokens)
        return sampling


@asynccontextmanager
async def policy_bench(
    kind: str, policy: Any = None, *, deaf: bool = False, **server: Any
) -> AsyncIterator[PolicyBench]:
    settings: dict[str, Any] = server.pop("settings", {})
    reported = "temperature" if kind == "sglang" else "raw"
    sampler = FakeSampler(policy, latency=server.pop("latency", 0.0), kind=reported, deaf=deaf)
    shared = CurrentPolicy(PolicyVersion(0, "run:0", sampler), logprobs=reported)
    async with (
        PolicyServer(
            shared, sampler.codec.tokenizer, model_name="policy", port=0, **sampler.serving, **server
        ) as running,
        relayed_engine(kind, running.root_url, "policy", settings) as (engine, relay),
    ):
        yield PolicyBench(engine, relay, sampler)


@pytest.mark.parametrize("engine_name", ["vllm", "vllm-generate", "sglang", "atropos"])
class TestEveryEngine(EngineSuite):
    constraint = {"ignore_eos": True}  # noqa: RUF012 - a constant

    @pytest.fixture
    def opened(self, engine_name):
        return lambda policy=None, **server: policy_bench(engine_name, policy, **server)


class TestASamplerThatIgnoresStops(EngineSuite):
    engine = "vllm"
    constraint = {"ignore_eos": True}  # noqa: RUF012 - a constant

    @pytest.fixture
    def opened(self):
        return lambda policy=None, **server: policy_bench("vllm", policy, deaf=True, **server)


@pytest.mark.parametrize("kind", ["vllm", "vllm-generate", "sglang"])
async def test_every_completion_carries_the_version_that_sampled_it(kind):
    async with policy_bench(kind) as it:
        for one in await it.engine.generate([5], Sampling(3), n=2):
            assert one.model_version == "run:0"
            assert one.versions == (("run:0", 0, len(one.ids)),)
            assert one.prompt_checked == "ids"
