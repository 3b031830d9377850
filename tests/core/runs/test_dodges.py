"""An agent cannot choose not to be counted: what it does to its own place and to its time is scored."""

from __future__ import annotations

import asyncio
import json
import re
import time
from collections import Counter
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from lachesis.loop.outcome import Outcome
from lachesis.rewards import AgentFault
from lachesis_testing.fake_server import Ask, FakeServer
from tests.support.scripted_server import ScriptedServer, call, say
from tests.support.small_envs import ManyWords, SortWords, lines, make, process, rollouts, sorts
from tests.support.stock_run_api import StockRunApi, Trainer, run_api
from tests.support.training_runs import environment, take, with_tokens

__all__ = ["run_api"]

MANY_PROCESSES = """python3 -c 'import os, time
while True:
    try:
        os.fork() or time.sleep(300)
    except OSError:
        time.sleep(300)' > /dev/null 2>&1 &
sleep 0.5"""
OTHER_BASH = "mkdir -p ~/bin; printf '#!/bin/sh\\nexit 0\\n' > ~/bin/bash; chmod +x ~/bin/bash; export PATH=~/bin:$PATH"
BREAKS = {
    "read-only workspace": "chmod 555 /workspace",
    "closed workspace": "touch out; chmod 000 /workspace",
    "removed workspace": "cd /; rm -rf /workspace/* /workspace 2> /dev/null; true",
    "a file in the place of the workspace": "cd /; rm -rf /workspace 2> /dev/null; echo x > /workspace",
    "files where folders were": "echo x > dir; mkdir -p out/x",
    "links in a loop": "ln -s out out; ln -s dir dir",
    "pipes": "mkfifo out dir",
    "unreadable": "mkdir -p dir; echo x > dir/a; echo x > out; chmod 000 dir/a dir out",
    "full disk": "head -c 100000000 /dev/zero > fill 2> /dev/null; head -c 100000 /dev/zero >> fill; true",
    "no free process": MANY_PROCESSES,
    "another bash": OTHER_BASH,
    "deep folders": "mkdir -p dir; cd dir; for i in $(seq 100); do mkdir -p d && cd d; done",
    "links to elsewhere": "mkdir dir; ln -s /etc/passwd dir/out; ln -s /nowhere out",
    "long names": "ln -s $(printf 'x%.0s' $(seq 300)) out",
}


def _methods(local: Path) -> dict[str, Any]:
    (local / "up" / "dir").mkdir(parents=True)
    (local / "up" / "dir" / "a").write_text("a")
    return {
        "terminal": lambda ctx: ctx.terminal("cat out", timeout=1),
        "read_file": lambda ctx: ctx.read_file("out", default=None),
        "read_bytes": lambda ctx: ctx.read_bytes("out"),
        "write_file": lambda ctx: ctx.write_file("dir/new", "x" * 300_000),
        "upload_file": lambda ctx: ctx.upload_file(local / "up" / "dir" / "a", "out/a"),
        "upload_dir": lambda ctx: ctx.upload_dir(local / "up", "."),
        "download_file": lambda ctx: ctx.download_file("out", local / "down" / "out"),
        "download_dir": lambda ctx: ctx.download_dir("dir", local / "downs"),
        "search": lambda ctx: ctx.search("x", "dir"),
        "seal": lambda ctx: ctx.seal(["out", "dir"]),
    }


def does(command: str) -> Any:
    """A model whose rollouts all run one command."""

    def answer(request: dict[str, Any]) -> Any:
        return say("Done.") if request["messages"][-1]["role"] == "tool" else call(("terminal", {"command": command}))

    return answer


@pytest.mark.sample(7)
@pytest.mark.parametrize("name", BREAKS)
async def test_whatever_an_agent_does_to_its_place_every_call_of_a_reward_leaves_a_score(
    tmp_path: Path, name: str
) -> None:
    met: dict[str, str] = {}

    class Tries(SortWords):
        async def get_next_item(self) -> Any:
            self.left = getattr(self, "left", list(methods))
            return self.left.pop(0) if self.left else None

        def format_prompt(self, item: Any) -> str:
            return f"Work. ({item})"

        async def compute_reward(self, item: Any, result: Any, ctx: Any) -> float:
            try:
                await methods[item](ctx)
            except AgentFault as fault:
                met[item] = str(fault)
                raise
            met[item] = ""
            return 1.0

    methods = _methods(tmp_path)
    limits = {"terminal_disk": 32, "terminal_pids": 60, "max_failed_groups": 1}
    ran = await process(Tries, tmp_path, does(BREAKS[name]), total_steps=len(methods), group_size=1, **limits)
    found = {group["item"]: rollout for group in lines(ran.files.groups) for rollout in group["rollouts"]}
    print({n: (r["reward"], r["agent_fault"] or r["reason"][:60]) for n, r in found.items()})
    assert found.keys() == methods.keys() == met.keys()
    for method, rollout in found.items():
        expected = 0.0 if met[method] else 1.0
        assert (rollout["reward"], rollout["agent_fault"]) == (expected, met[method]), method
        assert rollout["outcome"] == "completed" and rollout["traceback"] is None and rollout["attempts"] == 1
    assert ran.exceptions == ran.failed_groups == 0


DISHONEST = [
    *("chmod 555 .", "mkfifo answer.txt", "mkdir answer.txt", "ln -s answer.txt answer.txt", "rm -rf /workspace/*"),
    *("echo 41 > answer.txt; chmod 000 answer.txt", "sleep 60", "sleep 60 &", "head -c 99M /dev/zero > fill"),
    "sleep 2; sleep 60",
]
HONEST = "echo 42 > answer.txt"
SHORT = {"rollout_timeout": 3, "terminal_disk": 16, "max_failed_groups": 1, "max_infra_retries": 0}


class Answers(SortWords):
    """One agent of eleven is honest."""

    async def setup(self) -> None:
        self.left = [*DISHONEST, HONEST]

    async def get_next_item(self) -> Any:
        return self.left.pop(0) if self.left else None

    async def get_eval_items(self) -> Any:
        return self.left

    def format_prompt(self, item: Any) -> str:
        return f"Run: {item}"

    async def compute_reward(self, item: Any, result: Any, ctx: Any) -> float:
        await ctx.write_file("seen.txt", "the reward was here")
        return float(await ctx.read_bytes("answer.txt") == b"42\n")


@pytest.mark.sample(1)
@pytest.mark.parametrize("command", ["process", "evaluate"])
async def test_the_mean_of_a_dishonest_policy_is_its_true_mean(tmp_path: Path, command: str) -> None:
    def obeys(request: dict[str, Any]) -> Any:
        *_, asked = [message["content"] for message in request["messages"] if message["role"] == "user"]
        return does(asked.removeprefix("Run: "))(request)

    async with ScriptedServer(obeys) as server:
        env = make(Answers, server, tmp_path, total_steps=11, group_size=1, eval_items=11, **SHORT)
        ran = await (env.process_manager() if command == "process" else env._run_evaluate())
    found = rollouts(ran.files.groups)
    assert sorted(rollout["reward"] for rollout in found) == [0.0] * 10 + [1.0]
    assert ran.summary.reward.mean == 1 / 11 and ran.summary.scored == ran.summary.rollouts == 11
    assert ran.summary.outcomes == {"completed": 9, "timeout": 2}
    assert ran.summary.agent_faults == sum(bool(rollout["agent_fault"]) for rollout in found) == 10
    assert not ran.failed


@pytest.mark.slow
async def test_a_trainer_gets_every_rollout_of_a_dishonest_policy_with_its_true_score(
    tmp_path: Path, run_api: StockRunApi
) -> None:
    left = [HONEST, *DISHONEST]

    def takes_turns(ask: Ask) -> str:
        if ask.turn:
            return "Done."
        arguments = json.dumps({"name": "terminal", "arguments": {"command": left.pop() if left else HONEST}})
        return f"<tool_call>\n{arguments}\n</tool_call>"

    class OneGroup(Answers):
        async def get_next_item(self) -> Any:
            return "as you like"

    async with run_api.wiped() as api, FakeServer(takes_turns) as model:
        served = {"rollout_server_url": api.url, "spool_path": str(tmp_path / "spool"), "steps_per_eval": 0}
        settings = {"group_size": 11, "total_steps": -1, "enabled_toolsets": ["terminal"], "max_num_workers": 1}
        env = environment(OneGroup, tmp_path, with_tokens(model, tmp_path), **SHORT, **served, **settings)
        trainer = Trainer(api.url, batch_size=11, num_steps=1)
        await trainer.register()
        await trainer.poll()
        run = asyncio.create_task(env.env_manager())
        await take(trainer, 1)
        await run
    (group,) = trainer.groups
    assert sorted(group["scores"]) == [0.0] * 10 + [1.0]


async def test_agents_that_break_their_place_stop_no_run(tmp_path: Path) -> None:
    class Writes(ManyWords):
        async def compute_reward(self, item: Any, result: Any, ctx: Any) -> float:
            await ctx.write_file("tests/test.py", "assert True")
            return 1.0

    for name, score in (("scored", -0.5), ("out", "leave_out")):
        (tmp_path / name).mkdir()
        settings = {"total_steps": 6, "group_size": 1, "max_failed_groups": 2, "score_of_agent_fault": score}
        ran = await process(Writes, tmp_path / name, does("chmod 555 /workspace"), **settings)
        found = rollouts(ran.files.groups if name == "scored" else ran.files.failures)
        assert [rollout["reward"] for rollout in found] == [-0.5 if name == "scored" else None] * 6
        assert all(rollout["agent_fault"].startswith("write_file: [Errno 13]") for rollout in found)
        assert ran.exceptions == 0 and not ran.failed, "nothing has to be repaired"
        assert ran.left_to_agents == (6 if name == "out" else 0)


@pytest.mark.slow
async def test_a_timeout_is_scored_as_the_settings_say_with_what_stands_in_the_sandbox(tmp_path: Path) -> None:
    class Half(SortWords):
        async def compute_reward(self, item: Any, result: Any, ctx: Any) -> float:
            assert result.outcome is Outcome.TIMEOUT and result.turns_used == 2
            return float(await ctx.read_file("half.txt") == "half\n") / 2

    def works_then_sleeps(request: dict[str, Any]) -> Any:
        begun = request["messages"][-1]["role"] == "tool"
        return call(("terminal", {"command": "sleep 30" if begun else "echo half > half.txt"}))

    for score, reward in (("reward", 0.5), (-1.0, -1.0), ("leave_out", None)):
        (tmp_path / str(score)).mkdir()
        settings = {"total_steps": 1, "group_size": 1, "rollout_timeout": 1.5, "score_of_timeout": score}
        ran = await process(Half, tmp_path / str(score), works_then_sleeps, **settings)
        (rollout,) = rollouts(ran.files.groups if reward is not None else ran.files.failures)
        assert (rollout["reward"], rollout["outcome"], rollout["attempts"]) == (reward, "timeout", 1)
        assert rollout["seconds_own"] >= 1.5 and rollout["traceback"] is None
        assert ran.summary.outcomes == {"timeout": 1}


async def test_a_server_that_hangs_is_no_timeout_of_the_agent_and_holds_no_rollout_for_ever(tmp_path: Path) -> None:
    async def hangs(request: dict[str, Any]) -> Any:
        if request["messages"][-1]["role"] == "tool":
            await asyncio.sleep(60)
        return call(("terminal", {"command": "sleep 0.8"}))

    settings = {"total_steps": 1, "group_size": 1, "rollout_timeout": 4, "max_infra_retries": 0}
    began = time.monotonic()
    ran = await process(SortWords, tmp_path, hangs, **settings)
    (rollout,) = rollouts(ran.files.failures)
    assert (rollout["reward"], rollout["outcome"]) == (None, "infra_error")
    assert re.match(r"servers and sandboxes took [4-9]\.\d s of \d+\.\d s", rollout["reason"]), rollout["reason"]
    assert 0.8 <= rollout["seconds_own"] < 4 <= rollout["seconds_waiting"] and time.monotonic() - began < 60


async def test_a_long_answer_is_the_agents_own_time_also_when_it_comes_late(tmp_path: Path) -> None:
    async def slow(request: dict[str, Any]) -> Any:
        await asyncio.sleep(0.8)
        return call(("terminal", {"command": "true"}))

    settings = {"total_steps": 1, "group_size": 1, "rollout_timeout": 1.2}
    ran = await process(SortWords, tmp_path, slow, **settings)
    (rollout,) = rollouts(ran.files.groups)
    assert (rollout["reward"], rollout["outcome"], rollout["turns"]) == (0.0, "timeout", 1)
    assert [branch["reason"] for branch in rollout["discarded"]] == [f"unfinished turn: {rollout['reason']}"]
    assert rollout["completion_tokens"] == 10, "what was sampled is counted"


async def test_failed_requests_and_their_pauses_use_up_nothing_of_the_agents_time(tmp_path: Path) -> None:
    asked: list[int] = []

    def flaky(request: dict[str, Any]) -> Any:
        asked.append(1)
        return 503 if len(asked) in (1, 2) else sorts(request)

    settings = {"total_steps": 1, "group_size": 1, "rollout_timeout": 2.0}
    async with ScriptedServer(flaky) as server:
        env = make(SortWords, server, tmp_path, **settings)
        env.server.servers[0].settings = replace(env.server.servers[0].settings, max_retries=3)
        ran = await env.process_manager()
    (rollout,) = rollouts(ran.files.groups)
    assert (rollout["reward"], rollout["outcome"]) == (1.0, "completed")
    assert rollout["seconds_waiting"] > 0.7 > rollout["seconds_own"]


async def test_in_a_verifier_a_write_replaces_the_artifact_in_its_way_and_a_read_is_the_agents(tmp_path: Path) -> None:
    met: list[str] = []

    class Sealed(SortWords):
        async def compute_reward(self, item: Any, result: Any, ctx: Any) -> float:
            verifier = await ctx.seal(["tests", "check.sh", "src"])
            await verifier.write_file("tests/test_a.py", "a")  # the agent left a file named `tests`
            await verifier.write_file("check.sh", "true")  # and a folder here
            (tmp_path / "up" / "deep").mkdir(parents=True)
            (tmp_path / "up" / "deep" / "a").write_text("new")
            await verifier.upload_dir(tmp_path / "up", "src")  # and a file `deep`, and a folder `deep/a`
            await verifier.upload_file(tmp_path / "up" / "deep" / "a", "src/x/y")
            assert await verifier.read_file("src/deep/a") == await verifier.read_file("src/x/y") == "new"
            assert (await verifier.terminal("bash check.sh"))["exit_code"] == 0
            try:
                await verifier.read_bytes("src/result")
            except AgentFault as fault:
                met.append(str(fault))
            return 1.0

    leaves = "echo x > tests; mkdir -p check.sh/y src; echo x > src/deep; ln -s x src/x; ln -s result src/result"
    ran = await process(Sealed, tmp_path, does(leaves), total_steps=1, group_size=1)
    (rollout,) = rollouts(ran.files.groups)
    assert (rollout["reward"], rollout["agent_fault"], rollout["traceback"]) == (1.0, "", None)
    assert met == ["read_bytes: [Errno 40] Too many levels of symbolic links: '/workspace/src/result'"]


async def test_what_this_machine_lacks_is_nobodys_fault_inside(tmp_path: Path) -> None:
    class Uploads(SortWords):
        async def compute_reward(self, item: Any, result: Any, ctx: Any) -> float:
            if "apple" in item:
                await ctx.upload_file(tmp_path / "nowhere", "a")
            await ctx.upload_dir(tmp_path / "nowhere", "a")
            return 1.0

    ran = await process(Uploads, tmp_path, does("true"), total_steps=2, group_size=1)
    for rollout in rollouts(ran.files.failures):
        assert rollout["reward"] is None and rollout["agent_fault"] == ""
        assert "FileNotFoundError: [Errno 2]" in rollout["traceback"] and "nowhere" in rollout["traceback"]
    assert ran.exceptions == len(rollouts(ran.files.failures)) > 0


async def helper(ctx: Any) -> None:
    await ctx.write_file("dir/a", "a")


async def in_task_group(ctx: Any) -> None:
    async with asyncio.TaskGroup() as checks:
        checks.create_task(helper(ctx))
        checks.create_task(helper(ctx))


async def in_another_error(ctx: Any) -> None:
    try:
        await helper(ctx)
    except OSError as error:
        raise RuntimeError("the tests cannot be written") from error


async def in_a_forgotten_task(ctx: Any) -> None:
    checks.add(asyncio.create_task(helper(ctx)))
    await asyncio.sleep(0.3)


checks: set[Any] = set()
WAYS = {
    "helper": helper,
    "thread": lambda ctx: asyncio.to_thread(ctx.read_bytes, "dir/a"),
    "task group": in_task_group,
    "other error": in_another_error,
    "forgotten task": in_a_forgotten_task,
    "half a character": lambda ctx: ctx.read_bytes("\ud800"),
    "no path": lambda ctx: ctx.read_bytes("a\0b"),
    "no command": lambda ctx: ctx.terminal("echo \ud800"),
}


@pytest.mark.parametrize("together", [False, True])
async def test_a_fault_is_the_agents_wherever_the_reward_meets_it_and_costs_the_others_nothing(
    tmp_path: Path, together: bool
) -> None:
    left = list(WAYS)

    class Meets(SortWords):
        async def get_next_item(self) -> Any:
            return left.pop(0) if left else None

        def format_prompt(self, item: Any) -> str:
            return f"Work. {item}"

        async def compute_reward(self, item: Any, result: Any, ctx: Any) -> float:
            if not together and (await ctx.read_file("dir")) == "broken\n":
                await WAYS[item](ctx)
            return 0.25

        async def compute_group_reward(self, item: Any, results: Any, ctxs: Any) -> Any:
            verifiers = [await ctx.seal(["honest.txt"]) for ctx in ctxs] if item == "helper" and not together else ctxs
            for ctx, found in zip(ctxs, verifiers, strict=True):
                if together and (await ctx.read_file("dir")) == "broken\n":
                    await WAYS[item](ctx)
                assert found.task_id
            return [0.5 + len(results) / 10] * len(results)

    asked: Counter[str] = Counter()

    def first_breaks(request: dict[str, Any]) -> Any:
        if request["messages"][-1]["role"] == "tool":
            return say("Done.")
        item = str(request["messages"][-1]["content"])
        asked[item] += 1
        return call(("terminal", {"command": "echo broken > dir" if asked[item] == 1 else "true"}))

    ran = await process(Meets, tmp_path, first_breaks, total_steps=len(WAYS), group_size=3)
    for group in lines(ran.files.groups):
        rewards = sorted(rollout["reward"] for rollout in group["rollouts"])
        assert rewards == [0.0, 0.7, 0.7], (group["item"], [rollout["traceback"] for rollout in group["rollouts"]])
        (broken,) = [rollout for rollout in group["rollouts"] if rollout["agent_fault"]]
        assert broken["reward"] == 0.0 and broken["traceback"] is None
    assert ran.exceptions == ran.failed_groups == 0 and len(asked) == len(WAYS)


async def test_a_group_reward_that_seals_is_repeated_without_the_rollout_at_fault(tmp_path: Path) -> None:
    class Ranks(SortWords):
        async def compute_group_reward(self, item: Any, results: Any, ctxs: Any) -> Any:
            verifiers = [await ctx.seal(["out"]) for ctx in ctxs]
            return [float(len(await verifier.read_bytes("out"))) for verifier in verifiers]

    asked: list[int] = []

    def last_leaves_nothing(request: dict[str, Any]) -> Any:
        if request["messages"][-1]["role"] == "tool":
            return say("Done.")
        asked.append(1)
        return call(("terminal", {"command": "echo 1 > out" if len(asked) < 3 else "ln -s out out"}))

    ran = await process(Ranks, tmp_path, last_leaves_nothing, total_steps=1, group_size=3)
    assert sorted(rollout["reward"] for rollout in rollouts(ran.files.groups)) == [0.0, 2.0, 2.0]


async def test_a_reward_may_catch_the_fault_as_what_it_is(tmp_path: Path) -> None:
    class Catches(SortWords):
        async def compute_reward(self, item: Any, result: Any, ctx: Any) -> float:
            try:
                await ctx.read_bytes("out")
            except IsADirectoryError as fault:
                return 0.125 if isinstance(fault, AgentFault) else 0.0
            return 1.0

    ran = await process(Catches, tmp_path, does("mkdir out"), total_steps=1, group_size=1)
    (rollout,) = rollouts(ran.files.groups)
    assert (rollout["reward"], rollout["agent_fault"]) == (0.125, "")
