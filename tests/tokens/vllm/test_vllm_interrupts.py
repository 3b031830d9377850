"""Weight updates of a real vLLM in mid-completion: `/pause`, `reload_weights`, `/resume` and `/abort_requests`."""

from __future__ import annotations

import asyncio
import shutil
import subprocess
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import aiohttp
import pytest
from real_vllm import FOLDER, HOME, ROUNDING, OneVLLM, RealVLLM, difference, forward_pass

from lachesis_client.sampling import Sampling
from lachesis_messages.history import MessageHistory
from lachesis_messages.messages import FinishReason
from lachesis_messages.tokens import TokenPrefix
from lachesis_tokens.engines import create_engine
from lachesis_tokens.engines.base import Generation
from lachesis_tokens.prompts.prompts import PromptBuilder
from lachesis_tokens.samples.samples import samples
from lachesis_tokens.samples.verification import verify
from lachesis_tokens.server.token_server import TokenServer

LONG = Sampling(max_tokens=120, extra={"ignore_eos": True})
HALVED = """
import sys
from safetensors.torch import load_file, save_file
weights = load_file(sys.argv[1])
weights["model.norm.weight"] = weights["model.norm.weight"] * 0.5
save_file(weights, sys.argv[2], metadata={"format": "pt"})
"""


class Control:
    """vLLM's routes for weight updates."""

    def __init__(self, vllm: RealVLLM) -> None:
        self.vllm = vllm
        self.url = vllm.base_url.removesuffix("/v1")

    async def post(self, path: str, body: Any = None) -> Any:
        async with aiohttp.ClientSession() as session, session.post(self.url + path, json=body or {}) as answer:
            assert answer.status == 200, await answer.text()
            return await answer.json()

    async def sampled(self, tokens: int) -> None:
        """Wait until the server has sampled this many more tokens."""
        wanted = await self.vllm.counter("vllm:generation_tokens_total") + tokens
        while await self.vllm.counter("vllm:generation_tokens_total") < wanted:  # noqa: ASYNC110
            await asyncio.sleep(0.05)

    async def load(self, folder: Path, version: str) -> None:
        await self.post("/collective_rpc", {"method": "reload_weights", "kwargs": {"weights_path": str(folder)}})
        await self.post("/update_weight_version", {"new_version": version})


@pytest.fixture
def updated(one_vllm: OneVLLM, monkeypatch: pytest.MonkeyPatch) -> RealVLLM:
    """vLLM with the routes for weight updates."""
    monkeypatch.setenv("VLLM_SERVER_DEV_MODE", "1")
    return one_vllm.running("--enable-scale-out", "--seed", "0")  # other flags: another server


@pytest.fixture(params=["vllm", "vllm-generate"])
async def server(updated: RealVLLM, tokenizer: Any, request: pytest.FixtureRequest) -> AsyncIterator[TokenServer]:
    engine = create_engine(request.param, updated.settings())
    yield TokenServer([engine], PromptBuilder(tokenizer), "hermes")
    await engine.close()


@pytest.fixture(scope="module")
def halved(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The model with its last norm halved: a policy whose logprobs differ by tenths and more."""
    folder = tmp_path_factory.mktemp("weights") / "halved"
    shutil.copytree(FOLDER, folder)
    (folder / "model.safetensors").unlink()
    command = [str(HOME / "bin" / "python"), "-c", HALVED]
    subprocess.run([*command, str(FOLDER / "model.safetensors"), str(folder / "model.safetensors")], check=True)
    return folder


async def test_aborted_completions_go_on_with_the_same_logprobs(
    server: TokenServer, updated: RealVLLM, prompts: list[list[int]]
) -> None:
    control = Control(updated)
    running = asyncio.create_task(server.generate(TokenPrefix(prompts[0]), LONG, n=3))
    for _ in range(3):
        await control.sampled(20)
        await control.post("/abort_requests")
    found = await running
    assert all(len(each.ids) == 120 and each.finish_reason is FinishReason.LENGTH for each in found)
    assert sum(each.interrupts for each in found) > 3
    gap = difference([each.logprobs for each in found], forward_pass([(prompts[0], each.ids) for each in found]))
    print(f"{server.servers[0].kind}: {sum(each.interrupts for each in found)} interrupts, {gap}")
    assert gap.largest < ROUNDING


@pytest.mark.parametrize("mode", ["abort", "keep"])
async def test_tokens_before_and_after_an_update_are_of_their_own_policy(
    server: TokenServer, updated: RealVLLM, prompts: list[list[int]], halved: Path, mode: str
) -> None:
    control = Control(updated)
    await control.post("/update_weight_version", {"new_version": "whole"})
    running = asyncio.create_task(server.generate(TokenPrefix(prompts[1]), LONG, n=2))
    try:
        await control.sampled(40)
        await control.post(f"/pause?mode={mode}")
        await control.load(halved, "halved")
        await control.post("/resume")
        found = await running
    finally:
        await control.load(FOLDER, "whole")
    reports = server.servers[0].kind == "vllm-generate"
    for each in found:
        assert len(each.ids) == 120
        assert each.interrupts == (mode == "abort")
        assert bool(each.versions) == reports
        if reports:
            (first, start, middle), (second, begin, end) = each.versions
            assert (first, start, begin, second, end) == ("whole", 0, middle, "halved", 120)
            _assert_of(prompts[1], each, middle, halved, exact=mode == "abort")


def _assert_of(prompt: list[int], each: Generation, middle: int, halved: Path, *, exact: bool) -> None:
    """Up to `middle` the model's own policy, after it the other one; `exact` if its cache was computed anew."""
    [whole] = forward_pass([(prompt, each.ids)])
    [half] = forward_pass([(prompt, each.ids)], model=halved)
    assert difference([each.logprobs[:middle]], [whole[:middle]]).largest < ROUNDING
    after = difference([each.logprobs[middle:]], [half[middle:]])
    print(f"{middle} tokens, then {after}")
    assert after.largest < ROUNDING if exact else after.mean < 0.05
    assert difference([each.logprobs[middle:]], [whole[middle:]]).mean > 0.1


async def test_a_rollout_over_updates_verifies(server: TokenServer, updated: RealVLLM) -> None:
    control = Control(updated)
    managed, history = server.for_rollout(), MessageHistory([{"role": "user", "content": "Tell me a long story."}])
    for turn in range(2):
        running = asyncio.create_task(managed.chat(history, max_tokens=100, temperature=1.0))
        await control.sampled(20)
        await control.post("/pause?mode=abort")
        await control.post("/update_weight_version", {"new_version": f"step-{turn}"})
        await control.post("/resume")
        history.append(await running)
        history.append({"role": "user", "content": "And then?"})
    (sample,) = samples(history, rollout_id="r", outcome="completed")
    assert verify(sample) == []
    assert [span.interrupts for span in sample.spans] == [1, 1]
    gap = difference(
        [sample.logprobs[span.start : span.end] for span in sample.spans],
        forward_pass([(sample.tokens[: span.start], sample.tokens[span.start : span.end]) for span in sample.spans]),
    )
    assert gap.largest < ROUNDING
