"""`lachesis batch --ray` on a real Ray of this machine: shards are tasks, and what is killed goes on."""

from __future__ import annotations

import asyncio
import fcntl
import importlib
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.support.batch_runs import entries, flags, keys, thinks, write_rows
from tests.support.small_envs import ROOT, served

if os.environ.get("LACHESIS_NEED_RAY"):
    importlib.import_module("ray")
else:
    pytest.importorskip("ray", reason="ray is not installed; `make test-ray` has it")

SHARDS = 3


@pytest.fixture
def ray_variables() -> Iterator[dict[str, str]]:
    folder = tempfile.mkdtemp(prefix="ray")  # not of pytest: the names of sockets may have 107 characters
    yield {**os.environ, "RAY_TMPDIR": folder, "RAY_AUTH_MODE": "disabled", "RAY_USAGE_STATS_ENABLED": "0"}
    shutil.rmtree(folder)


def test_shards_on_ray_are_joined_and_a_killed_run_goes_on(tmp_path: Path, ray_variables: dict[str, str]) -> None:
    rows = [{"prompt": f"prompt {number}{' no thought' * (number % 7 == 3)}"} for number in range(40)]
    write_rows(tmp_path / "rows.jsonl", rows)
    asked: Counter[str] = Counter()
    going = threading.Event()

    async def slowly(request: dict[str, Any]) -> Any:
        asked[request["messages"][-1]["content"]] += 1
        if len(asked) > 5:
            going.set()
        await asyncio.sleep(0.2)
        return thinks(request)

    with served(slowly) as server:
        # A relative path: shards play where the command was called.
        arguments = flags("rows.jsonl", tmp_path, server.base_url, "--ray", "local", f"--shards={SHARDS}")
        arguments += ["--concurrency", "2", "--grace_period", "0"]
        command = [sys.executable, "-m", "lachesis", "batch", *arguments]
        variables = {**ray_variables, "PYTHONPATH": str(ROOT)}
        first = subprocess.Popen(command, cwd=tmp_path, env=variables)
        assert going.wait(120)
        first.send_signal(signal.SIGKILL)
        first.wait()
        for lock in (tmp_path / "run").glob("shard_*/groups.lock"):  # each shard ends by itself
            with lock.open() as file:
                fcntl.flock(file, fcntl.LOCK_EX)
        kept = sum(len(keys(folder)) for folder in (tmp_path / "run").glob("shard_*"))
        assert kept < 34
        ended = subprocess.run(command, cwd=tmp_path, env=variables, capture_output=True, text=True, check=False)
    assert ended.returncode == 0, ended.stdout + ended.stderr
    assert all(f"shard {number}/{SHARDS} ended with exit code 0" in ended.stdout for number in (1, 2, 3))
    assert f"{SHARDS} shards: 34 kept, 6 discarded, 0 failed" in ended.stdout
    merged = entries(tmp_path / "run/merged")
    assert Counter(entry["conversations"][1]["value"] for entry in merged) == Counter(
        row["prompt"] for row in rows if "no thought" not in row["prompt"]
    )
    assert set(asked) == {row["prompt"] for row in rows}


def test_what_stops_every_shard_is_its_exit_code(tmp_path: Path, ray_variables: dict[str, str]) -> None:
    source = write_rows(tmp_path / "rows.jsonl", [{"prompt": "a"}])
    arguments = flags(source, tmp_path, "http://127.0.0.1:9/v1", "--distribution", "no_such_one")
    command = [sys.executable, "-m", "lachesis", "batch", *arguments, "--ray", "local", "--shards", "2"]
    ended = subprocess.run(command, cwd=ROOT, env=ray_variables, capture_output=True, text=True, check=False)
    assert ended.returncode == 2, ended.stdout + ended.stderr
    assert "no_such_one" in ended.stdout + ended.stderr
