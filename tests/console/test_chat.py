"""`lachesis chat`: a person in a rollout, driven by lines on the standard input and on a terminal."""

from __future__ import annotations

import asyncio
import base64
import json
import random
import re
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from backends.errors import SettingsError
from lachesis.cli import main
from lachesis_console.chat.agent_lines import NotACall, read_line
from lachesis_console.chat.journal import Journal
from lachesis_console.chat.recordings import differs, find_rollout, recorded_policy, recorded_rollouts
from lachesis_messages.history import MessageHistory
from lachesis_messages.records.groups import stored_messages
from lachesis_testing import FakeServer, ToolUser
from lachesis_testing.export_suite import example_groups
from lachesis_testing.scripted_server import Answer, ScriptedServer, call, say
from lachesis_tokens.verbs import verify
from tests.support.chats import LIMIT, chat, command, environment, records
from tests.support.job_groups import PICTURE
from tests.support.training_runs import with_tokens


@pytest.fixture
def recorded(tmp_path: Path) -> Path:
    """A rollout in which a person was the agent."""
    folder = tmp_path / "recorded"
    said = chat(
        tmp_path, "tool_result", "--as", "agent", "-o", str(folder), typed="/look_up\ngear-33\n/reward\n/lookup\n291\n"
    )
    assert "reward 0.25" in said and "did you mean 'look_up'" in said and "reward 1;" in said
    return folder


def test_a_person_is_the_agent_and_the_recording_solves_the_item(recorded: Path, tmp_path: Path) -> None:
    [record] = records(recorded)
    assert record["scores"] == [1.0]
    assert [m["role"] for m in record["messages"][0]] == ["user", "assistant", "tool", "assistant"]
    line = [sys.executable, "-m", "lachesis", "check", "tool_result", "-n", "1", "--recorded", str(recorded)]
    done = subprocess.run(line, capture_output=True, text=True, timeout=LIMIT, check=False)
    assert "reference 2 1.000" in " ".join(done.stdout.split()), done.stdout


def test_a_recording_is_played_again_and_handed_over(recorded: Path, tmp_path: Path) -> None:
    rollout = find_rollout(str(recorded)).rollout_id
    said = chat(tmp_path, "--replay", f"{recorded}#{rollout[:6]}", "-m", "reference", "-o", f"{tmp_path}/a")
    assert "replayed 2 turns: 0 of 1 results differ" in said
    said = chat(
        tmp_path, "tool_result", "--replay", str(recorded), "--at", "1", "-m", "reference", "-o", f"{tmp_path}/b"
    )
    assert "replayed 1 turn: 0 of 1 results differ" in said
    for folder, models in (("a", ["recording"]), ("b", ["recording", "reference-policy"])):
        [record] = records(tmp_path / folder)
        assert record["scores"] == [1.0]
        assert [name for name, *_ in record["rollouts"][0]["completions"]["models"]] == models


@pytest.mark.slow
async def test_a_recorded_answer_is_asked_for_again_with_the_tools(recorded: Path, tmp_path: Path) -> None:
    async with ScriptedServer([say("292")]) as server:
        line = ["--replay", str(recorded), "-m", "scripted", "-b", server.base_url, "-o", f"{tmp_path}/run"]
        await asyncio.to_thread(chat, tmp_path, *line, typed="/retry\n/quit\n")
    [request] = server.requests
    assert [tool["function"]["name"] for tool in request["tools"]] == ["look_up"]
    [record] = records(tmp_path / "run")
    assert [m["content"] for m in record["messages"][0]][-1] == "292"
    assert record["rollouts"][0]["discarded"][0]["reason"] == "asked again"


async def sampled_and_trained(tmp_path: Path, *arguments: str, typed: str) -> tuple[list[int], list[list[int]]]:
    """The tokens that a server of tokens sampled in a chat, and those that each sample trains."""
    async with FakeServer(ToolUser()) as server:
        tokenizer = with_tokens(server, tmp_path).tokenizer_name
        line = ["tool_result", *arguments, "-m", "fake", "-b", server.base_url, "-o", f"{tmp_path}/run"]
        line += ["--openai.server_type", "vllm", "--openai.tokenizer_name", str(tokenizer)]
        await asyncio.to_thread(chat, tmp_path, *line, typed=typed)
        sampled = [token for request in server.requests for each in request.completions for token in each.ids]
    assert verify.main([str(tmp_path / "run")]) == 0
    [record] = records(tmp_path / "run")
    trained = [
        [token for token, mask in zip(each["tokens"], each["masks"], strict=True) if mask != -100]
        for each in record["samples"]
    ]
    return sampled, trained


@pytest.mark.slow
async def test_the_branch_of_a_recording_has_exact_tokens(recorded: Path, tmp_path: Path) -> None:
    sampled, [trained] = await sampled_and_trained(tmp_path, "--replay", str(recorded), "--at", "1", typed="")
    assert sampled and trained == sampled
    [record] = records(tmp_path / "run")
    assert record["messages"][0][1]["tool_calls"][0]["function"]["name"] == "look_up"


@pytest.mark.slow
async def test_tokens_of_answers_that_were_taken_back_are_delivered_once(tmp_path: Path) -> None:
    typed = "/retry\nmore\n/retry\n/undo\nother\n/quit\n"
    sampled, trained = await sampled_and_trained(tmp_path, typed=typed)
    assert len(trained) == 4 and Counter(sampled) == Counter(token for each in trained for token in each)


async def test_a_checkpoint_is_gone_back_to_with_its_files(tmp_path: Path) -> None:
    script = [
        call(("terminal", {"command": "echo one > /tmp/log"})),
        say("done"),
        call(("terminal", {"command": "echo two >> /tmp/log"})),
        say("done again"),
        call(("terminal", {"command": "cat /tmp/log"})),
        say("read"),
        say("from the beginning"),
    ]
    typed = "/checkpoint here\nwrite more\n/back\nread it\n/back nowhere\n/undo 9\n/back here\n/retry\n/quit\n"
    async with ScriptedServer(script) as server:
        line = ["terminal", "-m", "scripted", "-b", server.base_url, "-o", f"{tmp_path}/run"]
        said = await asyncio.to_thread(chat, tmp_path, *line, typed=typed)
    assert "with a name of /checkpoint: here" in said and "messages before here were taken back" in said
    [record] = records(tmp_path / "run")
    taken_back = [message for each in record["rollouts"][0]["discarded"] for message in each["messages"]]
    results = [json.loads(each["content"])["output"].strip() for each in taken_back if each["role"] == "tool"]
    assert results[-1] == "one", "the file has what was written after the checkpoint"


def test_a_place_is_kept_by_the_person_who_is_the_agent(tmp_path: Path) -> None:
    said = chat(
        tmp_path,
        *("terminal", "--as", "agent", "-o", f"{tmp_path}/run"),
        typed="/checkpoint\n/terminal touch x; sleep 100 &\n/checkpoint\n/back\n/terminal ls\n291\n/quit\n",
    )
    assert "/back 1 comes back to here" in said and "sleep 100" in said and "/back 2" not in said
    [record] = records(tmp_path / "run")
    last = [each["content"] for each in record["messages"][0] if each["role"] == "tool"][-1]
    assert json.loads(last)["output"] == ""


@pytest.mark.slow
def test_a_result_that_differs_from_the_recording_is_shown(recorded: Path, tmp_path: Path) -> None:
    path = recorded / "groups.jsonl"
    path.write_text(path.read_text().replace('"content": "291"}, {', '"content": "no such part"}, {'))
    said = chat(tmp_path, "tool_result", "--replay", str(path), "-m", "reference", "-o", f"{tmp_path}/a")
    assert "1 of 1 results differ" in said and "no such part" in said
    assert (differs("at 12:03 in /tmp/a1", "at 12:04 in /tmp/b2"), differs("a", "a"), differs("a", "b")) == (
        "volatile",
        "",
        "other",
    )


async def test_the_person_answers_the_questions_of_the_model_and_sees_no_turn_of_a_sub_agent(tmp_path: Path) -> None:
    script = [
        call(("clarify", {"question": "Which part?", "choices": ["gear-33", "gear-34"]})),
        call(("delegate_task", {"goal": "Find the price."})),
        say("It costs 7."),
        say("The price is 7."),
    ]
    async with ScriptedServer(script) as server:
        line = ["tool_result", "-m", "scripted", "-b", server.base_url, "-o", f"{tmp_path}/run"]
        flag = "--env.enabled_toolsets=[clarify, delegation]"
        said = await asyncio.to_thread(chat, tmp_path, *line, flag, typed="2\n\n/quit\n")
    assert "1. gear-33\n" in said and "agent: It costs 7." not in said and "agent: The price is 7." in said
    [record] = records(tmp_path / "run")
    results = [message["content"] for message in record["messages"][0] if message["role"] == "tool"]
    assert results == ["gear-34", "It costs 7."]


def test_commands_of_a_chat_with_a_model(tmp_path: Path) -> None:
    typed = "/help\n/tools\n/reward\n/usage\n/history\n/undo\n/retry\n/nope\n/undo x\n/save {}\n/branch b\n/quit\n"
    typed = typed.replace("{}", str(tmp_path / "saved.json"))
    said = chat(tmp_path, "tool_result", "-m", "reference", "--session", "a", "-o", f"{tmp_path}/run", typed=typed)
    assert "look_up(part)" in said and "reward 1 (call 1, answer 1)" in said
    assert "there is no command /nope" in said and "invalid literal for int()" in said
    assert said.count("agent: 291") == 2
    [record] = records(tmp_path / "run")
    assert record["scores"] == [1.0] and record["rollouts"][0]["discarded"][0]["reason"] == "taken back"
    assert [m["role"] for m in json.loads((tmp_path / "saved.json").read_text())][-1] == "assistant"
    assert Journal.named("b", tmp_path / "state/lachesis/chats").messages[-1]["content"] == "291"


@pytest.mark.sample(2)
@pytest.mark.parametrize(
    "typed",
    [
        b"\xff\xfe\x00\n",
        b"\x1b[2J\x1b]0;title\x07\n",
        b"a" * 1_000_000 + b"\n",
        b"no end of the line",
        "\u202eright to left\n".encode(),
        b"/\n/ \n//\n/undo 9\n/undo -1\n/model\n/image /etc/passwd\n/save\n/save /nowhere/x\n/branch ../x\n"
        b"/compress\n/retry\n",
    ],
    ids=["bytes", "escapes", "long", "cut", "direction", "commands"],
)
async def test_odd_lines_end_no_chat(typed: bytes, tmp_path: Path) -> None:
    async with ScriptedServer([say("\x1b[31mred\u202e")]) as server:
        line = ("tool_result", "-m", "scripted", "-b", server.base_url, "-o", f"{tmp_path}/run")
        said = await asyncio.to_thread(chat, tmp_path, *line, typed=typed)
    assert "\x1b" not in said and "\u202e" not in said
    assert records(tmp_path / "run")[0]["rollouts"][0]["outcome"] == "completed"


HOSTILE = (
    *("/look_up {", "/look_up " + "[" * 5000, '/look_up {"part": NaN}', '/look_up {"part": 1e999}', "/look_up []"),
    *('/look_up {"a": 1}', "/look_up part=", "/look_up 'unclosed", "/look_up \x00", "/look_up \u202e", "/look_up {}"),
    *(
        "/look_up " + "x" * 200_000,
        "/look_up\t",
        "/LOOK_UP x",
        "/look_up null",
        "/ look_up",
        "//",
        "/help me",
        "/history x",
    ),
    *("/undo 99999999999999999999999", "/undo 0", "/undo 1.5", "/image", "/image /nonexistent.png", "/save", "/save /"),
    *("/branch", "/branch .", "/branch a/b", "/model a b c d e", "/personality nobody"),
)


def test_hostile_lines_of_an_agent_end_no_chat(tmp_path: Path) -> None:
    typed = "".join(f"{line}\n" for line in HOSTILE)
    said = chat(
        tmp_path, "tool_result", "--as", "agent", "-o", f"{tmp_path}/run", typed=f"{typed}/look_up gear-33\n291\n"
    )
    assert "\x1b" not in said and "\u202e" not in said and "reward 1;" in said
    assert said.count("error: ") >= 18


@pytest.mark.slow
def test_a_closed_input_or_output_ends_a_chat(tmp_path: Path) -> None:
    line = " ".join(command("tool_result", "-m", "reference", "-o", f"{tmp_path}/run"))
    for closed in ("<&-", "</dev/null | head -n 1", "</dev/null >&-"):
        ended = subprocess.run(
            ["bash", "-c", f"{line} {closed}"],
            capture_output=True,
            timeout=LIMIT,
            check=False,
            env=environment(tmp_path),
        )
        assert b"Traceback" not in ended.stderr, (closed, ended.stderr.decode())
    assert len(records(tmp_path / "run")) == 1


def test_a_wrong_flag_is_named_before_anybody_types(tmp_path: Path) -> None:
    for target in ([], ["tool_result"]):
        ended = subprocess.run(
            command(*target, "-m", "reference", "--env.max_agent_turn", "3"),
            input="hello\n",
            capture_output=True,
            text=True,
            timeout=LIMIT,
            check=False,
            env=environment(tmp_path),
        )
        assert (ended.returncode, ended.stdout) == (2, "")
        assert ended.stderr == ("error: unknown setting --env.max_agent_turn; did you mean --env.max_agent_turns?\n")


async def test_another_model_is_asked_at_the_same_server_and_without_a_foreign_key(tmp_path: Path) -> None:
    async with ScriptedServer([say("one")]) as server, ScriptedServer([say("two")]) as other:
        line = ["tool_result", "-m", "a", "-b", server.base_url, "-k", "key-of-a", "-o", f"{tmp_path}/run"]
        typed = f"/model b\n/retry\n/model c {other.base_url}\n/retry\n/quit\n"
        await asyncio.to_thread(chat, tmp_path, *line, typed=typed)
    assert [request["model"] for request in server.requests] == ["a", "b"]
    assert [request["model"] for request in other.requests] == ["c"]
    assert {headers.get("Authorization") for headers in server.headers} == {"Bearer key-of-a"}
    assert all("key-of-a" not in str(headers) for headers in other.headers)


@pytest.mark.slow
def test_a_chat_is_never_taken_for_a_run_that_is_done(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    for folder in ("run", "data/tool-result", "data/tool-result-2"):
        output = ["-o", folder] if folder == "run" else []
        said = chat(tmp_path, "tool_result", "-m", "reference", "--session", "s", *output, typed="/quit\n")
        assert "agent: 291" in said and f"the rollout is in {folder}/groups.jsonl" in said


BROKEN = """
from lachesis import HermesAgentBaseEnv
from lachesis_tools import BUILTIN_TOOLS, tool

@tool(toolset="bug")
async def broken() -> str:
    \'\'\'Breaks.\'\'\'
    raise ValueError("the database is down")

class Bug(HermesAgentBaseEnv):
    name = "bug"
    tools, toolsets = BUILTIN_TOOLS.extended(broken), ("bug",)

    async def get_next_item(self):
        return {}

    def format_prompt(self, item):
        return "say something"

    def compute_reward(self, item, result, ctx):
        raise RuntimeError("the reward is down")

    def reference_policy(self):
        return lambda messages, tools: "hi"
"""


@pytest.mark.parametrize(("typed", "why"), [("/broken\n", "the database is down"), ("hi\n", "the reward is down")])
def test_what_breaks_in_the_environment_is_said(typed: str, why: str, tmp_path: Path) -> None:
    (tmp_path / "bug.py").write_text(BROKEN)
    line = [f"{tmp_path}/bug.py", "--as", "agent", "-o", f"{tmp_path}/run"]
    said = chat(tmp_path, *line, typed=typed, code=1)
    assert f'Error("{why}")\n' in said and "error: environment: " in said
    assert f"the rollout is in {tmp_path}/run/groups.failed.jsonl" in said and "groups 0/1" not in said
    assert len(records(tmp_path / "run", "groups.failed.jsonl")) == 1


def test_an_item_that_no_stream_of_items_reaches_is_an_error(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("lachesis_console.verbs.chat._SEEKING", 0.1)
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path))
    (tmp_path / "endless.py").write_text(BROKEN)
    line = [f"{tmp_path}/endless.py", "--item", "99999999", "-m", "reference", "-o", f"{tmp_path}/run"]
    assert main(["chat", *line]) == 2
    said = "".join(capsys.readouterr())
    assert "looking for item 99999999" in said and "item 99999999 is too far: 0.1 s lead to item " in said


def test_no_character_ends_a_chat(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PYTHONIOENCODING", "latin-1")
    typed = '/look_up {"part": "\\ud800"}\n/look_up gear-33\n/history\n291\n'
    said = chat(tmp_path, "tool_result", "--as", "agent", "-o", f"{tmp_path}/run", typed=typed)
    assert "half of a surrogate pair" in said and "\\u2190 look_up" in said and "reward 1;" in said


def test_a_branch_of_a_chat_without_a_name_is_kept(tmp_path: Path) -> None:
    chat(tmp_path, "tool_result", "-m", "reference", "-o", f"{tmp_path}/run", typed="/branch mine\n/quit\n")
    [path] = (tmp_path / "state/lachesis/chats").iterdir()
    assert path.name == "mine.jsonl" and '"291"' in path.read_text()


def test_no_key_of_the_flags_is_written_down(tmp_path: Path) -> None:
    line = ["tool_result", "--session", "s", "-o", f"{tmp_path}/run"]
    flags = ["--openai.model_name", "reference", "--openai.api_key", "secret-1", "-k", "secret-2"]
    flags += ["--env.max_token_length", "500", "--env.terminal_env={api_key: secret-3}"]
    chat(tmp_path, *line, *flags, "--openai.headers", "{X-Key: secret-4}", typed="/quit\n")
    path = tmp_path / "state/lachesis/chats/s.jsonl"
    assert "secret" not in path.read_text() and '"--env.max_token_length", "500"' in path.read_text()
    assert "replayed 2 turns" in chat(tmp_path, *line, typed="/quit\n")


async def test_a_chat_without_an_environment_takes_the_configuration(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    script: list[Answer] = [call(("terminal", {"command": "echo hi > a; cat a"})), say("it says hi"), say("bye"), 500]
    async with ScriptedServer(script) as server:
        model = {"default": "scripted", "base_url": server.base_url, "api_key": "secret-key"}
        config = {
            "model": model,
            "agent": {"save_trajectories": True, "system_prompt": "Be: short"},
            "toolsets": ["terminal"],
        }
        (tmp_path / "cli-config.yaml").write_text(json.dumps(config))  # JSON is YAML
        typed = "\nwhat is in a?\nthanks\n/quit\n"
        await asyncio.to_thread(chat, tmp_path, "--session", "p", "--openai.max_retries", "0", typed=typed)
        said = await asyncio.to_thread(chat, tmp_path, "--session", "p", typed="more?\n/quit\n")
    assert server.requests[0]["messages"][0] == {"role": "system", "content": "Be: short"}
    assert {tool["function"]["name"] for tool in server.requests[0]["tools"]} == {"terminal", "process"}
    assert "replayed 3 turns: 0 of 1 results differ" in said and "status 500" in said
    [entry] = records(tmp_path, "trajectory_samples.jsonl")
    assert entry["completed"]
    said_by = [turn["from"] for turn in entry["conversations"]]
    assert said_by == ["system", "human", "gpt", "tool", "gpt", "human", "gpt"]
    [failed] = records(tmp_path, "failed_trajectories.jsonl")
    assert not failed["completed"] and failed["conversations"][-1] == {"from": "human", "value": "more?"}
    assert b"secret-key" not in (tmp_path / "state/lachesis/chats/p.jsonl").read_bytes()


def killed(tmp_path: Path, lines: Sequence[str], until: int) -> None:
    """A chat that is killed when `until` of its messages are in its file."""
    process = subprocess.Popen(
        command("terminal", "--as", "agent", "--session", "k"),
        stdin=subprocess.PIPE,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
        env=environment(tmp_path),
        cwd=tmp_path,
    )
    assert process.stdin is not None
    process.stdin.write("".join(f"{line}\n" for line in lines).encode())
    process.stdin.flush()
    path, end = tmp_path / "state/lachesis/chats/k.jsonl", time.monotonic() + LIMIT
    while not path.exists() or path.read_bytes().count(b"\n") < until + 1:
        assert time.monotonic() < end
        time.sleep(0.05)
    process.kill()
    process.wait()


def test_a_chat_that_was_killed_goes_on(tmp_path: Path) -> None:
    killed(tmp_path, ["/terminal echo one > a", "/terminal cat a"], 4)
    journal = Journal.named("k", tmp_path / "state/lachesis/chats")
    assert [m["role"] for m in journal.messages] == ["assistant", "tool", "assistant", "tool"]
    journal.close()
    with journal.path.open("ab") as file:
        file.write(b'{"role": "assist')  # cut off
    typed = "/terminal cat a a\nDone\n"
    said = chat(tmp_path, "--as", "agent", "--session", "k", "-o", f"{tmp_path}/run", typed=typed)
    assert "replayed 2 turns: 0 of 2 results differ" in said
    [record] = records(tmp_path / "run")
    results = [json.loads(m["content"])["output"] for m in record["messages"][0] if m["role"] == "tool"]
    assert results == ["", "one\n", "one\none\n"]


def test_a_kill_during_a_call_does_not_lose_the_call(tmp_path: Path) -> None:
    killed(tmp_path, ["/terminal sleep 50"], 1)
    journal = Journal.named("k", tmp_path / "state/lachesis/chats")
    assert [m["role"] for m in journal.messages] == ["assistant"]
    assert journal.messages[0]["tool_calls"][0]["function"]["arguments"] == '{"command": "sleep 50"}'
    journal.close()


def test_a_chat_that_is_killed_while_it_resumes_loses_nothing(tmp_path: Path) -> None:
    path = tmp_path / "state/lachesis/chats/k.jsonl"
    typed = "/terminal sleep 0\n/terminal sleep 0.05\n/terminal cat a\n"
    chat(tmp_path, "terminal", "--as", "agent", "--session", "k", typed=typed)
    path.write_text(path.read_text().replace("sleep 0.05", "sleep 50"))
    before = path.read_bytes()
    with subprocess.Popen(
        command("--as", "agent", "--session", "k"),
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        env={**environment(tmp_path), "PYTHONUNBUFFERED": "1"},
        cwd=tmp_path,
    ) as process:
        assert process.stdout is not None
        while b"sleep 50" not in (line := process.stdout.readline()):
            assert line
        process.kill()
    assert path.read_bytes() == before


async def test_what_a_person_said_without_an_answer_is_there_again_with_the_summary(tmp_path: Path) -> None:
    def answer(body: dict[str, Any]) -> Answer:
        asked = body["messages"][-1]["content"]
        return 400 if asked.startswith("no answer") else say("a summary" if "Summarise" in asked else f"to {asked}")

    async with ScriptedServer(answer) as server:
        line = ["tool_result", "-m", "scripted", "-b", server.base_url, "--session", "k"]
        typed = "two\nno answer\nmy number is 4711\nthree\nfour\n/compress\nno answer, again\nlast\n"
        await asyncio.to_thread(chat, tmp_path, *line, "-o", f"{tmp_path}/run", typed=typed)
        kept = Journal.named("k", tmp_path / "state/lachesis/chats").messages
        server.requests.clear()
        said = await asyncio.to_thread(chat, tmp_path, *line, "-o", f"{tmp_path}/again", typed="and now?\n")
        assert Journal.named("k", tmp_path / "state/lachesis/chats").messages[: len(kept)] == kept
    texts = [message["content"] for message in server.requests[-1]["messages"]]
    assert texts[1:3] == ["[CONTEXT SUMMARY]: a summary", "my number is 4711"]
    assert texts[-4:] == ["no answer, again", "last", "to last", "and now?"]
    assert "user: [CONTEXT SUMMARY]" in said and "user: no answer, again\n" in said


@pytest.mark.long
async def test_of_a_chat_that_is_killed_ten_times_every_answer_that_was_shown_is_kept(tmp_path: Path) -> None:
    asked = 0

    async def answer(body: dict[str, Any]) -> dict[str, Any]:
        nonlocal asked
        asked += 1
        await asyncio.sleep(0.05 * random.random())
        return say(f"answer {asked}")

    shown: list[str] = []
    async with ScriptedServer(answer) as server:
        line = command("tool_result", "-m", "scripted", "-b", server.base_url, "--session", "k")
        for _ in range(10):
            process = await asyncio.create_subprocess_exec(
                *line, stdin=subprocess.PIPE, stdout=subprocess.PIPE, env=environment(tmp_path), cwd=tmp_path
            )
            assert process.stdin is not None and process.stdout is not None
            process.stdin.write(b"more\n" * 1000)
            until, lines = len(shown) + random.randint(2, 12), list[str]()
            while len(lines) < until:
                text = (await asyncio.wait_for(process.stdout.readline(), LIMIT)).decode()
                lines += re.findall(r"^agent: (answer \d+)\n", text)
            process.kill()
            lines += re.findall(r"^agent: (answer \d+)\n", (await process.stdout.read()).decode(), re.MULTILINE)
            await process.wait()
            kept = Journal.named("k", tmp_path / "state/lachesis/chats").messages
            assert lines[: len(shown)] == shown
            assert [m["content"] for m in kept if m["role"] == "assistant"][: len(lines)] == lines
            shown = lines


def test_a_journal_follows_edits_and_refuses_other_files(tmp_path: Path) -> None:
    journal = Journal.named("a", tmp_path)
    journal.begin({"environment": "e", "flags": [], "item": 1})
    history = MessageHistory([{"role": "user", "content": "x"}])
    for text in ("one", "two"):
        history.append({"role": "assistant", "content": text})
        journal.follow(history.to_openai()[1:])
        history.append({"role": "user", "content": "next"})
        journal.follow(history.to_openai()[1:])
    history.rewind(2, "taken back")
    history[1]["content"] = "half a character: \ud800"
    journal.follow(history.to_openai()[1:])
    with pytest.raises(SettingsError, match=r"a\.jsonl cannot be used: another chat goes on in it; end that one"):
        Journal.named("a", tmp_path)
    journal.close()
    assert journal.path.stat().st_mode & 0o777 == 0o600
    assert Journal.named("a", tmp_path).messages == history.to_openai()[1:]
    (tmp_path / "b.jsonl").write_text('{"schema": "other"}\n')
    for name in ("b", "../a", "", ".hidden"):
        with pytest.raises(Exception, match="name"):
            Journal.named(name, tmp_path)


@pytest.mark.parametrize(
    "line", ["123", '{"keep": "x"}', '{"keep": 9}', '{"content": "hi"}', "[" * 100_000, "\xff", "{}"]
)
def test_a_damaged_line_of_a_journal_is_named(line: str, tmp_path: Path) -> None:
    journal = Journal.named("a", tmp_path)
    journal.begin({"environment": "e", "flags": [], "item": 1})
    journal.close()
    header = journal.path.read_text()
    for number, text in ((1, f"{line}\n"), (2, f"{header}{line}\n")):
        journal.path.write_text(text, encoding="latin-1")
        with pytest.raises(SettingsError, match=rf"a\.jsonl, line {number} is none of a chat .*; move the file away"):
            Journal.named("a", tmp_path)


@pytest.mark.parametrize(
    ("line", "arguments"),
    [
        ('/f {"a": 1, "b": "x"}', {"a": 1, "b": "x"}),
        ("/f a=1 b='x y'", {"a": 1, "b": "x y"}),
        ("/f just text = 3", {"a": "just text = 3"}),
        ("/f", {"a": 7}),
    ],
)
async def test_lines_of_the_agent(line: str, arguments: dict[str, Any]) -> None:
    schema = {"properties": {"a": {"type": "integer"}, "b": {"type": "string"}}, "required": ["a"]}
    tools = [{"function": {"name": "f", "parameters": schema}}]

    async def ask(prompt: str) -> str | None:
        return "7"

    read = await read_line(line, tools, ask)
    assert read is not None and (read[0], json.loads(read[1])) == ("f", arguments)
    assert await read_line("an answer", tools, ask) is None
    for wrong in ("/g x", "/f {"):
        with pytest.raises(NotACall):
            await read_line(wrong, tools, ask)


@pytest.mark.slow
async def test_an_image_of_a_person_is_there_again_in_a_replay(tmp_path: Path) -> None:
    (tmp_path / "dot.png").write_bytes(base64.b64decode(PICTURE.partition(",")[2]))
    async with ScriptedServer([say("one"), say("a dot"), say("the end")]) as server:
        line = ["tool_result", "-m", "scripted", "-b", server.base_url]
        typed = f"/image {tmp_path}/dot.png\nwhat is it?\n/quit\n"
        await asyncio.to_thread(chat, tmp_path, *line, "-o", f"{tmp_path}/run", typed=typed)
        line = [*line, "--replay", f"{tmp_path}/run", "--at", "1"]
        await asyncio.to_thread(chat, tmp_path, *line, "-o", f"{tmp_path}/cut", typed="/quit\n")
        await asyncio.to_thread(chat, tmp_path, *line[:-2], "-o", f"{tmp_path}/again", typed="/quit\n")
    asked = [{"type": "text", "text": "what is it?"}, {"type": "image_url", "image_url": {"url": PICTURE}}]
    for folder, said in (("run", ["one", asked, "a dot"]), ("again", ["one", asked, "a dot"]), ("cut", ["one"])):
        [record] = records(tmp_path / folder)
        assert [m["content"] for m in record["messages"][0]][1:] == said, folder


def test_a_folder_without_a_recording_is_no_reference(tmp_path: Path) -> None:
    chat(tmp_path, "tool_result", "--as", "agent", "-o", f"{tmp_path}/run", typed="/quit\n")
    line = [sys.executable, "-m", "lachesis", "check", "tool_result", "-n", "1", "--recorded", f"{tmp_path}/run"]
    done = subprocess.run(line, capture_output=True, text=True, timeout=LIMIT, check=False)
    assert "no finished rollout is recorded there" in done.stdout + done.stderr


def test_a_recorded_policy_takes_the_best_rollout(recorded: Path) -> None:
    path = recorded / "groups.jsonl"
    worse = path.read_text().replace('"content": "291"}]', '"content": "7"}]').replace('"reward": 1.0', '"reward": 0.5')
    path.write_text(worse + path.read_text())
    prompt = find_rollout(str(path)).prompt
    assert recorded_policy(path)([*prompt, {"role": "assistant"}], None).text == "291"  # type: ignore[union-attr]


def test_a_recording_without_a_score_has_its_own_conversation(tmp_path: Path) -> None:
    group = next(each for each in example_groups() if {None} < {one["reward"] for one in each["rollouts"]})
    (tmp_path / "groups.jsonl").write_text(json.dumps({**group, "rollouts": group["rollouts"][::-1]}) + "\n")
    found = {each.rollout_id: [*each.prompt, *each.turns] for each in recorded_rollouts(tmp_path)}
    assert found == {each["rollout_id"]: stored_messages(group, each) for each in group["rollouts"]}
    assert len(found) == len(group["rollouts"]) > len(group["scores"])
