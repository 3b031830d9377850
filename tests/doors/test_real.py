"""Doors against what they open to: `make test-doors` installs it, each into an interpreter of its own."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import socket
import subprocess
import time
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from lachesis.cli.environment_classes import environment_class
from lachesis_doors.guest_process import INSIDE, GuestProcess
from lachesis_doors.processes import PACKAGES, interpreter
from lachesis_envs.gsm8k import GSM8kAgentEnv
from lachesis_envs.gsm8k.symbolic import gsm_symbolic
from tests.doors.test_serving import Served, served
from tests.support.scripted_server import call, say
from tests.support.small_envs import lines, make, process, rollouts

DOORS = Path(os.environ.get("LACHESIS_DOORS") or Path.home() / ".cache/lachesis/doors")
HERE = Path(__file__).parent / "real"
pytestmark = pytest.mark.skipif(
    not os.environ.get("LACHESIS_NEED_DOORS"), reason="environments of others: `make test-doors` has them"
)


async def play(target: str, folder: Path, model: Any, **settings: Any) -> Any:
    folder.mkdir(exist_ok=True)
    chosen = {"total_steps": 2, "group_size": 2, "max_agent_turns": 12, **settings}
    return await process(environment_class(target), folder, model, enabled_toolsets=[], **chosen)


@contextlib.contextmanager
def server(scheme: str, path: str) -> Iterator[int]:
    """The port of a server of `real/` that answers at `path`."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    command = [str(DOORS / scheme / "bin/python"), str(HERE / f"{scheme}_server.py"), str(port)]
    with subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL) as running:
        try:
            end = time.monotonic() + 120
            while True:
                try:
                    with urllib.request.urlopen(f"http://127.0.0.1:{port}{path}", timeout=5):
                        break
                except OSError:
                    assert running.poll() is None and time.monotonic() < end
                    time.sleep(0.2)
            yield port
        finally:
            running.terminate()


def halves(request: dict[str, Any]) -> Any:
    """A model that halves the interval from 1 to 9."""
    (tool,) = request["tools"]
    low, high = 1, 9
    for message in request["messages"]:
        if message["role"] == "tool":
            middle = (low + high) // 2
            low, high = (middle + 1, high) if "higher" in message["content"] else (low, middle - 1)
    return call((tool["function"]["name"], {"number": (low + high) // 2}))


async def test_the_open_reward_standard(tmp_path: Path) -> None:
    with server("ors", "/health") as port:
        target = f"ors:http://127.0.0.1:{port}/numbers"
        found = rollouts((await play(target, tmp_path / "played", halves)).files.groups)
        assert sorted((each["reward"], each["turns"], each["outcome"]) for each in found) == [
            *[(0.5, 3, "completed")] * 2,
            *[(0.75, 2, "completed")] * 2,
        ]
        fails = await play(
            target, tmp_path / "broken", lambda _: call(("guess", {"number": 13})), total_steps=1, group_size=1
        )
        (each,) = rollouts(fails.files.failures)
        assert (each["reward"], each["unscored_kind"]) == (None, "environment")
        assert "the environment fell over" in each["traceback"]

        def wrong(request: dict[str, Any]) -> Any:
            return call(("guess", {"number": "many"})) if len(request["messages"]) < 2 else say("No.")

        (each,) = rollouts((await play(target, tmp_path / "wrong", wrong, total_steps=1, group_size=1)).files.groups)
        assert (each["reward"], len(each["tool_errors"])) == (0.0, 1)


async def test_openenv_with_more_rollouts_than_sessions(tmp_path: Path) -> None:
    def model(request: dict[str, Any]) -> Any:
        asked = request["messages"][0]["content"].removeprefix("say ")
        return call(("step", {"message": "what" if len(request["messages"]) < 2 else asked}))

    with server("openenv", "/health") as port:
        found = rollouts((await play(f"openenv:ws://127.0.0.1:{port}", tmp_path, model, group_size=4)).files.groups)
    assert [(each["reward"], each["outcome"]) for each in found] == [(0.5, "completed")] * 8


async def test_gymnasium(tmp_path: Path) -> None:
    way = [1, 1, 2, 2, 1, 2]  # down, down, right, right, down, right

    def model(request: dict[str, Any]) -> Any:
        taken = sum(message["role"] == "tool" for message in request["messages"])
        return call(("step", {"action": way[taken]}))

    result = await play("gymnasium:FrozenLake-v1?is_slippery=false", tmp_path, model, total_steps=1)
    found = rollouts(result.files.groups)
    assert [(each["reward"], each["turns"]) for each in found] == [(1.0, 6), (1.0, 6)]


async def test_textarena(tmp_path: Path) -> None:
    def model(request: dict[str, Any]) -> Any:
        low, high = 1, 20
        guesses = [m["content"] for m in request["messages"] if m["role"] == "assistant"]
        hints = [m["content"].lower() for m in request["messages"][1:] if m["role"] == "user"]
        for guess, hint in zip(guesses, hints, strict=True):
            number = int(guess.strip("[]"))
            low, high = (number + 1, high) if "higher" in hint else (low, number - 1)
        return say(f"[{(low + high) // 2}]")

    found = rollouts((await play("textarena:GuessTheNumber-v0", tmp_path, model, total_steps=3)).files.groups)
    assert {each["reward"] for each in found} == {1.0}
    first = [group["messages"][0][0] for group in lines(tmp_path / "groups.jsonl")]
    again = await play("textarena:GuessTheNumber-v0", tmp_path / "again", model, total_steps=3)
    assert [group["messages"][0][0] for group in lines(again.files.groups)] == first


@pytest.mark.parametrize("kind", ["base", "miss_func", "miss_param", "long_context"])
async def test_the_ground_truth_of_bfcl_is_right_and_idleness_is_not(kind: str) -> None:
    script = INSIDE / "bfcl.py"
    guest = GuestProcess(interpreter("bfcl", PACKAGES["bfcl"]), script, f"multi_turn_{kind}", {})
    await guest.start()
    try:
        solved, idle = [], []
        for number in range(guest.about["size"]):
            item = (await guest.call("item", number=number))["item"]
            for session, scores in (("solved", solved), ("idle", idle)):
                opened = await guest.call("open", session, item=item)
                for turn in opened["solution"] if session == "solved" else ():
                    for each in turn.get("calls") or ():
                        await guest.call("call", session, **json.loads(json.dumps(each)))
                    if "text" in turn:
                        await guest.call("act", session, text=turn["text"])
                scores.append((await guest.call("score", session, messages=[]))["reward"])
                await guest.call("close", session)
    finally:
        await guest.close()
    # Row 49 of miss_func calls `tail` two turns before it is offered.
    assert [number for number, score in enumerate(solved) if score != 1.0] == ([49] if kind == "miss_func" else [])
    assert set(idle) == {0.0}


@pytest.mark.parametrize("standard", ["ors", "openenv"])
@pytest.mark.parametrize("solves", [True, False])
async def test_the_clients_of_others_play_what_we_serve(tmp_path: Path, standard: str, solves: bool) -> None:
    async def play_with_sdk(env_cls: Any, answer: str, command: dict[str, str], tools: list[str]) -> Any:
        calls = [[tools[0], command], ["submit", {"answer": answer}]]
        async with served(standard, env_cls, tmp_path, enabled_toolsets=tools) as url:
            program = [str(DOORS / standard / "bin/python"), str(HERE / f"{standard}_client.py")]
            arguments = [url, env_cls.name.lower(), json.dumps(calls)]
            pipe = asyncio.subprocess.PIPE
            running = await asyncio.create_subprocess_exec(*program, *arguments, stdout=pipe, stderr=pipe)
            out, log = await running.communicate()
            assert running.returncode == 0, log.decode()
            return json.loads(out)

    words = "apple\nfig\npear" if solves else "pear"
    said = await play_with_sdk(Served, "Done.", {"command": f"printf '{words}' >sorted.txt"}, ["terminal"])
    assert "pear fig apple" in said["prompt"] and said["tools"] == ["terminal", "process", "submit"]
    assert (said["rewards"], said["finished"]) == ([None, float(solves)], [False, True])

    row = gsm_symbolic(1, 0)[0]
    answer = f"It is \\boxed{{{row['answer'] if solves else -1}}}."
    said = await play_with_sdk(GSM8kAgentEnv, answer, {"code": "print(6 * 7)"}, ["python"])
    assert row["question"] in said["prompt"]
    assert (said["rewards"], said["finished"]) == ([None, float(solves)], [False, True])


def test_most_games_of_textarena_play_and_two_games_of_one_seed_are_alike() -> None:
    python = interpreter("textarena", PACKAGES["textarena"])
    command = [python, str(HERE / "textarena_survey.py"), str(INSIDE / "textarena.py")]
    listed = subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True).stdout
    print(listed)
    rows = [line.split("\t") for line in listed.splitlines()]
    assert len(rows) == 238
    alike = [name for name, _, found, _ in rows if found == "alike"]
    assert len(alike) >= 185, sorted({row[0] for row in rows} - set(alike))
    assert not [name for name, _, found, _ in rows if found == "differs"]


async def test_tau2_with_a_scripted_customer_and_with_one_who_does_not_answer(tmp_path: Path) -> None:
    def model(request: dict[str, Any]) -> Any:
        task = request["messages"][-1]
        made = {"user_id": "user_1", "title": "Important Meeting"}
        return call(("create_task", made)) if task["role"] == "user" else say("Done.")

    settings = {"total_steps": 1, "group_size": 2}
    found = rollouts((await play("tau2:mock?user=scripted", tmp_path / "mock", model, **settings)).files.groups)
    assert [(each["reward"], each["turns"], each["outcome"]) for each in found] == [(1.0, 2, "completed")] * 2
    target = "tau2:airline?user=scripted"
    found = rollouts((await play(target, tmp_path / "airline", lambda _: say("No."), **settings)).files.groups)
    assert {each["outcome"] for each in found} == {"completed"}
    gone = "tau2:mock?user=http://127.0.0.1:9/v1&user_model=customer"
    lost = rollouts((await play(gone, tmp_path / "gone", model, **settings)).files.failures)
    assert {(each["reward"], each["unscored_kind"]) for each in lost} == {(None, "infra_error")}
    assert "the customer's model gave no answer" in lost[0]["reason"]


@pytest.mark.parametrize(("domain", "count", "unsolved"), [("mock", 9, ["7"]), ("telecom", 8, [])])
async def test_the_calls_of_tau2s_evaluation_pass_it(
    tmp_path: Path, domain: str, count: int, unsolved: list[str]
) -> None:
    chosen = {"total_steps": count, "group_size": 1, "max_agent_turns": 40, "enabled_toolsets": []}
    env = make(environment_class(f"tau2:{domain}?user=scripted"), None, tmp_path, **chosen)
    groups = lines((await env.process_manager()).files.groups)
    print([(group.keys(), group["item"]) for group in groups][:2])
    rewards = {str(group["item"]["item"]["number"]): group["rollouts"][0]["reward"] for group in groups}
    assert len(rewards) == count
    # Task 7 of mock names no calls.
    assert [number for number, reward in rewards.items() if reward != 1.0] == unsolved
