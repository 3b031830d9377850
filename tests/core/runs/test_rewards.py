"""Rewards with parts, rewards of whole groups, and rewards of turns: from the environment to every record."""

from __future__ import annotations

import asyncio
import re
import threading
import time
from contextlib import suppress
from pathlib import Path
from typing import Any

import numpy
import pytest
from rich.console import Console

from backends import BackendError
from lachesis.base_env import HermesAgentBaseEnv
from lachesis.figures.figures import Figures
from lachesis.figures.summary import BUILTIN_FIGURES, evaluation_metrics, training_metrics
from lachesis.loop.rollout import Rollout
from lachesis.rewards.reward import Reward, checked_reward
from lachesis.runs.decisions import LeftOut
from lachesis.runs.group_player import play_group
from lachesis.runs.results import print_result
from lachesis_testing.fake_server import FakeServer, ToolUser
from lachesis_tokens.samples.decision import ANY_TRAINER, decide_for_training
from tests.support import report_pages
from tests.support.scripted_server import ScriptedServer, call, say
from tests.support.small_envs import (
    SortWords,
    does_nothing,
    kill_sandboxes,
    lines,
    make,
    process,
    rollouts,
    sandboxes,
    sorts,
)
from tests.support.stock_run_api import StockRunApi, run_api
from tests.support.training_runs import CoinToss, serving, trained, with_tokens

__all__ = ["run_api"]


class InParts(SortWords):
    async def compute_reward(self, item: Any, result: Any, ctx: Any) -> Any:
        turns = [0.5] * (result.turns_used - 1) + [1.0]
        return Reward(0.75, components={"right": 1.0, "short": 0.5}, turn_rewards=turns)

    def rollout_metrics(self, item: Any, result: Any, reward: Any) -> Any:
        return {"twice": 2 * reward}


async def test_components_are_metrics_of_the_record_the_table_and_the_report_without_further_code(
    tmp_path: Path,
) -> None:
    result = await process(InParts, tmp_path, total_steps=1)
    (group,) = lines(result.files.groups)
    assert group["scores"] == [0.75, 0.75]
    metrics = {"reward/right": 1.0, "reward/short": 0.5, "twice": 1.5}
    assert [rollout["metrics"] for rollout in group["rollouts"]] == [metrics] * 2
    assert [rollout["turn_rewards"] for rollout in group["rollouts"]] == [[0.5, 1.0]] * 2
    assert result.summary.metrics == metrics
    with (tmp_path / "table.txt").open("w") as file:
        print_result(Console(file=file, width=100), result)
    assert "reward/short" in (tmp_path / "table.txt").read_text()
    for shown in report_pages.rollouts(result.files.report.read_text()):
        assert "reward/right 1 · reward/short 0.5 · twice 1.5" in shown


@pytest.mark.parametrize(
    ("given", "problem"),
    [
        (Reward(float("nan")), "sort-words: compute_reward returned nan; it must be finite"),
        (Reward("1"), "sort-words: compute_reward returned '1'; it must be a number"),  # type: ignore[arg-type]
        (Reward(1.0, {"part": float("inf")}), "sort-words: compute_reward: component 'part' is inf"),
        (Reward(1.0, turn_rewards=[1.0, 2.0, 3.0]), "turn_rewards has 3 numbers for 1 turns"),
        (Reward(1.0, turn_rewards=[float("nan")]), "sort-words: compute_reward: turn_rewards has nan"),
        (Reward(1.0, turn_rewards=0.5), "turn_rewards is a list of numbers, not 0.5"),  # type: ignore[arg-type]
        (Reward(1.0, ["a"]), "components is a mapping of names to numbers, not ['a']"),  # type: ignore[arg-type]
        (Reward(1.0, {"a": 1.0}, weights={"a": "x"}), "weight 'a' is 'x'; it must be"),  # type: ignore[dict-item]
        (Reward(1.0, {"a": 1.0}, weights=["a"]), "weights is a mapping of names to numbers"),  # type: ignore[arg-type]
    ],
)
async def test_every_part_of_a_reward_has_to_be_finite(tmp_path: Path, given: Reward, problem: str) -> None:
    class Strange(SortWords):
        async def compute_reward(self, item: Any, result: Any, ctx: Any) -> Any:
            return given

    result = await process(Strange, tmp_path, does_nothing, total_steps=1, group_size=1)
    (rollout,) = rollouts(result.files.failures)
    assert rollout["reward"] is None
    assert problem in rollout["traceback"]


@pytest.mark.parametrize(
    ("given", "kept"),
    [
        (Reward(0.3, {"a": 0.1, "b": 0.2}, weights={"a": 1, "b": 1}), True),
        (Reward(numpy.float32(0.07), {"a": 0.7}, weights={"a": numpy.float32(0.1)}), True),
        (Reward(0.333333, {"a": 1 / 3}, weights={"a": 1}), True),
        (Reward(1.0, {"a": 1.0}, weights={"a": 1, "did not occur": 0.5}), True),
        (Reward(1.0, {"a": 0.6, "b": 0.9}, weights={"a": 1, "b": 1}), False),  # clipped
        (Reward(0.5, {"a": 1, "b": 0}, weights={"a": 1, "b": 1}), False),  # normalised
        (Reward(0.1, {"a": 0.1, "b": 0.0}, weights={"a": 1}), False),
        (Reward(0.0, {"a": 1e308, "b": -1e308}, weights={"a": 2e10, "b": 2e10}), False),
    ],
)
def test_weights_are_kept_where_they_explain_the_value_and_never_refuse_it(given: Reward, kept: bool) -> None:
    checked = checked_reward(given, turns=1, source="compute_reward")
    assert checked is not None
    assert checked.value == float(given.value)
    assert checked.weights.keys() == (given.components.keys() if kept else set())


async def test_names_of_components_are_no_markup(tmp_path: Path) -> None:
    class Marked(SortWords):
        async def compute_reward(self, item: Any, result: Any, ctx: Any) -> Any:
            return Reward(1.0, {"[/b]": 1.0})

    result = await process(Marked, tmp_path, does_nothing, total_steps=1, group_size=1)
    with (tmp_path / "table.txt").open("w") as file:
        print_result(Console(file=file, width=100), result)
    assert "reward/[/b]" in (tmp_path / "table.txt").read_text()


@pytest.mark.parametrize("name", ["avg_reward", "items", "total_rollouts", "outcome/completed", "reward/right"])
async def test_metrics_cannot_take_the_name_of_a_built_in_figure(tmp_path: Path, name: str) -> None:
    class Named(SortWords):
        async def compute_reward(self, item: Any, result: Any, ctx: Any) -> Any:
            return Reward(0.5, {"right": 1.0})

        def rollout_metrics(self, item: Any, result: Any, reward: Any) -> Any:
            return {name: 99.0}

    result = await process(Named, tmp_path, does_nothing, total_steps=1, group_size=1)
    assert result.summary.metrics == {"reward/right": 1.0}
    (rollout,) = rollouts(result.files.groups)
    assert f"rollout_metrics returned '{name}'" in rollout["traceback"]


async def test_every_built_in_figure_is_a_reserved_name(tmp_path: Path) -> None:
    result = await process(SortWords, tmp_path, does_nothing, total_steps=1, group_size=1)
    figures = Figures()
    figures.add(lines(result.files.groups)[0])
    names = [*evaluation_metrics(result.summary), *training_metrics(figures.summary())]
    plain = {name.partition("/")[2] for name in names if "/outcome/" not in name}
    # These are there where there is an interval, where rollouts were left out, where contexts are compressed, where a
    # parser read calls, and where there are prices.
    sometimes = {"avg_reward_low", "avg_reward_high", "unscored_alarm", "unscored_items"}
    sometimes |= {"compressions", "failed_compressions", "repaired_call_rate", "repaired_calls_alarm"}
    sometimes |= {"total_cost", "avg_cost"}
    assert plain | sometimes == BUILTIN_FIGURES


# Rewards of groups.


def writes_its_number(request: dict[str, Any]) -> Any:
    """Each rollout of the group leaves a longer file than the one before."""
    if request["messages"][-1]["role"] == "tool":
        return say("Done.")
    writes_its_number.count += 1  # type: ignore[attr-defined]
    content = "x" * writes_its_number.count  # type: ignore[attr-defined]
    return call(("write_file", {"path": "out.txt", "content": content}))


@pytest.fixture(autouse=True)
def first_number() -> None:
    writes_its_number.count = 0  # type: ignore[attr-defined]


class Ranked(SortWords):
    """Has no reward but that of the group: the longest file wins."""

    compute_reward = SortWords.__base__.compute_reward  # type: ignore[union-attr, misc]

    async def compute_group_reward(self, item: Any, results: Any, ctxs: Any) -> Any:
        sizes = [len(await ctx.read_file("out.txt")) for ctx in ctxs]
        return [Reward(float(size == max(sizes)), {"size": size}) for size in sizes]


class RankedPlainly(Ranked):
    def compute_group_reward(self, item: Any, results: Any, ctxs: Any) -> Any:  # type: ignore[override]
        assert threading.current_thread() is not threading.main_thread()
        sizes = [len(ctx.read_file("out.txt")) for ctx in ctxs]
        return [float(size == max(sizes)) for size in sizes]


@pytest.mark.parametrize("kind", [Ranked, RankedPlainly])
async def test_a_group_is_scored_together_while_all_of_its_sandboxes_are_leased(
    tmp_path: Path, kind: type[SortWords]
) -> None:
    result = await process(kind, tmp_path, writes_its_number, total_steps=1, group_size=3)
    (group,) = lines(result.files.groups)
    assert sorted(group["scores"]) == [0.0, 0.0, 1.0]
    for rollout in group["rollouts"]:
        assert [used["method"] for used in rollout["reward_calls"]] == ["read_file"]
        assert kind is RankedPlainly or set(rollout["metrics"]) == {"reward/size"}
    assert sandboxes() == set()


async def test_a_group_reward_sees_the_rollouts_that_were_scored_and_their_rewards(tmp_path: Path) -> None:
    seen: list[Any] = []

    class Relative(SortWords):
        async def compute_reward(self, item: Any, result: Any, ctx: Any) -> Any:
            place = int(ctx.task_id.split("-")[2])
            return None if place == 1 else float(place)

        async def compute_group_reward(self, item: Any, results: Any, ctxs: Any) -> Any:
            seen.extend(result.reward.value for result in results)
            mean = sum(result.reward.value for result in results) / len(results)
            return [result.reward.value - mean for result in results]

        def rollout_metrics(self, item: Any, result: Any, reward: Any) -> Any:
            return {} if reward is None else {"final": reward}

    result = await process(Relative, tmp_path, does_nothing, total_steps=1, group_size=3)
    (group,) = lines(result.files.groups)
    assert sorted(seen) == [0.0, 2.0]
    assert [rollout["reward"] for rollout in group["rollouts"]] == [-1.0, None, 1.0]
    assert [rollout["metrics"] for rollout in group["rollouts"]] == [{"final": -1.0}, {}, {"final": 1.0}]


async def test_a_reward_that_leaves_every_rollout_out_is_named_in_the_table(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    class Nothing(SortWords):
        async def compute_reward(self, item: Any, result: Any, ctx: Any) -> Any:
            return None

    print_result(Console(), await process(Nothing, tmp_path, does_nothing, total_steps=1))
    said = " ".join(capsys.readouterr().out.split())
    assert "2 x no reward: a reward returned None 1 of the groups had no scored rollout" in said


@pytest.mark.parametrize(
    ("given", "problem"),
    [
        ([1.0], "compute_group_reward returned 1 rewards for 2 rollouts"),
        (1.0, "it must be a list with one reward for each rollout"),
        ({5.0, 3.0}, "it must be a list with one reward for each rollout"),
        ([1.0, float("nan")], "sort-words: compute_group_reward returned nan; it must be finite"),
        (ZeroDivisionError("broken"), "ZeroDivisionError: broken"),
    ],
)
async def test_failure_is_not_zero_a_wrong_group_reward_leaves_the_whole_group_out(
    tmp_path: Path, given: Any, problem: str
) -> None:
    class Strange(SortWords):
        async def compute_group_reward(self, item: Any, results: Any, ctxs: Any) -> Any:
            if isinstance(given, Exception):
                raise given
            return given

    result = await process(Strange, tmp_path, does_nothing, total_steps=1)
    found = rollouts(result.files.failures)
    assert [rollout["reward"] for rollout in found] == [None, None]
    assert all(problem in rollout["traceback"] for rollout in found)
    assert (result.failed_groups, result.exceptions) == (1, 2)
    assert sandboxes() == set()


@pytest.mark.slow
async def test_a_group_reward_that_hangs_ends_at_its_limit_and_releases_everything(tmp_path: Path) -> None:
    class Hangs(SortWords):
        async def compute_group_reward(self, item: Any, results: Any, ctxs: Any) -> Any:
            await ctxs[0].terminal("sleep 300", timeout=300)

    result = await process(Hangs, tmp_path, does_nothing, total_steps=1, reward_timeout=3)
    assert all("reward_timeout = 3 s" in rollout["traceback"] for rollout in rollouts(result.files.failures))
    assert sandboxes() == set()


@pytest.mark.parametrize("together", [False, True])
async def test_a_late_reward_that_catches_everything_is_no_score(tmp_path: Path, together: bool) -> None:
    async def late() -> None:
        with suppress(BaseException):
            await asyncio.sleep(30)

    class Catching(SortWords):
        async def compute_reward(self, item: Any, result: Any, ctx: Any) -> Any:
            if not together:
                await late()
            return 0.0

        async def compute_group_reward(self, item: Any, results: Any, ctxs: Any) -> Any:
            await late()
            return [0.0] * len(results)

    result = await process(Catching, tmp_path, does_nothing, total_steps=1, reward_timeout=0.5)
    assert result.summary.scored == 0
    assert "longer than reward_timeout" in rollouts(result.files.failures)[0]["traceback"]


@pytest.mark.parametrize("raises", [False, True])
async def test_a_cancelled_reward_that_catches_everything_is_not_written(tmp_path: Path, raises: bool) -> None:
    begun = asyncio.Event()

    class Catching(SortWords):
        async def compute_group_reward(self, item: Any, results: Any, ctxs: Any) -> Any:
            begun.set()
            try:
                await ctxs[0].terminal("sleep 30")
            except:  # noqa: E722
                if raises:
                    raise ValueError("instead of the cancellation") from None
            return [0.0] * len(results)

    async with ScriptedServer(does_nothing) as server:
        running = asyncio.create_task(make(Catching, server, tmp_path, total_steps=1).process_manager())
        await begun.wait()
        await asyncio.sleep(0.3)
        running.cancel()
        with pytest.raises(asyncio.CancelledError):
            await running
    assert not lines(tmp_path / "groups.jsonl")
    assert not lines(tmp_path / "groups.failed.jsonl")
    assert sandboxes() == set()


async def test_a_reward_that_ends_as_its_time_runs_out_is_late(tmp_path: Path) -> None:
    class Late(SortWords):
        async def compute_reward(self, item: Any, result: Any, ctx: Any) -> Any:
            asyncio.get_running_loop().call_soon(time.sleep, 0.5)  # the limit passes when this has returned
            await asyncio.sleep(0)
            await asyncio.sleep(0)
            return 1.0

    result = await process(Late, tmp_path, does_nothing, total_steps=1, reward_timeout=0.3)
    found = rollouts(result.files.groups) + rollouts(result.files.failures)
    assert [rollout["outcome"] for rollout in found] == ["completed"] * 2, "and not lost"
    assert all(rollout["reward"] == 1.0 or "reward_timeout" in rollout["traceback"] for rollout in found)


async def test_a_time_limit_inside_a_plain_reward_keeps_its_traceback(tmp_path: Path) -> None:
    def ask_grader() -> None:
        raise TimeoutError("no answer from my grader")

    class Plain(SortWords):
        def compute_reward(self, item: Any, result: Any, ctx: Any) -> Any:  # type: ignore[override]
            ask_grader()

    result = await process(Plain, tmp_path, does_nothing, total_steps=1)
    trace = rollouts(result.files.failures)[0]["traceback"]
    assert "in ask_grader" in trace and "no answer from my grader" in trace


@pytest.mark.parametrize("error", [SystemExit(3), StopIteration(4)])
async def test_a_plain_reward_that_raises_what_ends_loops_is_an_error_of_the_environment(
    tmp_path: Path, error: BaseException
) -> None:
    class Exits(SortWords):
        def compute_reward(self, item: Any, result: Any, ctx: Any) -> Any:  # type: ignore[override]
            raise error

    result = await process(Exits, tmp_path, does_nothing, total_steps=1)
    assert all(type(error).__name__ in rollout["traceback"] for rollout in rollouts(result.files.failures))


async def test_a_reward_may_survive_the_failure_of_its_own_tasks(tmp_path: Path) -> None:
    async def fails() -> None:
        await asyncio.sleep(0.01)
        raise ValueError("one of the checks")

    class Tolerant(SortWords):
        async def compute_reward(self, item: Any, result: Any, ctx: Any) -> Any:
            with suppress(ExceptionGroup):
                async with asyncio.TaskGroup() as checks:
                    checks.create_task(fails())
            return 0.5

    result = await process(Tolerant, tmp_path, does_nothing, total_steps=1)
    assert [group["scores"] for group in lines(result.files.groups)] == [[0.5, 0.5]]


async def test_a_sandbox_that_dies_under_a_group_reward_is_no_zero(tmp_path: Path) -> None:
    class Hides(SortWords):
        async def compute_group_reward(self, item: Any, results: Any, ctxs: Any) -> Any:
            await ctxs[0].terminal("true")
            kill_sandboxes()
            try:
                await ctxs[0].terminal("sleep 100")
            except Exception:
                return [0.0] * len(results)
            return [1.0] * len(results)

    result = await process(Hides, tmp_path, does_nothing, total_steps=1)
    found = rollouts(result.files.failures)
    assert [(rollout["reward"], rollout["outcome"]) for rollout in found] == [(None, "infra_error")] * 2
    assert all("the group could not be scored" in rollout["reason"] for rollout in found)


async def test_metrics_that_raise_do_not_keep_a_broken_group_from_another_attempt(tmp_path: Path) -> None:
    class Broken(SortWords):
        async def compute_group_reward(self, item: Any, results: Any, ctxs: Any) -> Any:
            raise BackendError("the sandbox is lost")

        def rollout_metrics(self, item: Any, result: Any, reward: Any) -> Any:
            return {"solved": float(reward > 0)}

    async with ScriptedServer(does_nothing) as server:
        env = make(Broken, server, tmp_path, group_size=1)
        async with env.running():
            group = await play_group(env, "b a", "key", size=1)
    decision = decide_for_training(group, env.config, ANY_TRAINER)
    assert isinstance(decision, LeftOut)
    assert decision.again
    assert "TypeError" in decision.tracebacks[0]
    assert "the sandbox is lost" in decision.unscored_because


async def test_a_cancelled_group_releases_the_sandboxes_that_waited_for_its_reward(tmp_path: Path) -> None:
    waiting = asyncio.Event()

    class Waits(SortWords):
        async def compute_reward(self, item: Any, result: Any, ctx: Any) -> Any:
            await ctx.terminal("true")
            return 1.0

        async def compute_group_reward(self, item: Any, results: Any, ctxs: Any) -> Any:
            waiting.set()
            await asyncio.sleep(600)

    task = asyncio.create_task(process(Waits, tmp_path, does_nothing, total_steps=1))
    await asyncio.wait_for(waiting.wait(), 120)
    assert len(sandboxes()) > 0
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    assert sandboxes() == set()


@pytest.mark.parametrize("raises", [False, True])
async def test_rollouts_that_an_override_drops_release_their_sandboxes(tmp_path: Path, raises: bool) -> None:
    left: list[int] = []

    class Dropping(SortWords):
        async def get_next_item(self) -> Any:
            left.append(len(sandboxes()))
            return await super().get_next_item()

        async def play_rollout(self, *args: Any, **kwargs: Any) -> Any:
            await super().play_rollout(*args, **kwargs)
            if raises and len(left) % 2:
                raise ValueError("in the override")
            return await super().play_rollout(*args, **kwargs)

        async def compute_group_reward(self, item: Any, results: Any, ctxs: Any) -> Any:
            return [1.0] * len(results)

    await process(Dropping, tmp_path, sorts, total_steps=3, group_size=1, max_num_workers=1)
    assert left == [0] * 3


def test_a_subclass_that_drops_the_reward_of_the_group_has_no_reward() -> None:
    class Grouped(HermesAgentBaseEnv):
        get_next_item = SortWords.get_next_item
        format_prompt = SortWords.format_prompt

        async def compute_group_reward(self, item: Any, results: Any, ctxs: Any) -> Any:
            return [1.0] * len(results)

    class Dropped(Grouped):
        compute_group_reward = None  # type: ignore[assignment]

    Grouped(*Grouped.config_init())
    with pytest.raises(TypeError, match="compute_reward"):
        Dropped(*Dropped.config_init())


def test_an_environment_without_any_reward_is_still_abstract() -> None:
    class Nothing(SortWords):
        compute_reward = SortWords.__base__.compute_reward  # type: ignore[union-attr, misc]

    with pytest.raises(TypeError, match="compute_reward"):
        make(Nothing, "http://127.0.0.1:1/v1", Path("/tmp"))


async def test_turn_rewards_reach_the_trainer_with_their_sample(tmp_path: Path, run_api: StockRunApi) -> None:
    class OfTurns(CoinToss):
        async def compute_reward(self, item: Any, result: Any, ctx: Any) -> Any:
            value = await super().compute_reward(item, result, ctx)
            return Reward(value, turn_rewards=[value / 2] * result.turns_used)

    async with run_api.wiped() as api, FakeServer(ToolUser()) as model:
        server = with_tokens(model, tmp_path)
        plain = serving(tmp_path, api, server, max_agent_turns=3, max_token_length=120)
        env = OfTurns(plain.config, plain.server_configs)
        env.console = plain.console
        trainer = await trained(env, api, groups=2, steps=1)
    for group in trainer.groups:
        for score, overrides in zip(group["scores"], group["overrides"], strict=True):
            assert overrides["turn_rewards"] and set(overrides["turn_rewards"]) == {score / 2}


# One history, one serialisation.


async def test_a_history_is_serialised_once_for_all_of_its_records(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from lachesis_messages.history import MessageHistory
    from lachesis_tokens.samples.decision import ANY_TRAINER, decide_for_training

    finished: list[Rollout] = []
    serialised: list[int] = []
    original = MessageHistory.to_openai

    def counted(self: MessageHistory, *args: Any) -> Any:
        serialised.append(id(self))
        return original(self, *args)

    async with ScriptedServer(sorts) as server:
        env = make(SortWords, server, tmp_path, include_messages=True)
        async with env.running():
            from lachesis.runs.group_player import play_group
            from lachesis.runs.group_records import group_record

            group = await play_group(env, "b a", "key", size=2)
            finished.extend(group.rollouts)
            monkeypatch.setattr(MessageHistory, "to_openai", counted)
            decide_for_training(group, env.config, ANY_TRAINER)
            for _ in range(2):
                record = group_record(group, environment="e", model="m")
    assert [len(messages) for messages in record["messages"]] == [4, 4]
    assert len(serialised) == len(finished) == 2


async def test_a_reward_that_forgets_to_await_is_an_error_with_its_line_and_no_score(tmp_path: Path) -> None:
    class Uses(SortWords):
        async def compute_reward(self, item: Any, result: Any, ctx: Any) -> float:
            try:
                return float("apple" in ctx.read_file("sorted.txt"))
            except Exception:
                return 0.0

    class Compares(SortWords):
        async def compute_reward(self, item: Any, result: Any, ctx: Any) -> float:
            return float(ctx.read_file("sorted.txt") == "apple\n")

    for kind in (Uses, Compares):
        (tmp_path / kind.__name__).mkdir()
        result = await process(kind, tmp_path / kind.__name__, sorts, total_steps=1)
        found = rollouts(result.files.failures)
        assert [rollout["reward"] for rollout in found] == [None, None]
        for rollout in found:
            assert rollout["unscored_kind"] == "environment"
            assert re.search(
                rf"ctx\.read_file\(\) at .*{Path(__file__).name}:\d+ was never awaited", rollout["traceback"]
            )
