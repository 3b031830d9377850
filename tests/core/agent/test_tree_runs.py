"""Runs of trees that are killed or interrupted between two forks, and started again."""

from __future__ import annotations

import asyncio
import json
import signal
import threading
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from lachesis_messages.records.jsonl import read_lines
from lachesis_testing.fake_server import Ask, FakeServer
from lachesis_tokens.samples.verification import verify_records
from tests.core.runs.test_process import orphans
from tests.support.small_envs import lines, sandboxes, start

BOUND = 120.0
GROUPS = 4


@contextmanager
def in_thread(policy: Callable[[Ask], str], folder: Path) -> Iterator[FakeServer]:
    """A fake server whose loop is not that of the test; its tokenizer is in the folder."""
    loop = asyncio.new_event_loop()
    thread = threading.Thread(target=loop.run_forever)
    thread.start()
    server = FakeServer(policy, vary=True, latency=0.05)
    try:
        asyncio.run_coroutine_threadsafe(server.__aenter__(), loop).result(BOUND)
        server.tokenizer.save_pretrained(str(folder))
        yield server
        asyncio.run_coroutine_threadsafe(server.__aexit__(None, None, None), loop).result(BOUND)
    finally:
        loop.call_soon_threadsafe(loop.stop)
        thread.join()
        loop.close()


@pytest.mark.slow
@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGINT])
def test_a_run_that_ends_within_a_tree_is_continued_without_loss(tmp_path: Path, number: signal.Signals) -> None:
    late = threading.Semaphore(0)
    """Counts requests after the first fork of a tree."""

    def policy(ask: Ask) -> str:
        if ask.turn == 2:
            late.release()
        if ask.turn == 3:
            return "Done."
        command = f"echo {ask.rng().randrange(10**6)} >> log"
        return f"<tool_call>\n{json.dumps({'name': 'terminal', 'arguments': {'command': command}})}\n</tool_call>"

    groups = tmp_path / "groups.jsonl"
    with in_thread(policy, tmp_path / "tokenizer") as server:
        flags = {
            "openai.base_url": server.base_url,
            "openai.model_name": "fake",
            "openai.server_type": "vllm",
            "openai.tokenizer_name": str(tmp_path / "tokenizer"),
            "env.enabled_toolsets": "[terminal]",
            "env.total_steps": str(GROUPS),
            "env.group_size": "8",
            "env.tree_at": "turns:2,3",
            "env.max_num_workers": "8",
            "env.data_path_to_save_groups": str(groups),
        }
        arguments = [text for name, value in flags.items() for text in (f"--{name}", value)]
        run = start(["-m", "tests.support.small_envs", "process", *arguments])
        for _ in range(12):  # the first group, and the second one in its middle
            assert late.acquire(timeout=BOUND), run.poll()
        assert sandboxes()
        run.send_signal(number)
        output = run.communicate(timeout=BOUND)[0]
        assert run.returncode == (130 if number is signal.SIGINT else -number), output
        assert "Traceback" not in output
        before = [line for line in groups.read_text().splitlines() if line.endswith("}")] if groups.exists() else []
        assert len(before) < GROUPS
        assert orphans() == []
        again = start(["-m", "tests.support.small_envs", "process", *arguments])
        output = again.communicate(timeout=BOUND)[0]
    assert again.returncode == 0, output
    assert groups.read_text().splitlines()[: len(before)] == before
    records = lines(groups)
    assert len({each["item_key"] for each in records}) == len(records) == GROUPS
    assert all(len({each["tree"]["path"] for each in group["rollouts"]}) == 8 for group in records)
    spans = Counter(s["completion_id"] for group in records for made in group["samples"] for s in made["spans"])
    assert set(spans.values()) == {1}
    totals = verify_records(read_lines(groups))
    assert totals.ok and totals.delivered == totals.sampled, totals.problems
    assert orphans() == []
