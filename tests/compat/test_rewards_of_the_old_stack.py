"""Environments that call as those of the removed Hermes stack do: the same calls in the same ways, in our own words.

A perfect policy gets the score that it had there, and so does one that does nothing: 0 by what the sandbox holds, and
not by an exception that the reward caught.
"""

from __future__ import annotations

import asyncio
import json
import re
import shutil
import tempfile
from pathlib import Path
from typing import Any, ClassVar

import pytest

from environments.tool_context import ToolContext
from lachesis_compat.synchronous import with_blocking_calls
from tests.support.scripted_server import ScriptedServer, call, say
from tests.support.small_envs import OldSortWords, does_nothing, lines, make, process, sandboxes


class Old(OldSortWords):
    """What all of them share."""

    item: ClassVar[Any] = {"name": "task"}
    work: tuple[str, ...] = ()
    """Commands of the perfect policy."""
    perfect = 1.0
    idle = 0.0

    async def setup(self):
        self.buffer = []

    async def get_next_item(self):
        return self.item

    def format_prompt(self, item):
        return "Do the task."

    @classmethod
    def policy(cls, request):
        done = sum(message["role"] == "tool" for message in request["messages"])
        return call(("terminal", {"command": cls.work[done]})) if done < len(cls.work) else say("Done.")


class FileWithText(Old):
    """As terminal_test: shows a file, and compares."""

    item: ClassVar[Any] = {"path": "/tmp/out/greeting.txt", "text": "hello\nthere"}
    work = ("mkdir -p /tmp/out; printf 'hello\\nthere\\n' > /tmp/out/greeting.txt",)

    async def compute_reward(self, item, result, ctx):
        shown = ctx.terminal(f"cat {item['path']}")
        if shown["exit_code"] != 0:
            self.buffer.append(0.0)
            return 0.0
        found = shown.get("output", "").strip()
        return 1.0 if found == item["text"] else 0.5 if item["text"] in found else 0.0


class FileWithMore(FileWithText):
    work = ("mkdir -p /tmp/out; printf 'oh, hello\\nthere\\n' > /tmp/out/greeting.txt",)
    perfect = 0.5


class InlineTest(Old):
    """As hermes_swe: the item's test is a program on the command line."""

    item: ClassVar[Any] = {
        "test": "import sys; sys.path.insert(0, '.'); from double import double; assert double(4) == 8"
    }
    work = ("cd /workspace && echo 'def double(x): return 2 * x' > double.py",)

    async def compute_reward(self, item, result, ctx):
        if test := item.get("test", item.get("tests", "")):
            ran = ctx.terminal(f'cd /workspace && python3 -c "{test}"', timeout=60)
            if ran["exit_code"] == 0:
                self.buffer.append(1.0)
                return 1.0
        files = ctx.terminal("find /workspace -name '*.py' | head -5")
        return 0.1 if files["exit_code"] == 0 and files.get("output", "").strip() else 0.0


class UntestedFile(InlineTest):
    work = ("echo 'def double(x): return 3 * x' > double.py",)
    perfect = 0.1


class Weighted(Old):
    """As agentic_opd: parts with weights, and every exception is a part of 0."""

    work = ("echo 'print(\"3 passed\")' > test_solution.py",)
    perfect = 0.7 + 0.15 + 0.15 * 0.6
    idle = 0.7 * 0.1 + 0.15

    async def compute_reward(self, item, result, ctx):
        correct = 0.0
        try:
            ran = ctx.terminal("python3 test_solution.py 2>&1", timeout=30)
            output, code = ran.get("output", ""), ran.get("exit_code", 1)
            correct = (1.0 if "passed" in output.lower() else 0.8) if code == 0 else 0.1
        except Exception:
            correct = 0.0
        used = {
            asked["function"]["name"]
            for message in result.messages
            if message.get("role") == "assistant" and message.get("tool_calls")
            for asked in message["tool_calls"]
        }
        return 0.7 * correct + 0.15 * (result.turns_used <= 3) + 0.15 * (0.6 if "terminal" in used else 0.0)


class ManyTests(Old):
    """As swe_smith_oracle: an installation, then tests in portions, the first failure of which ends it."""

    item: ClassVar[Any] = {"tests": [f"part_{number}" for number in range(5)]}
    work = ("mkdir repo && cd repo && for i in 0 1 2 3 4; do echo true > part_$i; done",)

    async def compute_reward(self, item, result, ctx):
        if not sum(len(message.get("tool_calls", [])) for message in result.messages if message["role"] == "assistant"):
            return 0.0
        ready = ctx.terminal("cd repo && echo '#!/bin/sh' > runner && chmod +x runner", timeout=int(60.0))
        if ready.get("exit_code", 1) != 0:
            return 0.0
        for start in range(0, len(item["tests"]), 2):
            names = " ".join(item["tests"][start : start + 2])
            ran = ctx.terminal(f"cd repo && for t in {names}; do sh $t || exit 1; done", timeout=60)
            if ran.get("exit_code", 1) != 0:
                return 0.0
        return 1.0


class LastTestMissing(ManyTests):
    work = ("mkdir repo && cd repo && for i in 0 1 2 3; do echo true > part_$i; done",)
    perfect = 0.0


class InAnExecutor(Old):
    """As endless_terminals: the whole check is a plain method, which runs in the loop's executor."""

    work = ("echo 4 > answer",)

    def check(self, text, ctx, name):
        try:
            ctx.write_file("/tmp/check_dir/check.py", text)
            ran = ctx.terminal("cd /tmp/check_dir && python3 check.py 2>&1", timeout=60)
            if ran.get("exit_code", -1) == 0:
                return 1.0
            output = ran.get("output", "")
            passed, failed = len(re.findall(r" PASSED", output)), len(re.findall(r" FAILED", output))
            return passed / (passed + failed) if passed + failed else 0.0
        except Exception:
            return 0.0

    async def compute_reward(self, item, result, ctx):
        text = (
            "import pathlib, sys\n"
            "answer = pathlib.Path('/workspace/answer')\n"
            "good = answer.exists() and answer.read_text() == '4\\n'\n"
            "print('one PASSED')\n"
            "print('two', 'PASSED' if good else 'FAILED')\n"
            "sys.exit(not good)\n"
        )
        try:
            loop = asyncio.get_event_loop()
            return await loop.run_in_executor(None, self.check, text, ctx, item["name"])
        except Exception:
            return 0.0


InAnExecutor.idle = 0.5


class Judged(Old):
    """As web_research: the model judges what the model wrote; an exception there is 0."""

    perfect = 0.6 + 0.2 * 1.0
    idle = 0.2 * 1.0

    @classmethod
    def policy(cls, request):
        if "Judge" in request["messages"][0]["content"]:
            return say(json.dumps({"score": 1.0 if "Paris" in request["messages"][0]["content"] else 0.0}))
        return say("It is Paris.")

    async def judge(self, answer):
        try:
            asked = [{"role": "user", "content": f"Judge: {answer}"}]
            reply = await self.server.chat_completion(messages=asked, n=1, max_tokens=50, temperature=0.0, split="eval")
            return float(json.loads(reply.choices[0].message.content)["score"])
        except Exception:
            return 0.0

    async def compute_reward(self, item, result, ctx):
        answer = next(message["content"] for message in reversed(result.messages) if message["role"] == "assistant")
        return 0.6 * await self.judge(answer) + 0.2 * (result.turns_used <= 5)


def judged_badly(request):
    return Judged.policy(request) if "Judge" in request["messages"][0]["content"] else say("I do not know.")


class FromTheText(Old):
    """As gsm8k and yc_bench: the context is not used."""

    @classmethod
    def policy(cls, request):
        return say("So it is \\boxed{42}.")

    async def compute_reward(self, item, result, ctx):
        text = next(message["content"] for message in reversed(result.messages) if message["role"] == "assistant")
        return 1.0 if "\\boxed{42}" in text else 0.0


KINDS = [FileWithText, FileWithMore, InlineTest, UntestedFile, Weighted, ManyTests, LastTestMissing, InAnExecutor]


@pytest.mark.sample(5)
@pytest.mark.parametrize("kind", [*KINDS, Judged, FromTheText])
async def test_a_policy_gets_the_score_that_it_had_in_the_old_stack(tmp_path: Path, kind: type[Old]) -> None:
    for name, policy, score in (
        ("perfect", kind.policy, kind.perfect),
        ("idle", judged_badly if kind is Judged else does_nothing, kind.idle),
    ):
        (tmp_path / name).mkdir()
        result = await process(kind, tmp_path / name, policy, total_steps=1, group_size=2)
        (group,) = lines(result.files.groups)
        assert group["scores"] == pytest.approx([score] * 2), name
        assert [rollout["traceback"] for rollout in group["rollouts"]] == [None] * 2
    assert sandboxes() == set()


class Benchmark(Old):
    """As terminalbench_2 and tblite: contexts made by hand, in tasks with time limits; the checks run in threads."""

    def upload_and_run(self, item, ctx, name):
        ctx.terminal("mkdir -p /tests /logs/verifier")
        tests = Path(tempfile.mkdtemp(prefix=f"tests-{name}-"))
        try:
            (tests / "deep").mkdir()
            (tests / "deep" / "data.bin").write_bytes(bytes(range(256)) * 100)
            ctx.upload_dir(str(tests), "/tests")
        except Exception:
            pass
        finally:
            shutil.rmtree(tests, ignore_errors=True)
        ctx.write_file("/tests/test.sh", item["test_sh"])
        ctx.terminal("chmod +x /tests/test.sh")
        ran = ctx.terminal("bash /tests/test.sh", timeout=60)
        reward = 0.0
        local = Path(tempfile.mkdtemp(prefix=f"verifier-{name}-"))
        try:
            ctx.download_dir("/logs/verifier", str(local))
            found = local / "reward.txt"
            if found.exists() and found.stat().st_size > 0:
                reward = float(found.read_text().strip())
            else:
                reward = 1.0 if ran.get("exit_code", -1) == 0 else 0.0
        except Exception:
            reward = 1.0 if ran.get("exit_code", -1) == 0 else 0.0
        finally:
            shutil.rmtree(local, ignore_errors=True)
        return reward

    async def rollout_and_score(self, item):
        task_id = f"{item['name']}-by-hand"
        agent = ToolContext(task_id)  # what the agent would do
        agent.terminal(item["work"])
        ctx = ToolContext(task_id)
        reward = None
        try:
            loop = asyncio.get_event_loop()
            reward = await loop.run_in_executor(None, self.upload_and_run, item, ctx, item["name"])
        except Exception:
            reward = 0.0
        finally:
            ctx.cleanup()
        return reward

    async def within_the_limit(self, item):
        try:
            return await asyncio.wait_for(self.rollout_and_score(item), timeout=item.get("limit", 60))
        except TimeoutError:
            return 0.0

    async def evaluate(self, *args, **kwargs):
        tasks = [asyncio.create_task(self.within_the_limit(item)) for item in BENCHMARK]
        done = 0
        for each in asyncio.as_completed(tasks):
            await each
            done += 1
        assert done == len(tasks)
        return {item["name"]: task.result() for item, task in zip(BENCHMARK, tasks, strict=True)}

    async def compute_reward(self, item, result, ctx):
        return 0.0


WRITES_REWARD = "echo $(cat /workspace/answer) > /logs/verifier/reward.txt"
BENCHMARK: list[dict[str, Any]] = [
    {"name": "solved", "work": "echo 1 > answer", "test_sh": WRITES_REWARD},
    {"name": "failed", "work": "echo 0 > answer", "test_sh": WRITES_REWARD},
    {"name": "half", "work": "echo 0.5 > answer", "test_sh": WRITES_REWARD},
    {"name": "no-reward-file", "work": "true", "test_sh": "test $(stat -c %s /tests/deep/data.bin) = 25600"},
    {"name": "late", "work": "true", "test_sh": "sleep 50", "limit": 2},
]


async def test_an_evaluation_that_makes_its_own_contexts_scores_as_in_the_old_stack(tmp_path: Path) -> None:
    async with ScriptedServer(does_nothing) as server:
        env = make(Benchmark, server, tmp_path)
        async with env.running():
            scores = await with_blocking_calls(env.evaluate(), name="benchmark: evaluate")
            assert len(env.player.sessions) == 0
    assert scores == {"solved": 1.0, "failed": 0.0, "half": 0.5, "no-reward-file": 1.0, "late": 0.0}
    assert sandboxes() == set()


async def test_a_context_made_by_hand_serves_the_environments_own_reward(tmp_path: Path) -> None:
    """As the evaluations of agentic_opd and web_research, and the trajectories of endless_terminals."""

    class Evaluates(Weighted):
        async def one(self, number):
            task_id = f"eval-{number}"
            ctx = ToolContext(task_id)
            await ctx.terminal(self.work[0])

            class Result:
                messages = ()
                turns_used = 1

            try:
                return await self.compute_reward({}, Result(), ctx)
            except Exception:
                return 0.0
            finally:
                ctx.cleanup()

        async def evaluate(self, *args, **kwargs):
            alone = await self.one(0)
            return [alone, *await asyncio.gather(*[self.one(number) for number in (1, 2)], return_exceptions=True)]

    async with ScriptedServer(does_nothing) as server:
        env = make(Evaluates, server, tmp_path)
        async with env.running():
            assert await with_blocking_calls(env.evaluate()) == pytest.approx([0.85] * 3)
            assert len(env.player.sessions) == 0
