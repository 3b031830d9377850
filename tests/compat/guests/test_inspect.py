"""Tasks of Inspect play unmodified: exact tokens, the values of their scorers, and failures that are never scores."""

from __future__ import annotations

import asyncio
import json
import re
import subprocess
import sys
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
from aiohttp import web

from backends.errors import SettingsError
from lachesis.settings.server_settings import ServerConfig
from lachesis_compat.guests import guest
from lachesis_compat.guests.inspect_tasks import InspectEnv, load
from lachesis_testing.fake_server import Ask, FakeServer
from tests.compat.guests.support import EXAMPLES, assert_exact, make, needed, played, run_page, served, written
from tests.support.eval_logs import evaluated
from tests.support.scripted_server import ScriptedServer, call, say
from tests.support.small_envs import lines
from tests.support.stock_run_api import StockRunApi, run_api
from tests.support.training_runs import with_tokens

__all__ = ["run_api"]

needed("inspect", "inspect_ai")
STOCK = f"{EXAMPLES / 'stock_keeping.py'}@stock"
SHELVES = {"north": 12, "south": 30, "east": 7, "west": 51}


def counts(ask: Ask) -> str:
    """A model that counts one shelf after the other, and thinks before each turn."""
    one, other = re.findall(r"shelves (\w+) and (\w+) together", ask.prompt)[-1]
    thought = f"<think>\nTurn {ask.turn + 1}.\n</think>\n\n"
    if ask.turn < 2:
        shelf = json.dumps({"name": "count", "arguments": {"shelf": (one, other)[ask.turn]}})
        return f"{thought}I count it.\n<tool_call>\n{shelf}\n</tool_call>"
    return f"{thought}The sum is {SHELVES[one] + SHELVES[other]}"


def always_calls(_: Ask) -> str:
    return '<tool_call>\n{"name": "count", "arguments": {"shelf": "north"}}\n</tool_call>'


async def stock(folder: Path, policy: Any = counts, faults: Any = (), **settings: Any) -> list[dict[str, Any]]:
    return await played(InspectEnv, folder, policy, faults, **{"task": STOCK, **settings})


async def test_many_rollouts_at_once_deliver_every_token_exactly(tmp_path: Path) -> None:
    async with FakeServer(counts) as model:
        env = make(InspectEnv, tmp_path, with_tokens(model, tmp_path), task=STOCK, total_steps=16, group_size=4)
        await env.process_manager()
    assert assert_exact(tmp_path, model) == 64, "what goes on from an answer is one sample with it"
    found = written(tmp_path)
    assert len(found) == 64
    for rollout in found:
        assert (rollout["outcome"], rollout["reason"], rollout["turns"]) == ("completed", "stop", 3)
        assert (rollout["reward"], rollout["metrics"]) == (1.0, {"reward/match": 1.0})
    for group in lines(tmp_path / "groups.jsonl"):
        asked = [message["content"] for message in group["messages"][0] if message["role"] == "user"]
        assert asked == [group["item"]["input"]]


async def test_wrong_answers_are_scored(tmp_path: Path) -> None:
    for rollout in await stock(tmp_path, lambda ask: "Some 1000"):
        assert (rollout["outcome"], rollout["reward"]) == ("completed", 0.0)


async def test_evaluate_plays_the_first_samples(tmp_path: Path) -> None:
    async with FakeServer(counts) as model:
        env = make(InspectEnv, tmp_path, with_tokens(model, tmp_path), task=STOCK)
        async with env.running():
            result = await env.evaluate()
    assert (result.summary.items, result.summary.reward.mean) == (3, 1.0)


@pytest.mark.parametrize(
    ("value", "reward"), [("C", 1.0), ("I", 0.0), ("P", 0.5), ("N", 0.0), (0.25, 0.25), (True, 1.0), ("nan", None)]
)
async def test_values_of_scorers_are_rewards(tmp_path: Path, value: Any, reward: float | None) -> None:
    for rollout in await stock(tmp_path, task_args={"score": "gives", "value": value}):
        assert (rollout["outcome"], rollout["reward"], rollout["traceback"]) == ("completed", reward, None)


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ({"task_args": {"score": "gives", "value": "maybe"}}, "the value of scorer 'gives' is not a score: 'maybe'"),
        ({"task_args": {"score": "gives", "value": "error"}}, "RuntimeError: the scorer is out of order"),
        ({"task_args": {"broken": True}}, "RuntimeError: the shelf fell over"),
        ({"task_args": {"score": "two"}}, "there are two_values.right, two_values.short: set --env.scorer"),
    ],
)
async def test_errors_of_the_task_are_no_scores(tmp_path: Path, settings: Any, words: str) -> None:
    for rollout in await stock(tmp_path, max_infra_retries=2, **settings):
        assert (rollout["reward"], rollout["attempts"]) == (None, 1)
        assert words in rollout["traceback"]


async def test_one_of_several_scorers_is_chosen_and_all_are_shown(tmp_path: Path) -> None:
    with pytest.raises(SettingsError, match=r"has 2 scorers; choose one with --env\.scorer"):
        await stock(tmp_path, task_args={"score": "several"})
    for rollout in await stock(tmp_path / "2", task_args={"score": "several"}, scorer="two_values.short"):
        assert rollout["reward"] == 1.0
        assert set(rollout["metrics"]) == {"reward/match", "reward/two_values.right", "reward/two_values.short"}


async def test_what_a_scorer_asks_is_no_part_of_the_rollout(tmp_path: Path) -> None:
    asked: Counter[str] = Counter()

    def judges(ask: Ask) -> str:
        judge = "Yes or no." in ask.prompt
        asked["judge" if judge else "policy"] += 1
        return "Yes, it is." if judge else counts(ask)

    for rollout in await stock(tmp_path, judges, task_args={"score": "judge"}):
        assert (rollout["reward"], rollout["api_calls"], rollout["discarded"]) == (1.0, 3, [])
    assert asked == {"policy": 6, "judge": 2}


async def test_a_model_server_that_fails_is_no_score_and_is_tried_again(tmp_path: Path) -> None:
    for rollout in await stock(tmp_path, faults=("server_error",), max_infra_retries=1):
        assert (rollout["outcome"], rollout["reward"], rollout["attempts"]) == ("infra_error", None, 2)
    faults = {"server_error": {1, 6}}
    found = await stock(tmp_path / "again", faults=faults, group_size=6, max_infra_retries=1)
    assert [rollout["reward"] for rollout in found] == [1.0] * 6
    assert sum(rollout["attempts"] for rollout in found) == 8


async def test_limits_are_those_of_the_task_and_of_the_run(tmp_path: Path) -> None:
    for number, (settings, outcome, turns) in enumerate(
        [
            ({"task_args": {"message_limit": 6}}, "max_turns", 2),
            ({"max_agent_turns": 3}, "max_turns", 4),  # Inspect lets the turn that is too many be sampled
            ({"task_args": {"turn_limit": 2}, "max_agent_turns": 3}, "max_turns", 3),
            ({"rollout_token_budget": 70}, "context_exhausted", 3),
        ]
    ):
        for rollout in await stock(tmp_path / str(number), always_calls, **settings):
            assert (rollout["outcome"], rollout["turns"]) == (outcome, turns), rollout["reason"]
            assert rollout["reward"] == 0.0


async def test_a_conversation_that_outgrows_the_model_is_scored(tmp_path: Path) -> None:
    settings = {"max_token_length": 40, "fake": {"context_length": 700}}
    for rollout in await stock(tmp_path, always_calls, **settings):
        assert (rollout["outcome"], rollout["reason"], rollout["reward"]) == ("context_exhausted", "model_length", 0.0)


async def test_a_refused_conversation_is_scored(tmp_path: Path) -> None:
    def moderated(_: dict[str, Any]) -> Any:
        return web.json_response({"error": {"message": "flagged by moderation"}}, status=403)

    async with ScriptedServer(moderated) as server:
        one = ServerConfig(base_url=server.base_url, model_name="scripted", api_key="x")
        env = make(InspectEnv, tmp_path, one, task=STOCK)
        await env.process_manager()
    for group in lines(tmp_path / "groups.jsonl"):
        assert {(rollout["outcome"], rollout["reward"]) for rollout in group["rollouts"]} == {("refused", 0.0)}


async def test_what_inspect_says_about_a_sandbox_that_cannot_start_is_shown(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("DOCKER_HOST", f"unix://{tmp_path}/no.sock")
    monkeypatch.setenv("PATH", str(tmp_path))
    task = tmp_path / "boxed.py"
    task.write_text(
        "from inspect_ai import Task, task\nfrom inspect_ai.dataset import Sample\n"
        "from inspect_ai.scorer import match\nfrom inspect_ai.solver import generate\n\n\n@task\ndef boxed():\n"
        "    return Task(dataset=[Sample(input='1+1?', target='2')], solver=generate(), scorer=match(), "
        "sandbox='docker')\n"
    )
    async with FakeServer("2") as model:
        env = make(InspectEnv, tmp_path, with_tokens(model, tmp_path), task=f"{task}@boxed", max_failed_groups=5)
        await env.process_manager()
    for rollout in (rollout for group in lines(tmp_path / "groups.failed.jsonl") for rollout in group["rollouts"]):
        assert "Docker" in rollout["traceback"].partition("\n")[0] and rollout["reward"] is None


async def test_a_rollout_whose_time_the_server_took_is_no_score(tmp_path: Path) -> None:
    for rollout in await stock(tmp_path, faults=("hang",), rollout_timeout=4):
        assert (rollout["outcome"], rollout["reward"]) == ("infra_error", None)
        assert "the model server took" in rollout["reason"]


async def test_without_tokens_messages_are_recorded(tmp_path: Path) -> None:
    def by_messages(request: dict[str, Any]) -> Any:
        if request["messages"][-1]["role"] == "tool":
            return say("It is 42")
        return call(("count", {"shelf": "north"}))

    async with ScriptedServer(by_messages) as model:
        server = ServerConfig(base_url=model.base_url, model_name="scripted", api_key="x", max_retries=0)
        await make(InspectEnv, tmp_path, server, task=STOCK).process_manager()
    (group,) = lines(tmp_path / "groups.jsonl")
    roles = [message["role"] for message in group["messages"][0]]
    assert roles == ["system", "user", "assistant", "tool", "assistant"]


async def test_inspect_keeps_a_log_of_its_own_where_it_is_asked_to(tmp_path: Path) -> None:
    await stock(tmp_path, inspect_log_dir=str(tmp_path / "logs"))
    from inspect_ai.log import read_eval_log

    (file,) = (tmp_path / "logs").glob("*.eval")
    log = read_eval_log(str(file))
    assert (log.status, len(log.samples or [])) == ("success", 2)


async def test_inspect_reads_the_logs_that_we_export(tmp_path: Path) -> None:
    path = str(await evaluated(tmp_path))
    from inspect_ai.analysis import events_df, messages_df, samples_df
    from inspect_ai.log import read_eval_log, read_eval_log_sample_summaries, read_eval_log_samples, write_eval_log

    log = read_eval_log(path)
    assert (log.status, log.eval.task, log.eval.model, log.eval.config.epochs) == ("success", "shelves", "scripted", 2)
    assert log.results is not None
    (reward, *_) = log.results.scores
    assert (reward.name, reward.metrics["mean"].value, reward.metrics["stderr"].value) == ("reward", 0.5, 0.5)
    samples = list(read_eval_log_samples(path, all_samples_required=False))
    assert [(each.limit and each.limit.type, each.error is not None) for each in samples].count(("turn", False)) == 2
    listed = {each.uuid: each for each in read_eval_log_sample_summaries(path)}
    for sample in samples:
        ours, theirs = listed[sample.uuid], sample.summary()
        for name in (
            "id",
            "epoch",
            "input",
            "target",
            "scores",
            "error",
            "limit",
            "retries",
            "message_count",
            "metadata",
        ):
            assert getattr(ours, name) == getattr(theirs, name), name
    write_eval_log(log, str(tmp_path / "again.eval"))
    frames = [frame(path) for frame in (samples_df, messages_df, events_df)]
    # Inspect takes the messages of events: the last one of a rollout without an answer, which no model saw, is in none.
    assert [len(frame) for frame in frames] == [6, 4 * 4, 2 * 3 + 2 * 4 + 2]
    assert sorted(frames[0]["score_reward"].dropna()) == [0.0, 0.0, 1.0, 1.0]
    command = [sys.executable, "-m", "inspect_ai", "log", "dump", path]
    dumped = await asyncio.to_thread(subprocess.run, command, capture_output=True, check=True)
    assert len(json.loads(dumped.stdout)["samples"]) == 6


async def test_a_run_that_is_cancelled_ends_the_eval(tmp_path: Path) -> None:
    async with FakeServer(counts, faults=("hang",)) as model:
        env = make(InspectEnv, tmp_path, with_tokens(model, tmp_path), task=STOCK)
        run = asyncio.create_task(env.process_manager())
        while not model.requests:  # noqa: ASYNC110
            await asyncio.sleep(0.05)
        run.cancel()
        with pytest.raises(asyncio.CancelledError):
            await run
    assert len(await stock(tmp_path / "next")) == 2, "another eval can run"


def test_what_cannot_be_loaded_is_an_error_that_says_why(tmp_path: Path) -> None:
    for spec, arguments, words in [
        ("", {}, "no task is named; set --env.task"),
        ("no/such/file.py@x", {}, "env.task no/such/file.py@x cannot be loaded"),
        (STOCK.replace("@stock", "@other"), {}, "cannot be loaded: .*other"),
        (STOCK, {"score": "none"}, "cannot be loaded: KeyError: 'none'"),
    ]:
        with pytest.raises(SettingsError, match=words):
            load(spec, arguments)


async def test_a_target_is_a_class_with_its_settings(tmp_path: Path) -> None:
    env_cls = guest(f"inspect:{STOCK}?score=gives&value=0.75")
    assert env_cls is not None
    async with FakeServer(counts) as model:
        env = make(env_cls, tmp_path, with_tokens(model, tmp_path))
        assert env.run_name == "inspect-stock"
        await env.process_manager()
    assert {rollout["reward"] for rollout in written(tmp_path)} == {0.75}


async def test_what_was_played_is_sent_to_the_trainer(tmp_path: Path, run_api: StockRunApi) -> None:
    await served(InspectEnv, tmp_path, run_api, counts, lambda ask: "1", task=STOCK)


@pytest.mark.parametrize("command", ["python -m lachesis_compat.guests.inspect_tasks ", "lachesis process 'inspect:"])
async def test_the_commands_of_the_page_play_its_example(tmp_path: Path, command: str) -> None:
    def looks(ask: Ask) -> str:
        shelf = re.findall(r"on the shelf (\w+)\?", ask.prompt)[-1]
        if ask.turn == 0:
            return f'<tool_call>\n{{"name": "count", "arguments": {{"shelf": "{shelf}"}}}}\n</tool_call>'
        return f"There are {SHELVES[shelf]}"

    model = await run_page(command, tmp_path, looks)
    assert assert_exact(tmp_path, model) == 12
    assert {rollout["reward"] for rollout in written(tmp_path)} == {1.0}
