"""Watched rewards in several threads, in a process with an audit hook, as debuggers and `lachesis audit` set one."""

from __future__ import annotations

import subprocess
import sys

CODE = """
import sys, threading, time
from lachesis.rewards.watching import Watch

sys.addaudithook(lambda event, args: time.sleep(0.0001) if event == "sys.settrace" else None)
failed = []

def reward():
    for _ in range(200):
        try:
            Watch().call(lambda: 1.0)
        except RuntimeError as error:
            failed.append(error)

threads = [threading.Thread(target=reward) for _ in range(4)]
for thread in threads: thread.start()
for thread in threads: thread.join()
sys.exit(str(failed[0]) if failed else 0)
"""


def test_rewards_are_watched_in_several_threads_while_an_audit_hook_runs() -> None:
    done = subprocess.run([sys.executable, "-c", CODE], capture_output=True, text=True, timeout=100)
    assert done.returncode == 0, done.stderr
