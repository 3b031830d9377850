"""A command that was started with its parent ends with it, also when nothing but the kernel can tell it."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from backends.host.folders import user_cache
from backends.with_parent import with_parent

STARTS = """
import subprocess, sys, time
from backends.with_parent import with_parent
subprocess.Popen(with_parent(sys.executable, "-c", sys.argv[1]))
time.sleep(600)
"""
SAYS = "import os, sys, time; print(os.getpid(), os.getppid(), sys.argv, flush=True); time.sleep(600)"


def alive(pid: int) -> bool:
    try:
        return "State:\tZ" not in Path(f"/proc/{pid}/status").read_text()
    except FileNotFoundError:
        return False


def test_a_killed_parent_takes_its_child_with_it() -> None:
    command = [sys.executable, "-c", STARTS, SAYS]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True, cwd=Path(__file__).parents[2]) as parent:
        assert parent.stdout is not None
        child, its_parent, _ = parent.stdout.readline().split(maxsplit=2)
        assert int(its_parent) == parent.pid and alive(int(child))
        parent.send_signal(signal.SIGKILL)
        parent.wait()
    deadline = time.monotonic() + 60
    while alive(int(child)):
        assert time.monotonic() < deadline, "the child outlived its parent"
        time.sleep(0.01)


def test_the_command_gets_its_arguments_and_output_and_its_exit_code_is_the_childs() -> None:
    code = "import sys; print(sys.argv[1:]); sys.exit(7)"
    done = subprocess.run(with_parent(sys.executable, "-c", code, "a b", ""), capture_output=True, text=True)
    assert (done.returncode, done.stdout) == (7, "['a b', '']\n")


def test_a_parent_that_is_gone_already_leaves_nothing() -> None:
    command = with_parent("true")
    command[command.index(str(os.getpid()))] = "1"
    assert subprocess.run(command).returncode == 1


@pytest.mark.parametrize(
    ("chosen", "below"), [("/x/cache", "/x/cache"), ("", "/home/a/.cache"), ("c", "/home/a/.cache")]
)
def test_the_cache_is_where_xdg_says_if_that_is_an_absolute_path(
    chosen: str, below: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HOME", "/home/a")
    monkeypatch.setenv("XDG_CACHE_HOME", chosen)
    assert user_cache() == Path(below) / "lachesis"
