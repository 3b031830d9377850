"""The maze of files: its way, what earns nothing, and rollouts that branch in it."""

from __future__ import annotations

import json
import re
from collections import defaultdict
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from lachesis.settings.server_settings import ServerConfig
from lachesis_envs.maze import MazeEnv, go, maze
from lachesis_messages.records.jsonl import read_lines
from lachesis_testing.fake_server.completions import Ask
from lachesis_tokens.samples.verification import verify_records
from lachesis_tools import BUILTIN_TOOLS
from tests.support.scripted_server import ScriptedServer, call, say
from tests.support.small_envs import lines, make, process
from tests.support.training_runs import played

DOOR = re.compile(r"(red|blue|green|white|black) (\w+)")


def doors(text: str) -> dict[str, str]:
    """Rooms by colour, without the code of the environment."""
    return dict(DOOR.findall(text.rpartition("doors: ")[2].partition("\n")[0]))


def replayed(rooms: dict[str, str], calls: list[dict[str, Any]], answers: list[str]) -> str:
    """Where the calls lead; each answer must be the one of its room."""
    here = "hall"
    for each, answer in zip(calls, answers, strict=True):
        door = json.loads(each["function"]["arguments"])["door"]
        if door in doors(rooms[here]).values():
            here = door
            assert answer == rooms[here]
        else:
            assert "no such door" in answer
    return here


@given(number=st.integers(1, 10**9))
def test_the_end_is_five_doors_away_and_only_the_colour_leads_there(number: int) -> None:
    drawn = maze(number)
    rooms, found, frontier = drawn["rooms"], {"hall": 0}, ["hall"]
    for here in frontier:
        for door in doors(rooms[here]).values():
            if door not in found:
                found[door] = found[here] + 1
                frontier.append(door)
    assert found.keys() == rooms.keys()
    assert found[drawn["end"]] == 5
    for start in rooms:
        here, steps = start, 0
        while here != drawn["end"]:
            here, steps = doors(rooms[here])[drawn["colour"]], steps + 1
        assert steps <= 6
    assert all(len(doors(text)) == text.count(",") + 1 for text in rooms.values() if "doors" in text), "a colour twice"


def asked(request: dict[str, Any]) -> tuple[str, dict[str, str]]:
    """The colour, and the doors of the room."""
    task, last = (request["messages"][at]["content"] for at in (0, -1))
    return task.split()[2], doors(last)


def follows(request: dict[str, Any]) -> Any:
    colour, there = asked(request)
    return call(("go", {"door": there[colour]}))


def wrong(*turns: int) -> Any:
    """A model that takes another door in these turns."""

    def play(request: dict[str, Any]) -> Any:
        colour, there = asked(request)
        if sum(each["role"] == "assistant" for each in request["messages"]) in turns:
            ends = maze_of(request)["rooms"]
            colour = next(each for each, door in there.items() if each != colour and ends[door].count(",") == 0)
        return call(("go", {"door": there[colour]}))

    return play


def maze_of(request: dict[str, Any]) -> Mapping[str, Any]:
    """The first item of training."""
    item: Mapping[str, Any] = next(
        MazeEnv(MazeEnv.env_config_cls(), [ServerConfig(model_name="reference")]).items("train")
    )
    assert item["question"] == request["messages"][0]["content"]
    return item


def jumps(request: dict[str, Any]) -> Any:
    return call(("go", {"door": maze_of(request)["end"]}))


def claims(request: dict[str, Any]) -> Any:
    return say(maze_of(request)["rooms"][maze_of(request)["end"]])


def writes(text: str) -> Any:
    """A model that writes the right call as text, which our parser reads."""

    def play(request: dict[str, Any]) -> Any:
        colour, there = asked(request)
        return say(text.replace("{}", json.dumps({"name": "go", "arguments": {"door": there[colour]}})))

    return play


@pytest.mark.parametrize(
    ("model", "turns", "reward", "as_read"),
    [
        (follows, 5, 1.0, 1.0),
        (writes("<tool_call>\n{}\n</tool_call>"), 5, 1.0, 1.0),
        (wrong(2), 7, 1.0, 1.0),
        (wrong(0, 3), 7, 0.0, 0.0),
        (writes("<tool_call>\n{}"), 5, 0.0, 1.0),
        (jumps, 7, 0.0, 0.0),
        (claims, 1, 0.0, 0.0),
    ],
    ids=["follows", "written", "one dead end", "two dead ends", "not closed", "jumps", "claims"],
)
async def test_what_a_way_earns(tmp_path: Path, model: Any, turns: int, reward: float, as_read: float) -> None:
    settings = {"total_steps": 1, "group_size": 1, "enabled_toolsets": ["maze"]}
    (group,) = lines((await process(MazeEnv, tmp_path, model, **settings)).files.groups)
    (rollout,), (messages,) = group["rollouts"], group["messages"]
    assert (rollout["turns"], rollout["reward"], rollout["metrics"]["right_as_read"]) == (turns, reward, as_read)
    calls = [each for message in messages for each in message.get("tool_calls") or ()]
    answers = [message["content"] for message in messages if message["role"] == "tool"]
    here = replayed(group["item"]["rooms"], calls, answers)
    assert (here == group["item"]["end"]) == bool(as_read)


async def test_a_place_that_was_written_and_not_reached_earns_nothing(tmp_path: Path) -> None:
    """Where settings give the agent a terminal."""

    def writes_it(request: dict[str, Any]) -> Any:
        if len(request["messages"]) > 1:
            return say("Done.")
        return call(("terminal", {"command": f"printf {maze_of(request)['end']} > here"}))

    settings = {"total_steps": 1, "group_size": 1, "enabled_toolsets": ["maze", "terminal"]}

    class Open(MazeEnv):
        tools = BUILTIN_TOOLS.extended(go)

    async with ScriptedServer(writes_it) as server:
        result = await make(Open, server, tmp_path, **settings).process_manager()
    (rollout,) = lines(result.files.groups)[0]["rollouts"]
    assert (rollout["reward"], rollout["tool_errors"]) == (0.0, [])


async def test_the_reference_policy_earns_everything(tmp_path: Path) -> None:
    result = await make(MazeEnv, None, tmp_path, enabled_toolsets=["maze"]).process_manager()
    assert result.summary.reward.mean == 1.0


class Walker:
    """Takes the right door with this probability, else any."""

    def __init__(self, right: float) -> None:
        self.right = right

    def __call__(self, ask: Ask) -> str:
        colour = re.findall(r"Follow the (\w+) doors", ask.prompt)[-1]
        there = doors(ask.prompt)
        dice = ask.rng()
        door = there[colour] if dice.random() < self.right else dice.choice(list(there.values()))
        return f"<tool_call>\n{json.dumps({'name': 'go', 'arguments': {'door': door}})}\n</tool_call>"


@pytest.mark.slow
async def test_random_walks_fail(tmp_path: Path) -> None:
    settings = {"group_size": 8, "total_steps": 8, "enabled_toolsets": ["maze"]}
    found = await played(MazeEnv, tmp_path, Walker(0.0), fake={"vary": True}, **settings)
    assert sum(each["reward"] for each in found) <= 0.1 * len(found)


async def test_each_branch_of_a_tree_has_its_own_place(tmp_path: Path) -> None:
    settings = {"group_size": 8, "total_steps": 4, "tree_at": "turns:2,4", "enabled_toolsets": ["maze"]}
    await played(MazeEnv, tmp_path, Walker(0.6), fake={"vary": True}, **settings)
    groups = list(read_lines(tmp_path / "groups.jsonl"))
    rewards: set[float] = set()
    split = 0
    for group in groups:
        rooms, ends = group["item"]["rooms"], defaultdict(set)
        for rollout, messages in zip(group["rollouts"], group["messages"], strict=True):
            calls = [each for message in messages for each in message.get("tool_calls") or ()]
            answers = [message["content"] for message in messages if message["role"] == "tool"]
            here = replayed(rooms, calls, answers)
            assert rollout["reward"] == float(here == group["item"]["end"])
            rewards.add(rollout["reward"])
            ends[rollout["tree"]["path"].split(".")[0]].add(here)
        assert all(rollout["tree"]["turns"] == [0, 1, 3] for rollout in group["rollouts"])
        split += sum(len(places) > 1 for places in ends.values())
    assert rewards == {0.0, 1.0}
    assert split, "trees whose branches came to different rooms"
    assert verify_records(groups).ok
