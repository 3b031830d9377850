"""What an environment inherits: rollouts are isolated, rewards see the sandbox, and failure is never zero."""

from __future__ import annotations

import asyncio
import os
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import Any

import pytest
from aiohttp import web

from environments.tool_context import ToolContext
from lachesis.runs import command_line as cli
from lachesis.runs.failures import RunStopped
from lachesis.runs.results import RunResult
from lachesis.settings.server_settings import Phase1CannotTrain
from lachesis_client import TokenTrackingUnavailable, Unauthorized
from tests.support.busy_machine import busy_machine
from tests.support.scripted_server import ScriptedServer, call, say
from tests.support.small_envs import (
    ROOT,
    OldSortWords,
    SortWords,
    does_nothing,
    kill_sandboxes,
    lines,
    make,
    process,
    rollouts,
    sandboxes,
    served,
    sorts,
)


async def test_an_environment_in_ten_lines_works(tmp_path: Path) -> None:
    before = dict(os.environ)
    async with ScriptedServer(sorts) as server:
        env = make(SortWords, server, tmp_path, total_steps=3)
        result = await env.process_manager()
    assert isinstance(result, RunResult)
    assert (result.summary.items, result.summary.rollouts, result.summary.reward.mean) == (3, 6, 1.0)
    assert sandboxes() == set()
    assert env._tokenizer is None, "Phase 1 loads no tokenizer"
    assert dict(os.environ) == before
    assert all("tools" in request for request in server.requests)


async def test_one_rollout_one_sandbox(tmp_path: Path) -> None:
    seen: list[str] = []

    class Marked(SortWords):
        async def compute_reward(self, item: Any, result: Any, ctx: Any) -> float:
            found = await ctx.terminal("ls ~ /workspace /tmp; cat /workspace/mark")
            seen.append(found["output"])
            return 1.0

    def marks(request: dict[str, Any]) -> Any:
        if request["messages"][-1]["role"] == "tool":
            return say("Done.")
        marks.count += 1  # type: ignore[attr-defined]
        return call(("terminal", {"command": f"echo rollout-{marks.count} >> mark; sleep 0.2"}))  # type: ignore[attr-defined]

    marks.count = 0  # type: ignore[attr-defined]
    await process(Marked, tmp_path, marks, total_steps=1, group_size=4)
    assert sorted(text.split()[-1] for text in seen) == [f"rollout-{number}" for number in (1, 2, 3, 4)]
    assert all(text.count("rollout-") == 1 for text in seen)


# Rewards.


async def test_async_all_the_way_a_plain_reward_waits_in_a_thread_of_its_own(tmp_path: Path) -> None:
    shown: dict[str, Any] = {}
    (tmp_path / "up" / "deep").mkdir(parents=True)
    (tmp_path / "up" / "deep" / "a.bin").write_bytes(bytes(range(256)))

    class Plain(SortWords):
        def compute_reward(self, item: Any, result: Any, ctx: Any) -> float:  # type: ignore[override]
            shown["thread"] = threading.current_thread() is not threading.main_thread()
            shown["terminal"] = ctx.terminal("pwd; echo oops >&2; exit 3")
            shown["slow"] = ctx.terminal("sleep 30", timeout=0.3)
            ctx.write_file("made/by/reward.txt", "needle\n")
            shown["read"] = ctx.read_file("made/by/reward.txt")
            shown["missing"] = ctx.read_file("nowhere.txt")
            shown["search"] = str(ctx.search("need.e"))
            ctx.upload_dir(tmp_path / "up", "arrived")
            shown["uploaded"] = ctx.terminal("ls arrived/deep")["output"].split()
            ctx.upload_file(tmp_path / "up" / "deep" / "a.bin", "~/a.bin")
            ctx.download_file("/home/agent/a.bin", tmp_path / "down" / "a.bin")
            ctx.download_dir("arrived", tmp_path / "downdir")
            shown["tool"] = ctx.call_tool("read_file", {"path": "made/by/reward.txt"})
            shown["no tool"] = ctx.web_search("x")
            with pytest.raises(FileNotFoundError):
                ctx.read_file("nowhere.txt", default=None)
            return 0.25

    # The agent leaves its shell in another folder: paths of the reward start at the workspace all the same.
    script = [call(("terminal", {"command": "mkdir -p /tmp/elsewhere && cd /tmp/elsewhere"})), say("Done.")]
    result = await process(Plain, tmp_path, script, total_steps=1, group_size=1)
    assert rollouts(result.files.groups)[0]["traceback"] is None
    assert shown["thread"]
    assert shown["terminal"] == {"output": "/workspace\noops\n", "exit_code": 3, "error": None}
    assert shown["slow"]["exit_code"] == 124
    assert "longer than 0.3 s" in shown["slow"]["error"]
    assert (shown["read"], shown["missing"]) == ("needle\n", "")
    assert "reward.txt" in shown["search"]
    assert shown["uploaded"] == ["a.bin"]
    assert (tmp_path / "down" / "a.bin").read_bytes() == bytes(range(256))
    assert (tmp_path / "downdir" / "deep" / "a.bin").read_bytes() == bytes(range(256))
    assert "needle" in shown["tool"]
    assert "web_search" in str(shown["no tool"])
    assert result.summary.reward.mean == 0.25


async def test_a_reward_may_fetch_several_folders_at_once(tmp_path: Path) -> None:
    class Fetches(SortWords):
        async def compute_reward(self, item: Any, result: Any, ctx: Any) -> float:
            names = [str(number) for number in range(4)]
            for name in names:
                await ctx.write_file(f"{name}/file.txt", name * 1_000_000)
            await asyncio.gather(*(ctx.download_dir(name, tmp_path / "down" / name) for name in names))
            return float(all((tmp_path / "down" / n / "file.txt").read_text() == n * 1_000_000 for n in names))

    result = await process(Fetches, tmp_path, does_nothing, total_steps=1, group_size=1)
    assert result.summary.reward.mean == 1.0


async def test_a_plain_reward_that_hands_over_to_a_coroutine_does_not_stop_the_run(tmp_path: Path) -> None:
    class Handed(SortWords):
        def compute_reward(self, item: Any, result: Any, ctx: Any) -> Any:  # type: ignore[override]
            return super().compute_reward(item, result, ctx)

    result = await asyncio.wait_for(process(Handed, tmp_path), 60)
    assert result.summary.reward.mean == 1.0


@pytest.mark.parametrize("kind", ["async", "plain"])
async def test_failure_is_not_zero_an_exception_in_a_reward_touches_no_sibling(tmp_path: Path, kind: str) -> None:
    def judge(self: SortWords) -> float:
        self.judged = getattr(self, "judged", 0) + 1  # type: ignore[attr-defined]
        if self.judged == 2:  # type: ignore[attr-defined]
            raise ZeroDivisionError("the judge is broken")
        return 0.75

    class Async(SortWords):
        async def compute_reward(self, item: Any, result: Any, ctx: Any) -> float:
            return judge(self)

    class Plain(SortWords):
        def compute_reward(self, item: Any, result: Any, ctx: Any) -> float:  # type: ignore[override]
            return judge(self)

    result = await process(Async if kind == "async" else Plain, tmp_path, total_steps=1, group_size=3)
    (group,) = lines(result.files.groups)
    assert group["scores"] == [0.75, 0.75]
    assert sorted(str(rollout["reward"]) for rollout in group["rollouts"]) == ["0.75", "0.75", "None"]
    (broken,) = [rollout for rollout in group["rollouts"] if rollout["reward"] is None]
    assert "ZeroDivisionError: the judge is broken" in broken["traceback"]
    assert len(broken["messages"]) == 4, "what the agent did is kept"
    assert result.summary.reward.mean == 0.75
    assert result.exceptions == 1
    assert "the judge is broken" in (tmp_path / "console.txt").read_text()


@pytest.mark.parametrize(
    ("given", "trace"),
    [
        (float("nan"), "must be finite"),
        (float("inf"), "must be finite"),
        ("1.0", "must be a number"),
        ([1.0], "must be a number"),
        (10**400, "must be a number"),
        (None, None),
        (TimeoutError("the judge's own"), "the judge's own"),
        (SystemExit(0), "SystemExit"),
    ],
)
async def test_a_reward_that_is_no_number_leaves_the_rollout_out(tmp_path: Path, given: Any, trace: str | None) -> None:
    class Strange(SortWords):
        async def compute_reward(self, item: Any, result: Any, ctx: Any) -> Any:
            if isinstance(given, BaseException):
                raise given
            return given if "apple" in item else 0.5

        async def setup(self) -> None:
            self.items = iter(["pear apple", "b a"])

        async def get_next_item(self) -> Any:
            return next(self.items, None)

    result = await process(Strange, tmp_path, does_nothing, group_size=1)
    found = [*rollouts(result.files.failures), *rollouts(result.files.groups)]
    assert found[0]["reward"] is None
    if trace is None:
        assert found[0]["traceback"] is None
    else:
        assert trace in found[0]["traceback"]
    assert all(rollout["reward"] != 0.0 for rollout in found)


async def test_a_reward_that_hangs_ends_at_its_limit_and_holds_nobody_up(tmp_path: Path) -> None:
    unwound: list[str] = []

    class Hangs(SortWords):
        def compute_reward(self, item: Any, result: Any, ctx: Any) -> float:  # type: ignore[override]
            if "apple" not in item:
                return 1.0
            try:
                ctx.terminal("sleep 300", timeout=300)
            except BaseException as error:
                unwound.append(type(error).__name__)
                raise
            return 0.0

    class Sleeps(SortWords):
        def compute_reward(self, item: Any, result: Any, ctx: Any) -> float:  # type: ignore[override]
            time.sleep(300)
            return 0.0

    result = await process(Hangs, tmp_path, does_nothing, group_size=1, reward_timeout=4)
    (late,) = [rollout for rollout in rollouts(result.files.groups) if rollout["agent_fault"]]
    assert late["reward"] == 0.0, "what runs in the sandbox is the agent's: it cannot keep its score from being given"
    assert "of reward_timeout = 4 s" in late["agent_fault"]
    assert sorted(rollout["reward"] for rollout in rollouts(result.files.groups)) == [0.0, 1.0]
    assert unwound == ["RewardIsOver"]

    (tmp_path / "sleeps").mkdir()
    began = time.monotonic()
    settings = {"total_steps": 1, "group_size": 1, "reward_timeout": 0.5}
    result = await process(Sleeps, tmp_path / "sleeps", does_nothing, **settings)
    (slow,) = rollouts(result.files.failures)
    assert slow["reward"] is None and "reward_timeout = 0.5 s" in slow["traceback"], "the reward's own time"
    assert time.monotonic() - began < 200, "nobody waits for the thread"


@pytest.mark.slow
async def test_a_late_reward_on_an_overloaded_machine_is_no_score(tmp_path: Path) -> None:
    class Works(SortWords):
        def compute_reward(self, item: Any, result: Any, ctx: Any) -> float:  # type: ignore[override]
            done = ctx.terminal("python3 -c 'import time\nwhile time.process_time() < 1: pass'", timeout=300)
            return float(done["exit_code"] == 0)

    with busy_machine(14):
        settings = {"total_steps": 1, "group_size": 1, "max_infra_retries": 0, "max_failed_groups": 2}
        result = await process(Works, tmp_path, sorts, reward_timeout=2, **settings)
    (late,) = rollouts(result.files.failures)
    assert late["reward"] is None and late["outcome"] == "infra_error" and "overloaded" in str(late)


@pytest.mark.long
async def test_a_program_of_a_reward_that_sleeps_is_a_score_on_an_overloaded_machine_too(tmp_path: Path) -> None:
    class Sleeps(SortWords):
        async def compute_reward(self, item: Any, result: Any, ctx: Any) -> float:
            done = await ctx.terminal("sleep 600", timeout=900)
            return float(done["exit_code"] == 0)

    with busy_machine(14):
        settings = {"total_steps": 1, "group_size": 1, "max_infra_retries": 0, "max_failed_groups": 2}
        result = await process(Sleeps, tmp_path, sorts, reward_timeout=4, **settings)
    (late,) = rollouts(result.files.groups)
    assert late["reward"] == 0.0 and "of reward_timeout = 4 s" in late["agent_fault"]


async def test_a_cancelled_error_of_the_rewards_own_doing_is_an_exception_and_no_rollout_is_lost(
    tmp_path: Path,
) -> None:
    class Leaks(SortWords):
        async def compute_reward(self, item: Any, result: Any, ctx: Any) -> float:
            if "apple" in item:
                inner = asyncio.create_task(asyncio.sleep(9))
                await asyncio.sleep(0)
                inner.cancel()
                await inner
            return 1.0

    class LeaksInPrompt(SortWords):
        def format_prompt(self, item: Any) -> str:
            raise asyncio.CancelledError

    result = await process(Leaks, tmp_path, does_nothing, group_size=1)
    (lost,) = rollouts(result.files.failures)
    assert (lost["outcome"], lost["reward"]) == ("completed", None)
    assert "CancelledError" in lost["traceback"]
    assert (result.played, result.failed_groups, result.exceptions) == (1, 1, 1)

    (tmp_path / "prompt").mkdir()
    result = await process(LeaksInPrompt, tmp_path / "prompt", does_nothing, total_steps=1)
    assert (result.failed_groups, result.exceptions) == (1, 2)


async def test_a_reward_that_edits_the_messages_changes_no_record(tmp_path: Path) -> None:
    class Edits(SortWords):
        async def compute_reward(self, item: Any, result: Any, ctx: Any) -> float:
            result.messages[-1]["content"] = result.messages.pop(0)["content"]
            return 1.0

    result = await process(Edits, tmp_path, does_nothing, total_steps=1)
    (group,) = lines(result.files.groups)
    assert [[message["role"] for message in messages] for messages in group["messages"]] == [["user", "assistant"]] * 2
    assert group["messages"][0][-1]["content"] == "I would rather not."


async def test_a_call_without_a_name_neither_stops_the_run_nor_spoils_its_folder(tmp_path: Path) -> None:
    result = await process(SortWords, tmp_path, lambda _: call(("", {})))
    assert result.summary.outcomes == {"model_error": 4}
    assert (await process(SortWords, tmp_path, does_nothing, total_steps=3)).played == 1


async def test_figures_that_cannot_be_computed_keep_the_reward_and_show_the_exception(tmp_path: Path) -> None:
    class Measured(SortWords):
        def rollout_metrics(self, item: Any, result: Any, reward: Any) -> Any:
            return {"share": 0.5} if "apple" in item else {"share": float("nan")}

    result = await process(Measured, tmp_path, group_size=1)
    good, bad = sorted(rollouts(result.files.groups), key=lambda rollout: rollout["traceback"] is not None)
    assert (good["reward"], good["metrics"]) == (1.0, {"share": 0.5})
    assert (bad["reward"], bad["metrics"]) == (1.0, {})
    assert "share" in bad["traceback"]


# What the infrastructure breaks.


DEADLY = "kill -9 $PPID; sleep 1000"
"""Where nothing walls it off, the executor is the shell's parent."""


async def test_a_sandbox_that_dies_is_played_again_in_a_fresh_one(tmp_path: Path) -> None:
    attempts: list[str] = []

    def deadly_once(request: dict[str, Any]) -> Any:
        if request["messages"][-1]["role"] == "tool":
            return say("Done.")
        attempts.append("")
        return call(("terminal", {"command": DEADLY if len(attempts) == 1 else "echo quick > sorted.txt"}))

    settings = {"total_steps": 1, "group_size": 1, "sandbox": "none", "max_infra_retries": 2}
    result = await process(SortWords, tmp_path, deadly_once, **settings)
    (rollout,) = rollouts(result.files.groups)
    assert (rollout["attempts"], rollout["reward"], rollout["outcome"]) == (2, 0.0, "completed")
    assert len(rollout["retried_after"]) == 1
    assert result.tokens == rollout["completion_tokens"] + rollout["lost_completion_tokens"] == 15


async def test_failure_is_not_zero_what_stays_broken_is_left_out_and_counted(tmp_path: Path) -> None:
    def first_is_deadly(request: dict[str, Any]) -> Any:
        return call(("terminal", {"command": DEADLY})) if len(server.requests) == 1 else sorts(request)

    settings = {"total_steps": 1, "group_size": 3, "sandbox": "none"}
    async with ScriptedServer(first_is_deadly) as server:
        result = await make(SortWords, server, tmp_path, **settings).process_manager()
    (group,) = lines(result.files.groups)
    assert group["scores"] == [1.0, 1.0]
    (broken,) = [rollout for rollout in group["rollouts"] if rollout["reward"] is None]
    assert broken["outcome"] == "infra_error"
    assert result.summary.outcomes == {"completed": 2, "infra_error": 1}
    assert (result.summary.reward.mean, result.summary.rollouts, result.summary.scored) == (1.0, 3, 2)
    assert result.exceptions == 0
    assert sandboxes() == set()


async def test_a_sandbox_that_dies_under_a_reward_which_hides_it_is_no_zero(tmp_path: Path) -> None:
    class Hides(SortWords):
        async def compute_reward(self, item: Any, result: Any, ctx: Any) -> float:
            await ctx.terminal("true")
            kill_sandboxes()
            try:
                await ctx.terminal("sleep 100")
            except Exception:
                return 0.0
            return 1.0

    settings = {"total_steps": 1, "group_size": 1, "max_infra_retries": 1}
    result = await process(Hides, tmp_path, does_nothing, **settings)
    (rollout,) = rollouts(result.files.failures)
    assert (rollout["reward"], rollout["outcome"], rollout["attempts"]) == (None, "infra_error", 2)


def test_a_server_that_goes_down_stops_the_run_with_a_message(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    def goes_down(request: dict[str, Any]) -> Any:
        return sorts(request) if len(server.requests) <= 4 else 503

    class Listed(SortWords):
        async def setup(self) -> None:
            self.items = iter([f"b a {number}" for number in range(20)])

        async def get_next_item(self) -> Any:
            return next(self.items, None)

    with served(goes_down) as server:
        arguments = ["process", "--env.total_steps", "20", "--env.group_size", "1", "--env.max_num_workers", "1"]
        arguments += ["--openai.base_url", server.base_url, "--openai.model_name", "scripted", "--openai.max_retries=0"]
        arguments += ["--env.max_infra_retries", "0", "--env.max_failed_groups", "2"]
        arguments += ["--env.data_path_to_save_groups", str(tmp_path / "groups.jsonl")]
        assert cli.main(Listed, arguments) == 1
        requests = len(server.requests)
    shown = capsys.readouterr().err
    assert "2 groups in a row without a scored rollout" in shown
    assert "503" in shown
    assert "start again to continue" in shown
    assert requests == 6
    assert len(lines(tmp_path / "groups.jsonl")) == 2
    assert [rollout["outcome"] for rollout in rollouts(tmp_path / "groups.failed.jsonl")] == ["infra_error"] * 2
    assert (tmp_path / "groups.html").exists()


@pytest.mark.parametrize(("status", "setting"), [(401, "api_key"), (404, "model_name")])
async def test_a_rejection_of_every_request_stops_the_run_at_once(tmp_path: Path, status: int, setting: str) -> None:
    async with ScriptedServer(lambda _: status) as server:
        env = make(SortWords, server, tmp_path, total_steps=50, max_num_workers=2, max_infra_retries=5)
        with pytest.raises(RunStopped, match=setting):
            await env.process_manager()
    own = [request for request in server.requests if request["messages"] != [{"role": "user", "content": "Hi"}]]
    assert len(own) <= 4, "two groups of two rollouts, none of them again"


async def test_a_key_that_is_refused_is_found_before_the_first_rollout(tmp_path: Path) -> None:
    class Closed(ScriptedServer):
        async def _models(self, _: web.Request) -> web.Response:
            return web.json_response({"error": {"message": "bad key"}}, status=401)

    async with Closed(sorts) as server:
        with pytest.raises(Unauthorized, match="api_key"):
            await make(SortWords, server, tmp_path).process_manager()
    assert server.requests == []


# What Phase 1 does not have.


async def test_serve_refuses_to_send_made_up_tokens(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    env = make(SortWords, "http://127.0.0.1:1/v1", tmp_path)
    with pytest.raises(Phase1CannotTrain, match="Phase 2"):
        await env.env_manager()
    with pytest.raises(TokenTrackingUnavailable, match="Phase 2"):
        env.server.managed_server()


def test_serve_exits_with_2_and_says_what_to_do(capsys: pytest.CaptureFixture[str]) -> None:
    server = ["--openai.base_url", "http://127.0.0.1:1/v1", "--openai.model_name", "m"]
    assert cli.main(SortWords, ["serve", *server]) == 2
    shown = capsys.readouterr().err
    assert "Phase 1" in shown
    assert "use `process`" in shown


async def test_a_group_outside_of_a_run_is_refused_not_silently_left_out(tmp_path: Path) -> None:
    env = make(SortWords, "http://127.0.0.1:1/v1", tmp_path)
    with pytest.raises(BaseException) as raised:
        await env.collect_trajectories("b a")
    shown = [str(error) for error in getattr(raised.value, "exceptions", [raised.value])]
    assert any("env.running()" in text for text in shown)


async def test_a_group_in_atropos_shape(tmp_path: Path) -> None:
    async with ScriptedServer(sorts) as server:
        env = make(SortWords, server, tmp_path)
        async with env.running():
            group, backlog = await env.collect_trajectories("b a")
    assert group is not None
    assert (group["scores"], group["tokens"], backlog) == ([1.0, 1.0], None, [])
    assert [message["role"] for message in group["messages"][0]] == ["user", "assistant", "tool", "assistant"]


# No global state.


async def test_environments_with_different_servers_live_side_by_side(tmp_path: Path) -> None:
    (tmp_path / "good").mkdir()
    (tmp_path / "lazy").mkdir()
    good, lazy = await asyncio.gather(
        process(SortWords, tmp_path / "good", sorts), process(SortWords, tmp_path / "lazy", does_nothing)
    )
    assert (good.summary.reward.mean, lazy.summary.reward.mean) == (1.0, 0.0)


async def test_contexts_made_by_hand_in_two_runs_at_once_are_told_apart(tmp_path: Path) -> None:
    """Each run has its own settings of sandboxes, which shows whose sandbox a call without `await` reached."""

    class ByHand(OldSortWords):
        async def compute_reward(self, item: Any, result: Any, ctx: Any) -> float:
            extra = ToolContext(f"extra-{ctx.task_id}")
            own = [extra.terminal("sleep 0.1; echo $RUN")["output"]]
            await asyncio.sleep(0)
            own.append((await asyncio.to_thread(lambda: extra.terminal("echo $RUN")))["output"])
            own.append(ctx.terminal("echo $RUN")["output"])
            extra.cleanup()
            seen.setdefault(own[0].strip(), []).append(own)
            return 1.0

    seen: dict[str, list[list[str]]] = {}
    for name in "ab":
        (tmp_path / name).mkdir()
    settings = {"total_steps": 2, "group_size": 2}
    await asyncio.gather(
        *(process(ByHand, tmp_path / n, does_nothing, terminal_env={"RUN": n}, **settings) for n in "ab")
    )
    assert seen == {name: [[f"{name}\n"] * 3] * 4 for name in "ab"}
    assert sandboxes() == set()


async def test_one_environment_can_run_twice(tmp_path: Path) -> None:
    async with ScriptedServer(sorts) as server:
        env = make(SortWords, server, tmp_path, eval_items=2)
        first = await env._run_evaluate()
        second = await env.process_manager()
    assert (first.summary.reward.mean, second.summary.reward.mean) == (1.0, 1.0)


def test_leaving_in_the_middle_of_a_reward_takes_no_longer_than_the_program(tmp_path: Path) -> None:
    """A program whose reward hangs ends when it is asked to."""
    program = tmp_path / "program.py"
    program.write_text(
        "import asyncio, time\n"
        "from lachesis.rewards.timed_call import RewardThreads\n"
        "async def main():\n"
        "    try:\n"
        "        async with asyncio.timeout(0.2):\n"
        "            await RewardThreads(1).run(time.sleep, 600)\n"
        "    except TimeoutError:\n"
        "        print('left')\n"
        "asyncio.run(main())\n"
    )
    done = subprocess.run([sys.executable, str(program)], cwd=ROOT, capture_output=True, text=True, timeout=60)
    assert done.stdout == "left\n"
