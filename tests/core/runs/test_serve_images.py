"""`serve` and `process` with images in user messages and tool results: what a trainer gets, and what the files hold."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from lachesis_client.sampling import Sampling
from lachesis_data.exports.builtin_exports import token_samples
from lachesis_data.exports.exports import export_group
from lachesis_envs.harbor.regrading import Graded, regraded_groups
from lachesis_messages.records.export_lines import ExportTotals
from lachesis_messages.records.jsonl import read_lines
from lachesis_testing.fake_server import FakeServer, ToolUser
from lachesis_testing.fake_server.images import seen_ids
from lachesis_tokens.samples.sample_records import read_sample
from lachesis_tokens.samples.verification import verify_records
from lachesis_tools import BUILTIN_TOOLS, ToolResult, tool
from tests.support.pictures import image, png, text
from tests.support.stock_run_api import StockRunApi, run_api
from tests.support.training_runs import CoinToss, environment, proven, serving, trained, with_tokens

__all__ = ["run_api"]

SHOTS = itertools.count()


@tool(toolset="screen")
async def screenshot() -> ToolResult:
    """Take a picture of the screen."""
    return ToolResult("The screen:", images=(png(56, 56, next(SHOTS) % 256),))


class Pictures(CoinToss):
    """The task and every tool result have an image."""

    name = "pictures"
    tools = BUILTIN_TOOLS.extended(screenshot)

    def format_prompt(self, item: Any) -> list[dict[str, Any]]:
        return [text(f"Describe {item!r}: "), image(84, 56, len(item))]

    async def compute_reward(self, item: Any, result: Any, ctx: Any) -> float:
        return float(next(SHOTS))


async def test_serve_sends_the_images_that_the_model_saw_once(tmp_path: Path, run_api: StockRunApi) -> None:
    async with run_api.wiped() as api, FakeServer(ToolUser(), images=True) as model:
        server = with_tokens(model, tmp_path).model_copy(update={"engine": "vllm-generate"})
        limits = {"max_agent_turns": 6, "max_token_length": 120, "enabled_toolsets": ["screen"]}
        env = serving(tmp_path, api, server, Pictures, **limits)
        trainer = await trained(env, api, groups=2, steps=1)
        samples = proven(trainer)
        asked = [seen.call for seen in model.requests if seen.call is not None]
        calls = {(tuple(call.prompts[0]), tuple(shown.sha256 for shown in call.images)): call for call in asked}
        for sample in samples:
            assert len(sample.spans) == 4 and [placed.tokens for placed in sample.images] == [6, 4, 4, 4]
            for span in sample.spans:
                seen = tuple(placed.image.sha256 for placed in sample.images if placed.start < span.start)
                call = calls[tuple(sample.tokens[: span.start]), seen]
                ids = sample.tokens[span.start : span.end]
                scored = model.model.score(seen_ids(call.prompts[0], call.images), ids, Sampling(max_tokens=1))
                assert scored == sample.logprobs[span.start : span.end]
    for group in trainer.groups:
        assert list(map(len, group["images"])) == [4, 3], "the image of the prompt, which siblings share, is sent once"


async def processed(folder: Path, **settings: Any) -> dict[str, Any]:
    """A group of `process`."""
    async with FakeServer(ToolUser(), images=True) as model:
        server = with_tokens(model, folder).model_copy(update={"engine": "sglang", "server_type": "sglang"})
        env = environment(Pictures, folder, server, max_agent_turns=6, enabled_toolsets=["screen"], **settings)
        await env.process_manager()
    (record,) = read_lines(folder / "groups.jsonl")
    return dict(record)


async def test_process_writes_the_images_and_verify_misses_none(tmp_path: Path) -> None:
    record = await processed(tmp_path)
    assert verify_records([record]).ok
    first, second = record["samples"]
    assert len(first["image_data"]) == 4 and len(second["image_data"]) == 3
    spoils: list[Callable[[dict[str, Any]], Any]] = [
        lambda sample: sample.pop("image_data"),
        lambda sample: sample["images"][0].update(start=sample["images"][0]["start"] + 1),
        lambda sample: sample["images"].pop(),
        lambda sample: sample["images"][2].update(sha256=sample["images"][1]["sha256"]),
        lambda sample: sample["image_data"].update({sample["images"][1]["sha256"]: png(28, 28, 9)}),
    ]
    for spoil in spoils:
        (record,) = read_lines(tmp_path / "groups.jsonl")
        spoil(record["samples"][0])
        assert not verify_records([record]).ok


@pytest.mark.parametrize("branches", [{}, {"group_size": 8, "tree_at": "turns:2,3"}])
async def test_a_sample_that_leaves_its_group_has_the_data_of_its_images(
    branches: dict[str, Any], tmp_path: Path
) -> None:
    group = await processed(tmp_path, **branches)
    good = sorted(group["scores"])[len(group["scores"]) // 2]
    lines = [line.content for line in export_group(token_samples, group, ExportTotals())]
    best = [line.content for line in export_group(token_samples, group, ExportTotals(), min_reward=good)]
    assert len(lines) == len(best) * 2 == len(group["rollouts"])
    for line in [*lines, *best]:
        assert line["image_data"].keys() == {each["sha256"] for each in line["images"]}
        assert all(line["image_data"].values())
    assert verify_records(lines).ok and verify_records(best).ok


async def test_the_other_rollouts_of_a_group_have_its_images_when_one_loses_its_score(tmp_path: Path) -> None:
    group = await processed(tmp_path)
    lost = group["rollouts"][0]
    lost["verifier"] = {"artifacts": "", "diff": ""}
    (regraded,) = regraded_groups([group], {lost["rollout_id"]: Graded(None, {}, "the sandbox is gone")})
    (sample,) = regraded["samples"]
    assert len(sample["image_data"]) == 4 and read_sample(sample).images[0].image.url
    assert next(regraded_groups([group], {}))["samples"] == group["samples"]
