"""What real clients do to conversations: nothing is lost, doubled or put after another prompt.

`make test` plays 500 behaviours, `make test-all` 10,000.
"""

from __future__ import annotations

from collections import Counter
from random import Random

import aiohttp
import pytest

from lachesis_testing.fake_server import fake_tokenizer
from lachesis_tokens.endpoint import RecordingEndpoint
from lachesis_tokens.prompts.prompts import PromptBuilder
from lachesis_tokens.samples.samples import samples
from lachesis_tokens.samples.verification import verify, verify_records
from tests.support.exactness import stack, trained
from tests.support.strange_clients import MARK, Model, Program

STEPS = 25
PARTS = [range(20), *(pytest.param(range(start, start + 20), marks=pytest.mark.long) for start in range(20, 400, 20))]
PROMPTS = PromptBuilder(fake_tokenizer())


@pytest.mark.slow
@pytest.mark.parametrize("seeds", PARTS, ids=str)
async def test_whatever_clients_do_every_sampled_token_is_trained_once_after_its_prompt(seeds: range) -> None:
    done: Counter[str] = Counter()
    for seed in seeds:
        done += await play(seed)
    print(f"\n{sum(done.values())} behaviours: {dict(done)}")


async def play(seed: int) -> Counter[str]:
    rng = Random(seed)
    async with (
        stack(PROMPTS.tokenizer, prompts=PROMPTS, policy=Model(rng), latency=(0.0, 0.004)) as world,
        RecordingEndpoint(world.tokens, ping_interval=0.002) as endpoint,
        aiohttp.ClientSession() as http,
    ):
        recording = endpoint.open()
        program = Program(world, recording, http, rng)
        await program.play(STEPS)
        await recording.close()
        assert recording.error is None
        program.judge()
        program.judge_history()
        found = samples(recording.history(), rollout_id=f"r{seed}", outcome="completed")
        sampled, delivered = world.sampled(), trained(found)
        assert not delivered - sampled, "trained twice, or after another prompt"
        missing = sampled - delivered
        assert sum(missing.values()) <= program.left, "not delivered"
        for _, ids, _ in missing:  # the client was gone before the answer was read
            assert not program.received.intersection(MARK.findall(world.text(ids))[:1]) - {"A0"}
        for sample in found:
            assert not (reasons := verify(sample)), reasons
        totals = verify_records([sample.to_record() for sample in found])
        assert totals.ok, totals.problems
        assert (totals.delivered, totals.duplicated, totals.wrong_prefix) == (totals.sampled, 0, 0)
    return program.done
