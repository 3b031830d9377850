"""`lachesis chat` on a terminal: what a person types, pastes, presses and resizes."""

from __future__ import annotations

import asyncio
import base64
import fcntl
import os
import signal
import struct
import termios
import time
from pathlib import Path
from typing import Any

import pytest

from lachesis_testing.scripted_server import ScriptedServer, call, say
from tests.support.chats import Terminal, records
from tests.support.job_groups import PICTURE


async def test_ctrl_c_interrupts_an_answer_and_a_tool(tmp_path: Path) -> None:
    asked = 0

    async def answer(body: dict[str, Any]) -> dict[str, Any]:
        nonlocal asked
        asked += 1
        if asked == 1:
            await asyncio.sleep(60)
        if asked == 2:
            return call(("terminal", {"command": "sleep 50; echo late"}))
        assert body["messages"][-1]["content"] == "leave it" and "interrupted" in body["messages"][-2]["content"]
        return say("as you like")

    async with ScriptedServer(answer) as server:
        arguments = ("terminal", "-m", "scripted", "-b", server.base_url, "-o", f"{tmp_path}/run", "--session", "x")
        terminal = Terminal(tmp_path, *arguments)
        for seen, typed in (
            ("thinking", "\x03"),
            ("you>", "/retry\r"),
            ("sleep 50", "\x03"),
            ("you>", "leave it\r"),
            ("as you like", ""),
            ("you>", "/quit\r"),
        ):
            await asyncio.to_thread(terminal.until, seen)
            if typed == "\x03":
                await asyncio.sleep(0.3)  # the command runs
                os.killpg(terminal.process.pid, signal.SIGINT)
            else:
                terminal.type(typed)
        await asyncio.to_thread(terminal.until, "the rollout is in")
        assert await asyncio.to_thread(terminal.close) == 0
    [record] = records(tmp_path / "run")
    assert record["scores"] == [0.0]
    assert [m["role"] for m in record["messages"][0]] == ["system", "user", "assistant", "tool", "user", "assistant"]


@pytest.mark.slow
async def test_ctrl_c_keeps_the_calls_of_the_turn_that_had_finished(tmp_path: Path) -> None:
    turn = call(("terminal", {"command": "echo sent > mail; cat mail"}), ("terminal", {"command": "sleep 50"}))
    async with ScriptedServer([turn, say("as you like")]) as server:
        terminal = Terminal(tmp_path, "terminal", "-m", "scripted", "-b", server.base_url, "-o", f"{tmp_path}/run")
        await asyncio.to_thread(terminal.until, "sleep 50")
        await asyncio.sleep(3)  # the first call has ended
        os.killpg(terminal.process.pid, signal.SIGINT)
        await asyncio.to_thread(terminal.until, "you>")
        terminal.type("go on\r")
        await asyncio.to_thread(terminal.until, "as you like")
        await asyncio.to_thread(terminal.until, "you>")
        terminal.type("/quit\r")
        await asyncio.to_thread(terminal.until, "the rollout is in")
        assert await asyncio.to_thread(terminal.close) == 0
    [record] = records(tmp_path / "run")
    first, second = (each["content"] for each in record["messages"][0] if each["role"] == "tool")
    assert "sent" in first and second == "The user interrupted this call."


def test_ctrl_c_at_the_prompt_of_a_plain_chat_ends_it_with_a_rollout(tmp_path: Path) -> None:
    terminal = Terminal(tmp_path, "tool_result", "-m", "reference", "-o", f"{tmp_path}/run", "--plain")
    for seen, typed in (("agent: 291", ""), ("Ctrl-C again", "/usage\r"), ("prompt tokens", ""), ("Ctrl-C again", "")):
        terminal.until(seen)
        terminal.type(typed)
        if not typed:
            time.sleep(0.5)  # it waits for a line
            os.killpg(terminal.process.pid, signal.SIGINT)
    terminal.until("reward 1; the rollout is in")
    assert terminal.close() == 0
    assert len(records(tmp_path / "run")) == 1


async def test_each_command_on_a_terminal(tmp_path: Path) -> None:
    said = iter(["one", "two", "three", "four", "five", "six", "a summary", "seven"])
    image = tmp_path / "dot.png"
    image.write_bytes(base64.b64decode(PICTURE.partition(",")[2]))
    steps = (
        ("agent: one", "/help\r"),
        ("the rollout gets its reward", "/tools\r"),
        ("look_up(part)", "/toolsets\r"),
        ("coding", "/reward\r"),
        ("reward 0 ", "/retry\r"),
        ("agent: two", "/undo\r"),
        ("0 messages are left", f"/image {image}\r"),
        ("goes with your next", "what is this?\r"),
        ("agent: three", "/model scripted-2 URL secret-key\r"),
        ("the next answer is of scripted-2", "and now?\r"),
        ("agent: four", "/compress\r"),
        ("too short", "more\r"),
        ("agent: five", "again\r"),
        ("agent: six", "/compress\r"),
        ("became a summary", "/history\r"),
        ("[CONTEXT SUMMARY]: a summary", "/usage\r"),
        ("completion tokens", "/personality kawaii\r"),
        ("you> ", f"/save {tmp_path}/saved.json\r"),
        ("messages are in", "/branch y\r"),
        ("this is the chat y", "go on\r"),
        ("agent: seven", "/quit\r"),
        ("the rollout is in", ""),
    )
    async with ScriptedServer(lambda body: say(next(said))) as server:
        arguments = ("tool_result", "-m", "scripted", "-b", server.base_url, "-o", f"{tmp_path}/run", "--session", "x")
        terminal = Terminal(tmp_path, *arguments)
        for seen, typed in steps:
            await asyncio.to_thread(terminal.until, seen)
            terminal.type(typed.replace("URL", server.base_url))
        assert await asyncio.to_thread(terminal.close) == 0
    lines = tmp_path / "state/lachesis/typed"
    assert "+go on" in lines.read_text() and "secret-key" not in lines.read_text()
    assert lines.stat().st_mode & 0o777 == 0o600
    [record] = records(tmp_path / "run")
    [messages] = record["messages"]
    assert [m["content"] for m in messages if m["role"] == "assistant"] == ["four", "five", "six", "seven"]
    discarded = [each["reason"] for each in record["rollouts"][0]["discarded"]]
    assert discarded == ["asked again", "taken back", "replacement of messages 1 to 2"]
    assert server.requests[2]["messages"][-1]["content"][1]["image_url"]["url"] == PICTURE
    assert [request["model"] for request in server.requests] == ["scripted"] * 3 + ["scripted-2"] * 5


def resize(terminal: Terminal, columns: int) -> None:
    fcntl.ioctl(terminal.file, termios.TIOCSWINSZ, struct.pack("HHHH", 24, columns, 0, 0))
    os.killpg(terminal.process.pid, signal.SIGWINCH)


@pytest.mark.slow
async def test_what_is_pasted_is_one_message_and_a_resize_changes_nothing(tmp_path: Path) -> None:
    pasted = "first line\n\x00\x07second\u202e line\n" + "many words " * 2_000

    async def answer(body: dict[str, Any]) -> dict[str, Any]:
        await asyncio.sleep(1.0)
        return say("word " * 60)

    async with ScriptedServer(answer) as server:
        terminal = Terminal(tmp_path, "tool_result", "-m", "scripted", "-b", server.base_url, "-o", f"{tmp_path}/run")
        await asyncio.to_thread(terminal.until, "thinking")
        for columns in (60, 120, 1, 200):
            resize(terminal, columns)
            await asyncio.sleep(0.1)
        await asyncio.to_thread(terminal.until, "you>")
        terminal.type(f"\x1b[200~{pasted}\x1b[201~")
        resize(terminal, 80)
        await asyncio.to_thread(terminal.until, "words")
        terminal.type("\r")
        await asyncio.to_thread(terminal.until, "word word")
        await asyncio.to_thread(terminal.until, "you>")
        terminal.type("\x1b[A\x1b[B\x1bOP\x1b[1;5D\t\x1b\x1b\x0c\x1a")  # arrows, F1, keys of the shell
        terminal.type("\x03")
        await asyncio.to_thread(terminal.until, "Ctrl-C again")
        await asyncio.to_thread(terminal.until, "you>")
        terminal.type("\x04")
        await asyncio.to_thread(terminal.until, "the rollout is in")
        assert await asyncio.to_thread(terminal.close) == 0
    sent = server.requests[1]["messages"][-1]["content"]
    assert sent.split() == pasted.split()
    assert records(tmp_path / "run")[0]["rollouts"][0]["outcome"] == "completed"
