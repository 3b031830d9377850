"""Chats and recordings of which a summary has replaced a part, or whose end was taken back: what ran in the sandbox is
more than the conversation shows."""

from __future__ import annotations

import asyncio
import json
import re
from pathlib import Path
from typing import Any

import pytest

from backends.errors import SettingsError
from lachesis.cli.environment_classes import environment_class
from lachesis.runs.command_line import read_settings
from lachesis.runs.commands import process
from lachesis_console.chat.journal import Journal
from lachesis_console.chat.recordings import find_rollout, recorded_policy
from lachesis_testing.scripted_server import ScriptedServer, call, say
from tests.support.chats import chat, records

COMPRESSED = [f"--env.compress_context_{name}" for name in ("at=2500", "to=2200", "keep=2")]
ENVIRONMENT = """
from lachesis import HermesAgentBaseEnv
from lachesis_messages.messages import Message

class Counting(HermesAgentBaseEnv):
    name = "counting"

    async def setup(self):
        self.left = 1

    async def get_next_item(self):
        self.left -= 1
        return {"task": "count"} if self.left >= 0 else None

    def format_prompt(self, item):
        return "count"

    def reference_policy(self):
        return lambda messages, tools: Message("assistant", "done")

    async def compute_reward(self, item, result, ctx):
        return float(len((await ctx.read_file("log")).split()))
"""


class Counter(ScriptedServer):
    """A model whose calls each add a line to a file, until it has so many lines; it writes summaries when asked."""

    def __init__(self, lines: int) -> None:
        super().__init__(self._answer)
        self.lines = lines

    def _answer(self, body: dict[str, Any]) -> dict[str, Any]:
        last, number = body["messages"][-1], len(self.requests)
        asked = f"{last['content']}"
        tokens = sum(len(json.dumps(each)) for each in body["messages"]) // 4
        usage = {"prompt_tokens": tokens, "completion_tokens": 5, "total_tokens": tokens + 5}
        if "A summary that you write" in asked:
            return say(f"summary {number}", usage=usage)
        so_far = re.search(r"COUNT (\d+)", asked) if last["role"] == "tool" else None
        if last["role"] == "tool" and (so_far is None or int(so_far[1]) >= self.lines):
            return say("done", usage=usage)
        command = "echo x >> log; echo COUNT $(wc -l < log); seq 1 300"
        answer = call(("terminal", {"command": command}), usage=usage)
        answer["tool_calls"][0]["id"] = f"call_{number}"
        return answer


def environment_file(tmp_path: Path, source: str = ENVIRONMENT) -> str:
    """A module of another name in each test."""
    path = tmp_path / f"counting_{tmp_path.name}.py"
    path.write_text(source)
    return str(path)


def counts(messages: list[Any]) -> list[int]:
    """What the calls said that are in a conversation."""
    return [int(re.search(r"COUNT (\d+)", m["content"])[1]) for m in messages if m["role"] == "tool"]  # type: ignore[index]


async def talk(tmp_path: Path, server: ScriptedServer, *arguments: str, typed: str) -> str:
    line = [*arguments, "-m", "scripted", "-b", server.base_url]
    return await asyncio.to_thread(chat, tmp_path, *line, typed=typed)


def kept(tmp_path: Path, name: str = "k") -> list[Any]:
    """The messages of a chat's file."""
    journal = Journal.named(name, tmp_path / "state/lachesis/chats")
    journal.close()
    return journal.messages


@pytest.mark.slow
async def test_a_chat_goes_on_in_the_sandbox_that_all_its_calls_have_made(tmp_path: Path) -> None:
    session = ("--session", "k", *COMPRESSED)
    async with Counter(8) as server:
        await talk(tmp_path, server, *session, typed="go\n")
        assert counts(kept(tmp_path)) != [*range(1, 9)] and "CONTEXT SUMMARY" in json.dumps(kept(tmp_path))
        # Each start plays it again, and each question has one call more, until the context is compressed again.
        for start in range(4):
            before = len(server.requests)
            said = await talk(tmp_path, server, "--session", "k", typed="more\nmore\n")
            assert ": 0 of" in said and "that the conversation no longer has" in said, said
            assert counts(kept(tmp_path))[-2:] == [9 + 2 * start, 10 + 2 * start]
            assert "A summary that you write" not in json.dumps(kept(tmp_path))  # asked of the model alone
        assert any("A summary that you write" in json.dumps(each) for each in server.requests[before:])


@pytest.fixture
async def compressed(tmp_path: Path) -> Path:
    """A run of one rollout, whose reward is what is in the sandbox."""
    async with Counter(8) as server:
        env_cls = environment_class(environment_file(tmp_path))
        flags = ["--openai.model_name=scripted", f"--openai.base_url={server.base_url}", "--env.group_size=1"]
        flags += ["--env.total_steps=1", f"--env.data_path_to_save_groups={tmp_path}/run/groups.jsonl", *COMPRESSED]
        await process(env_cls(**read_settings(env_cls, ["process", *flags], prog="test")[1]))
    [record] = records(tmp_path / "run")
    assert record["scores"] == [8.0] and len(counts(record["messages"][0])) < 8
    return tmp_path / "run"


@pytest.mark.slow
async def test_a_recording_is_played_with_what_a_summary_replaced(compressed: Path, tmp_path: Path) -> None:
    async with Counter(8) as server:
        for source, again in ((compressed, "again"), (tmp_path / "again", "once more")):  # of what was replayed, too
            line = [environment_file(tmp_path), "--replay", str(source), "-o", f"{tmp_path}/{again}"]
            said = await talk(tmp_path, server, *line, "--session", again.split()[0], typed="")
            assert "and 4 that the conversation no longer has: 0 of 8 results differ" in said
            [record] = records(tmp_path / again)
            assert record["scores"] == [8.0] and record["messages"] == records(compressed)[0]["messages"]
        assert not server.requests
        said = await talk(tmp_path, server, "--session", "again", "-o", f"{tmp_path}/resumed", typed="")
    assert "and 4 that the conversation no longer has: 0 of 8 results differ" in said
    policy: Any = recorded_policy(compressed)
    turns: list[Any] = [{"role": "user", "content": "count"}]
    while (now := policy(turns, [])).tool_calls:
        turns.append(now.to_openai())
    assert len(turns) == 1 + 8


async def test_turns_that_are_asked_for_have_the_sandbox_of_their_time(compressed: Path, tmp_path: Path) -> None:
    async with Counter(3) as server:
        line = [environment_file(tmp_path), "--replay", str(compressed), "--at", "1", "-o", f"{tmp_path}/again"]
        said = await talk(tmp_path, server, *line, typed="")
    assert "replayed 1 turn: 0 of 1 results differ" in said  # what was replaced came later
    assert records(tmp_path / "again")[0]["scores"] == [3.0]


async def test_a_recording_without_what_was_replaced_is_refused(compressed: Path, tmp_path: Path) -> None:
    [record] = records(compressed)
    record["rollouts"][0]["discarded"] = []
    (tmp_path / "branch.jsonl").write_text(json.dumps(record) + "\n")
    with pytest.raises(SettingsError, match=r"a summary replaced messages .* its record does not have them"):
        find_rollout(str(tmp_path / "branch.jsonl"))
    with pytest.raises(SettingsError, match="no finished rollout"):
        recorded_policy(tmp_path / "branch.jsonl")


@pytest.mark.slow
def test_calls_that_were_taken_back_have_run_and_those_before_a_checkpoint_gone_back_to_have_not(
    tmp_path: Path,
) -> None:
    line, count = (
        [environment_file(tmp_path), "--as", "agent", "--session", "k"],
        "/terminal echo x >> log; wc -l < log",
    )
    typed = [count, "/undo", count, "/checkpoint a", count, count, "/back a", count, "/branch b", count, "/undo", count]
    chat(tmp_path, *line, "-o", f"{tmp_path}/one", typed="\n".join([*typed, "done\n"]))
    [record] = records(tmp_path / "one")
    assert record["scores"] == [5.0]
    chat(tmp_path, "--as", "agent", "--session", "k", "-o", f"{tmp_path}/k", typed="done\n")
    chat(tmp_path, "--as", "agent", "--session", "b", "-o", f"{tmp_path}/b", typed="done\n")
    chat(tmp_path, *line[:3], "--replay", f"{tmp_path}/one", "-o", f"{tmp_path}/two", typed="done\n")
    assert [records(tmp_path / name)[0]["scores"] for name in ("k", "b", "two")] == [[3.0], [5.0], [5.0]]


@pytest.mark.slow
async def test_a_prompt_of_which_a_summary_replaced_a_part_stays_so(tmp_path: Path) -> None:
    source = ENVIRONMENT.replace(
        'return "count"',
        'return "count"'
        + """

    def initial_messages(self, item):
        told = [{"role": "user", "content": f"note {n} " + "word " * 1000} for n in range(4)]
        said = [{"role": "assistant", "content": f"noted {n}"} for n in range(4)]
        talked = [message for pair in zip(told, said) for message in pair]
        return [*talked, {"role": "user", "content": "count"}]""",
    )
    async with Counter(3) as server:
        session = (environment_file(tmp_path, source), "--session", "k", *COMPRESSED)
        await talk(tmp_path, server, *session, typed="more\n")
        before, number = server.requests[-1]["messages"], len(server.requests)
        said = await talk(tmp_path, server, "--session", "k", "-o", f"{tmp_path}/again", typed="and more\n")
    assert "CONTEXT SUMMARY" in json.dumps(before) and "0 of 4 results differ" in said
    assert server.requests[number]["messages"][: len(before)] == before


def test_a_file_of_an_older_version_has_run_once_what_it_wrote_again_behind_a_summary(tmp_path: Path) -> None:
    def turn(number: int) -> list[dict[str, Any]]:
        asked = {"role": "assistant", "content": None, **call(("terminal", {"command": str(number)}))}
        asked["tool_calls"][0]["id"] = str(number)
        return [asked, {"role": "tool", "tool_call_id": str(number), "name": "terminal", "content": f"{number}"}]

    about = {"schema": "lachesis.chat/1", "environment": "e", "flags": [], "item": 1}
    summary = {"role": "user", "content": "a summary"}
    lines = [about, *turn(1), *turn(2), *turn(3), {"keep": 2}, summary, *turn(3), *turn(4)]
    (tmp_path / "a.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    journal = Journal.named("a", tmp_path)
    assert [m.get("tool_call_id") for m in journal.messages] == [None, "1", None, None, "3", None, "4"]
    assert dict(journal.lost) == {2: turn(2)}
