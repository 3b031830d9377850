"""Environments of verifiers play unmodified: exact tokens, their rewards, and failures that are never scores."""

from __future__ import annotations

import json
import re
import signal
from pathlib import Path
from typing import Any

import pytest

from backends.errors import SettingsError
from lachesis.settings.server_settings import ServerConfig
from lachesis_compat.guests import guest
from lachesis_compat.guests.verifiers import VerifiersEnv, load
from lachesis_testing.fake_server import Ask, FakeServer
from tests.compat.guests.support import EXAMPLES, assert_exact, make, needed, played, run_page, served, written
from tests.support.scripted_server import ScriptedServer, call, say
from tests.support.small_envs import lines
from tests.support.stock_run_api import StockRunApi, run_api
from tests.support.training_runs import with_tokens

__all__ = ["run_api"]

needed("verifiers", "verifiers")
SHOP = str(EXAMPLES / "fruit_prices.py")
PRICES = {"pear": 3, "fig": 5, "apple": 2, "plum": 4}


def shops(ask: Ask) -> str:
    """A model that looks both prices up at once, and thinks before it answers."""
    number, one, other = re.findall(r"What do (\d+) x (\w+) and 2 x (\w+)", ask.prompt)[-1]
    if ask.turn == 0:
        calls = [json.dumps({"name": "price", "arguments": {"fruit": fruit}}) for fruit in (one, other)]
        return "I look them up.\n" + "\n".join(f"<tool_call>\n{call}\n</tool_call>" for call in calls)
    return str(int(number) * PRICES[one] + 2 * PRICES[other])


def always_calls(_: Ask) -> str:
    return '<tool_call>\n{"name": "price", "arguments": {"fruit": "fig"}}\n</tool_call>'


async def shop(folder: Path, policy: Any = shops, faults: Any = (), **settings: Any) -> list[dict[str, Any]]:
    return await played(VerifiersEnv, folder, policy, faults, **{"module": SHOP, **settings})


async def test_many_rollouts_at_once_deliver_every_token_exactly(tmp_path: Path) -> None:
    async with FakeServer(shops) as model:
        env = make(VerifiersEnv, tmp_path, with_tokens(model, tmp_path), module=SHOP, total_steps=16, group_size=4)
        await env.process_manager()
    assert assert_exact(tmp_path, model) == 64, "what goes on from an answer is one sample with it"
    for group in lines(tmp_path / "groups.jsonl"):
        assert group["scores"] == [1.0] * 4
    for rollout in written(tmp_path):
        assert (rollout["outcome"], rollout["reason"], rollout["turns"]) == ("completed", "no_tools_called", 2)
        assert rollout["metrics"] == {
            "reward/right_answer": 1.0,
            "reward/is_short": 1.0,
            "reward/num_turns": 2.0,
            "reward/total_tool_calls": 2.0,
            "reward/price_calls": 2.0,
        }


async def test_wrong_answers_are_scored_by_the_rubric(tmp_path: Path) -> None:
    for rollout in await shop(tmp_path, lambda ask: "I do not know, sorry."):
        assert (rollout["outcome"], rollout["reward"]) == ("completed", 0.0)


async def test_evaluate_plays_the_rows_for_evaluation(tmp_path: Path) -> None:
    async with FakeServer(shops) as model:
        env = make(VerifiersEnv, tmp_path, with_tokens(model, tmp_path), module=SHOP)
        async with env.running():
            result = await env.evaluate()
    assert result.summary.reward.mean == 1.0
    questions = [line["item"]["question"] for line in lines(tmp_path / "eval" / "samples.jsonl")]
    assert sorted(questions)[0].startswith("What do 101 x ")


async def test_a_reward_function_that_raises_is_no_score(tmp_path: Path) -> None:
    for rollout in await shop(tmp_path, module_args={"broken": "rubric"}):
        assert (rollout["reward"], rollout["outcome"]) == (None, "completed")
        assert rollout["traceback"].rstrip().endswith("RuntimeError: the rubric is out of order")


async def test_a_judge_is_asked_and_not_recorded(tmp_path: Path) -> None:
    async with FakeServer(shops) as model, FakeServer("Yes.") as judge:
        arguments = {"judge_url": judge.base_url}
        env = make(VerifiersEnv, tmp_path, with_tokens(model, tmp_path), module=SHOP, module_args=arguments)
        await env.process_manager()
    assert assert_exact(tmp_path, model) == 2
    assert [rollout["reward"] for rollout in written(tmp_path)] == [1.0, 1.0]
    assert len(judge.requests) == 2


async def test_a_judge_that_does_not_answer_leaves_no_score(tmp_path: Path) -> None:
    async with FakeServer("Yes.", faults=("server_error",)) as judge:
        found = await shop(tmp_path, module_args={"judge_url": judge.base_url})
    for rollout in found:
        assert (rollout["outcome"], rollout["reward"]) == ("completed", None)
        assert "Judge model API error" in rollout["traceback"]


@pytest.mark.parametrize(
    ("broken", "policy", "words"),
    [
        ("tool", lambda ask: always_calls(ask).replace("fig", "melon"), "ToolCallError <- KeyError: 'melon'"),
        ("state", shops, "the environment raised ValueError"),
    ],
)
async def test_an_error_of_the_environment_is_no_score(tmp_path: Path, broken: str, policy: Any, words: str) -> None:
    for rollout in await shop(tmp_path, policy, module_args={"broken": broken}, max_infra_retries=2):
        assert (rollout["reward"], rollout["attempts"]) == (None, 1)
        assert rollout["reason"] == words
        assert rollout["traceback"] is not None


async def test_a_sandbox_of_the_environment_that_fails_is_tried_again(tmp_path: Path) -> None:
    for rollout in await shop(tmp_path, module_args={"broken": "setup"}, max_infra_retries=1):
        assert (rollout["outcome"], rollout["reward"], rollout["attempts"]) == ("infra_error", None, 2)
        assert rollout["reason"] == "SandboxError: no sandbox could be made"


async def test_a_model_server_that_fails_is_no_score_and_is_tried_again(tmp_path: Path) -> None:
    for rollout in await shop(tmp_path, faults=("server_error",), max_infra_retries=1):
        assert (rollout["outcome"], rollout["reward"], rollout["attempts"]) == ("infra_error", None, 2)
    faults = {"server_error": {1, 6}}
    found = await shop(tmp_path / "again", faults=faults, group_size=6, max_infra_retries=1)
    assert [rollout["reward"] for rollout in found] == [1.0] * 6
    assert sum(rollout["attempts"] for rollout in found) == 8


async def test_a_model_that_says_nothing_is_scored(tmp_path: Path) -> None:
    for rollout in await shop(tmp_path, lambda ask: ""):
        assert (rollout["outcome"], rollout["reward"]) == ("model_error", 0.0)


async def test_turns_are_limited_by_the_environment_and_by_the_run(tmp_path: Path) -> None:
    for number, (settings, outcome, turns) in enumerate(
        [
            ({}, "max_turns", 4),
            ({"max_agent_turns": 2}, "max_turns", 2),
            ({"max_agent_turns": 9}, "max_turns", 4),
            ({"rollout_token_budget": 30}, "context_exhausted", 2),
        ]
    ):
        for rollout in await shop(tmp_path / str(number), always_calls, **settings):
            assert (rollout["outcome"], rollout["reward"], rollout["turns"]) == (outcome, 0.0, turns)


async def test_the_end_of_an_environment_with_one_turn_is_no_limit(tmp_path: Path) -> None:
    module = tmp_path / "one_turn.py"
    module.write_text(
        "import verifiers as vf\nfrom datasets import Dataset\n\n\n"
        "def load_environment(grouped=False):\n"
        "    rows = Dataset.from_list([{'question': 'Say yes.', 'answer': 'yes'}] * 2)\n"
        "    rubric = vf.Rubric([lambda completion, answer: float((completion[-1].content or '') == answer)])\n"
        "    one = vf.SingleTurnEnv(dataset=rows, rubric=rubric)\n"
        "    return vf.EnvGroup([one, vf.SingleTurnEnv(dataset=rows, rubric=rubric)]) if grouped else one\n"
    )
    for grouped in (False, True):
        settings = {"module": str(module), "module_args": {"grouped": grouped}}
        for rollout in await played(VerifiersEnv, tmp_path / str(grouped), lambda ask: "yes", (), **settings):
            assert (rollout["outcome"], rollout["reward"], rollout["turns"]) == ("completed", 1.0, 1), rollout["reason"]
    for rollout in await played(
        VerifiersEnv, tmp_path / "cut", lambda ask: "yes " * 50, (), module=str(module), max_token_length=4
    ):
        assert rollout["outcome"] == "context_exhausted"


async def test_a_conversation_that_outgrows_the_model_is_scored(tmp_path: Path) -> None:
    settings = {"max_token_length": 40, "module_args": {"max_turns": 100}}
    for rollout in await shop(tmp_path, always_calls, fake={"context_length": 700}, **settings):
        assert (rollout["outcome"], rollout["reason"], rollout["reward"]) == ("context_exhausted", "prompt_too_long", 0)


async def test_rewards_of_whole_groups_are_compared(tmp_path: Path) -> None:
    found = await shop(tmp_path, shops, module_args={"together": True}, group_size=3)
    assert [rollout["reward"] for rollout in found] == [pytest.approx(1 / 4)] * 3
    assert found[0]["metrics"]["reward/shorter_than_others"] == pytest.approx(1 / 4)


async def test_a_rollout_that_takes_too_long_is_no_score(tmp_path: Path) -> None:
    for rollout in await shop(tmp_path, faults=("hang",), rollout_timeout=4):
        assert (rollout["outcome"], rollout["reward"]) == ("infra_error", None)
        assert "the model server took" in rollout["reason"]


async def test_without_tokens_messages_are_recorded(tmp_path: Path) -> None:
    def by_messages(request: dict[str, Any]) -> Any:
        if request["messages"][-1]["role"] == "tool":
            return say("42")
        return call(("price", {"fruit": "fig"}))

    async with ScriptedServer(by_messages) as model:
        server = ServerConfig(base_url=model.base_url, model_name="scripted", api_key="x", max_retries=0)
        await make(VerifiersEnv, tmp_path, server, module=SHOP).process_manager()
    (group,) = lines(tmp_path / "groups.jsonl")
    roles = [message["role"] for message in group["messages"][0]]
    assert roles == ["system", "user", "assistant", "tool", "assistant"]


def test_loading_an_environment_leaves_the_signals_alone() -> None:
    before = signal.getsignal(signal.SIGTERM)
    load(SHOP, {})
    assert signal.getsignal(signal.SIGTERM) is before


def test_what_cannot_be_loaded_is_an_error_that_says_why() -> None:
    for module, words in [
        ("", "no environment is named; set --env.module"),
        ("no/such/file.py", "there is no file"),
        ("no-such-module", "Could not import 'no_such_module'"),
    ]:
        with pytest.raises(SettingsError, match=words):
            load(module, {})
    with pytest.raises(SettingsError, match="unexpected keyword argument 'wrong'"):
        load(SHOP, {"wrong": 1})


async def test_a_target_is_a_class_with_its_settings(tmp_path: Path) -> None:
    env_cls = guest(f"verifiers:{SHOP}?count=3&max_turns=2")
    assert env_cls is not None
    async with FakeServer(always_calls) as model:
        env = make(env_cls, tmp_path, with_tokens(model, tmp_path))
        assert env.run_name == "verifiers-fruit_prices"
        await env.process_manager()
    assert {rollout["turns"] for rollout in written(tmp_path)} == {2}


async def test_what_was_played_is_sent_to_the_trainer(tmp_path: Path, run_api: StockRunApi) -> None:
    await served(VerifiersEnv, tmp_path, run_api, shops, lambda ask: "1", module=SHOP)


@pytest.mark.parametrize("command", ["python -m lachesis_compat.guests.verifiers ", "lachesis play 'verifiers:"])
async def test_the_commands_of_the_page_play_its_example(tmp_path: Path, command: str) -> None:
    def shops(ask: Ask) -> str:
        number, fruit = re.findall(r"What do (\d) x (\w+) cost", ask.prompt)[-1]
        if ask.turn == 0:
            return f'<tool_call>\n{{"name": "price", "arguments": {{"fruit": "{fruit}"}}}}\n</tool_call>'
        return str(int(number) * PRICES[fruit])

    model = await run_page(command, tmp_path, shops)
    assert assert_exact(tmp_path, model) == 16
    assert {rollout["reward"] for rollout in written(tmp_path)} == {1.0}
