"""What an agent leaves is scored, whatever a reward makes of it, and a bug of the reward never is."""

from __future__ import annotations

import ast
import asyncio
import io
import json
import re
import urllib.request
import zipfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import pytest

from lachesis.runs.failures import RunStopped
from lachesis.testing.fake_server import Ask, FakeServer
from lachesis.trajectories.messages import Message, ToolCall
from tests.support.scripted_server import ScriptedServer, call, say
from tests.support.small_envs import SortWords, lines, make, process, rollouts
from tests.support.stock_run_api import StockRunApi, Trainer, run_api
from tests.support.training_runs import environment, take, with_tokens

__all__ = ["run_api"]

DEEP = "python3 -c \"print('[' * 100000)\" > a"
DODGES: dict[str, tuple[str, list[str]]] = {
    "json": ("echo '{\"answer\": 42}' > a", ["echo x > a", "mkdir a", "echo '[]' > a", "echo '{\"answer\"' > a"]),
    "nested": (
        'echo \'{"result": {"values": [41]}}\' > a',
        ['echo \'{"result": null}\' > a', 'echo \'{"result": {"values": ["x"]}}\' > a', DEEP, "ln -s a a"],
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
    "markup": (
        "echo '<a><b>42</b></a>' > a",
        ["echo '<a>' > a", "echo '<a/>' > a", "echo '<a><b/></a>' > a", "printf '<a>&x;</a>' > a"],
    ),
}
assert sum(len(dodges) for _, dodges in DODGES.values()) > 40


def parsed(text: str) -> int:
    if not text.startswith("answer="):
        raise ValueError("there is no answer")
    return int(text.removeprefix("answer="))


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
        return await getattr(self, f"reward_{item['kind']}")(item, result, ctx)

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
        local = Path(self.config.data_path_to_save_groups or self.config.spool_path).parent / ctx.task_id
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

    async def reward_markup(self, item: Any, result: Any, ctx: Any) -> float:
        root = ElementTree.fromstring(await ctx.read_file("a"))
        return float(int(root.find("b").text) == 42)  # type: ignore[union-attr,arg-type]


def obeys(request: dict[str, Any]) -> Any:
    """A model that does what it is asked to."""
    work = next(each["content"] for each in request["messages"] if each["role"] == "user").removeprefix("Do: ")
    if work.startswith("say "):
        return say(work.removeprefix("say "))
    return say("Done.") if request["messages"][-1]["role"] == "tool" else call(("terminal", {"command": work}))


HONEST = sorted(work for work, _ in DODGES.values())


def unscored(found: list[dict[str, Any]]) -> list[Any]:
    return [(each["messages"][1:3], each["traceback"]) for each in found if each["reward"] is None]


@pytest.mark.parametrize("command", ["process", "evaluate"])
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


async def test_a_trainer_gets_every_rollout_of_a_group_that_dodges_by_content(
    tmp_path: Path, run_api: StockRunApi
) -> None:
    left = {kind: [*dodges, honest] for kind, (honest, dodges) in DODGES.items() if kind != "said"}

    def takes_turns(ask: Ask) -> str:
        if ask.turn:
            return "Done."
        kind = next(each["content"] for each in ask.messages if each["role"] == "user").removeprefix("Do: ")
        arguments = json.dumps({"name": "terminal", "arguments": {"command": left[kind].pop()}})
        return f"<tool_call>\n{arguments}\n</tool_call>"

    class Groups(Parses):
        def all_items(self) -> Iterator[dict[str, str]]:
            return ({"kind": kind, "work": kind} for kind in left)

    async with run_api.wiped() as api, FakeServer(takes_turns) as model:
        served = {"rollout_server_url": api.url, "spool_path": str(tmp_path / "spool"), "steps_per_eval": 0}
        settings = {"group_size": 5, "total_steps": -1, "enabled_toolsets": ["terminal"], "max_num_workers": 2}
        env = environment(Groups, tmp_path, with_tokens(model, tmp_path), **served, **settings)
        trainer = Trainer(api.url, batch_size=5 * len(left), num_steps=1)
        await trainer.register()
        await trainer.poll()
        run = asyncio.create_task(env.env_manager())
        await take(trainer, len(left))
        await run
    assert [sorted(group["scores"]) for group in trainer.groups] == [[0.0] * 4 + [1.0]] * len(left)
