"""`follow_up`: the user answers the agent; what goes wrong there is never the agent's score."""

from __future__ import annotations

import threading
from pathlib import Path
from typing import Any

import pytest
from aiohttp import web

from backends.errors import SettingsError
from lachesis import ServerConfig, ToolResult
from lachesis_envs.harbor import HarborEnv
from lachesis_testing.fake_server import FakeServer, Scripted
from lachesis_tokens.endpoint.agent_program import AgentProgramEnv
from tests.support.scripted_server import ScriptedServer, say
from tests.support.small_envs import SortWords, does_nothing, process, rollouts
from tests.support.training_runs import played


class Asked(SortWords):
    """The user asks twice more."""

    toolsets = ()

    def follow_up(self, item: Any, messages: list[dict[str, Any]]) -> Any:
        assert threading.current_thread() is not threading.main_thread(), "a plain def blocks nobody"
        assert [message["role"] for message in messages[-2:]] == ["user", "assistant"]
        return f"And {item}, again?" if len(messages) < 6 else None

    async def compute_reward(self, item: Any, result: Any, ctx: Any) -> float:
        assert result.messages[2] == {"role": "user", "content": f"And {item}, again?"}
        return float(result.turns_used)


async def test_the_user_answers_until_the_task_is_over_and_turns_are_counted_over_all_of_it(tmp_path: Path) -> None:
    for rollout in await played(Asked, tmp_path / "all", Scripted("No."), enabled_toolsets=[]):
        assert (rollout["outcome"], rollout["reward"]) == ("completed", 3.0)
    (rollout,) = await played(
        Asked, tmp_path / "two", Scripted("No."), enabled_toolsets=[], max_agent_turns=2, group_size=1
    )
    assert (rollout["outcome"], rollout["reward"]) == ("max_turns", 2.0)


@pytest.mark.parametrize(
    ("given", "problem"),
    [
        (KeyError("city"), "sort-words: follow_up: KeyError: 'city'"),
        (5, "sort-words: follow_up returned 5; it must be text"),
        (ToolResult("More.", reward=float("nan")), "sort-words: follow_up: its reward is nan; it must be finite"),
    ],
)
async def test_an_error_of_the_user_is_one_of_the_environment(tmp_path: Path, given: Any, problem: str) -> None:
    class Wrong(Asked):
        async def follow_up(self, item: Any, messages: Any) -> Any:
            if isinstance(given, Exception):
                raise given
            return given

    result = await process(Wrong, tmp_path, does_nothing, total_steps=1, group_size=1)
    (rollout,) = rollouts(result.files.failures)
    assert (rollout["reward"], rollout["unscored_kind"]) == (None, "environment")
    assert problem in rollout["traceback"]


async def test_failure_is_not_zero_a_model_plays_the_user_or_the_rollout_has_no_score(tmp_path: Path) -> None:
    class Played(Asked):
        async def follow_up(self, item: Any, messages: Any) -> Any:
            try:
                said = await self.judge(f"You are a customer, and read: {messages[-1]['content']}", str)
            except Exception:
                return None
            return said if len(messages) < 6 else None

    for kind, faults in (("", {}), ("model_server", {"unavailable": 1.0})):
        async with FakeServer(Scripted('"And pear fig apple, again?"'), faults=faults) as user:
            server = {"base_url": user.base_url, "model_name": "fake", "max_retries": 0}
            folder = tmp_path / f"run{kind}"
            folder.mkdir()
            result = await process(Played, folder, does_nothing, total_steps=1, group_size=1, judge_server=server)
        (rollout,) = rollouts(result.files.failures if kind else result.files.groups)
        assert (rollout["reward"], rollout["traceback"]) == (None if kind else 3.0, None)
        assert rollout.get("unscored_kind", "") == kind


async def test_what_the_model_refuses_that_plays_the_user_ends_the_rollout_as_refused(tmp_path: Path) -> None:
    class Played(Asked):
        async def follow_up(self, item: Any, messages: Any) -> Any:
            return await self.judge(f"You are a customer, and read: {messages[-1]['content']}", str)

        async def compute_reward(self, item: Any, result: Any, ctx: Any) -> float:
            return 0.25

    def user(request: dict[str, Any]) -> Any:
        if "BOMB" not in str(request["messages"]):
            return say('"And again?"')
        return web.json_response({"error": {"message": "flagged", "code": "content_filter"}}, status=400)

    said = iter(["Good.", "BOMB"])
    async with ScriptedServer(user) as server:
        judge = {"base_url": server.base_url, "model_name": "scripted", "max_retries": 0}
        settings = {"total_steps": 1, "group_size": 1, "max_infra_retries": 0, "judge_server": judge}
        result = await process(Played, tmp_path, lambda _: say(next(said)), **settings)
    (rollout,) = rollouts(result.files.groups)
    assert (rollout["outcome"], rollout["reward"], rollout["traceback"]) == ("refused", 0.25, None)


async def test_an_agent_that_takes_no_answers_is_named_before_the_first_rollout(tmp_path: Path) -> None:
    class Program(AgentProgramEnv, SortWords):
        command = "true"
        follow_up = Asked.follow_up

    class Tasks(HarborEnv):
        follow_up = Asked.follow_up

    with pytest.raises(SettingsError, match="follow_up has no effect here"):
        await process(Program, tmp_path, does_nothing, total_steps=1, group_size=1)
    with pytest.raises(SettingsError, match="follow_up has no effect here"):
        Tasks(Tasks.env_config_cls(), [ServerConfig(model_name="reference")]).scorer()
