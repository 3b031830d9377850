"""Environments of other packages, in a process of their own interpreter."""

from __future__ import annotations

import asyncio
import os
import signal
import sys
from pathlib import Path
from typing import Any, ClassVar

import pytest

from backends.errors import SettingsError
from lachesis.cli.environment_classes import environment_class
from lachesis_doors.guest_process import INSIDE, GuestError, GuestLost, GuestProcess, NotLoaded
from lachesis_doors.processes import Package, ProcessEnv, interpreter
from tests.support.scripted_server import call, say
from tests.support.small_envs import lines, make, process, rollouts

SCRIPT = """
import os, sys, time
print("a guest that prints while it is imported")

class Guest:
    rewards = "sum"
    def __init__(self, target, size=4, fails="", **arguments):
        if target == "broken":
            raise KeyError("level")
        self.size, self.fails = size, fails
    def item(self, number):
        schema = {"type": "object", "properties": {"by": {"type": "integer"}}, "required": ["by"]}
        return {"item": {"number": number}, "tools": [{"name": "add", "description": "Add.", "parameters": schema}]}
    async def open(self, item):
        if self.fails == "open":
            raise OSError("no board")
        return Sum(self, item["number"])

class Sum:
    def __init__(self, guest, number):
        self.guest, self.number, self.value = guest, number, 0
        self.prompt = "Make %d." % (number + 2)
        self.solution = [{"calls": [{"name": "add", "arguments": {"by": number + 2}}]}]
    def call(self, name, arguments):
        print("a guest that prints")
        os.write(1, b"straight to its output\\n")
        self.value += arguments["by"]
        if self.guest.fails == "call":
            raise ValueError("the board fell")
        if self.guest.fails == "lost":
            error = ConnectionError("the board is far away")
            error.lost = True
            raise error
        if self.guest.fails == "stalls" and self.number == 0:
            time.sleep(3600)
        if self.guest.fails == "killed" and not os.path.exists("killed"):
            open("killed", "w").close()
            os.kill(os.getpid(), 9)
        done = self.value == self.number + 2
        return {"text": str(self.value), "reward": 1.0 if done else -0.5, "done": done}
    async def act(self, text):
        return {"text": "Go on.", "reward": 0.25, "done": text == "stop"}
    def score(self, messages):
        if self.guest.fails == "score" and messages[-1]["content"] == "stop":
            raise ValueError("no number")
        return {"invalid": "a judge is missing"} if self.guest.fails == "invalid" else {}
    def close(self):
        with open("closed", "a") as file:
            file.write("%d\\n" % self.number)
"""


@pytest.fixture
def door(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    monkeypatch.chdir(tmp_path)
    script = tmp_path / "sums.py"
    script.write_text(SCRIPT)
    guest_script = script

    class SumEnv(ProcessEnv):
        package = Package("json", "json")
        script: ClassVar[Path] = guest_script

    return SumEnv.at


async def play(env_cls: Any, folder: Path, model: Any, **settings: Any) -> Any:
    chosen = {"total_steps": 2, "group_size": 2, **settings}
    return await process(env_cls, folder, model, enabled_toolsets=[], **chosen)


def adds(request: dict[str, Any]) -> Any:
    """A model that adds 2 until the environment ends it."""
    return call(("add", {"by": 2}))


async def test_calls_messages_and_rewards_are_the_guests(tmp_path: Path, door: Any) -> None:
    said = iter(["Hm.", "stop"] * 2)

    def model(request: dict[str, Any]) -> Any:
        wanted = request["messages"][0]["content"]
        return say(next(said)) if wanted == "Make 3." else adds(request)

    result = await play(door("sums:easy"), tmp_path, model, group_size=1)
    first, second = rollouts(result.files.groups)
    assert (first["reward"], first["reason"]) == (1.0, "the tool add ended the task")
    assert (second["reward"], second["outcome"], second["turns"]) == (0.5, "completed", 2)
    talk = lines(result.files.groups)[1]["messages"][0]
    assert [message["content"] for message in talk] == ["Make 3.", "Hm.", "Go on.", "stop"]
    assert sorted((tmp_path / "closed").read_text().split()) == ["0", "1"]


@pytest.mark.parametrize("own", [False, True])
async def test_a_prompt_of_messages_gets_the_system_prompt_unless_it_has_one(tmp_path: Path, own: bool) -> None:
    """The guest scores what the agent said, wherever that begins."""
    said = ([{"role": "system", "content": "Theirs."}] if own else []) + [{"role": "user", "content": "Go."}]
    script = tmp_path / "talk.py"
    script.write_text(
        "class Guest:\n size = 1\n def __init__(self, target): pass\n def item(self, number): return {'item': 0}\n"
        f" def open(self, item): return self\n prompt = {said!r}\n"
        " def act(self, text): return None\n"
        " def score(self, messages): return {'reward': [each['content'] for each in messages] == ['Gone.']}\n"
    )
    guest_script = script

    class TalkEnv(ProcessEnv):
        package = Package("json", "json")
        script: ClassVar[Path] = guest_script

    settings = {"total_steps": 1, "group_size": 1, "system_prompt": "Ours."}
    result = await play(TalkEnv.at("talk:all"), tmp_path, lambda _: say("Gone."), **settings)
    (group,) = lines(result.files.groups)
    (messages,), scores = group["messages"], group["scores"]
    assert scores == [1.0]
    first = "Theirs." if own else "Ours."
    assert [message["content"] for message in messages] == [first, "Go.", "Gone."]


async def test_the_reference_begins_with_its_first_turn_where_the_prompt_is_a_conversation(tmp_path: Path) -> None:
    begun = [
        {"role": "user", "content": "Guess."},
        {"role": "assistant", "content": "Which one?"},
        {"role": "user", "content": "Both."},
    ]
    script = tmp_path / "goes_on.py"
    script.write_text(
        "class Guest:\n size = 1\n def __init__(self, target): self.said = []\n"
        f" def item(self, number): return {{'item': 0}}\n def open(self, item): return self\n prompt = {begun!r}\n"
        " solution = [{'text': 'One.'}, {'text': 'Two.'}]\n"
        " def act(self, text):\n  self.said.append(text)\n  return {'text': 'And?'} if len(self.said) < 2 else None\n"
        " def score(self, messages): return {'reward': float(self.said == ['One.', 'Two.'])}\n"
    )
    guest_script = script

    class GoesOnEnv(ProcessEnv):
        package = Package("json", "json")
        script: ClassVar[Path] = guest_script

    env = make(GoesOnEnv.at("goes_on:all"), None, tmp_path, enabled_toolsets=[], total_steps=1, group_size=1)
    (each,) = rollouts((await env.process_manager()).files.groups)
    assert (each["reward"], each["turns"]) == (1.0, 2)


LATER = """
class Guest:
    size = 1
    def __init__(self, target):
        pass
    def item(self, number):
        schema = {"type": "object", "properties": {"by": {"type": "integer"}}, "required": ["by"]}
        names = {"look": True, "add": False, "todo": True}
        tools = [{"name": each, "parameters": schema, "offered": names[each]} for each in names]
        return {"item": {}, "tools": tools}
    def open(self, item):
        return Session()

class Session:
    prompt = "Add 3."
    added = 0
    told = False
    def act(self, text):
        if self.told:
            return None
        self.told = True
        return {"text": "Now there is the function add."}
    def call(self, name, arguments):
        if name == "add" and not self.told:
            return {"error": "not yet", "text": "There is no function add yet."}
        self.added += arguments["by"]
        return {"text": str(self.added)}
    def score(self, messages):
        return {"reward": float(self.added == 3)}
"""


async def test_a_tool_that_comes_later_is_not_in_the_prompt_and_can_be_called(tmp_path: Path) -> None:
    turns = [call(("add", {"by": 3})), say("I cannot."), call(("add", {})), call(("add", {"by": 3})), say("Done.")]
    offered: list[set[str]] = []

    def model(request: dict[str, Any]) -> Any:
        offered.append({tool["function"]["name"] for tool in request["tools"]})
        return turns[sum(message["role"] == "assistant" for message in request["messages"])]

    script = tmp_path / "later.py"
    script.write_text(LATER)
    found = ProcessEnv.at("later:one")
    found.package, found.script = Package("json", "nothing"), script
    result = await process(found, tmp_path, model, group_size=1, total_steps=1, enabled_toolsets=[])
    (group,) = lines(result.files.groups)
    assert group["scores"] == [1.0] and offered == [{"look", "todo"}] * 5
    answers = [message["content"] for message in group["messages"][0] if message["role"] == "tool"]
    assert "no function add yet" in answers[0] and "by" in answers[1] and answers[2] == "3"
    assert {tool["function"]["name"] for tool in group["tools"]} == {"look", "todo"}  # not that of a toolset


@pytest.mark.parametrize(("fails", "kind"), [("open", "environment"), ("call", "environment"), ("lost", "infra_error")])
async def test_an_error_of_the_guest_is_never_a_score(tmp_path: Path, door: Any, fails: str, kind: str) -> None:
    result = await play(door(f"sums:easy?fails={fails}"), tmp_path, adds, total_steps=1, group_size=1)
    (each,) = rollouts(result.files.failures)
    assert (each["reward"], each["unscored_kind"]) == (None, kind)
    if kind == "environment":
        assert {"open": "no board", "call": "the board fell"}[fails] in each["traceback"]


async def test_a_guest_that_declares_a_rollout_invalid_gives_no_score(tmp_path: Path, door: Any) -> None:
    result = await play(door("sums:easy?fails=invalid"), tmp_path, adds, total_steps=1, group_size=1)
    (each,) = rollouts(result.files.failures)
    assert each["reward"] is None


async def test_a_scorer_that_fails_for_one_rollout_of_a_group_gives_it_no_score(tmp_path: Path, door: Any) -> None:
    """The line that failed here was passed for the other rollouts; which of them erred is not known."""
    said = iter(["Hm.", "stop"])

    def model(request: dict[str, Any]) -> Any:
        return say("stop") if len(request["messages"]) == 1 and next(said) == "stop" else adds(request)

    result = await play(door("sums:easy?fails=score"), tmp_path, model, total_steps=1)
    found = rollouts(result.files.groups)
    assert [each["reward"] for each in found if each["reward"] is not None] == [1.0]
    (failed,) = [each for each in found if each["reward"] is None]
    assert failed["unscored_kind"] == "environment"
    assert "sums:easy: ValueError: no number" in failed["traceback"]


async def test_a_killed_guest_is_the_infrastructures_and_starts_again(tmp_path: Path, door: Any) -> None:
    settings = {"total_steps": 1, "group_size": 1, "max_infra_retries": 2}
    (each,) = rollouts((await play(door("sums:easy?fails=killed"), tmp_path, adds, **settings)).files.groups)
    assert (each["reward"], each["attempts"]) == (1.0, 2)
    assert "its process was killed by signal 9" in each["retried_after"][0]


async def test_a_guest_that_ends_between_two_items_is_started_for_the_next(tmp_path: Path, door: Any) -> None:
    env = make(door("sums:easy"), "http://127.0.0.1:9/v1", tmp_path)
    await env.setup()
    try:
        assert (await env.get_next_item())["item"] == {"number": 0}
        os.kill(env._guest._process.pid, signal.SIGKILL)
        await env._guest._process.wait()
        assert (await env.get_next_item())["item"] == {"number": 1}
    finally:
        await env.teardown()


async def test_a_call_that_stalls_the_guest_costs_no_other_rollout_its_score(tmp_path: Path, door: Any) -> None:
    """The time for which others wait is not their agents', though longer than these have."""
    limits = {"setup_timeout": 2.0, "reward_timeout": 2.0, "rollout_timeout": 1.0, "max_infra_retries": 2}

    def model(request: dict[str, Any]) -> Any:
        return call(("add", {"by": 3 if request["messages"][0]["content"] == "Make 3." else 2}))

    async with asyncio.timeout(60):
        result = await play(
            door("sums:easy?fails=stalls&size=3"), tmp_path, model, total_steps=3, group_size=1, **limits
        )
    found = rollouts(result.files.groups)
    assert [each["outcome"] for each in found] == ["completed", "completed"], found
    (stalled,) = rollouts(result.files.failures)
    assert stalled["unscored_kind"] == "environment" and "kept all others waiting" in stalled["traceback"]


async def test_a_guest_that_stalls_between_two_items_is_started_for_the_next(tmp_path: Path, door: Any) -> None:
    env = make(door("sums:easy"), "http://127.0.0.1:9/v1", tmp_path, setup_timeout=3.0)
    await env.setup()
    try:
        assert (await env.get_next_item())["item"] == {"number": 0}
        os.kill(env._guest._process.pid, signal.SIGSTOP)
        async with asyncio.timeout(30):
            assert (await env.get_next_item())["item"] == {"number": 1}
    finally:
        await env.teardown()


async def test_an_environment_that_cannot_be_loaded_is_named_before_the_first_rollout(
    tmp_path: Path, door: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("LACHESIS_DOORS", str(tmp_path))
    with pytest.raises(
        NotLoaded, match=r"sums:broken: KeyError: 'level'\. Next step: .*; what it printed is in "
    ) as caught:
        await play(door("sums:broken"), tmp_path, adds)
    assert "\n" not in str(caught.value) and "in __init__" in (tmp_path / "logs" / "sums-broken.log").read_text()


async def test_sessions_of_one_process_never_meet_and_answers_may_be_large(tmp_path: Path) -> None:
    script = tmp_path / "echo.py"
    script.write_text(
        "import asyncio\nclass Guest:\n size = None\n def __init__(self, target): pass\n"
        " def open(self, item): return Echo(item)\n"
        "class Echo:\n def __init__(self, item): self.prompt, self.seen = item, []\n"
        " async def act(self, text):\n"
        "  self.seen.append(text)\n  await asyncio.sleep(0.001 * (len(text) % 7))\n  return {'seen': self.seen}\n"
    )
    guest = GuestProcess(interpreter("echo", Package("json", "")), script, "all", {})
    await guest.start()
    try:

        async def talk(name: str) -> None:
            assert (await guest.call("open", name, item=name))["prompt"] == name
            for turn in range(20):
                said = [f"{name} {each}" * (each + 1) for each in range(turn + 1)]
                assert (await guest.call("act", name, text=said[-1])) == {"seen": said}

        await asyncio.gather(*(talk(f"session {number}") for number in range(20)))
        large = "x" * 5_000_000
        assert (await guest.call("open", "large", item=large))["prompt"] == large
        assert guest._process is not None
        os.kill(guest._process.pid, signal.SIGKILL)
        with pytest.raises(GuestLost):
            await guest.call("act", "large", text="")
    finally:
        await guest.close()
    with pytest.raises(GuestLost):
        await guest.call("act", "large", text="")


def test_a_package_that_is_missing_is_named_with_the_command_that_installs_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("LACHESIS_DOORS", str(tmp_path))
    with pytest.raises(SettingsError, match=r"-m venv .*/games && .*/games/bin/pip install games==1"):
        interpreter("games", Package("no_such_package", "games==1"))
    with pytest.raises(SettingsError, match="names no environment; write textarena:NAME"):
        environment_class("textarena:")


# --- a guest that does not behave

HABITS = """
import asyncio, json, os, subprocess, sys, time

class Guest:
    size = None
    def __init__(self, target, habit="", **arguments):
        if habit == "hangs":
            time.sleep(3600)
        if habit == "first" and not os.path.exists("loaded"):
            open("loaded", "w").close()
            raise OSError("the download broke off")
        if habit == "daemon":
            subprocess.Popen(["sleep", "20"], start_new_session=True)
    def open(self, item):
        return Session()

class Session:
    prompt = ""
    def __init__(self):
        self.count = 0
    def act(self, text):
        self.count += 1
        if text == "floods":
            for _ in range(90):
                sys.stderr.write("." * 1_000_000)
        if text == "reads":
            return {"text": sys.stdin.read() + subprocess.run(["cat"], stdout=subprocess.PIPE).stdout.decode()}
        if text == "stalls":
            time.sleep(3600)
        if text == "naps":
            time.sleep(0.3)
        if text == "waits":
            return self.waits()
        if text == "exits":
            sys.exit("done for")
        if text == "circle":
            said = {}
            said["self"] = said
            return said
        if text == "object":
            class Odd:
                def tolist(self): raise AttributeError("odd")
            return {"text": Odd()}
        if text == "closes":
            os.closerange(0, 64)
            time.sleep(3600)
        if text == "dies":
            sys.stderr.write("the last words")
            sys.stderr.flush()
            os._exit(7)
        return {"text": str(self.count)}
    async def waits(self):
        await asyncio.sleep(2.5)
        return {"text": "waited"}
"""


@pytest.fixture
def habits(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    monkeypatch.chdir(tmp_path)
    script = tmp_path / "habits.py"
    script.write_text(HABITS)
    return lambda patience=240.0, **arguments: GuestProcess(sys.executable, script, "all", arguments, patience=patience)


async def test_a_guest_that_answers_nothing_is_killed_and_who_keeps_it_is_named(habits: Any) -> None:
    guest = habits(patience=1.0)
    try:
        for waits in (True, False):
            await guest.start()
            for name in ("one", "two"):
                await guest.call("open", name, item=None)
            stalled = asyncio.create_task(guest.call("act", "one", text="stalls"))
            await asyncio.sleep(0.1)
            if not waits:  # its rollout ended; what is asked for it then fails as it did
                stalled.cancel()
                stalled = asyncio.create_task(guest.call("close", "one"))
            other = asyncio.create_task(guest.call("act", "two", text=""))
            async with asyncio.timeout(30):
                with pytest.raises(GuestError, match="did not end in 1 s and kept all others waiting"):
                    await stalled
                with pytest.raises(GuestLost, match="killed by signal 9 after 1 s in which it answered nothing"):
                    await other
    finally:
        await guest.close()


async def test_a_guest_that_is_slow_or_waits_is_not_killed(habits: Any) -> None:
    guest = habits(patience=1.0)
    await guest.start()
    try:
        await guest.call("open", "one", item=None)
        assert (await guest.call("act", "one", text="waits"))["text"] == "waited"
        naps = [guest.call("act", "one", text="naps") for _ in range(6)]
        assert [each["text"] for each in await asyncio.gather(*naps)] == [str(number) for number in range(2, 8)]
    finally:
        await guest.close()


async def test_a_guest_may_flood_its_outputs_and_read_its_input(habits: Any) -> None:
    guest = habits()
    await guest.start()
    try:
        await guest.call("open", "one", item=None)
        async with asyncio.timeout(120):
            assert (await guest.call("act", "one", text="floods"))["text"] == "1"
            assert (await guest.call("act", "one", text="reads"))["text"] == ""
            waiting = [guest.call("act", "one", text="") for _ in range(1500)]
            assert len({found["text"] for found in await asyncio.gather(*waiting)}) == 1500
    finally:
        await guest.close()


@pytest.mark.parametrize(
    ("habit", "said"), [("exits", "SystemExit: done for"), ("circle", "not JSON"), ("object", "not JSON")]
)
async def test_what_ends_in_no_answer_is_an_error_of_the_guest(habits: Any, habit: str, said: str) -> None:
    guest = habits()
    await guest.start()
    try:
        await guest.call("open", "one", item=None)
        async with asyncio.timeout(60):
            with pytest.raises(GuestError, match=said):
                await guest.call("act", "one", text=habit)
            assert (await guest.call("act", "one", text=""))["text"] == "2"
    finally:
        await guest.close()


async def test_a_guest_that_dies_or_closes_its_output_takes_its_sessions_along(habits: Any) -> None:
    guest = habits()
    await guest.start()
    try:
        for habit, said in (("dies", "ended with 7: the last words"), ("closes", "was killed by signal 9")):
            for name in ("one", "other"):
                await guest.call("open", name, item=None)
            with pytest.raises(GuestLost, match=said):
                await guest.call("act", "one", text=habit)
            await asyncio.gather(guest.start(), guest.start())
            with pytest.raises(GuestLost, match="the session was in a process that has ended"):
                await guest.call("act", "other", text="")
    finally:
        await guest.close()


@pytest.mark.slow
async def test_a_guest_that_is_started_again_while_the_other_one_ends_loads(habits: Any) -> None:
    guest = habits(habit="daemon")  # it leaves a process that keeps the pipes open
    await guest.start()
    try:
        await guest.call("open", "one", item=None)
        dying = asyncio.create_task(guest.call("act", "one", text="dies"))
        while guest._process.returncode is None:  # noqa: ASYNC110
            await asyncio.sleep(0.001)
        await guest.start()
        assert (await guest.call("open", "two", item=None))["prompt"] == ""
        with pytest.raises(GuestLost):
            await dying
    finally:
        async with asyncio.timeout(60):
            await guest.close()


async def test_a_guest_that_did_not_load_is_loaded_again_and_one_that_hangs_is_ended(habits: Any) -> None:
    guest = habits(habit="first")
    try:
        with pytest.raises(GuestError, match="the download broke off"):
            await guest.start()
        with pytest.raises(GuestLost):
            await guest.call("open", "one", item=None)
        await guest.start()
        assert (await guest.call("open", "one", item=None))["prompt"] == ""
    finally:
        await guest.close()
    hangs = habits(habit="hangs")
    with pytest.raises(TimeoutError):
        await asyncio.wait_for(hangs.start(), 2)
    assert hangs._process.returncode == -signal.SIGKILL
    await hangs.close()


async def test_a_session_that_is_not_opened_to_the_end_is_closed(tmp_path: Path, door: Any) -> None:
    """The rollout is cancelled while the guest opens its session."""
    slow = "open('opens', 'w').close(); await __import__('asyncio').sleep(0.5)\n        if self.fails == 'open'"
    (tmp_path / "sums.py").write_text(SCRIPT.replace('if self.fails == "open"', slow))
    run = asyncio.create_task(play(door("sums:easy"), tmp_path, adds, total_steps=1, group_size=1))
    while not (tmp_path / "opens").exists():  # noqa: ASYNC110
        await asyncio.sleep(0.01)
    run.cancel()
    with pytest.raises(asyncio.CancelledError):
        await run
    assert (tmp_path / "closed").read_text() == "0\n"


async def test_gymnasium_offers_the_actions_of_a_space_that_begins_at_another_number(tmp_path: Path) -> None:
    pytest.importorskip("gymnasium")
    (tmp_path / "steps_from_one.py").write_text(
        "import gymnasium\n\n"
        "class Steps(gymnasium.Env):\n"
        " action_space = gymnasium.spaces.Discrete(3, start=1)\n observation_space = gymnasium.spaces.Discrete(9)\n"
        " def reset(self, seed=None, options=None): return 0, {}\n"
        " def step(self, action): return 1, float(action), True, False, {}\n\n"
        "gymnasium.register('Steps-v0', entry_point=Steps, disable_env_checker=True, order_enforce=False)\n"
    )
    python = tmp_path / "python"
    python.write_text(f'#!/bin/sh\nPYTHONPATH={tmp_path} exec {sys.executable} "$@"\n')
    python.chmod(0o755)
    guest = GuestProcess(str(python), INSIDE / "gymnasium.py", "steps_from_one:Steps-v0", {})
    await guest.start()
    try:
        item = await guest.call("item", number=0)
        action = item["tools"][0]["parameters"]["properties"]["action"]
        assert (action["minimum"], action["maximum"]) == (1, 3)
        assert "an integer from 1 to 3" in (await guest.call("open", "one", item=item["item"]))["prompt"]
        assert (await guest.call("call", "one", name="step", arguments={"action": 3}))["reward"] == 3.0
    finally:
        await guest.close()
