"""Chats in a process of their own: on pipes, and on a terminal."""

from __future__ import annotations

import contextlib
import json
import os
import pty
import re
import select
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

LIMIT = 90.0


def command(*arguments: str) -> list[str]:
    return [sys.executable, "-m", "lachesis", "chat", *arguments]


def environment(tmp_path: Path) -> dict[str, str]:
    return {**os.environ, "XDG_STATE_HOME": str(tmp_path / "state"), "TERM": "xterm", "COLUMNS": "80"}


def chat(tmp_path: Path, *arguments: str, typed: str | bytes = "", code: int = 0) -> str:
    """What a chat prints whose standard input is no terminal."""
    given = typed.encode() if isinstance(typed, str) else typed
    done = subprocess.run(
        command(*arguments), input=given, capture_output=True, timeout=LIMIT, check=False, env=environment(tmp_path)
    )
    said = done.stdout.decode()
    assert done.returncode == code, said + done.stderr.decode()
    assert b"Traceback" not in done.stderr, done.stderr.decode()
    return said + done.stderr.decode()


def records(folder: Path, name: str = "groups.jsonl") -> list[dict[str, Any]]:
    return [json.loads(line) for line in (folder / name).read_text().splitlines()]


class Terminal:
    """A chat on a terminal."""

    def __init__(self, tmp_path: Path, *arguments: str) -> None:
        ours, theirs = pty.openpty()
        self.file, self.text = ours, ""
        self.process = subprocess.Popen(
            command(*arguments),
            stdin=theirs,
            stdout=theirs,
            stderr=theirs,
            env=environment(tmp_path),
            start_new_session=True,
            preexec_fn=lambda: os.close(os.open(os.ttyname(0), os.O_RDWR)),  # the controlling terminal
        )
        os.close(theirs)

    def until(self, text: str) -> None:
        """Read until `text` is shown, without colours and movements of the cursor."""
        end = time.monotonic() + LIMIT
        while text not in self.plain:
            assert time.monotonic() < end, self.plain
            if select.select([self.file], [], [], 0.2)[0]:
                with contextlib.suppress(OSError):
                    data = os.read(self.file, 65536).decode(errors="replace")
                    self.text += data
                    if "\x1b[6n" in data:  # it asks where the cursor is
                        os.write(self.file, b"\x1b[1;1R")
        self.text = self.plain.partition(text)[2]

    @property
    def plain(self) -> str:
        return re.sub(r"\x1b\[[0-9;?]*[A-Za-z]|\x1b[=>]|\r", "", self.text)

    def type(self, text: str) -> None:
        os.write(self.file, text.encode())

    def close(self) -> int:
        end = time.monotonic() + LIMIT
        while self.process.poll() is None and time.monotonic() < end:
            if select.select([self.file], [], [], 0.1)[0]:
                with contextlib.suppress(OSError):
                    os.read(self.file, 65536)
        os.close(self.file)
        return self.process.wait(5)
