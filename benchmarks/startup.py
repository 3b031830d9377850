"""How much CPU a command takes to start: `--help`, `lachesis doctor`, and `process` until its first request.

python -m benchmarks.startup

The first byte on a terminal is measured in wall-clock time as well, since a person waits for it. Medians of fresh
processes; the last line names what is over its limit.
"""

from __future__ import annotations

import os
import pty
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

from benchmarks.machine import cpu_seconds

ROOT = Path(__file__).resolve().parents[1]
RUNS = 5
ENVIRONMENT = [sys.executable, "environments/terminal_test_env.py"]
LIMITS = {
    "import lachesis": 0.05,
    "process --help": 0.7,
    "lachesis doctor": 0.7,
    "process: first request": 1.5,
    "process: first output (wall)": 1.0,
}
"""Seconds; of CPU where nothing else is said. `import lachesis` is measured above a bare interpreter."""


def cpu_of_command(*command: str) -> float:
    before = os.times()
    subprocess.run(command, cwd=ROOT, check=True, stdout=subprocess.DEVNULL)
    after = os.times()
    return after.children_user - before.children_user + after.children_system - before.children_system


class Server(ThreadingHTTPServer):
    """Answers `/models`, and notes when the first completion is requested."""

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), _Handler)
        self.requested = threading.Event()
        self.cpu = 0.0
        self.pid = 0
        threading.Thread(target=self.serve_forever, daemon=True).start()


class _Handler(BaseHTTPRequestHandler):
    server: Server

    def do_GET(self) -> None:
        body = b'{"object": "list", "data": [{"id": "m", "object": "model"}]}'
        self.send_response(200)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def do_POST(self) -> None:
        if not self.server.requested.is_set():
            self.server.cpu = cpu_seconds(self.server.pid)
            self.server.requested.set()

    def log_message(self, format: str, *args: Any) -> None: ...


def start_process(folder: str) -> tuple[float, float]:
    """CPU seconds of `process` until its first request, and wall-clock seconds until its first output."""
    server = Server()
    ours, theirs = pty.openpty()
    command = [
        *(*ENVIRONMENT, "process", "--env.total_steps=1", "--env.group_size=1", "--openai.model_name=m"),
        *(f"--openai.base_url=http://127.0.0.1:{server.server_port}/v1", "--openai.max_retries=0"),
        f"--env.data_path_to_save_groups={folder}/groups.jsonl",
    ]
    began = time.monotonic()
    child = subprocess.Popen(command, cwd=ROOT, stdout=subprocess.DEVNULL, stderr=theirs, start_new_session=True)
    server.pid = child.pid
    os.close(theirs)
    try:
        os.read(ours, 1)
        spoke = time.monotonic() - began
        threading.Thread(target=_drain, args=[ours], daemon=True).start()
        if not server.requested.wait(60):
            raise RuntimeError("no request within a minute")
        return server.cpu, spoke
    finally:
        child.terminate()
        child.wait()
        server.shutdown()
        server.server_close()


def _drain(terminal: int) -> None:
    try:
        while os.read(terminal, 65536):
            pass
    except OSError:
        os.close(terminal)


def main() -> int:
    lachesis = str(Path(sys.executable).with_name("lachesis"))
    commands = {
        "import lachesis": [sys.executable, "-c", "import lachesis"],
        "process --help": [*ENVIRONMENT, "process", "--help"],
        "lachesis doctor": [lachesis, "doctor"],
    }
    bare = statistics.median(cpu_of_command(sys.executable, "-c", "pass") for _ in range(RUNS))
    taken: dict[str, list[float]] = {name: [] for name in LIMITS}
    with tempfile.TemporaryDirectory() as folder:
        for run in range(RUNS + 1):  # the first writes the byte code
            for name, command in commands.items():
                seconds = cpu_of_command(*command) - (bare if name == "import lachesis" else 0)
                taken[name] += [seconds] if run else []
            cpu, spoke = start_process(tempfile.mkdtemp(dir=folder))
            taken["process: first request"] += [cpu] if run else []
            taken["process: first output (wall)"] += [spoke] if run else []
    over = []
    for name, limit in LIMITS.items():
        median = statistics.median(taken[name])
        print(f"  {name:<30} {median:6.3f} s   limit {limit} s")
        if median > limit:
            over.append(name)
    if over:
        print(f"over the limit: {', '.join(over)}")
    return bool(over)


if __name__ == "__main__":
    sys.exit(main())
