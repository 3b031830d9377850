"""The temporary folder of a process is gone after it, however it ended."""

from __future__ import annotations

import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

MAKES = """
import os, pathlib, sys, tempfile
from lachesis.tool_context.own_folder import own_folder
made = pathlib.Path(tempfile.mkdtemp(dir=own_folder()))
(made / "closed").mkdir()
(made / "closed/file").write_text("x")
(made / "away").symlink_to(sys.argv[1])
(made / "closed").chmod(0)
print(made, flush=True)
sys.stdin.read()
"""


def start(place: Path, kept: Path) -> tuple[subprocess.Popen[str], Path]:
    process = subprocess.Popen(
        [sys.executable, "-c", MAKES, str(kept)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),  # a job in the background ignores it
        env={"TMPDIR": str(place), "PATH": "/usr/bin:/bin"},
    )
    assert process.stdout is not None
    return process, Path(process.stdout.readline().strip())


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGTERM, signal.SIGINT, 0])
def test_nothing_is_left_and_nothing_else_is_touched(tmp_path: Path, number: int) -> None:
    place, kept = tmp_path / "tmp", tmp_path / "kept"
    (place / "lachesis-files-of-somebody").mkdir(parents=True)
    kept.mkdir()
    (kept / "file").write_text("x")
    process, made = start(place, kept)
    other, others = start(place, kept)
    with process, other:
        process.send_signal(number) if number else process.communicate("")
        process.wait()
        end = time.monotonic() + 60
        while made.parent.exists() and time.monotonic() < end:
            time.sleep(0.01)
        assert sorted(place.iterdir()) == sorted([place / "lachesis-files-of-somebody", others.parent])
        other.communicate("")
    assert (kept / "file").read_text() == "x"


def test_what_a_killed_process_left_is_removed_by_the_next(tmp_path: Path) -> None:
    """As where its child was killed with it."""
    process, made = start(tmp_path, tmp_path)
    with process:
        children = Path(f"/proc/{process.pid}/task/{process.pid}/children").read_text().split()
        subprocess.run(["kill", "-9", *children, str(process.pid)], check=True)
    assert made.parent.is_dir()
    process, made_next = start(tmp_path, tmp_path)
    with process:
        assert not made.parent.exists() and made_next.is_dir()
        process.communicate("")
    assert list(tmp_path.iterdir()) == []
