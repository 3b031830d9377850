"""Games of TextArena for several players, over a game with its interface."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from backends.errors import SettingsError
from lachesis_doors.guest_process import GuestError
from lachesis_doors.processes import Package
from lachesis_doors.textarena import TextArenaEnv
from tests.support.scripted_server import ScriptedServer, say
from tests.support.small_envs import lines, process, rollouts


@pytest.fixture
def door(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    monkeypatch.chdir(tmp_path)
    # The guest imports it from the current folder.
    (tmp_path / "textarena.py").write_text(Path(__file__).with_name("textarena_game.py").read_text())

    class GameEnv(TextArenaEnv):
        package = Package("json", "json")

    return GameEnv.at


async def play(target: Any, folder: Path, model: Any, **settings: Any) -> Any:
    chosen = {"total_steps": 2, "group_size": 1, "max_agent_turns": 9, **settings}
    return await process(target, folder, model, enabled_toolsets=[], **chosen)


def asks_of(request: dict[str, Any]) -> list[str]:
    return [message["content"] for message in request["messages"] if message["role"] == "user"]


def twos(_: dict[str, Any]) -> Any:
    return say("[2]")


async def test_the_seat_alternates_and_a_model_plays_the_other_one(tmp_path: Path, door: Any) -> None:
    """Whoever says 2 all the time wins from the first seat: 2, 4, 6."""
    talks = []

    def opponent(request: dict[str, Any]) -> Any:
        talks.append((request["model"], asks_of(request)))
        return say("[2]")

    async with ScriptedServer(opponent) as server:
        target = f"textarena:Five-v0?opponent={server.base_url}&opponent_model=rival"
        result = await play(door(target), tmp_path, twos)
    groups = sorted(lines(result.files.groups), key=lambda group: group["messages"][0][0]["content"])  # by the seat
    first, second = (group["messages"][0] for group in groups)
    assert [each["reward"] for group in groups for each in group["rollouts"]] == [1.0, -1.0]
    assert [message["content"] for message in first] == [
        "[GAME] You are player 0. Say [1] or [2].",
        "[2]",
        "[GAME] It is 2.\n[Player 1] [2]\n[GAME] It is 4.",
        "[2]",
    ]
    assert [message["content"] for message in second] == [
        "[GAME] You are player 1. Say [1] or [2].\n[Player 0] [2]\n[GAME] It is 2.",
        "[2]",
    ]
    assert [model for model, _ in talks] == ["rival"] * 3
    assert max((said for _, said in talks), key=len) == [
        "[GAME] You are player 0. Say [1] or [2].",
        "[GAME] It is 2.\n[Player 1] [2]\n[GAME] It is 4.",
    ]


async def test_the_agents_own_model_plays_the_other_seat_and_only_the_agents_is_recorded(
    tmp_path: Path, door: Any
) -> None:
    asked = []

    def model(request: dict[str, Any]) -> Any:
        asked.append(asks_of(request)[0].split(".")[0])
        return say("[2]")

    result = await play(door("textarena:Five-v0?opponent=policy"), tmp_path, model)
    found = sorted((each["reward"], each["turns"]) for each in rollouts(result.files.groups))  # groups end in any order
    assert found == [(-1.0, 1), (1.0, 2)]
    assert sorted(asked) == ["[GAME] You are player 0"] * 4 + ["[GAME] You are player 1"] * 2


@pytest.mark.parametrize("move", ["[9]", "[crash]", ""])
async def test_an_illegal_move_loses_also_where_the_game_breaks_on_it(tmp_path: Path, door: Any, move: str) -> None:
    result = await play(door("textarena:Five-v0?opponent=random"), tmp_path, lambda _: say(move or "no move"))
    found = rollouts(result.files.groups)
    assert [(each["reward"], each["outcome"]) for each in found] == [(-1.0, "completed")] * 2


async def test_an_illegal_move_of_the_opponent_is_the_agents_win(tmp_path: Path, door: Any) -> None:
    async with ScriptedServer(lambda _: say("[crash]")) as server:
        target = f"textarena:Five-v0?opponent={server.base_url}&opponent_model=rival"
        result = await play(door(target), tmp_path, twos)
    assert [each["reward"] for each in rollouts(result.files.groups)] == [1.0]
    unplayed = rollouts(result.files.failures)  # from the second seat, the game was over before the agent's first move
    assert {each["reward"] for each in unplayed} == {None}


async def test_a_game_that_breaks_on_every_move_is_an_error_of_the_environment(tmp_path: Path, door: Any) -> None:
    async with ScriptedServer(twos) as server:
        target = f"textarena:Broken-v0?opponent={server.base_url}&opponent_model=rival"
        result = await play(door(target), tmp_path, twos, total_steps=1)
    (each,) = rollouts(result.files.failures)
    assert (each["reward"], each["unscored_kind"]) == (None, "environment")
    assert "the board is lost" in each["traceback"]


async def test_random_moves_are_legal_and_the_same_for_the_same_seed(tmp_path: Path, door: Any) -> None:
    target = "textarena:Five-v0?opponent=random&seed=7"
    played = []
    for folder in ("one", "two"):
        (tmp_path / folder).mkdir()
        result = await play(door(target), tmp_path / folder, lambda _: say("[1]"), total_steps=6)
        played.append(sorted(str(group["messages"][0]) for group in lines(result.files.groups)))
        assert {abs(each["reward"]) for each in rollouts(result.files.groups)} == {1.0}
    assert played[0] == played[1]
    assert len(set(played[0])) > 2


@pytest.mark.slow
async def test_an_opponent_that_does_not_answer_is_the_infrastructures(tmp_path: Path, door: Any) -> None:
    async with ScriptedServer(lambda _: say("[1]")) as server:
        gone = server.base_url
    target = f"textarena:Five-v0?opponent={gone}&opponent_model=rival"
    result = await play(door(target), tmp_path, twos, total_steps=1)
    (each,) = rollouts(result.files.failures)
    assert (each["reward"], each["outcome"], each["unscored_kind"]) == (None, "infra_error", "infra_error")
    assert "the opponent made no move" in each["reason"]


async def test_what_is_missing_is_said_before_the_first_rollout(tmp_path: Path, door: Any) -> None:
    with pytest.raises(GuestError, match=r"a game for 2 players. Next step: .*opponent=random"):
        await play(door("textarena:Five-v0"), tmp_path, twos)
    with pytest.raises(SettingsError, match="name the model at http://there, as &opponent_model=NAME"):
        await play(door("textarena:Five-v0?opponent=http://there"), tmp_path, twos)
    with pytest.raises(SettingsError, match="opponent=me: write random, policy, or the URL"):
        await play(door("textarena:Five-v0?opponent=me"), tmp_path, twos)
