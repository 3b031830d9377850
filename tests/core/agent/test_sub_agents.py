"""Sub-agents: their conversations are trees of the rollout's graph, and their tokens are delivered with it."""

from __future__ import annotations

import json
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
from aiohttp import web

from lachesis_testing.fake_server import Ask, FakeServer
from lachesis_tokens.verbs.verify import verify_file
from tests.support.scripted_server import ScriptedServer, call, say
from tests.support.small_envs import SortWords, kill_sandboxes, lines, make, process, rollouts
from tests.support.training_runs import environment, with_tokens

TOOLSETS = ["terminal", "memory", "delegation", "clarify"]


class Delegates(SortWords):
    """A task of which a part is delegated."""

    name = "delegates"
    toolsets = TOOLSETS
    system_prompt = "You are careful."

    async def compute_reward(self, item: Any, result: Any, ctx: Any) -> float:
        return 1.0


class Answers(Delegates):
    """With a user who answers."""

    name = "answers"

    def follow_up(self, item: Any, messages: Any) -> str | None:
        said = messages[-1]["content"]
        return f"You asked: {said}" if "?" in said else None


def calls(name: str, **arguments: Any) -> str:
    return f"<tool_call>\n{json.dumps({'name': name, 'arguments': arguments})}\n</tool_call>"


def is_sub_agent(ask: Ask) -> bool:
    return "SUBTASK" in ask.prompt and "Write the words of" not in ask.prompt


def delegating(*turns: str, **arguments: Any) -> Any:
    """A model that delegates at once, and whose sub-agent takes `turns`; the last one repeats."""

    def model(ask: Ask) -> str:
        if is_sub_agent(ask):
            return turns[min(ask.turn, len(turns) - 1)]
        return calls("delegate_task", goal="SUBTASK", **arguments) if ask.turn == 0 else "Done."

    return model


async def played(folder: Path, model: Any, env_cls: Any = Delegates, faults: Any = (), **settings: Any) -> Any:
    """The only rollout, its group, and what the server sampled."""
    async with FakeServer(model, faults=faults) as server:
        chosen = {"group_size": 1, "enabled_toolsets": TOOLSETS, **settings}
        env = environment(env_cls, folder, with_tokens(server, folder).model_copy(update={"max_retries": 0}), **chosen)
        await env.process_manager()
        sampled = Counter(
            tuple(made.ids) for seen in server.requests if seen.state == "answered" for made in seen.completions
        )
    file = folder / "groups.jsonl"
    groups = lines(file if file.exists() and file.stat().st_size else folder / "groups.failed.jsonl")
    return groups[0]["rollouts"][0], groups[0], sampled


def assert_delivered(folder: Path, sampled: Counter[tuple[int, ...]]) -> None:
    totals = verify_file(folder / "groups.jsonl")
    assert totals.ok, totals.problems
    count = sum(len(ids) * times for ids, times in sampled.items())
    assert (totals.sampled, totals.delivered, totals.duplicated) == (count, count, 0)


async def test_the_turns_of_a_sub_agent_are_delivered_with_those_of_the_agent(tmp_path: Path) -> None:
    model = delegating(calls("terminal", command="echo pear > found"), "I found a pear.", context="It is green.")
    rollout, group, sampled = await played(tmp_path, model)
    assert (rollout["reward"], rollout["outcome"], rollout["turns"]) == (1.0, "completed", 2)
    (call,) = rollout["calls"].values()
    said = call["subagent"]["messages"]
    assert [message["role"] for message in said] == ["system", "user", "assistant", "tool", "assistant"]
    assert said[0]["content"] == "You are careful."
    assert said[1]["content"] == "SUBTASK\n\nWhat you need to know:\nIt is green."
    results = [message["content"] for message in group["messages"][0] if message["role"] == "tool"]
    assert results == ["I found a pear."]
    assert sum(sampled.values()) == 4
    assert_delivered(tmp_path, sampled)


def results(group: Any) -> list[str]:
    return [message["content"] for message in group["messages"][0] if message["role"] == "tool"]


async def test_a_sub_agent_has_no_more_tools_than_it_is_given_and_none_to_delegate_or_ask(tmp_path: Path) -> None:
    offered: list[set[str]] = []

    def model(ask: Ask) -> str:
        if is_sub_agent(ask):
            found = {name for name in (*EVERY, "delegate_task") if f'"name": "{name}"' in ask.prompt}
            offered.append(found)
            return calls("delegate_task", goal="SUBTASK") if ask.turn == 0 else "Done."
        goals = [{"toolsets": None}, {"toolsets": ["read_file", "memory", "delegation"]}, {"toolsets": ["termnal"]}]
        return calls("delegate_task", goal="SUBTASK", **goals[ask.turn]) if ask.turn < 3 else "Done."

    EVERY = ("terminal", "process", "read_file", "memory", "todo", "clarify", "execute_code")
    toolsets = ["terminal", "read_file", "memory", "todo", "clarify", "code_execution", "delegation"]
    _, group, sampled = await played(tmp_path, model, Answers, enabled_toolsets=toolsets)
    assert offered[::2] == [{"terminal", "process", "read_file"}, {"read_file"}]
    first, _, third = results(group)
    assert first == "Done." and "did you mean 'terminal'" in third
    assert_delivered(tmp_path, sampled)


@pytest.mark.parametrize(
    ("settings", "arguments", "said"),
    [
        ({}, {"max_turns": 2}, "2 turns without a final answer"),
        ({"max_tool_calls": 3}, {}, "the budget of 3 tool calls is used up"),
        ({"max_tool_calls": 2}, {}, "the budget of 2 tool calls is used up"),
    ],
)
async def test_a_sub_agent_that_does_not_finish_is_a_failed_call(
    tmp_path: Path, settings: Any, arguments: Any, said: str
) -> None:
    rollout, group, sampled = await played(
        tmp_path, delegating(calls("terminal", command="ls"), **arguments), **settings
    )
    assert said in results(group)[0] and rollout["tool_errors"][0]["tool"] == "delegate_task"
    assert rollout["outcome"] == ("max_turns" if settings else "completed")
    assert_delivered(tmp_path, sampled)


async def test_the_budget_of_tokens_is_that_of_the_rollout(tmp_path: Path) -> None:
    model = delegating(calls("terminal", command=f"echo {'x ' * 200}"))
    rollout, _, sampled = await played(tmp_path, model, rollout_token_budget=900)
    assert rollout["outcome"] == "context_exhausted"
    assert rollout["completion_tokens"] == sum(len(ids) * times for ids, times in sampled.items()) < 1500
    assert_delivered(tmp_path, sampled)


async def test_a_task_that_is_too_long_for_a_sub_agent_is_told_to_the_agent_who_wrote_it(tmp_path: Path) -> None:
    said = "This model's maximum context length is 2000 tokens. However, you requested 2400 tokens."

    def model(request: dict[str, Any]) -> Any:
        if request["messages"][-1]["content"].startswith("SUBTASK"):
            return web.json_response({"object": "error", "message": said, "code": 400}, status=400)
        answered = any(message["role"] == "tool" for message in request["messages"])
        return say("Done.") if answered else call(("delegate_task", {"goal": "SUBTASK"}))

    result = await process(Delegates, tmp_path, model, group_size=1, total_steps=1, enabled_toolsets=TOOLSETS)
    (rollout,) = rollouts(result.files.groups)
    assert (rollout["outcome"], rollout["reward"]) == ("completed", 1.0)
    (failed,) = rollout["tool_errors"]
    assert failed["tool"] == "delegate_task" and "the sub-agent has not finished" in failed["error"]


async def test_a_task_that_its_server_refuses_without_a_word_is_told_to_the_agent_who_wrote_it(tmp_path: Path) -> None:
    """If the server answers others: a 400 may also be about the tools or the sampling options of every request."""

    def model(request: dict[str, Any]) -> Any:
        if "SUBTASK" in str(request["messages"][-1]["content"]):
            return 400
        turns = sum(message["role"] == "assistant" for message in request["messages"])
        delegates = call(("delegate_task", {"goal": "SUBTASK"}))
        return [call(("terminal", {"command": "ls"})), delegates, say("Done.")][turns]

    settings = {"group_size": 1, "total_steps": 1, "enabled_toolsets": TOOLSETS}
    result = await process(Delegates, tmp_path, model, **settings)
    (rollout,) = rollouts(result.files.groups)
    assert (rollout["outcome"], rollout["reward"]) == ("completed", 1.0)
    assert [(each["tool"], "not finished" in each["error"]) for each in rollout["tool_errors"]] == [
        ("delegate_task", True)
    ]


async def test_what_a_sub_agent_sampled_before_the_time_was_over_is_delivered(tmp_path: Path) -> None:
    model = delegating(calls("terminal", command="echo 1"), calls("terminal", command="sleep 60"))
    rollout, group, sampled = await played(tmp_path, model, rollout_timeout=4)
    assert (rollout["outcome"], rollout["reward"]) == ("timeout", 1.0)
    assert [message["role"] for message in group["messages"][0]] == ["system", "user"]
    assert sum(sampled.values()) == 3
    assert_delivered(tmp_path, sampled)


@pytest.mark.parametrize("what", ["sandbox", "server"])
async def test_what_fails_under_a_sub_agent_is_the_infrastructures(tmp_path: Path, what: str) -> None:
    def model(ask: Ask) -> str:
        if is_sub_agent(ask) and ask.turn == 1:
            if what == "server":
                raise RuntimeError("the model server is broken")
            kill_sandboxes()
        return delegating(calls("terminal", command="ls"))(ask)

    rollout, _, _ = await played(tmp_path, model)
    assert (rollout["reward"], rollout["outcome"]) == (None, "infra_error")
    assert {"sandbox": "its executor died", "server": "the policy failed"}[what] in rollout["reason"]


async def test_a_question_is_answered_by_the_user_of_the_environment(tmp_path: Path) -> None:
    def model(ask: Ask) -> str:
        return calls("clarify", question="Which?", choices=["a", "b"]) if ask.turn == 0 else "I choose b."

    rollout, group, sampled = await played(tmp_path, model, Answers)
    assert results(group) == ["You asked: Which?\n- a\n- b"]
    assert (rollout["outcome"], rollout["turns"]) == ("completed", 2)
    assert_delivered(tmp_path, sampled)


async def test_without_a_user_there_is_no_question(tmp_path: Path) -> None:
    _, group, _ = await played(tmp_path, lambda ask: "Done.", group_size=1)
    assert "clarify" not in json.dumps(group["tools"]) and "delegate_task" in json.dumps(group["tools"])
    note = "skipped toolsets that have no tools here: clarify; clarify needs a user"
    assert note in (tmp_path / "console.txt").read_text()


async def test_the_time_that_a_server_lets_a_sub_agent_wait_is_not_the_agents(tmp_path: Path) -> None:
    script = [
        call(("delegate_task", {"goal": "SUBTASK"})),
        lambda _: web.json_response({}, status=429, headers={"Retry-After": "2"}),
        say("A pear."),
        say("Done."),
    ]
    async with ScriptedServer(script) as server:
        env = make(Delegates, server, tmp_path, total_steps=1, group_size=1, enabled_toolsets=TOOLSETS)
        env.server_configs[0].max_retries = 1
        await Delegates(env.config, env.server_configs).process_manager()
    (rollout,) = rollouts(tmp_path / "groups.jsonl")
    assert rollout["outcome"] == "completed" and rollout["seconds_waiting"] >= 1.9
    assert rollout["completion_tokens"] == 15
