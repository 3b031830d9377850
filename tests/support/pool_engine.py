"""A pool with its workers, as `lachesis pool up` starts it, with a state folder of its own."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
import time
import urllib.request
import uuid
from collections.abc import Iterator
from pathlib import Path
from typing import Any


class PoolEngine:
    """A running pool. `options` go to `create_backend("pool", ...)`."""

    def __init__(self, folder: Path, *arguments: str, env: dict[str, str] | None = None) -> None:
        self.folder, self.name = folder, f"pool{uuid.uuid4().hex[:8]}"
        folder.mkdir(parents=True, exist_ok=True)
        self.env = {**os.environ, **(env or {}), "XDG_STATE_HOME": str(folder)}
        self._arguments = arguments
        self.start()

    @property
    def place(self) -> dict[str, Any]:
        found: dict[str, Any] = json.loads((self.folder / f"lachesis/pools/{self.name}.json").read_text())
        return found

    @property
    def options(self) -> dict[str, Any]:
        key = self.folder / "key"
        key.write_text(self.place["token"])
        return {"url": self.place["url"], "token_file": str(key)}

    def start(self) -> None:
        command = [sys.executable, "-m", "lachesis_pools", "up", "--name", self.name, *self._arguments]
        with (self.folder / "log").open("ab") as log:
            self.process = subprocess.Popen(command, env=self.env, stdout=subprocess.PIPE, stderr=log, text=True)
        assert self.process.stdout is not None
        for line in self.process.stdout:
            if line.startswith("the key is in"):
                break
        else:
            raise RuntimeError(f"the pool does not start: {(self.folder / 'log').read_text()[-2000:]}")

    def run(self, *arguments: str) -> str:
        """The output of `lachesis pool ...`."""
        command = [sys.executable, "-m", "lachesis_pools", *arguments]
        done = subprocess.run(command, env=self.env, capture_output=True, text=True, timeout=120, check=False)
        assert done.returncode == 0, done
        return done.stdout

    def status(self) -> dict[str, Any]:
        """As of `lachesis pool status --json`, without a process."""
        place = self.place
        asked = urllib.request.Request(f"{place['url']}/status", headers={"Authorization": f"Bearer {place['token']}"})
        with urllib.request.urlopen(asked, timeout=30) as answer:
            found: dict[str, Any] = json.load(answer)
        return found

    def ready(self, workers: int, seconds: float = 120.0) -> dict[str, Any]:
        """Wait until so many workers have joined."""
        end = time.monotonic() + seconds
        while time.monotonic() < end:
            said = self.status()
            if len(said["workers"]) >= workers:
                return said
            time.sleep(0.2)
        raise AssertionError(f"{said}; {(self.folder / 'log').read_text()[-3000:]}")

    def workers(self) -> set[int]:
        """The processes of its workers."""
        return {*workers(self.name)}

    def end(self) -> str:
        """Ctrl-C, and what it says then."""
        self.process.send_signal(signal.SIGINT)
        said, _ = self.process.communicate(timeout=120)
        return said


@contextlib.contextmanager
def pool_engine(folder: Path, *arguments: str, env: dict[str, str] | None = None) -> Iterator[PoolEngine]:
    engine = PoolEngine(folder, *arguments, env=env)
    try:
        yield engine
    finally:
        if engine.process.poll() is None:
            engine.end()


def workers(base: str) -> list[int]:
    """The processes of workers whose names have this."""
    found = []
    for place in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError):
            words = (place / "cmdline").read_bytes().decode().split("\0")
            if "lachesis_pools" in words and "worker" in words and any(base in word for word in words):
                found.append(int(place.name))
    return found
