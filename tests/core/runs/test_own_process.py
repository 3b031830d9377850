"""A command sets up its own process, undoes that at the end, and a library call changes nothing."""

from __future__ import annotations

import asyncio
import gc
import itertools
import json
import os
import resource
import signal
import socket
import subprocess
import sys
import time
import weakref
from collections import Counter
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest

import lachesis
from lachesis.runs import command_line as cli
from lachesis.runs import own_process
from lachesis.runs.own_process import EVENTS, FewAtOnce, RareCollections, rare_collections
from tests.support.small_envs import SortWords, does_nothing, process, served


def state() -> tuple[Any, ...]:
    """What a process has one of."""
    files, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    return gc.get_threshold()[0], gc.get_freeze_count() > 0, sys.getswitchinterval(), files


class Looks(SortWords):
    """It notes the state of its process while it is played."""

    found: set[Any]

    async def compute_reward(self, item, result, ctx):
        selector = getattr(asyncio.get_running_loop(), "_selector", None)
        self.found.add((state(), type(selector) is FewAtOnce))
        return 1.0


def test_a_command_keeps_the_garbage_collector_out_of_its_rollouts_and_undoes_it(tmp_path: Path) -> None:
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (1024, hard))  # a shell's
    before = state()
    Looks.found = set()
    with served(does_nothing) as server:
        arguments = ["process", "--openai.base_url", server.base_url, "--openai.model_name", "scripted"]
        arguments += [
            "--env.total_steps=2",
            "--env.enabled_toolsets=[todo]",
            "--env.data_path_to_save_groups",
            str(tmp_path / "groups.jsonl"),
        ]
        assert cli.main(Looks, arguments) == 0
    assert Looks.found == {((0, True, own_process.SWITCH_INTERVAL, min(own_process.FILES, hard)), True)}
    assert state() == before
    resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))


async def test_a_run_in_the_process_of_somebody_else_changes_nothing_there(tmp_path: Path) -> None:
    before = state()
    Looks.found = set()
    await process(Looks, tmp_path, does_nothing, enabled_toolsets=["todo"])
    assert Looks.found == {(before, False)}


def test_what_a_command_changes_is_undone_after_an_error() -> None:
    async def fails() -> None:
        own_process.started()
        raise RuntimeError("of the run")

    before = state()
    with pytest.raises(RuntimeError, match="of the run"):
        lachesis.run(fails())
    assert state() == before


def test_the_loop_serves_a_few_sockets_a_turn_and_all_of_them_in_time() -> None:
    pairs = 20 * EVENTS
    per_turn: Counter[int] = Counter()
    served_ends: set[int] = set()

    async def main() -> None:
        loop = asyncio.get_running_loop()
        turn = 0
        done = asyncio.Event()

        def read(number: int, end: socket.socket) -> None:
            per_turn[turn] += 1
            if number >= EVENTS:  # those before it are never read, and are ready again in every turn
                end.recv(1)
                loop.remove_reader(end)
                served_ends.add(number)
            if len(served_ends) == pairs - EVENTS:
                done.set()

        with ExitStack() as stack:
            for number in range(pairs):
                ours, theirs = (stack.enter_context(end) for end in socket.socketpair())
                theirs.send(b"x")
                loop.add_reader(ours, read, number, ours)
                stack.callback(loop.remove_reader, ours)
            async with asyncio.timeout(20):
                while not done.is_set():
                    turn += 1
                    await asyncio.sleep(0)

    lachesis.run(main())
    assert max(per_turn.values()) <= EVENTS
    assert len(per_turn) <= 4 * pairs // EVENTS, "sockets that are always ready may not keep the others waiting"


def test_a_loop_that_a_policy_has_chosen_stays() -> None:
    class Own(asyncio.SelectorEventLoop):
        pass

    class Policy(asyncio.DefaultEventLoopPolicy):
        def new_event_loop(self) -> Own:
            return Own()

    before = asyncio.get_event_loop_policy()
    asyncio.set_event_loop_policy(Policy())
    try:
        loop = own_process.fair_loop()
    finally:
        asyncio.set_event_loop_policy(before)
    loop.close()
    assert type(loop) is Own


class Cycle:
    """Garbage that only a collection frees."""

    def __init__(self) -> None:
        self.own = self


def test_garbage_of_all_ages_goes_when_memory_has_grown_or_after_a_time(monkeypatch: pytest.MonkeyPatch) -> None:
    resident, now = 1 << 30, 100.0
    monkeypatch.setattr(own_process, "resident_bytes", lambda: resident)
    monkeypatch.setattr(own_process.time, "monotonic", lambda: now)

    with rare_collections() as collections:
        collections.freeze()
        garbage = weakref.ref(Cycle())
        resident = int(1.4 * resident)
        collections.look()
        assert len([[] for _ in range(100_000)]) and garbage() is not None, "until then, nothing that all wait for"
        resident = int(1.1 * resident)
        collections.look()
        assert garbage() is None
        garbage = weakref.ref(Cycle())
        resident = 1 << 20  # memory was given back
        collections.look()
        now += own_process.FULL_EVERY + 1
        collections.look()
        assert garbage() is None


def test_garbage_goes_while_setup_blocks_the_event_loop() -> None:
    """A dataset of parsed pages: trees of cycles, and nobody decides when to collect them meanwhile."""

    async def setup() -> int:
        pages = [weakref.ref(Cycle()) for _ in range(100_000)]
        return sum(page() is not None for page in pages)

    assert lachesis.run(setup()) < 50_000


def test_a_forked_process_has_its_garbage_collector() -> None:
    """A pool of processes that an environment forks during a run."""

    def in_child() -> bool:
        if not (child := os.fork()):
            os._exit(gc.get_threshold() != before)
        return os.waitpid(child, 0)[1] == 0

    before = gc.get_threshold()
    with rare_collections() as collections:
        collections.freeze()
        assert in_child()
    gc.set_threshold(before[0] + 1)
    before = gc.get_threshold()
    try:
        assert in_child(), "the run is over"
    finally:
        gc.set_threshold(before[0] - 1)


def test_the_memory_of_this_process_is_read() -> None:
    before = own_process.resident_bytes()
    held = bytearray(b"x") * (64 << 20)
    assert own_process.resident_bytes() - before > 32 << 20
    assert RareCollections()._limit >= own_process.resident_bytes() + own_process.LEAST_GROWTH
    del held


async def test_many_groups_do_not_begin_in_the_same_turn_of_the_loop(tmp_path: Path) -> None:
    begun: Counter[int] = Counter()
    turn = 0

    class Numbers(SortWords):
        async def setup(self):
            self.items = (f"number {number}" for number in itertools.count())

        def format_prompt(self, item):
            begun[turn] += 1
            return super().format_prompt(item)

        async def compute_reward(self, item, result, ctx):
            return 1.0

    async def count() -> None:
        nonlocal turn
        while True:
            turn += 1
            await asyncio.sleep(0)

    counting = asyncio.create_task(count())
    options = {"group_size": 2, "total_steps": 60, "max_num_workers": 50, "enabled_toolsets": ["todo"]}
    await process(Numbers, tmp_path, does_nothing, **options)
    counting.cancel()
    assert sum(begun.values()) == 120
    assert max(begun.values()) <= 4, "each begins with milliseconds of work"


STOPS = """
import asyncio, os, signal
from lachesis import HermesAgentBaseEnv, ToolCall, Message

class Stops(HermesAgentBaseEnv):
    name, toolsets, items = "stops", ["terminal"], [{"prompt": "wait"}]
    stops = ["in a reward", "in a rollout"]
    def stop(self, where):
        if self.stops[-1:] == [where]:
            self.stops.pop()
            asyncio.get_running_loop().call_later(0.2, os.kill, os.getpid(), signal.SIGSTOP)
    async def setup(self): pass
    async def get_next_item(self): return self.items[0]
    def format_prompt(self, item): return item["prompt"]
    def reference_policy(self):
        async def play(messages, tools):
            if messages[-1]["role"] == "tool":
                return Message("assistant", "done")
            self.stop("in a rollout")
            return Message("assistant", tool_calls=(ToolCall("c1", "terminal", '{"command": "sleep 1"}'),))
        return play
    async def compute_reward(self, item, result, ctx):
        self.stop("in a reward")
        return float((await ctx.terminal("sleep 1; echo there"))["output"] == "there\\n")
"""


@pytest.mark.slow
def test_time_in_which_a_run_is_stopped_is_nobodys(tmp_path: Path) -> None:
    """A queue that suspends a job, or a paused container, made timeouts of agents, and scores, of all rollouts."""
    (tmp_path / "stops.py").write_text(STOPS)
    command = [sys.executable, "-m", "lachesis", "process", "stops.py", "-m", "reference", "-n", "1", "-r", "1"]
    limits = ["--env.rollout_timeout", "6", "--env.reward_timeout", "6", "-o", "out"]
    with subprocess.Popen([*command, *limits], cwd=tmp_path, stderr=subprocess.PIPE, text=True) as run:
        for _ in range(2):
            _, status = os.waitpid(run.pid, os.WUNTRACED)
            assert os.WIFSTOPPED(status), run.communicate()
            time.sleep(8)
            run.send_signal(signal.SIGCONT)
        _, said = run.communicate(timeout=120)
    assert run.returncode == 0, said
    [rollout] = json.loads((tmp_path / "out/groups.jsonl").read_text().splitlines()[-1])["rollouts"]
    assert (rollout["outcome"], rollout["reward"], rollout["attempts"]) == ("completed", 1.0, 2), rollout
