"""Tokens and their cost: of each rollout and of a run, with lost attempts, and unknown where nobody counted."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from backends.errors import SettingsError
from lachesis.figures.costs import Prices, prices_of
from lachesis.figures.figures import Figures
from lachesis.settings.server_settings import ServerConfig
from tests.support.scripted_server import ScriptedServer, call, say
from tests.support.small_envs import ManyWords, SortWords, make, rollouts, sorts

PRICES = {"price_per_million_input": 2.0, "price_per_million_output": 10.0, "price_per_million_cached_input": 0.5}
COUNT = st.integers(0, 10**7)


async def play(folder: Path, policy: Any, prices: dict[str, float], **settings: Any) -> Any:
    async with ScriptedServer(policy) as server:
        env = make(SortWords, server, folder, **settings)
        env.server_configs = [each.model_copy(update=prices) for each in env.server_configs]
        return await env.process_manager()


async def test_a_run_says_what_its_tokens_cost_and_so_does_each_rollout(tmp_path: Path) -> None:
    result = await play(tmp_path, sorts, PRICES)
    played = rollouts(result.files.groups)
    assert len(played) == 4
    for each in played:
        assert each["prompt_tokens"] > 0 and each["completion_tokens"] > 0
        assert each["cost"] == pytest.approx((each["prompt_tokens"] * 2 + each["completion_tokens"] * 10) / 1e6)
    total = sum(each["cost"] for each in played)
    assert result.summary.cost == pytest.approx(total)
    rows = dict(result.rows())
    assert rows["cost"] == f"{total:.4f}, {total / 4:.4f} a rollout"
    assert f"{sum(each['prompt_tokens'] for each in played)} of prompts" in rows["tokens"]
    assert f"<dt>cost</dt><dd>{total:.4f}</dd>" in result.files.report.read_text()


async def test_without_prices_nothing_speaks_of_a_cost(tmp_path: Path) -> None:
    result = await play(tmp_path, sorts, {})
    assert all("cost" not in each for each in rollouts(result.files.groups))
    assert "cost" not in dict(result.rows()) and result.summary.cost is None


async def test_attempts_that_broke_are_paid_too(tmp_path: Path) -> None:
    def breaks_once(request: dict[str, Any]) -> Any:
        if request["messages"][-1]["role"] == "tool":
            return say("Done.")
        breaks_once.calls += 1  # type: ignore[attr-defined]
        deadly = "kill -9 $PPID; sleep 1000"
        return call(("terminal", {"command": deadly if breaks_once.calls == 1 else "echo a > sorted.txt"}))  # type: ignore[attr-defined]

    breaks_once.calls = 0  # type: ignore[attr-defined]
    settings = {"total_steps": 1, "group_size": 1, "sandbox": "none", "max_infra_retries": 2}
    result = await play(tmp_path, breaks_once, PRICES, **settings)
    [rollout] = rollouts(result.files.groups)
    assert rollout["attempts"] == 2 and rollout["lost_prompt_tokens"] > 0 and rollout["lost_completion_tokens"] > 0
    prompt = rollout["prompt_tokens"] + rollout["lost_prompt_tokens"]
    sampled = rollout["completion_tokens"] + rollout["lost_completion_tokens"]
    assert rollout["cost"] == pytest.approx((prompt * 2 + sampled * 10) / 1e6)
    assert f"{prompt} of prompts, {sampled} sampled" in dict(result.rows())["tokens"]


async def test_a_server_that_counts_nothing_costs_an_unknown_amount_and_not_0(tmp_path: Path) -> None:
    def uncounted(request: dict[str, Any]) -> Any:
        return {**sorts(request), "usage": None}

    result = await play(tmp_path, uncounted, PRICES, total_steps=1)
    assert [each["cost"] for each in rollouts(result.files.groups)] == [None, None]
    rows = dict(result.rows())
    assert rows["cost"] == "unknown for 2 of 2 rollouts" and rows["tokens"].startswith("unknown")
    assert not {"total_cost", "avg_cost", "prompt_tokens"} & result.summary.cost_metrics().keys()


async def test_an_evaluation_writes_them_into_its_metrics(tmp_path: Path) -> None:
    async with ScriptedServer(sorts) as server:
        env = make(ManyWords, server, tmp_path, eval_items=2)
        env.server_configs = [each.model_copy(update=PRICES) for each in env.server_configs]
        result = await env._run_evaluate()
    metrics = json.loads((tmp_path / "eval" / "metrics.json").read_text())["results"]["all"]
    assert metrics["eval/total_cost"] == pytest.approx(result.summary.cost)
    assert metrics["eval/avg_cost"] == pytest.approx(metrics["eval/total_cost"] / 2)


@given(COUNT, COUNT, COUNT, COUNT, COUNT)
def test_a_cost_is_a_sum_over_tokens(prompt: int, lost: int, cached: int, sampled: int, more: int) -> None:
    record = {"prompt_tokens": prompt + cached + 1, "cached_tokens": cached, "completion_tokens": sampled}
    prices = Prices(2.0, 10.0, 0.5)
    first = prices.of(record)
    assert first == pytest.approx(((prompt + 1) * 2 + cached * 0.5 + sampled * 10) / 1e6)
    again = prices.of({**record, "lost_prompt_tokens": lost, "lost_completion_tokens": more})
    assert again == pytest.approx(first + (lost * 2 + more * 10) / 1e6)
    assert prices.of({**record, "uncounted_requests": 1}) is None
    assert replace(prices, cached_input=2.0).of(record) == pytest.approx(
        ((prompt + cached + 1) * 2 + sampled * 10) / 1e6
    )


def test_what_is_known_in_part_is_said_as_a_lower_bound() -> None:
    def rollout(cost: float | None) -> dict[str, Any]:
        return {"reward": 1.0, "outcome": "completed", "turns": 1, "tool_calls": 0, "tool_errors": [], "discarded": [],
                "metrics": {}, "seconds": 1.0, "cost": cost}  # fmt: skip

    figures = Figures()
    figures.add({"item_key": "a-0", "rollouts": [rollout(0.25), rollout(None)]})
    assert dict(figures.summary().cost_rows())["cost"] == "at least 0.2500; unknown for 1 of 2 rollouts"


@pytest.mark.parametrize(
    ("configs", "said"),
    [
        ([{"price_per_million_input": 1.0}], "both"),
        ([{"price_per_million_cached_input": 1.0}], "both"),
        ([PRICES, {}], "same prices"),
    ],
)
def test_prices_that_leave_a_cost_open_are_refused(configs: list[dict[str, float]], said: str) -> None:
    with pytest.raises(SettingsError, match=said):
        prices_of([ServerConfig(**each) for each in configs])
    assert prices_of([ServerConfig()]) is None
    assert prices_of([ServerConfig(price_per_million_input=1, price_per_million_output=2)]) == Prices(1, 2, 1)
