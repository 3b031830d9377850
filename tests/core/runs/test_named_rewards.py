"""Methods with `@reward`: the weighted sum, its components by name, and what leaves a rollout without a score."""

from __future__ import annotations

import asyncio
import json
import runpy
import threading
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from lachesis import Reward, reward
from lachesis.base_env import HermesAgentBaseEnv
from lachesis.runs.results import print_result
from lachesis.settings.server_settings import ServerConfig
from tests.support import report_pages
from tests.support.scripted_server import ScriptedServer, say
from tests.support.small_envs import ROOT, SortWords, does_nothing, lines, process, rollouts
from tests.support.training_runs import environment


class Named(SortWords):
    """Named rewards only."""

    compute_reward = HermesAgentBaseEnv.compute_reward

    @reward(weight=0.75)
    async def sorted_words(self, item: Any, result: Any, ctx: Any) -> float:
        return float((await ctx.read_file("sorted.txt")).split() == sorted(item.split()))

    @reward(weight=0.2)
    def brief(self, item: Any, result: Any, ctx: Any) -> float:
        assert threading.current_thread() is not threading.main_thread()
        return 1 / result.turns_used

    @reward(weight=0)
    def bytes_written(self, item: Any, result: Any, ctx: Any) -> int:
        return len(ctx.read_bytes("sorted.txt"))


class Beside(Named):
    """The same beside `compute_reward`, which ends the sandbox: it runs last."""

    async def compute_reward(self, item: Any, result: Any, ctx: Any) -> Any:
        sealed = await ctx.seal(["sorted.txt"])
        assert not sealed.missing
        return Reward(0.5, {"own": 0.25}, turn_rewards=[0.0] * result.turns_used)


async def test_named_rewards_are_a_weighted_sum_and_a_component_each_wherever_metrics_are_shown(tmp_path: Path) -> None:
    result = await process(Named, tmp_path, total_steps=1)
    (group,) = lines(result.files.groups)
    size = len("\n".join(sorted(str(group["item"]).split())))
    metrics = {"reward/sorted_words": 1.0, "reward/brief": 0.5, "reward/bytes_written": float(size)}
    assert group["scores"] == [pytest.approx(0.85)] * 2
    assert [rollout["metrics"] for rollout in group["rollouts"]] == [metrics] * 2
    assert result.summary.metrics == metrics
    with (tmp_path / "table.txt").open("w") as file:
        print_result(Console(file=file, width=100), result)
    assert "reward/bytes_written" in (tmp_path / "table.txt").read_text()
    for shown in report_pages.rollouts(result.files.report.read_text()):
        assert all(name in shown for name in metrics)


async def test_compute_reward_is_added_with_its_components_and_runs_last(tmp_path: Path) -> None:
    result = await process(Beside, tmp_path, total_steps=1, group_size=1)
    (rollout,) = rollouts(result.files.groups)
    assert rollout["reward"] == pytest.approx(0.85 + 0.5)
    assert rollout["metrics"].keys() == {
        *("reward/sorted_words", "reward/brief", "reward/bytes_written", "reward/compute_reward", "reward/own")
    }
    assert (rollout["metrics"]["reward/compute_reward"], rollout["turn_rewards"]) == (0.5, [0.0, 0.0])
    made = [("read_file", "sorted_words"), ("read_bytes", "bytes_written"), ("seal", "compute_reward")]
    assert [(used["method"], used["reward"]) for used in rollout["reward_calls"]] == made
    took, completions = rollout["completions"]["seconds"], rollout["turns"]
    assert len(took) == completions and sum(took) == pytest.approx(rollout["seconds_in_model"], abs=0.01)
    assert rollout["completions"]["usage"] == [[10, 5]] * completions, "as the server counted them"
    assert rollout["reward_weights"] == {"sorted_words": 0.75, "brief": 0.2, "bytes_written": 0, "compute_reward": 1}


async def test_a_subclass_replaces_adds_and_removes_named_rewards(tmp_path: Path) -> None:
    class Changed(Named):
        brief = None

        async def bytes_written(self, item: Any, result: Any, ctx: Any) -> float:
            return 7.0

        @reward
        async def always(self, item: Any, result: Any, ctx: Any) -> float:
            return 1.0

    result = await process(Changed, tmp_path, total_steps=1, group_size=1)
    (rollout,) = rollouts(result.files.groups)
    assert rollout["reward"] == pytest.approx(1.75)
    assert rollout["metrics"] == {"reward/sorted_words": 1.0, "reward/bytes_written": 7.0, "reward/always": 1.0}


@pytest.mark.parametrize(
    ("given", "kind", "problem"),
    [
        (None, "declined", None),
        (ZeroDivisionError("broken"), "environment", "ZeroDivisionError: broken"),
        (float("nan"), "environment", "sort-words: odd returned nan; it must be finite"),
        (Reward(1.0), "environment", "sort-words: odd returned Reward"),
    ],
)
async def test_without_one_of_its_rewards_a_rollout_has_no_score(
    tmp_path: Path, given: Any, kind: str, problem: str | None
) -> None:
    class Odd(Named):
        @reward(weight=0)
        async def odd(self, item: Any, result: Any, ctx: Any) -> Any:
            if isinstance(given, Exception):
                raise given
            return given

        async def compute_reward(self, item: Any, result: Any, ctx: Any) -> float:
            raise AssertionError("it is not called any more")

    result = await process(Odd, tmp_path, total_steps=1, group_size=1)
    (rollout,) = rollouts(result.files.failures)
    assert (rollout["reward"], rollout["unscored_kind"], rollout["metrics"]) == (None, kind, {})
    assert rollout["traceback"] is None if problem is None else problem in rollout["traceback"]


async def test_the_time_limit_is_that_of_all_rewards_together(tmp_path: Path) -> None:
    class Slow(Named):
        @reward
        async def first(self, item: Any, result: Any, ctx: Any) -> float:
            await asyncio.sleep(1.5)
            return 1.0

        @reward
        async def second(self, item: Any, result: Any, ctx: Any) -> float:
            await asyncio.sleep(1.5)
            return 1.0

    result = await process(Slow, tmp_path, total_steps=1, group_size=1, reward_timeout=2)
    (rollout,) = rollouts(result.files.failures)
    assert "the reward took longer than reward_timeout = 2 s" in rollout["traceback"]


async def test_a_reward_of_the_group_replaces_the_score_and_keeps_named_components(tmp_path: Path) -> None:
    class Compared(Named):
        async def compute_group_reward(self, item: Any, results: Any, ctxs: Any) -> Any:
            return [Reward(result.reward.value - 1, {"rank": 2.0}) for result in results]

    result = await process(Compared, tmp_path, total_steps=1, group_size=2)
    for rollout in rollouts(result.files.groups):
        assert rollout["reward"] == pytest.approx(-0.15)
        assert rollout["metrics"].keys() == {
            *("reward/sorted_words", "reward/brief", "reward/bytes_written", "reward/rank")
        }


async def test_a_component_of_compute_reward_cannot_have_the_name_of_a_reward(tmp_path: Path) -> None:
    class Twice(Named):
        async def compute_reward(self, item: Any, result: Any, ctx: Any) -> Any:
            return Reward(1.0, {"brief": 1.0})

    result = await process(Twice, tmp_path, total_steps=1, group_size=1)
    (rollout,) = rollouts(result.files.failures)
    assert "compute_reward returned a component 'brief', the name of another one; rename it" in rollout["traceback"]


async def test_what_the_agent_broke_under_a_named_reward_is_its_fault(tmp_path: Path) -> None:
    result = await process(Named, tmp_path, does_nothing, total_steps=1, group_size=1)
    (rollout,) = rollouts(result.files.groups)
    assert rollout["reward"] == 0.0 and "read_bytes" in rollout["agent_fault"]


def test_a_wrong_use_of_the_decorator_is_an_error_where_it_is_written() -> None:
    with pytest.raises(TypeError, match="the weight of a reward is a finite number, not nan"):
        reward(weight=float("nan"))
    with pytest.raises(TypeError, match=r"a weight is written @reward\(weight=0.5\)"):
        reward(0.5)
    with pytest.raises(TypeError, match="compute_reward and compute_group_reward take no @reward"):

        class Marked(SortWords):
            @reward(weight=0.5)
            async def compute_reward(self, item: Any, result: Any, ctx: Any) -> float:
                return 1.0


def test_an_environment_without_any_reward_is_abstract() -> None:
    class Removed(Named):
        sorted_words = brief = bytes_written = None

    with pytest.raises(TypeError, match="abstract"):
        Removed(Removed.env_config_cls(), [])


async def test_the_environment_of_the_page_plays_with_the_reference_policy_of_the_page(tmp_path: Path) -> None:
    shown: dict[str, Any] = {}
    for text in (ROOT / "docs" / "environments.md").read_text().split("```python\n")[1:]:
        (tmp_path / "shown.py").write_text(text.partition("```")[0])
        shown |= runpy.run_path(str(tmp_path / "shown.py"))
    kind = shown["FixAndExplain"]
    kind.reference_policy = shown["reference_policy"]
    async with ScriptedServer(lambda _: say(json.dumps({"clear": "partly"}))) as judge:
        at = {"base_url": judge.base_url, "model_name": "scripted"}
        env = environment(kind, tmp_path, ServerConfig(model_name="reference"), group_size=1, judge_server=at)
        result = await env.process_manager()
        (asked,) = judge.requests
    assert "Done." in asked["messages"][0]["content"]
    (rollout,) = rollouts(result.files.groups)
    assert rollout["reward"] == pytest.approx(0.9)
    assert rollout["metrics"] == {"reward/right": 1.0, "reward/explained": 0.5, "reward/changed_lines": 1.0}
