"""Files and set-up of an item: in the sandbox before the agent's first turn, and an error of the environment's."""

from __future__ import annotations

import asyncio
import gc
from pathlib import Path
from typing import Any

import pytest

from backends import SandboxLost
from lachesis_testing.fake_server import FakeServer, Scripted
from tests.support.scripted_server import ScriptedServer, call, say
from tests.support.small_envs import OldSortWords, SortWords, does_nothing, make, process, rollouts, sandboxes
from tests.support.stock_run_api import StockRunApi, run_api
from tests.support.training_runs import serving, trained, with_tokens

__all__ = ["run_api"]


async def test_a_call_that_a_reward_leaves_behind_says_nothing_when_its_sandbox_ends(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    class Leaving(SortWords):
        async def compute_reward(self, item: Any, result: Any, ctx: Any) -> float:
            asyncio.get_running_loop().create_task(ctx.terminal("sleep 60"))
            await asyncio.sleep(0.3)
            return 1.0

    result = await process(Leaving, tmp_path, does_nothing, total_steps=1, group_size=1)
    assert result.exceptions == 1, "its result is lost"
    gc.collect()
    await asyncio.sleep(0)
    assert "never retrieved" not in caplog.text


class Prepared(SortWords):
    """The agent finds the words in a file, and a program that sorts."""

    toolsets = ("terminal", "file")

    def sandbox_files(self, item: Any) -> Any:
        return {"words.txt": item, "data/raw.bin": b"\x00\xff", "there/tool.sh": self.program}

    async def setup_sandbox(self, item: Any, ctx: Any) -> None:
        assert await ctx.read_file("words.txt") == item
        await ctx.terminal("chmod +x there/tool.sh && git init -q . && echo ready > state.txt", check=True)

    async def setup(self) -> None:
        await super().setup()
        self.program = Path(self.config.data_path_to_save_groups).with_name("program.sh")
        self.program.write_text("#!/bin/sh\ntr ' ' '\\n' < words.txt | sort > sorted.txt\n")

    async def compute_reward(self, item: Any, result: Any, ctx: Any) -> float:
        assert await ctx.read_bytes("data/raw.bin") == b"\x00\xff"
        return await super().compute_reward(item, result, ctx)


def uses_the_program(request: dict[str, Any]) -> Any:
    if request["messages"][-1]["role"] == "tool":
        return say("Done.")
    return call(("terminal", {"command": "grep -q ready state.txt && test -d .git && ./there/tool.sh"}))


async def test_files_and_set_up_are_there_before_the_first_turn_in_process_and_evaluate(tmp_path: Path) -> None:
    async with ScriptedServer(uses_the_program) as server:
        env = make(Prepared, server, tmp_path, eval_items=2)
        result = await env.process_manager()
        evaluated = await make(Prepared, server, tmp_path, eval_items=2)._run_evaluate()
    played = rollouts(result.files.groups)
    assert [rollout["reward"] for rollout in played] == [1.0] * 4
    methods = {tuple(used["method"] for used in rollout["reward_calls"]) for rollout in played}
    assert methods == {("read_bytes", "read_file")}, "what the set-up did is not what the reward did"
    assert [rollout["reward"] for rollout in rollouts(evaluated.files.groups)] == [1.0] * 2
    assert sandboxes() == set()


async def test_files_and_set_up_are_there_in_serve(tmp_path: Path, run_api: StockRunApi) -> None:
    use = '<tool_call>\n{"name": "terminal", "arguments": {"command": "./there/tool.sh"}}\n</tool_call>'
    async with run_api.wiped() as api, FakeServer(Scripted(use, "Done.", by_turn=True)) as model:
        same = {"ensure_scores_are_not_same": False, "max_token_length": 200}
        env = serving(tmp_path, api, with_tokens(model, tmp_path), Prepared, **same)
        env.config.data_path_to_save_groups = str(tmp_path / "groups.jsonl")
        trainer = await trained(env, api, groups=2, steps=1)
    assert {tuple(group["scores"]) for group in trainer.groups} == {(1.0, 1.0)}


async def test_every_attempt_is_set_up_anew_in_a_fresh_sandbox(tmp_path: Path) -> None:
    class Fails(SortWords):
        tries = 0

        async def setup_sandbox(self, item: Any, ctx: Any) -> None:
            assert (await ctx.terminal("ls -A"))["output"] == ""
            await ctx.write_file("mark.txt", "x")
            Fails.tries += 1
            if Fails.tries == 1:
                raise SandboxLost("gone, as the test says")

    result = await process(Fails, tmp_path, total_steps=1, group_size=1, max_infra_retries=1)
    (rollout,) = rollouts(result.files.groups)
    assert (rollout["attempts"], rollout["reward"], Fails.tries) == (2, 1.0, 2)
    assert rollout["retried_after"] == ["gone, as the test says"]


class OutOfTheWorkspace(SortWords):
    def sandbox_files(self, item: Any) -> Any:
        return {"a/../../escaped.txt": "x"}


class InAFolder(SortWords):
    def sandbox_files(self, item: Any) -> Any:
        return {"": "x"}


class NoText(SortWords):
    def sandbox_files(self, item: Any) -> Any:
        return {"a.json": {"not": "text"}}


class NoMapping(SortWords):
    def sandbox_files(self, item: Any) -> Any:
        return ["a.json"]


class NotThere(SortWords):
    def sandbox_files(self, item: Any) -> Any:
        return {"a.txt": Path("/nowhere/a.txt")}


class Raises(SortWords):
    async def setup_sandbox(self, item: Any, ctx: Any) -> None:
        raise ZeroDivisionError("broken")


class WithoutAwait(OldSortWords):
    async def setup_sandbox(self, item: Any, ctx: Any) -> None:
        ctx.write_file(".", "a folder is there")


class FailedCommand(SortWords):
    def setup_sandbox(self, item: Any, ctx: Any) -> None:
        ctx.terminal("echo no such package; exit 3", check=True)


class FailedInstall(SortWords):
    """Its output names another number for each rollout."""

    async def setup_sandbox(self, item: Any, ctx: Any) -> None:
        await ctx.terminal('yes retrying | head -99; echo "object at 0x$RANDOM"; echo no package; exit 1', check=True)


class Hangs(SortWords):
    async def setup_sandbox(self, item: Any, ctx: Any) -> None:
        await ctx.terminal("sleep 300", timeout=300)


@pytest.mark.sample(3)
@pytest.mark.parametrize(
    ("kind", "problem"),
    [
        (OutOfTheWorkspace, "sandbox_files: 'a/../../escaped.txt' is "),
        (InAFolder, "IsADirectoryError"),
        (NoText, "sandbox_files: 'a.json' is dict; a path has text, bytes or a Path"),
        (NoMapping, "sandbox_files returned ['a.json']; it must be a mapping"),
        (NotThere, "No such file or directory: '/nowhere/a.txt'"),
        (Raises, "ZeroDivisionError: broken"),
        (WithoutAwait, "IsADirectoryError"),
        (FailedCommand, "ended with exit code 3: no such package\n"),
        (FailedInstall, "exit 1' ended with exit code 1: no package\n  File"),
        (Hangs, "the set-up of the sandbox took longer than setup_timeout = 2 s"),
    ],
)
async def test_a_failed_set_up_is_the_environments_is_not_tried_again_and_shows_its_traceback(
    tmp_path: Path, kind: type[SortWords], problem: str
) -> None:
    timeout = {"setup_timeout": 2} if kind is Hangs else {}
    async with ScriptedServer(does_nothing) as server:
        env = make(kind, server, tmp_path, total_steps=1, group_size=1, max_infra_retries=3, **timeout)
        result = await env.process_manager()
        assert server.requests == [], "no agent begins"
    (rollout,) = rollouts(result.files.failures)
    assert (rollout["reward"], rollout["attempts"], rollout["unscored_kind"]) == (None, 1, "environment")
    assert rollout["agent_fault"] == "" and problem in rollout["traceback"]
    assert "AgentFault" not in rollout["traceback"]
    assert result.exceptions == 1
    assert sandboxes() == set()


async def test_the_same_failure_of_several_rollouts_is_printed_once(tmp_path: Path) -> None:
    await process(FailedInstall, tmp_path, does_nothing, total_steps=2, group_size=2)
    said = (tmp_path / "console.txt").read_text()
    assert said.count("exception in the environment") == 1
    assert "retrying\nretrying\n" in said, "the end of its output comes with the traceback"


async def test_a_set_up_that_asks_a_model_server_in_vain_is_the_infrastructures(tmp_path: Path) -> None:
    class Asks(SortWords):
        async def setup_sandbox(self, item: Any, ctx: Any) -> None:
            await self.server.chat([{"role": "user", "content": "Write a task."}])

    result = await process(Asks, tmp_path, [503], total_steps=1, group_size=1)
    (rollout,) = rollouts(result.files.failures)
    assert (rollout["unscored_kind"], rollout["traceback"]) == ("model_server", None)


async def test_the_image_of_a_class_is_the_default_of_its_setting() -> None:
    class Imaged(SortWords):
        image = "debian:13"
        images = ("a list of the environment's own",)

    assert Imaged.env_config_cls().terminal_image == "debian:13" == Imaged.image
    assert Imaged.env_config_cls(terminal_image="alpine").terminal_image == "alpine"
