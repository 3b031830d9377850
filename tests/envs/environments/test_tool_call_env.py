"""Tool calls for a first success: what a call earns, and items that training and evaluation never share."""

from __future__ import annotations

import itertools
import json
import math
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from lachesis import HermesAgentBaseEnv
from lachesis.settings.server_settings import ServerConfig
from lachesis_envs.maze import MazeEnv
from lachesis_envs.tool_call import ToolCallEnv, ToolResultEnv, graded, in_stock
from lachesis_envs.web_research import WebResearchEnv
from lachesis_messages.messages import Message, ToolCall
from tests.support.scripted_server import ScriptedServer, call, say
from tests.support.small_envs import make, rollouts

ENVIRONMENTS = [ToolCallEnv, ToolResultEnv, MazeEnv]


def environment(env_cls: type[HermesAgentBaseEnv], **settings: Any) -> Any:
    return env_cls(env_cls.env_config_cls(**settings), [ServerConfig(base_url="http://127.0.0.1:1/v1")])


def answering(**changes: Any) -> Any:
    """A model that makes the wanted call, with changes."""

    def play(request: dict[str, Any]) -> Any:
        name, a, _, b = request["messages"][-1]["content"].split()
        arguments = {"a": int(a), "b": int(b), **changes.get("arguments", {})}
        return call((changes.get("name", name), arguments), content=changes.get("text"))

    return play


def play(env_cls: Any, server: ScriptedServer, folder: Path, **settings: Any) -> Any:
    """One rollout."""
    return make(
        env_cls, server, folder, total_steps=1, group_size=1, enabled_toolsets=list(env_cls.toolsets), **settings
    ).process_manager()


def writing(text: str) -> Any:
    """A model that writes the wanted call as text, which our parser reads: `{}` is where its JSON goes."""

    def play(request: dict[str, Any]) -> Any:
        name, a, _, b = request["messages"][-1]["content"].split()
        return say(text.replace("{}", json.dumps({"name": name, "arguments": {"a": int(a), "b": int(b)}})))

    return play


async def earned(tmp_path: Path, answers: Any, **settings: Any) -> tuple[float, dict[str, Any]]:
    async with ScriptedServer(answers) as server:
        result = await play(ToolCallEnv, server, tmp_path, **settings)
    (rollout,) = rollouts(result.files.groups)
    return rollout["reward"], rollout


@pytest.mark.parametrize(
    ("answers", "reward"),
    [
        (answering(), 1.0),
        (answering(text="Here it is."), 0.9),
        (answering(name="multiply"), 0.8),
        (answering(arguments={"a": -1}), 0.75),
        (answering(arguments={"a": "12"}), 0.75),
        (answering(arguments={"c": 1}), 0.5),
        (answering(name="divide", arguments={"a": -1, "b": -1}), 0.3),
        ([say("It is 46.")], 0.0),
        (writing("<tool_call>\n{}\n</tool_call>"), 1.0),
        (writing("<tool_call>\n{}"), 0.1),
        (writing("<tool_call>\n{}}\n</tool_call>"), 0.1),
        (writing('<tool_call>\n{"name": "divide", "arguments": {}}\n</tool_call>'), 0.1),
        (writing("<tool_call>\n{}\n</tool_call>\n<tool_call>\n{}\n</tool_call>"), 0.0),
    ],
    ids=[
        "exact",
        "with text",
        "another tool",
        "wrong number",
        "text for a number",
        "one too many",
        "all wrong",
        "none",
        "written",
        "not closed",
        "one bracket too many",
        "no such tool",
        "twice",
    ],
)
async def test_what_a_call_earns(tmp_path: Path, answers: Any, reward: float) -> None:
    value, rollout = await earned(tmp_path, answers)
    assert value == pytest.approx(reward)
    assert weighted_parts(rollout) == pytest.approx(reward)


def weighted_parts(rollout: dict[str, Any]) -> float:
    """Of a record: the sum of its components, each between 0 and 1, times their weights."""
    parts = {name: rollout["metrics"][f"reward/{name}"] for name in rollout["reward_weights"]}
    assert parts and all(0.0 <= part <= 1.0 for part in parts.values())
    return math.fsum(rollout["reward_weights"][name] * part for name, part in parts.items())


@pytest.mark.parametrize("env_cls", [ToolCallEnv, ToolResultEnv, WebResearchEnv])
async def test_components_are_recorded_without_their_weights(tmp_path: Path, env_cls: Any) -> None:
    config = env_cls.env_config_cls(total_steps=1, data_path_to_save_groups=str(tmp_path / "groups.jsonl"))
    result = await env_cls(config, [ServerConfig(model_name="reference")]).process_manager()
    for rollout in rollouts(result.files.groups):
        assert weighted_parts(rollout) == rollout["reward"] == 1.0
        assert {value for name, value in rollout["metrics"].items() if name.startswith("reward/")} == {1.0}


async def test_a_call_that_is_not_closed_is_run_and_earns_less_than_any_closed_one(tmp_path: Path) -> None:
    _, rollout = await earned(tmp_path, writing("<tool_call>\n{}"))
    (other := tmp_path / "worst").mkdir()
    worst, _ = await earned(other, answering(name="multiply", arguments={"a": -1, "b": -1}, text="so"))
    assert (rollout["tool_calls"], rollout["tool_errors"]) == (1, [])
    assert rollout["metrics"]["right_as_read"] == 1.0
    assert rollout["metrics"]["exact"] == 0.0
    assert rollout["reward"] < worst
    assert rollout["repaired_calls"] == [1, 1]
    (repair,) = (call["repaired"] for call in rollout["calls"].values())
    assert repair


async def test_a_result_that_was_looked_up_by_a_repaired_call_earns_nothing(tmp_path: Path) -> None:
    def play_part(request: dict[str, Any]) -> Any:
        if request["messages"][-1]["role"] == "tool":
            return say(request["messages"][-1]["content"])
        part = request["messages"][-1]["content"].split()[4]
        return say("<tool_call>\n" + json.dumps({"name": "look_up", "arguments": {"part": part}}))

    async with ScriptedServer(play_part) as server:
        result = await play(ToolResultEnv, server, tmp_path)
    (rollout,) = rollouts(result.files.groups)
    assert rollout["turns"] == 2  # the call was run, and its result read
    assert rollout["reward"] == 0.0


@pytest.mark.parametrize("env_cls", ENVIRONMENTS)
async def test_the_reference_policy_earns_everything(tmp_path: Path, env_cls: type[HermesAgentBaseEnv]) -> None:
    config = env_cls.env_config_cls(total_steps=3, data_path_to_save_groups=str(tmp_path / "groups.jsonl"))
    result = await env_cls(config, [ServerConfig(model_name="reference")]).process_manager()
    assert result.summary.reward.mean == 1.0


@pytest.mark.parametrize("env_cls", ENVIRONMENTS)
@given(seed=st.integers(0, 2**32), other=st.integers(0, 2**32), highest=st.sampled_from([20, 99, 10_000]))
def test_no_seed_puts_an_item_of_evaluation_into_training(env_cls: Any, seed: int, other: int, highest: int) -> None:
    one, two = (environment(env_cls, dataset_seed=each, highest=highest) for each in (seed, other))
    training = {item["question"] for item in itertools.islice(one.items("train"), 50)}
    evaluation = {item["question"] for item in itertools.islice(two.items("test"), 50)}
    assert not training & evaluation


@pytest.mark.parametrize("env_cls", ENVIRONMENTS)
async def test_a_seed_gives_the_same_items_again(env_cls: Any) -> None:
    async def drawn(seed: int) -> list[Any]:
        env = environment(env_cls, dataset_seed=seed, eval_items=64)
        await env.setup()
        held_out = await env.get_eval_items()
        assert len({item["question"] for item in held_out}) == 64
        return [held_out, [await env.get_next_item() for _ in range(20)]]

    assert await drawn(3) == await drawn(3)
    assert await drawn(3) != await drawn(4)


async def test_an_answer_without_the_tool_earns_nothing(tmp_path: Path) -> None:
    """Also the right one: a guess teaches no call."""

    def guess(request: dict[str, Any]) -> Any:
        part = request["messages"][-1]["content"].split()[4]
        return say(f"There are {in_stock(part)}.")

    async with ScriptedServer(guess) as server:
        result = await play(ToolResultEnv, server, tmp_path)
    assert [rollout["reward"] for rollout in rollouts(result.files.groups)] == [0.0]


async def test_the_right_call_without_the_right_answer_earns_a_quarter(tmp_path: Path) -> None:
    def forgets(request: dict[str, Any]) -> Any:
        if request["messages"][-1]["role"] == "tool":
            return say("I do not know.")
        return call(("look_up", {"part": request["messages"][-1]["content"].split()[4]}))

    async with ScriptedServer(forgets) as server:
        result = await play(ToolResultEnv, server, tmp_path)
    assert [rollout["reward"] for rollout in rollouts(result.files.groups)] == [0.25]


@pytest.mark.parametrize(
    ("words", "reward"),
    [
        ("{n} pieces of {part} are in stock.", 1.0),
        ("There are {n} ({part}).", 1.0),
        ("{part}: {n}", 1.0),
        ("{n} of {part}, or 7.", 0.25),
        ("{part}", 0.25),
    ],
)
async def test_the_name_of_the_part_is_no_answer(tmp_path: Path, words: str, reward: float) -> None:
    def answers(request: dict[str, Any]) -> Any:
        part = request["messages"][0]["content"].split()[4]
        if request["messages"][-1]["role"] == "tool":
            return say(words.format(n=in_stock(part), part=part))
        return call(("look_up", {"part": part}))

    async with ScriptedServer(answers) as server:
        result = await play(ToolResultEnv, server, tmp_path)
    assert [rollout["reward"] for rollout in rollouts(result.files.groups)] == [reward]


def test_a_call_with_arguments_that_nest_too_deeply_for_the_reward_has_none() -> None:
    deep = ToolCall("call_1", "add", '{"a": ' + "[" * 50_000 + "]" * 50_000 + ', "b": 2}')
    item = {"tool": "add", "arguments": {"a": 1, "b": 2}}
    assert graded(Message("assistant", tool_calls=(deep,)), item).value == 0.5


async def test_no_sandbox_is_needed(tmp_path: Path) -> None:
    """The tools compute here, so a machine that can make no sandbox plays these environments too."""
    reward, _ = await earned(tmp_path, answering(), terminal_backend="docker", terminal_options={"url": "unix:///no"})
    assert reward == 1.0
