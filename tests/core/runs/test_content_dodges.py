"""What an agent leaves is scored, whatever a reward makes of it, and a bug of the reward never is."""

from __future__ import annotations

import ast
import asyncio
import datetime
import io
import itertools
import json
import linecache
import pickle
import re
import socket
import sqlite3
import subprocess
import sys
import threading
import urllib.request
import zipfile
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import pytest

from environments.hermes_base_env import HermesAgentBaseEnv as OldBaseEnv
from lachesis import Reward
from lachesis.rewards.statements import source_of, table_of
from lachesis.rewards.watching import Watch
from lachesis.runs.failures import RunStopped
from lachesis_messages.messages import Message, ToolCall
from lachesis_testing.fake_server import Ask, FakeServer
from tests.support.busy_machine import refuse_to_judge_on_a_busy_machine
from tests.support.scripted_server import ScriptedServer, call, say
from tests.support.small_envs import SortWords, lines, make, process, rollouts
from tests.support.stock_run_api import StockRunApi, Trainer, run_api
from tests.support.training_runs import environment, take, with_tokens

__all__ = ["run_api"]

DEEP = "python3 -c \"print('[' * 100000)\" > a"
NOT_A_NUMBER = """echo '{"answer": 42, "more": NaN}' > a"""
HIGH = "python3 -c \"print('[' * 900 + '1' + ']' * 900)\" > a"
PACK = """printf 42 > answer; python3 -m zipfile -c a answer; python3 -c "
import sys; data = bytearray(open('a', 'rb').read()); at = data.rfind(b'PK\\1\\2')
data[at + 10] = data[8] = int(sys.argv[1]); data[at + 8] |= int(sys.argv[2]); data[6] |= int(sys.argv[2])
open('a', 'wb').write(data)" """
"""Then the method of compression, and whether it is encrypted."""
DOZEN = 'echo \'{"answer": "a dozen"}\' > a'
DODGES: dict[str, tuple[str, list[str]]] = {
    "json": ("echo '{\"answer\": 42}' > a", ["echo x > a", "mkdir a", "echo '[]' > a", "echo '{\"answer\"' > a"]),
    "nested": (
        'echo \'{"result": {"values": [41]}}\' > a',
        ["echo '{\"result\": null}' > a", 'echo \'{"result": {"values": ["x"]}}\' > a', DEEP, "ln -s a a"],
    ),
    "bytes": ("printf 42 > a", [r"printf '\xff' > a", r"printf '4\x002\x00\xd8' > a", "gzip < /dev/null > a", "true"]),
    "number": ("echo 42 > a", ["echo NaN > a", "echo 1e999 > a", "echo forty > a", ": > a"]),
    "unpack": ("echo 41 1 > a", ["echo 1 > a", "echo 1 2 3 > a", "echo x y > a", "printf '1%.0s' $(seq 5000) > a"]),
    "said": ('say {"answer": 42}', ["say I would rather not.", "say {}", 'say {"answer": ', "say [42]"]),
    "search": ("echo answer: 42 > a", ["true", "echo answer: x > a", "mkfifo a", "echo Answer: 42 > a"]),
    "literal": (
        "echo '{\"answer\": 42}' > a",
        ["echo '(' > a", r"printf '1\0' > a", "echo 'print(1)' > a", "echo '{1}' > a"],
    ),
    "tree": (
        "mkdir out; echo 42 > out/a",
        ["mkdir -p out/a", "mkdir out; mkfifo out/a", "mkdir out; ln -s a out/a", "mkdir out; ln -s /etc/passwd out/a"],
    ),
    "raises": ("echo answer=42 > a", ["echo x > a", "true", "echo answer= > a", "chmod 000 ."]),
    "mean": (r"printf '41\n43\n' > a", [": > a", "echo x > a", r"printf '\n\n' > a", "echo 1,000 > a"]),
    "archive": (
        "printf 42 > answer; python3 -m zipfile -c a answer",
        ["echo x > a", "printf 42 > other; python3 -m zipfile -c a other", "mkdir a", r"printf 'PK\x05\x06' > a"],
    ),
    "gathered": ("echo '{\"answer\": 42}' > a", ["echo x > a", "echo {} > a", "echo '[]' > a", "true"]),
    "task group": ("echo '{\"answer\": 42}' > a", ["echo x > a", "echo {} > a", "echo '[]' > a", "true"]),
    "thread": ("echo '{\"answer\": 42}' > a", ["echo x > a", "echo {} > a", "echo '[]' > a", "true"]),
    "first line": ("echo '= 42' > a", ["true", "echo 42 > a", "echo x = > a", "echo = x > a"]),
    "class": ("echo '{\"answer\": 42}' > a", ["echo '{}' > a", "echo '[]' > a", "echo '{\"a\": 1}' > a", DOZEN]),
    "again": ("echo 42 > a", ["echo x > a", "true", "echo 4 2 > a", "echo nan > a"]),
    "markup": (
        "echo '<a><b>42</b></a>' > a",
        ["echo '<a>' > a", "echo '<a/>' > a", "echo '<a><b/></a>' > a", "printf '<a>&x;</a>' > a"],
    ),
    "object": ("echo 42 > a", ["echo x > a", "true", "echo 4 2 > a", "python3 -c \"print('9' * 5000)\" > a"]),
    "lambda": ("echo 42 > a", ["echo x > a", "echo 4 2 > a", r"printf '\xff' > a", "true"]),
    "evaluated": ("echo 40 + 2 > a", ["echo x > a", "echo '(' > a", "echo 1/0 > a", "echo 'import os' > a"]),
    "compression": (
        "printf 42 > answer; python3 -m zipfile -c a answer",
        [f"{PACK} 77 0", f"{PACK} 8 1", f"{PACK} 9 0", "true"],
    ),
    "pickled": (
        "python3 -c 'import pickle; print(end=pickle.dumps(42, 0).decode())' > a",
        ["echo x > a", r"printf 'cnope\nx\n.' > a", r"printf 'cos\nnope\n.' > a", "true"],
    ),
    "last line": ("echo answer=42 > a", ["echo x > a", "true", "echo answer > a", "echo = > a"]),
    "leaves": ("echo 42 > a", ["echo x > a", "true", "echo 41 > a", "mkdir a"]),
    "pool": ("echo 42 > a", ["echo x > a", "true", "echo 4 2 > a", "echo 4e1 > a"]),
    "long loop": ("echo 42 > a", ["echo x > a", "true", "echo 4 2 > a", "echo 4e1 > a"]),
    "halves": (
        """echo '{"answer": 42}' > a""",
        [
            r"""echo '{"\ud800": 1}' > a""",
            r"""echo '{"answer": "\ud800"}' > a""",
            NOT_A_NUMBER,
            f"{NOT_A_NUMBER}; cp a b",
        ],
    ),
    "with the item": (
        """echo '{"answer": 42}' > a""",
        ["""echo '{"answer": "x"}' > a""", "echo '[]' > a", """echo '{"answer": null}' > a""", "echo '{}' > a"],
    ),
    "local path": ("echo 42 > a", ["echo x > a", r"printf '\xff' > a", ": > a", "mkdir a"]),
    "recursion": ("echo '[40, [2]]' > a", ["echo '[[0.5, {}]]' > a", HIGH, "echo '[null]' > a", "echo '[' > a"]),
    "wrapped": ("echo 42 > a", ["echo x > a", "true", "echo 4 2 > a", "echo 4e1 > a"]),
}
assert sum(len(dodges) for _, dodges in DODGES.values()) > 40


def parsed(text: str) -> int:
    if not text.startswith("answer="):
        raise ValueError("there is no answer")
    return int(text.removeprefix("answer="))


async def answer_in(ctx: Any) -> Any:
    text = await ctx.read_file("a")
    return answer_of(text)


def answer_of(text: str) -> Any:
    found = json.loads(text)
    return found["answer"]


CHECKS = {"lambda": lambda text: int(text) == 42}


class Grader:
    def __init__(self, text: str) -> None:
        self.text = text

    def is_right(self) -> bool:
        return int(self.text) == 42


def total(value: Any) -> int:
    if isinstance(value, list):
        return sum(total(each) for each in value)
    return value + 0  # type: ignore[no-any-return]


@dataclass
class Answer:
    answer: int

    def __post_init__(self) -> None:
        if not isinstance(self.answer, int):
            raise TypeError("the answer is a number")


class Parses(SortWords):
    """Rewards that take no care."""

    name = "parses"

    async def setup(self) -> None:
        self.left = self.all_items()

    def all_items(self) -> Iterator[dict[str, str]]:
        for kind, (honest, dodges) in DODGES.items():
            yield from ({"kind": kind, "work": work} for work in (honest, *dodges))

    async def get_next_item(self) -> Any:
        return next(self.left, None)

    async def get_eval_items(self) -> Any:
        return list(self.all_items())

    def format_prompt(self, item: Any) -> str:
        return f"Do: {item['work']}"

    async def compute_reward(self, item: Any, result: Any, ctx: Any) -> Any:
        return await getattr(self, f"reward_{item['kind'].replace(' ', '_')}")(item, result, ctx)

    async def reward_json(self, item: Any, result: Any, ctx: Any) -> float:
        return float(json.loads(await ctx.read_file("a"))["answer"] == 42)

    async def reward_nested(self, item: Any, result: Any, ctx: Any) -> float:
        found = json.loads(await ctx.read_file("a"))
        return float(found["result"]["values"][0] + 1 == 42)

    async def reward_bytes(self, item: Any, result: Any, ctx: Any) -> float:
        text = (await ctx.read_bytes("a")).decode()
        return float(text == "42")

    async def reward_number(self, item: Any, result: Any, ctx: Any) -> float:
        return float(await ctx.read_file("a")) / 42

    async def reward_unpack(self, item: Any, result: Any, ctx: Any) -> float:
        left, right = (await ctx.read_file("a")).split()
        return float(int(left) + int(right) == 42)

    async def reward_said(self, item: Any, result: Any, ctx: Any) -> float:
        return float(json.loads(result.messages[-1]["content"])["answer"] == 42)

    async def reward_search(self, item: Any, result: Any, ctx: Any) -> float:
        match = re.search(r"answer: (\d+)", await ctx.read_file("a"))
        return float(match.group(1) == "42")  # type: ignore[union-attr]

    async def reward_literal(self, item: Any, result: Any, ctx: Any) -> float:
        value = ast.literal_eval(await ctx.read_file("a"))
        return float(value["answer"] == 42)

    async def reward_tree(self, item: Any, result: Any, ctx: Any) -> float:
        local = Path(self.config.data_path_to_save_groups or self.config.spool_path or "").parent / ctx.task_id
        await ctx.download_dir("out", local)
        return float((local / "a").read_text() == "42\n")

    async def reward_raises(self, item: Any, result: Any, ctx: Any) -> float:
        return float(parsed(await ctx.read_file("a")) == 42)

    async def reward_mean(self, item: Any, result: Any, ctx: Any) -> float:
        total = count = 0.0
        for line in (await ctx.read_file("a")).splitlines():
            total += float(line)
            count += 1
        return float(total / count == 42)

    def reward_archive_plain(self, data: bytes) -> bytes:
        with zipfile.ZipFile(io.BytesIO(data)) as archive:
            return archive.read("answer")

    async def reward_archive(self, item: Any, result: Any, ctx: Any) -> float:
        return float(self.reward_archive_plain(await ctx.read_bytes("a")) == b"42")

    async def reward_gathered(self, item: Any, result: Any, ctx: Any) -> float:
        found = await asyncio.gather(answer_in(ctx), asyncio.wait_for(answer_in(ctx), 60))
        return float(list(found) == [42, 42])

    async def reward_task_group(self, item: Any, result: Any, ctx: Any) -> float:
        async with asyncio.TaskGroup() as group:
            task = group.create_task(answer_in(ctx))
        return float(task.result() == 42)

    async def reward_thread(self, item: Any, result: Any, ctx: Any) -> float:
        return float(await asyncio.to_thread(answer_of, await ctx.read_file("a")) == 42)

    async def reward_first_line(self, item: Any, result: Any, ctx: Any) -> float:
        text = await ctx.read_file("a")
        line = next(each for each in text.splitlines() if each.startswith("="))
        return float(int(line[1:]) == 42)

    async def reward_class(self, item: Any, result: Any, ctx: Any) -> float:
        return float(Answer(**json.loads(await ctx.read_file("a"))).answer == 42)

    async def reward_again(self, item: Any, result: Any, ctx: Any) -> float:
        try:
            number = int(await ctx.read_file("a"))
        except ValueError as error:
            raise RuntimeError("no number") from error
        return float(number == 42)

    async def reward_markup(self, item: Any, result: Any, ctx: Any) -> float:
        root = ElementTree.fromstring(await ctx.read_file("a"))
        return float(int(root.find("b").text) == 42)  # type: ignore[union-attr,arg-type]

    async def reward_object(self, item: Any, result: Any, ctx: Any) -> float:
        return float(Grader(await ctx.read_file("a")).is_right())

    async def reward_lambda(self, item: Any, result: Any, ctx: Any) -> float:
        return float(CHECKS[item["kind"]](await ctx.read_text("a")))

    async def reward_evaluated(self, item: Any, result: Any, ctx: Any) -> float:
        return float(eval(await ctx.read_file("a"), {"__builtins__": {}}) == 42)

    async def reward_compression(self, item: Any, result: Any, ctx: Any) -> float:
        return float(self.reward_archive_plain(await ctx.read_bytes("a")) == b"42")

    async def reward_pickled(self, item: Any, result: Any, ctx: Any) -> float:
        return float(pickle.loads(await ctx.read_bytes("a")) == 42)

    async def reward_last_line(self, item: Any, result: Any, ctx: Any) -> float:
        for line in (await ctx.read_file("a")).splitlines():
            if line.startswith("answer="):
                return float(line == "answer=42")
        raise ValueError("there is no last line")

    async def reward_leaves(self, item: Any, result: Any, ctx: Any) -> float:
        if (await ctx.read_file("a")).strip() != "42":
            sys.exit("no answer")
        return 1.0

    async def reward_pool(self, item: Any, result: Any, ctx: Any) -> float:
        text = await ctx.read_file("a")
        with ThreadPoolExecutor() as pool:
            return float(all(pool.map(lambda each: int(each) == 42, [text])))

    async def reward_long_loop(self, item: Any, result: Any, ctx: Any) -> float:
        steps = 0
        for step in range(30_000):
            steps += step
        text = await ctx.read_file("a")
        return float(int(text) == 42)

    async def reward_halves(self, item: Any, result: Any, ctx: Any) -> Any:
        data = json.loads(await ctx.read_file("a"))
        if data.get("answer") != 42:
            raise ValueError(f"it is {data}, {''.join(map(str, data))}, {''.join(map(str, data.values()))}")
        return Reward(1.0, components=data)

    async def reward_with_the_item(self, item: Any, result: Any, ctx: Any) -> float:
        data = json.loads(await ctx.read_file("a"))
        return float(abs(data["answer"] - 29 - len(item["kind"])) < 1)

    async def reward_local_path(self, item: Any, result: Any, ctx: Any) -> float:
        self.place = Path(self.config.data_path_to_save_groups or self.config.spool_path or "").parent
        await ctx.download_file("a", self.place / f"{ctx.task_id}.txt")
        return float(int((self.place / f"{ctx.task_id}.txt").read_text()) == 42)

    async def reward_recursion(self, item: Any, result: Any, ctx: Any) -> float:
        return float(total(json.loads(await ctx.read_file("a"))) == 42)

    async def reward_wrapped(self, item: Any, result: Any, ctx: Any) -> float:
        text = await ctx.read_file("a")
        try:
            return float(int(text) == 42)
        except Exception:
            raise RuntimeError("it cannot be graded")  # noqa: B904  # as authors write it


def obeys(request: dict[str, Any]) -> Any:
    """A model that does what it is asked to."""
    work = next(each["content"] for each in request["messages"] if each["role"] == "user").removeprefix("Do: ")
    if work.startswith("say "):
        return say(work.removeprefix("say "))
    return say("Done.") if request["messages"][-1]["role"] == "tool" else call(("terminal", {"command": work}))


def unscored(found: list[dict[str, Any]]) -> list[Any]:
    return [(each["messages"][1:3], each["traceback"]) for each in found if each["reward"] is None]


@pytest.mark.slow
@pytest.mark.parametrize("command", ["process", pytest.param("evaluate", marks=pytest.mark.long)])
async def test_no_content_lets_an_agent_go_without_its_score(tmp_path: Path, command: str) -> None:
    total = sum(1 + len(dodges) for _, dodges in DODGES.values())
    async with ScriptedServer(obeys) as server:
        settings = {"total_steps": total, "eval_items": total, "group_size": 1, "max_num_workers": 3}
        env = make(Parses, server, tmp_path, **settings)
        ran = await (env.process_manager() if command == "process" else env._run_evaluate())
    groups = lines(ran.files.groups)
    rewards = {(group["item"]["kind"], group["item"]["work"]): group["rollouts"][0]["reward"] for group in groups}
    honest = {(kind, work) for kind, (work, _) in DODGES.items()}
    assert {place for place, reward in rewards.items() if reward} == honest
    assert not ran.files.failures.exists() or not unscored(rollouts(ran.files.failures))
    assert len(rewards) == total and ran.exceptions == 0 and not ran.failed
    faults = [rollout for group in groups for rollout in group["rollouts"] if rollout["agent_fault"]]
    assert ran.summary.agent_faults == len(faults) > 40 and all(each["reward"] == 0.0 for each in faults)
    assert any("fault_traceback" in each and "reward_unpack" in each["fault_traceback"] for each in faults)
    shown = (tmp_path / "console.txt").read_text()
    assert shown.count("ValueError: there is no answer (test_content_dodges.py, line ") == 1, "the first of each line"


@pytest.mark.long
async def test_a_trainer_gets_every_rollout_of_a_group_that_dodges_by_content(
    tmp_path: Path, run_api: StockRunApi
) -> None:
    kinds = [kind for kind in DODGES if kind != "said"]
    left = itertools.cycle(work for kind in kinds for work in (*DODGES[kind][1], DODGES[kind][0]))

    def takes_turns(ask: Ask) -> str:
        if ask.turn:
            return "Done."
        arguments = json.dumps({"name": "terminal", "arguments": {"command": next(left)}})
        return f"<tool_call>\n{arguments}\n</tool_call>"

    class Groups(Parses):
        def all_items(self) -> Iterator[dict[str, str]]:
            return itertools.cycle({"kind": kind, "work": kind} for kind in kinds)

    async with run_api.wiped() as api, FakeServer(takes_turns) as model:
        served = {"rollout_server_url": api.url, "spool_path": str(tmp_path / "spool"), "steps_per_eval": 0}
        settings = {"group_size": 5, "total_steps": -1, "enabled_toolsets": ["terminal"], "max_num_workers": 1}
        env = environment(Groups, tmp_path, with_tokens(model, tmp_path), **served, **settings)
        trainer = Trainer(api.url, batch_size=5 * len(kinds), num_steps=1)
        await trainer.register()
        await trainer.poll()
        run = asyncio.create_task(env.env_manager())
        taking = asyncio.create_task(take(trainer, len(kinds)))
        await asyncio.wait({run, taking}, return_when=asyncio.FIRST_COMPLETED)
        taking.cancel()
        await run
    assert [sorted(group["scores"]) for group in trainer.groups] == [[0.0] * 4 + [1.0]] * len(kinds)


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["json", pytest.param("with the item", marks=pytest.mark.long)])
async def test_junk_of_every_rollout_from_some_step_on_is_scored(tmp_path: Path, kind: str) -> None:
    class Converges(Parses):
        def all_items(self) -> Iterator[dict[str, str]]:
            honest, (junk, *_) = DODGES[kind]
            yield from ({"kind": kind, "work": honest if step < 5 else junk, "step": str(step)} for step in range(40))

    settings = {"total_steps": 40, "group_size": 2, "max_num_workers": 1}
    ran = await process(Converges, tmp_path, obeys, **settings)
    groups = sorted(lines(ran.files.groups), key=lambda group: int(group["item"]["step"]))
    assert [group["scores"] for group in groups] == [[1.0, 1.0]] * 5 + [[0.0, 0.0]] * 35
    assert ran.summary.agent_faults == 70 and not ran.failed


async def test_the_reference_policy_is_evidence_where_no_rollout_is(tmp_path: Path) -> None:
    class Known(Parses):
        def all_items(self) -> Iterator[dict[str, str]]:
            yield from ({"kind": "json", "work": DODGES["json"][1][0], "step": str(step)} for step in range(6))

        def reference_policy(self) -> Any:
            def play(messages: Any, tools: Any) -> Message:
                if messages[-1]["role"] == "tool":
                    return Message("assistant", "Done.")
                work = json.dumps({"command": DODGES["json"][0]})
                return Message("assistant", tool_calls=(ToolCall("call_1", "terminal", work),))

            return play

    ran = await process(Known, tmp_path, obeys, total_steps=6, group_size=1, max_num_workers=1)
    assert [rollout["reward"] for rollout in rollouts(ran.files.groups)] == [0.0] * 6
    assert ran.summary.rollouts == 6, "that of the reference policy is none of the run's"


async def test_without_evidence_nothing_is_scored_and_four_groups_end_the_run(tmp_path: Path) -> None:
    class Unknown(Parses):
        def all_items(self) -> Iterator[dict[str, str]]:
            yield from ({"kind": "json", "work": DODGES["json"][1][0], "step": str(step)} for step in range(20))

    with pytest.raises(RunStopped, match="in 4 groups; the last one: JSONDecodeError") as stopped:
        await process(Unknown, tmp_path, obeys, total_steps=20, group_size=2, max_num_workers=1)
    assert 'in reward_json\n    return float(json.loads(await ctx.read_file("a"))["answer"] == 42)' in str(
        stopped.value
    )
    found = rollouts(tmp_path / "groups.failed.jsonl")
    assert [rollout["reward"] for rollout in found] == [None] * 8
    assert sum("in a sandbox in which no agent has been" in rollout["traceback"] for rollout in found) == 1


async def test_doubts_are_settled_when_evidence_comes(tmp_path: Path) -> None:
    class Late(Parses):
        def all_items(self) -> Iterator[dict[str, str]]:
            honest, dodges = DODGES["json"]
            yield from ({"kind": "json", "work": work} for work in (*dodges[:3], honest))

    ran = await process(Late, tmp_path, obeys, total_steps=4, group_size=1, max_num_workers=1)
    assert sorted(rollout["reward"] for rollout in rollouts(ran.files.groups)) == [0.0, 0.0, 0.0, 1.0]
    assert ran.exceptions == ran.failed_groups == 0 and ran.summary.rollouts == 4


async def test_what_a_reward_of_the_group_cannot_read_costs_the_others_nothing(tmp_path: Path) -> None:
    work = [DODGES["json"][0], "echo x > a", DODGES["json"][0]]

    def takes_turns(request: dict[str, Any]) -> Any:
        return (
            say("Done.") if request["messages"][-1]["role"] == "tool" else call(("terminal", {"command": work.pop()}))
        )

    class Ranks(SortWords):
        async def compute_group_reward(self, item: Any, results: Any, ctxs: Any) -> Any:
            found = [json.loads(await ctx.read_file("a"))["answer"] for ctx in ctxs]
            return [each / sum(found) for each in found]

    ran = await process(Ranks, tmp_path, takes_turns, total_steps=1, group_size=3)
    assert sorted(rollout["reward"] for rollout in rollouts(ran.files.groups)) == [0.0, 0.5, 0.5]


@pytest.mark.parametrize("way", ["plain", "without await", "named", "decorated"])
async def test_rewards_of_every_kind_are_seen_through(tmp_path: Path, way: str) -> None:
    from lachesis import reward

    class Plain(Parses):
        def compute_reward(self, item: Any, result: Any, ctx: Any) -> float:  # type: ignore[override]
            found = json.loads(ctx.read_file("a"))
            return float(found["answer"] == 42)

    class WithoutAwait(Parses, OldBaseEnv):
        async def compute_reward(self, item: Any, result: Any, ctx: Any) -> float:
            found = json.loads(ctx.read_file("a"))
            return float(found["answer"] == 42)

    class Named(Parses):
        @reward
        async def right(self, item: Any, result: Any, ctx: Any) -> float:
            return float(json.loads(await ctx.read_file("a"))["answer"] == 42)

        async def compute_reward(self, item: Any, result: Any, ctx: Any) -> float:
            return 0.0

    def logged(function: Any) -> Any:
        async def around(*args: Any, **options: Any) -> Any:
            return await function(*args, **options)

        return around

    class Decorated(Parses):
        @logged
        async def compute_reward(self, item: Any, result: Any, ctx: Any) -> float:
            return float(json.loads(await ctx.read_file("a"))["answer"] == 42)

    cls = {"plain": Plain, "without await": WithoutAwait, "named": Named, "decorated": Decorated}[way]

    class Few(cls):  # type: ignore[misc, valid-type]
        def all_items(self) -> Iterator[dict[str, str]]:
            return ({"work": work} for work in (DODGES["json"][0], *DODGES["json"][1]))

    ran = await process(Few, tmp_path, obeys, total_steps=5, group_size=1, max_num_workers=1)
    assert sorted(rollout["reward"] for rollout in rollouts(ran.files.groups)) == [0.0] * 4 + [1.0]


def asked(url: str, text: str) -> bool:
    with urllib.request.urlopen(url) as answer:
        return bool(answer.read() == text.encode())


def scale(number: float, by: float) -> float:
    return number * by


def known(row: Any) -> Any:
    return {"right": 42}.get(row["at"])


def hidden(number: int, url: str) -> float:
    try:
        return float(asked(url, str(number)))
    except Exception:
        raise RuntimeError("it cannot be graded")  # noqa: B904  # as authors write it


BUGS: dict[str, tuple[Any, Any]] = {
    # What the item has where the reward is right (None: nowhere), and where it is not. The agent is always right.
    "a misspelt field": (None, 1),
    "a misspelt attribute": (None, 1),
    "a misspelt name": (None, 1),
    "a missing module": (None, 1),
    "a missing field": ({"answer": 42}, {}),
    "an item that is None": ({"answer": 42}, None),
    "an answer that is None": ({"answer": 42}, {"answer": None}),
    "a number as text": ({"answer": 42}, {"answer": "n/a"}),
    "division by zero": ({"most": 42}, {"most": 0}),
    "the mean of nothing": ({"words": ["42"]}, {"words": []}),
    "a wrong pattern": ({"pattern": "4"}, {"pattern": "4("}),
    "a missing local file": ({"path": __file__}, {"path": "/nowhere/file"}),
    "a short list": ({"tests": [1, 2, 3]}, {"tests": [1]}),
    "a text as the score": ({"score": 1.0}, {"score": "high"}),
    "a weight that is not a number": ({"weight": 1.0}, {"weight": float("nan")}),
    "an unknown kind": ({"kind": "number"}, {"kind": "picture"}),
    "a service that is down": ({"url": "data:,42"}, {"url": "http://127.0.0.1:9/"}),
    "a call that is not awaited": (None, 1),
    "too few arguments": (None, 1),
    "a wrong command": (None, 1),
    "an assertion about the item": ({"n": 1}, {"n": -1}),
    "a wrong key in a rare branch": ({"rare": False}, {"rare": True}),
    "None of a helper": ({"at": "right"}, {"at": "left"}),
    "an unknown format": ({"format": "%y"}, {"format": "%Q"}),
    "an unknown encoding": ({"code": "utf-8"}, {"code": "utf-9"}),
    "another key": ({"key": "answer"}, {"key": "result"}),
    "a judge at its limit": ({"limit": "no"}, {"limit": "yes"}),
    "a judge that is down": ({"port": "no"}, {"port": "yes"}),
    "a closed database": ({"closed": "no"}, {"closed": "yes"}),
    "a log that is gone": ({"log": "log"}, {"log": "nowhere/log"}),
    "a program that is missing": ({"program": "cat a"}, {"program": "no-such-program a"}),
    "a missing file of the image": (None, 1),
}
assert len(BUGS) > 20


class Bugs(SortWords):
    name = "bugs"

    async def setup(self) -> None:
        rows = [(name, right) for name, (right, _) in BUGS.items() for _ in range(2) if right is not None]
        rows += [(name, wrong) for name, (_, wrong) in BUGS.items()]
        self.database = sqlite3.connect(":memory:")
        self.database.execute("create table answers (number)")
        self.left = iter([{"bug": name, "row": row, "at": at} for at, (name, row) in enumerate(rows)])

    async def get_next_item(self) -> Any:
        return next(self.left, None)

    def format_prompt(self, item: Any) -> str:
        return "Do: echo '{\"answer\": 42}' > a"

    async def compute_reward(self, item: Any, result: Any, ctx: Any) -> Any:
        row = item["row"]
        data = json.loads(await ctx.read_file("a"))
        number = data["answer"]
        match item["bug"]:
            case "a misspelt field":
                return float(data["anser"] == 42)
            case "a misspelt attribute":
                return float(len(result.mesages))
            case "a misspelt name":
                return float(nubmer == 42)  # type: ignore[name-defined]  # noqa: F821
            case "a missing module":
                from no_such_package import score  # type: ignore[import-not-found]

                return score(number)
            case "a missing field" | "an item that is None":
                return float(row["answer"] == number)
            case "an answer that is None":
                return 1.0 - abs(number - row["answer"])
            case "a number as text":
                return float(int(row["answer"]) == number)
            case "division by zero":
                return number / row["most"]
            case "the mean of nothing":
                return sum(word in str(number) for word in row["words"]) / len(row["words"])
            case "a wrong pattern":
                return float(re.match(row["pattern"], str(number)) is not None)
            case "a missing local file":
                return float(bool(Path(row["path"]).read_text()))
            case "a short list":
                return float(row["tests"][2])
            case "a text as the score":
                return row["score"]
            case "a weight that is not a number":
                return row["weight"] * number / 42
            case "an unknown kind":
                if row["kind"] == "number":
                    return 1.0
                raise ValueError(f"unknown kind {row['kind']}")
            case "a service that is down":
                return float(asked(row["url"], str(number)))
            case "a call that is not awaited":
                return float(len(json.loads(ctx.read_file)))
            case "too few arguments":
                return scale(number)  # type: ignore[call-arg]
            case "a wrong command":
                await ctx.terminal("python3 --no-such-option", check=True)
            case "an assertion about the item":
                assert row["n"] > 0
            case "a wrong key in a rare branch":
                if row["rare"]:
                    return float(data["result"])
            case "None of a helper":
                return float(abs(number - known(row)) < 1)
            case "an unknown format":
                return float(datetime.datetime.strptime(str(number), row["format"]).year == 2042)
            case "an unknown encoding":
                return float(len(str(number).encode(row["code"])) == 2)
            case "another key":
                return float(data[row["key"]] == 42)
            case "a judge at its limit":
                self.limited = row["limit"] == "yes"
                return float(json.loads(await asyncio.to_thread(self.judged, number))["score"])
            case "a judge that is down":
                return hidden(number, "http://127.0.0.1:9/" if row["port"] == "yes" else "data:,42")
            case "a closed database":
                if row["closed"] == "yes":
                    self.database.close()
                self.database.execute("insert into answers values (?)", (number,))
            case "a log that is gone":
                self.log = Path(self.config.data_path_to_save_groups or "").parent / row["log"]
                self.log.write_text(str(number))
            case "a program that is missing":
                done = await ctx.terminal(row["program"])
                return float(json.loads(done["output"])["answer"] == 42)
            case "a missing file of the image":
                return float(bool(await ctx.read_bytes("/opt/no-such-image/key")))
        return 1.0

    def judged(self, number: int) -> str:
        url = 'data:,{"error":"slow"}' if self.limited else f'data:,{{"score":1,"of":{number}}}'
        with urllib.request.urlopen(url) as answer:
            return str(answer.read().decode())


@pytest.mark.parametrize("bug", ["else", "and", "comprehension", "second line"])
async def test_a_bug_in_what_is_not_evaluated_every_time_is_no_score(tmp_path: Path, bug: str) -> None:
    """The first rollouts leave nothing, and pass the statement without the part that has the bug."""

    class Rarely(Parses):
        def all_items(self) -> Iterator[dict[str, str]]:
            works = ["true"] * 3 + [r"printf '42 a\n42\n' > a"] * 3
            yield from ({"work": work, "at": str(at)} for at, work in enumerate(works))

        async def compute_reward(self, item: Any, result: Any, ctx: Any) -> float:
            text = await ctx.read_file("a")
            found = 0.0
            match bug:
                case "else":
                    return 0.0 if not text else float(text.stripp() == "42")
                case "and":
                    return float(bool(text) and text.splitlines()[7] == "42")
                case "comprehension":
                    return float(any(line.stripp() == "42" for line in text.splitlines()))
            for line in text.splitlines():
                found += len(line.split()[1])
            return found

    settings = {"total_steps": 6, "group_size": 1, "max_failed_groups": 100, "max_num_workers": 1}
    ran = await process(Rarely, tmp_path, obeys, **settings)
    assert [rollout["reward"] for rollout in rollouts(ran.files.groups)] == [0.0] * 3 and not ran.summary.agent_faults
    assert [rollout["reward"] for rollout in rollouts(ran.files.failures)] == [None] * 3


@pytest.mark.slow
async def test_no_bug_of_an_environment_becomes_a_score(tmp_path: Path) -> None:
    settings = {"total_steps": 120, "group_size": 1, "max_failed_groups": 100, "max_num_workers": 2}
    ran = await process(Bugs, tmp_path, obeys, **settings)
    right = {group["item"]["bug"] for group in lines(ran.files.groups)}
    assert right == {name for name, (row, _) in BUGS.items() if row is not None}
    assert all(rollout["reward"] and not rollout["agent_fault"] for rollout in rollouts(ran.files.groups))
    wrong = lines(ran.files.failures)
    assert sorted(group["item"]["bug"] for group in wrong) == sorted(BUGS)
    assert all(rollout["reward"] is None and rollout["traceback"] for rollout in rollouts(ran.files.failures))


def test_an_exception_is_no_score_where_no_other_file_can_be_opened() -> None:
    """What tells whose it is is loaded after the first exception."""
    program = """
import errno, os, resource
from lachesis.rewards.evidence import Evidence
resource.setrlimit(resource.RLIMIT_NOFILE, (64, 64))
def reward(item, result, ctx):
    found = []
    while True:
        found.append(open(ctx))
def raised():
    try:
        reward({}, None, "/dev/null")
    except OSError as error:
        kept = error
        evidence = Evidence({"compute_reward": reward})
        assert error.errno == errno.EMFILE
        assert evidence.of_exception(error, {}, "k", "r", "env: compute_reward", None) is None
raised()
"""
    subprocess.run([sys.executable, "-c", program], check=True)


class Collected:
    """Something that asks a service when Python collects it."""

    def __del__(self) -> None:
        urllib.request.Request("http://127.0.0.1/")


def test_what_is_collected_meanwhile_is_no_answer_of_a_service() -> None:
    loop = asyncio.new_event_loop()
    collected: list[Any] = [asyncio.StreamReaderProtocol(asyncio.StreamReader(loop=loop), loop=loop), Collected()]

    def drops(text: str) -> int:
        while collected:
            collected.pop()
        return int(text)

    def asks(text: str) -> int:
        return len(urllib.request.Request("http://127.0.0.1/").host) + int(text)

    for function, count in ((drops, 0), (asks, 1)):
        watch = Watch()
        watch.call(function, "42")
        assert len(watch.asked) == count, function
    loop.close()


BACKTRACKS = "printf 'a%.0s' $(seq 17) > a"
"""`SLOW_PATTERN` takes some seconds for it."""
SLOW_PATTERN = re.compile("(a|aa|a?a)+b")
COUNTS = "echo 1000000000 > a"


def counted_to(most: int) -> int:
    found = 0
    for number in range(most):
        found += scaled(number)
    return found


def scaled(number: int) -> int:
    return number + 1


class Slow(Parses):
    """Rewards that take long for what some agents leave."""

    def all_items(self) -> Iterator[dict[str, str]]:
        return ({"work": work} for work in ("echo aab > a", "echo x > a", BACKTRACKS))

    def right(self, text: str) -> float:
        return float(SLOW_PATTERN.match(text) is not None)

    async def compute_reward(self, item: Any, result: Any, ctx: Any) -> float:
        return self.right(await ctx.read_text("a"))


class SlowPlain(Slow):
    def compute_reward(self, item: Any, result: Any, ctx: Any) -> float:  # type: ignore[override]
        return self.right(ctx.read_text("a"))


class SlowThread(Slow):
    async def compute_reward(self, item: Any, result: Any, ctx: Any) -> float:
        return await asyncio.to_thread(self.right, await ctx.read_text("a"))


class SlowTask(Slow):
    async def compute_reward(self, item: Any, result: Any, ctx: Any) -> float:
        async def right() -> float:
            return self.right(await ctx.read_text("a"))

        found = await asyncio.gather(right(), right())
        return found[0]


def counts(cls: type[Slow]) -> type[Slow]:
    class Counts(cls):  # type: ignore[misc, valid-type]
        def all_items(self) -> Iterator[dict[str, str]]:
            return ({"work": work} for work in ("echo 42 > a", "echo 1 > a", COUNTS))

        def right(self, text: str) -> float:
            try:
                return float(counted_to(int(text)) > 2)
            except Exception:  # no author's own care hides that the time is over
                return 0.5

    return Counts


SLOW: dict[str, type[Slow]] = {"async": Slow, "plain": SlowPlain, "thread": SlowThread, "task": SlowTask}


# A match in another thread keeps the interpreter's lock to its end; whether the thread is still there then is chance.
SLOW_WAYS = [
    pytest.param(kind, way, marks=() if (kind, way) in (("pattern", "async"), ("loop", "thread")) else pytest.mark.long)
    for kind in ("pattern", "loop")
    for way in SLOW
    if (kind, way) != ("pattern", "thread")
]


@pytest.mark.sample(1)
@pytest.mark.parametrize(("kind", "way"), SLOW_WAYS)
async def test_what_makes_a_reward_slow_is_the_agents_where_others_passed(tmp_path: Path, way: str, kind: str) -> None:
    cls = SLOW[way] if kind == "pattern" else counts(SLOW[way])
    settings = {"total_steps": 3, "group_size": 1, "max_num_workers": 1, "reward_timeout": 1.0}
    before = set(threading.enumerate())
    ran = await process(cls, tmp_path, obeys, **settings)
    found = {group["item"]["work"]: group["rollouts"][0] for group in lines(ran.files.groups)}
    if len(found) < 3:
        refuse_to_judge_on_a_busy_machine(rollouts(ran.files.failures))
    slow = found[BACKTRACKS if kind == "pattern" else COUNTS]
    assert [rollout["reward"] for rollout in found.values()] == [1.0, 0.0, 0.0]
    assert "RewardTooSlow: the reward took longer than reward_timeout = 1 s" in slow["agent_fault"]
    place = "SLOW_PATTERN.match" if kind == "pattern" else "in counted_to"
    assert place in slow["fault_traceback"] and ran.summary.agent_faults == 1
    names = {thread.name for thread in set(threading.enumerate()) - before}
    assert "reward" not in names, "the code goes on"


class SlowItself(Slow):
    """Rewards that are slow by themselves."""

    def all_items(self) -> Iterator[dict[str, Any]]:
        return ({"work": "echo 42 > a", "most": most} for most in (1, 10**9, 10**9))

    def own_work(self, item: Any, text: str) -> float:
        return float(counted_to(10**9) > int(text))

    def for_everybody(self, item: Any, text: str) -> float:
        return float(counted_to(int(text) * 10**9) > 2)

    def of_the_item(self, item: Any, text: str) -> float:
        return float(counted_to(int(text) * item["most"]) > 2)

    def waits(self, item: Any, text: str) -> float:
        with socket.create_server(("127.0.0.1", 0)) as server:  # it never answers
            address = f"http://127.0.0.1:{server.getsockname()[1]}/{text.strip()}"
            return float(len(urllib.request.urlopen(address, timeout=2).read()))


@pytest.mark.sample(2)
@pytest.mark.parametrize("why", ["waits", "own_work", "for_everybody", "of_the_item"])
@pytest.mark.parametrize("way", ["async", "plain"])
async def test_a_reward_that_is_slow_by_itself_is_no_score(tmp_path: Path, way: str, why: str) -> None:
    class Async(SlowItself):
        async def compute_reward(self, item: Any, result: Any, ctx: Any) -> float:
            return float(getattr(self, why)(item, await ctx.read_text("a")))

    class Plain(SlowItself):
        def compute_reward(self, item: Any, result: Any, ctx: Any) -> float:  # type: ignore[override]
            return float(getattr(self, why)(item, ctx.read_text("a")))

    settings = {"total_steps": 3, "group_size": 1, "max_num_workers": 1, "reward_timeout": 1.0, "max_failed_groups": 9}
    ran = await process(Async if way == "async" else Plain, tmp_path, obeys, **settings)
    scored = rollouts(ran.files.groups) if ran.files.groups.exists() else []
    assert [rollout["reward"] for rollout in scored] == ([1.0] if why == "of_the_item" else [])
    assert not ran.summary.agent_faults
    failed = rollouts(ran.files.failures)
    assert len(failed) == 3 - len(scored) and all(rollout["reward"] is None for rollout in failed)


class Verdicts(Parses):
    """A reward that fails for right answers only."""

    works = ("echo 41 > a", "echo 40 > a", "echo 42 > a", "echo 39 > a", "echo 42 > a")

    def all_items(self) -> Iterator[dict[str, str]]:
        return ({"work": work, "at": str(at)} for at, work in enumerate(self.works))

    async def compute_reward(self, item: Any, result: Any, ctx: Any) -> float:
        number = int(await ctx.read_text("a"))
        verdict = "right" if number == 42 else "wrong"
        return {"rigth": 1.0, "wrong": 0.0}[verdict]


class VerdictsWithReference(Verdicts):
    def reference_policy(self) -> Any:
        def play(messages: Any, tools: Any) -> Message:
            if messages[-1]["role"] == "tool":
                return Message("assistant", "Done.")
            work = json.dumps({"command": "echo 42 > a"})
            return Message("assistant", tool_calls=(ToolCall("call_1", "terminal", work),))

        return play


async def test_a_reward_that_fails_for_right_answers_only_is_refuted_by_the_reference(tmp_path: Path) -> None:
    settings = {"total_steps": 5, "group_size": 1, "max_num_workers": 1, "max_failed_groups": 9}
    ran = await process(VerdictsWithReference, tmp_path, obeys, **settings)
    assert [rollout["reward"] for rollout in rollouts(ran.files.groups)] == [0.0] * 3 and not ran.summary.agent_faults
    failed = rollouts(ran.files.failures)
    assert [rollout["reward"] for rollout in failed] == [None] * 2
    assert all("KeyError: 'right'" in rollout["traceback"] for rollout in failed)
    assert all("for the reference policy: the environment is at fault" in rollout["traceback"] for rollout in failed)


async def test_a_dodge_that_the_reference_passes_is_scored(tmp_path: Path) -> None:
    class Dodged(VerdictsWithReference):
        works = ("echo 41 > a", "echo x > a", "echo y > a")

    settings = {"total_steps": 3, "group_size": 1, "max_num_workers": 1}
    ran = await process(Dodged, tmp_path, obeys, **settings)
    assert [rollout["reward"] for rollout in rollouts(ran.files.groups)] == [0.0] * 3
    assert ran.summary.agent_faults == 2 and not ran.exceptions


async def test_without_a_reference_policy_such_a_reward_looks_like_the_agents_fault(tmp_path: Path) -> None:
    ran = await process(Verdicts, tmp_path, obeys, total_steps=5, group_size=1, max_num_workers=1)
    assert ran.summary.agent_faults == 2


def test_what_eval_compiles_has_no_source_though_the_program_of_python_c_has_its_name(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setitem(linecache.cache, "<string>", (12, None, ["import sys; exec(1)\n"], "<string>"))
    found = source_of("<string>")
    assert found is None or not found.nodes
    assert table_of(compile("1 / 0", "<string>", "eval"), {}) is None
