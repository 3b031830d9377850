"""Writes the captures of docs/chat.md: a chat in tmux at three widths, resized in the middle of an answer.

python scripts/chat_captures.py

It needs tmux. The model is a scripted server in this process.
"""

from __future__ import annotations

import asyncio
import os
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

from lachesis_testing.scripted_server import ScriptedServer, call, say  # noqa: E402

PAGE = ROOT / "docs/chat.md"
SESSION = f"captures-{os.getpid()}"
ANSWER = (
    "The part gear-33 is in stock with 291 pieces. I looked it up once, with the name as it stands in your question, "
    "and the answer of the tool was a plain number."
)


def tmux(*arguments: str) -> str:
    return subprocess.run(["tmux", *arguments], check=True, capture_output=True, text=True).stdout


async def until(text: str) -> None:
    for _ in range(300):
        if text in " ".join(tmux("capture-pane", "-p", "-S", "-", "-t", SESSION).split()):
            return
        await asyncio.sleep(0.1)
    raise TimeoutError(f"{text!r} is not shown:\n{tmux('capture-pane', '-p', '-t', SESSION)}")


async def type_line(text: str) -> None:
    tmux("send-keys", "-t", SESSION, "-l", text)
    tmux("send-keys", "-t", SESSION, "Enter")


async def captured(width: int, folder: Path) -> str:
    asked = 0

    async def answer(body: dict[str, Any]) -> dict[str, Any]:
        nonlocal asked
        asked += 1
        if asked == 1:
            return call(("look_up", {"part": "gear-33"}))
        await asyncio.sleep(0.5 if asked == 2 else 60 if asked == 3 else 0)
        return say(ANSWER if asked == 2 else "As you like.")

    async with ScriptedServer(answer) as server:
        shell = f"PS1='$ ' PATH={Path(sys.executable).parent}:$PATH XDG_STATE_HOME={folder}/state bash --norc"
        tmux("new-session", "-d", "-s", SESSION, "-x", str(width), "-y", "60", "-c", str(folder), shell)
        try:
            await type_line(f"URL={server.base_url}; clear")
            await asyncio.sleep(0.5)
            await type_line("lachesis chat tool_result -m my-model -b $URL -o run")
            await until("thinking")
            tmux("resize-window", "-t", SESSION, "-x", str(width + 7))
            await asyncio.sleep(0.2)
            tmux("resize-window", "-t", SESSION, "-x", str(width))
            await until("plain number. you>")
            await type_line("Are you sure?")
            await until("you> Are you sure?")
            await asyncio.sleep(1)
            tmux("send-keys", "-t", SESSION, "C-c")
            await until("interrupted")
            for typed, text in (
                ("leave it", "As you like."),
                ("/reward", "reward 0"),
                ("/quit", "the rollout is in run/groups.jsonl $"),
                ("lachesis chat --replay run --at 1 --as agent -o again", "results differ agent>"),
                ("291", "the rollout is in again/groups.jsonl $"),
            ):
                await type_line(typed)
                await until(text)
            pane = tmux("capture-pane", "-p", "-S", "-", "-t", SESSION)
        finally:
            tmux("kill-session", "-t", SESSION)
    lines = [part.rstrip() for part in pane.splitlines()]
    start = next(at for at, part in enumerate(lines) if part.startswith("$ lachesis chat"))
    return "\n".join(lines[start:]).rstrip().removesuffix("$").rstrip() + "\n"


async def main() -> None:
    for width in (60, 80, 120):
        with tempfile.TemporaryDirectory() as folder:
            shown = await captured(width, Path(folder))
        before, heading, after = PAGE.read_text().partition(f"n {width} columns:\n\n")
        rest = after.partition("```text\n")[2].partition("```\n")[2]
        PAGE.write_text(f"{before}{heading}```text\n{shown}```\n{rest}")


if __name__ == "__main__":
    asyncio.run(main())
