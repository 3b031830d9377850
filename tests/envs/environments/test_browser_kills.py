"""Fifty rollouts with a browser, eight at a time, of which sandboxes and the run itself are killed: nothing is left.

The test prints what a rollout takes: the peak of its sandbox's memory, and processor time.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import random
import signal
import statistics
import subprocess
import sys
import time
import uuid
from collections.abc import Iterator
from pathlib import Path

import pytest

from backends.local import LocalBackend
from tests.support.browsers import on_request
from tests.support.small_envs import rollouts

ROLLOUTS, AT_ONCE = 50, int(os.environ.get("LACHESIS_BROWSERS_AT_ONCE", "8"))
KILLED_RUNS = 3


def left(mark: str) -> list[int]:
    """Processes of the sandboxes: Chromium overwrites its variables, but not where its files are."""
    found = []
    for folder in Path("/proc").glob("[0-9]*"):
        try:
            about = (folder / "environ").read_bytes() + (folder / "cmdline").read_bytes()
        except OSError:
            continue
        if mark.encode() in about or b"user-data-dir=/tmp/browser-" in about:
            found.append(int(folder.name))
    return [pid for pid in found if pid != os.getpid()]


def gone(mark: str) -> float:
    """Seconds until nothing is left. AssertionError after a minute."""
    began = time.monotonic()
    while (pids := left(mark)) and time.monotonic() < began + 60:
        time.sleep(0.1)
    assert not pids
    return time.monotonic() - began


def memory(pid: int) -> int:
    """The peak of the memory of a sandbox in bytes, by a process of it; 0 if unknown."""
    try:
        groups = dict(line.split(":", 2)[1:] for line in Path(f"/proc/{pid}/cgroup").read_text().splitlines())
        name, peak = ("memory", "memory.max_usage_in_bytes") if "memory" in groups else ("", "memory.peak")
        group = groups[name]
        return int(Path("/sys/fs/cgroup", name, group.lstrip("/"), peak).read_text()) if "/lachesis-" in group else 0
    except (OSError, KeyError):
        return 0


def spent(pid: int) -> float:
    """Seconds of processor time of a process and of the children that it has waited for."""
    try:
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except OSError:
        return 0.0
    return sum(map(int, fields[11:15])) / os.sysconf("SC_CLK_TCK")


class Killer:
    """Kills sandboxes of a run while it goes on, and measures them."""

    def __init__(self) -> None:
        self.draw = random.Random(random.getrandbits(32))
        self.killed = 0
        self.figures: dict[str, tuple[int, float]] = {}

    def during(self, run: subprocess.Popen[bytes], seconds: float) -> None:
        """Until the run ends, or the seconds are over."""
        ends, next_kill = time.monotonic() + seconds, time.monotonic() + 10
        while run.poll() is None and time.monotonic() < ends:
            of_run = [
                each for each in asyncio.run(LocalBackend().sandboxes()) if each.owner.split(".")[1] == str(run.pid)
            ]
            pids = {each.id: int(each.detail.rpartition(" ")[2]) for each in of_run if each.detail[-1].isdigit()}
            for name, pid in pids.items():
                inside, before = list(children(pid)), self.figures.get(name, (0, 0.0))
                now = max(map(memory, inside), default=0), sum(map(spent, inside))
                self.figures[name] = max(now[0], before[0]), max(now[1], before[1])
            if pids and time.monotonic() > next_kill:
                with contextlib.suppress(ProcessLookupError):  # it has just ended
                    os.kill(pids[self.draw.choice(sorted(pids))], signal.SIGKILL)
                    self.killed += 1
                next_kill = time.monotonic() + self.draw.uniform(4, 12)
            time.sleep(0.2)


def children(pid: int) -> Iterator[int]:
    try:
        listed = Path(f"/proc/{pid}/task/{pid}/children").read_text()
    except OSError:
        return
    yield pid
    for child in map(int, listed.split()):
        yield from children(child)


@on_request
def test_killed_browsers_leave_nothing(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    mark, groups, killer, waits = uuid.uuid4().hex, tmp_path / "groups.jsonl", Killer(), []
    settings = {
        "total_steps": ROLLOUTS,
        "dataset_size": ROLLOUTS,
        "group_size": 1,
        "max_num_workers": AT_ONCE,
        "max_infra_retries": 10,
        "terminal_env": json.dumps({"MARK": mark}),
        "data_path_to_save_groups": groups,
    }
    flags = [word for name, value in settings.items() for word in (f"--env.{name}", str(value))]
    command = [sys.executable, "-m", "lachesis", "process", "browser_tasks", "-m", "reference", *flags]
    began = time.monotonic()
    for number in range(KILLED_RUNS + 1):
        with (tmp_path / f"run{number}.log").open("wb") as log:
            run = subprocess.Popen(command, cwd=tmp_path, stdout=log, stderr=log)
        try:
            last = number == KILLED_RUNS
            killer.during(run, 1500 if last else killer.draw.uniform(25, 45))
        finally:
            run.kill()
            run.wait()
        waits.append(gone(mark))
    assert run.returncode == 0, (tmp_path / f"run{number}.log").read_text()[-3000:]
    played = rollouts(groups)
    assert len(played) == ROLLOUTS
    assert {(each["outcome"], each["reward"]) for each in played} == {("completed", 1.0)}
    assert killer.killed > 5
    peaks, seconds = zip(*killer.figures.values(), strict=True)
    took, mib = time.monotonic() - began, [peak / 2**20 for peak in peaks]
    with capsys.disabled():
        print(f"\n{ROLLOUTS} rollouts, {AT_ONCE} at a time, in {took:.0f} s; load {os.getloadavg()[0]:.1f}")
        print(
            f"{KILLED_RUNS} kills of the run, {killer.killed} of sandboxes: 0 processes left after {max(waits):.1f} s"
        )
        print(f"{len(mib)} sandboxes: memory {statistics.median(mib):.0f} MiB in the median, at most {max(mib):.0f}")
        print(f"processor {statistics.median(seconds):.1f} s in the median, at most {max(seconds):.1f}")
