"""Rewards that call their context as in the removed Hermes stack, without `await`, against real sandboxes."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import resource
import threading
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from backends import BackendError, SandboxLost, create_backend
from backends.errors import LachesisError
from environments.tool_context import ToolContext
from lachesis.loop.open_runs import OpenRun, opened
from lachesis.loop.outcome import Outcome
from lachesis.loop.result import AgentResult
from lachesis.rewards.reward import RewardError
from lachesis.rewards.scorer import Scorer
from lachesis_compat.modules.model_tools import handle_function_call
from lachesis_compat.synchronous import with_blocking_calls
from lachesis_messages.history import MessageHistory
from lachesis_tools import BUILTIN_TOOLS, ToolSessions
from tests.run import some
from tests.support.small_envs import OldSortWords, does_nothing, kill_sandboxes, lines, process, rollouts, sandboxes


@pytest.fixture
async def run() -> AsyncIterator[OpenRun]:
    async with ToolSessions(create_backend("local")) as sessions:
        run = OpenRun(sessions, BUILTIN_TOOLS, asyncio.get_running_loop())
        with opened(run):
            yield run


@pytest.fixture
def ctx(run: OpenRun) -> ToolContext:
    return ToolContext("task")


def finished() -> AgentResult:
    history = MessageHistory([{"role": "user", "content": "Work."}])
    return AgentResult(1, True, [], [], Outcome.COMPLETED, "done", history)


async def scored(reward: Any, ctx: ToolContext, timeout: float = 60) -> tuple[float | None, str]:
    """The score of a reward `(item, result, ctx)`, and the traceback or the fault of the agent."""
    found = await Scorer("env", reward, timeout=timeout, context_class=ToolContext).score(None, finished(), ctx)
    return found.value.value if found.value is not None else None, found.traceback or "".join(found.faults.values())


async def test_results_have_the_old_shapes_and_the_new_ones(ctx: ToolContext, tmp_path: Path) -> None:
    (tmp_path / "up" / "deep").mkdir(parents=True)
    (tmp_path / "up" / "deep" / "a").write_bytes(b"12345")
    (tmp_path / "up" / "b").write_text("123")

    async def reward(item: Any, result: Any, ctx: Any) -> float:
        shown = ctx.terminal("echo out; exit 3", timeout=10)
        assert (shown["output"], shown["exit_code"], shown.get("error")) == ("out\n", 3, None)
        written = ctx.write_file("deep/error.txt", "an error\n")
        assert written["success"] and written["bytes_written"] == 9 and not written.get("error")
        text = ctx.read_file("deep/error.txt")
        assert text == "an error\n" == text["content"] == text.get("content") == await ctx.read_file("deep/error.txt")
        assert text.get("error") is None and "content" in text and "error" not in text, "keys, as in a dictionary"
        assert "error" in await ctx.read_file("deep/error.txt"), "and text, where it was awaited"
        assert "error" in await text and text["total_lines"] == 1 and text[:2] == "an"
        uploaded = ctx.upload_file(str(tmp_path / "up" / "b"), "b")
        assert uploaded["exit_code"] == 0 and uploaded["success"]
        downloaded = ctx.download_file("b", str(tmp_path / "down"))
        assert downloaded == {**downloaded, "success": True, "bytes": 3} and "error" not in downloaded
        assert [each["bytes"] for each in ctx.upload_dir(str(tmp_path / "up"), "/tmp/up")] == [3, 5]
        assert all(each.get("success") for each in ctx.download_dir("/tmp/up", str(tmp_path / "back")))
        assert (tmp_path / "back" / "deep" / "a").read_bytes() == b"12345"
        assert "error.txt" in str(ctx.search("an err", path="deep"))
        assert "error" in ctx.call_tool("no_such_tool", {}) and ctx.web_search("x").get("error")
        called = ctx.call_tool(tool_name="read_file", arguments={"path": "deep/error.txt"})
        by_id = await asyncio.to_thread(handle_function_call, "read_file", {"path": "deep/error.txt"}, ctx.task_id)
        assert "an error" in json.loads(called)["content"] and called == by_id == await called
        assert ctx.read_bytes("b") == b"123"
        verifier = ctx.seal(["b"])
        assert verifier.read_file("b") == "123" and (await verifier).terminal("ls")["output"] == "b\n"
        return 1.0

    assert await scored(reward, ctx) == (1.0, "")


async def test_a_missing_file_is_an_answer_without_await_and_an_error_with_it(ctx: ToolContext, tmp_path: Path) -> None:
    calls: list[Any] = [
        lambda ctx: ctx.download_file("nowhere", tmp_path / "x"),
        lambda ctx: ctx.upload_file(tmp_path / "nowhere", "x"),
        lambda ctx: ctx.write_file("/proc/none", "x"),
        lambda ctx: ctx.download_dir("nowhere", tmp_path / "y"),
        lambda ctx: ctx.upload_dir(tmp_path / "nowhere", "y"),
    ]

    async def reward(item: Any, result: Any, ctx: Any) -> float:
        for number, call in enumerate(calls):
            given = call(ctx)
            reply = given[0] if number > 2 else given
            assert reply["success"] is False and reply["error"] and reply["exit_code"] != 0, number
            with pytest.raises(OSError):
                await given
        text = ctx.read_file("nowhere")
        assert text == "" and "error" in text and "content" not in text and "nowhere" in text["error"]
        for missing in (lambda: ctx.read_file("nowhere", default=None), lambda: ctx.read_bytes("nowhere")):
            with pytest.raises(FileNotFoundError):
                missing()
        with pytest.raises(FileNotFoundError):
            await ctx.download_file("nowhere", tmp_path / "x")
        return 1.0

    def plain(item: Any, result: Any, ctx: Any) -> float:
        for call in calls:
            with pytest.raises(OSError):
                call(ctx)
        return 1.0 if "error" not in ctx.read_file("nowhere") else 0.0

    assert await scored(reward, ctx) == (1.0, "")
    assert await scored(plain, ctx) == (1.0, "")
    assert [call.error[:17] for call in ctx.calls if call.method == "upload_file"] == ["FileNotFoundError"] * 2


async def test_this_machines_full_disk_is_no_answer(ctx: ToolContext) -> None:
    async def reward(item: Any, result: Any, ctx: Any) -> float:
        ctx.write_file("f", "x" * 10_000)
        reply = ctx.download_file("f", "/dev/full/f")
        assert "error" in reply
        return 1.0

    assert (await scored(reward, ctx))[0] == 1.0, "a path that cannot be, on the other hand, is"


async def test_a_call_that_cannot_work_is_no_low_score(ctx: ToolContext) -> None:
    """The trap: a reward that makes 0.0 of every exception."""

    async def reward(item: Any, result: Any, ctx: Any) -> float:
        try:
            made: asyncio.Future[Any] = asyncio.get_running_loop().create_future()
            asyncio.get_running_loop().call_soon(lambda: made.set_result(ctx.terminal("true")))
            return 1.0 if (await made)["exit_code"] == 0 else 0.0
        except Exception:
            return 0.0

    score, trace = await scored(reward, ctx)
    assert score is None
    assert "env: compute_reward: ctx.terminal() at " in trace and f"{Path(__file__).name}:" in trace
    assert "was never awaited" in trace


async def test_a_worker_that_was_there_before_the_reward_is_no_trap_either(ctx: ToolContext) -> None:
    jobs: asyncio.Queue[Any] = asyncio.Queue()

    async def work() -> None:
        while True:
            ctx, score = await jobs.get()
            try:
                score.set_result(float(ctx.terminal("true")["exit_code"] == 0))
            except Exception:
                score.set_result(0.0)

    async def reward(item: Any, result: Any, ctx: Any) -> float:
        score = asyncio.get_running_loop().create_future()
        await jobs.put((ctx, score))
        return float(await score)

    working = asyncio.create_task(work())
    score, trace = await scored(reward, ctx)
    working.cancel()
    assert score is None and "never awaited" in trace and Path(__file__).name in trace


async def test_a_task_that_was_given_the_context_and_forgotten_is_no_low_score(ctx: ToolContext) -> None:
    scores = [0.0]

    async def check(ctx: Any) -> None:
        scores[0] = float(ctx.terminal("true")["exit_code"] == 0)

    async def reward(item: Any, result: Any, ctx: Any) -> float:
        tasks.append(asyncio.create_task(check(ctx)))
        await asyncio.sleep(0)
        return scores[0]

    tasks: list[asyncio.Task[None]] = []
    score, trace = await scored(reward, ctx)
    assert score is None and "ctx.terminal() at " in trace and "was still running" in trace
    tasks[0].cancel()


async def test_a_file_that_the_agent_left_out_is_its_fault_without_await_too(ctx: ToolContext) -> None:
    async def reward(item: Any, result: Any, ctx: Any) -> float:
        return float(ctx.read_bytes("nowhere") == b"")

    score, fault = await scored(reward, ctx)
    assert score is None and "read_bytes: " in fault and "No such file" in fault


async def test_time_runs_out_in_a_call_without_await(ctx: ToolContext) -> None:
    async def reward(item: Any, result: Any, ctx: Any) -> float:
        try:
            ctx.terminal("echo begun > begun; sleep 3; echo late > late", timeout=100)
        except BaseException:
            return 0.0
        return 1.0

    await ctx.terminal("true")  # the sandbox is there: a busy machine needs more than that time to start one
    score, trace = await scored(reward, ctx, timeout=2)
    assert score is None and "reward_timeout = 2 s" in trace
    await asyncio.sleep(1.5)
    assert (await ctx.terminal("ls"))["output"] == "begun\n", "the command was killed"


async def test_a_lost_sandbox_is_no_score_however_it_is_called(run: OpenRun) -> None:
    async def inside(item: Any, result: Any, ctx: Any) -> float:
        with contextlib.suppress(Exception):
            ctx.terminal("true")
        return 0.0

    async def in_a_thread(item: Any, result: Any, ctx: Any) -> float:
        with contextlib.suppress(Exception):
            await asyncio.get_running_loop().run_in_executor(None, ctx.terminal, "true")
        return 0.0

    async def by_hand(item: Any, result: Any, ctx: Any) -> float:
        def check() -> None:
            with contextlib.suppress(Exception):
                ToolContext(ctx.task_id).terminal("true")

        thread = threading.Thread(target=check)
        thread.start()
        await asyncio.to_thread(thread.join)
        return 0.0

    def another(item: Any, result: Any, ctx: Any) -> float:
        with contextlib.suppress(Exception):
            ToolContext(f"{ctx.task_id}-tests").terminal("true")
            kill_sandboxes()
            ToolContext(f"{ctx.task_id}-tests").terminal("true")
        return 0.0

    async def another_in_a_thread(item: Any, result: Any, ctx: Any) -> float:
        return await asyncio.get_running_loop().run_in_executor(None, another, item, result, ctx)

    for reward in (inside, in_a_thread, by_hand, another, another_in_a_thread):
        ctx = ToolContext(reward.__name__)
        await ctx.terminal("true")
        if reward not in (another, another_in_a_thread):
            kill_sandboxes()
        with pytest.raises(SandboxLost):
            await scored(reward, ctx)
        await ctx.cleanup()


async def test_too_many_open_files_on_this_machine_are_no_low_score(ctx: ToolContext, tmp_path: Path) -> None:
    (tmp_path / "up").write_text("1")
    await ctx.write_file("down", "1")
    calls: list[Any] = [
        lambda ctx: ctx.upload_file(tmp_path / "up", "up"),
        lambda ctx: ctx.download_file("down", tmp_path / "down"),
    ]

    async def reward(item: Any, result: Any, ctx: Any) -> float:
        with contextlib.suppress(Exception):
            return 0.5 if call(ctx)["success"] else 0.0
        return 0.0

    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    for call in calls:  # noqa: B007  # the reward takes it
        ctx = ToolContext("files")
        await ctx.terminal("touch down")
        taken = [os.open("/dev/null", os.O_RDONLY)]
        resource.setrlimit(resource.RLIMIT_NOFILE, (taken[0] + 1, hard))
        try:
            with contextlib.suppress(OSError):
                while True:
                    taken.append(os.open("/dev/null", os.O_RDONLY))
            with pytest.raises(BackendError, match=r"failed on this machine: .*Too many open files"):
                await scored(reward, ctx)
        finally:
            resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
            for each in taken:
                os.close(each)
        await ctx.cleanup()


async def test_threads_that_wait_for_calls_leave_some_for_the_calls(ctx: ToolContext, tmp_path: Path) -> None:
    async def reward(item: Any, result: Any, ctx: Any) -> float:
        ctx.write_file("f", "1")
        loop = asyncio.get_running_loop()
        names = [tmp_path / str(number) for number in range(100)]
        found = await asyncio.gather(*(loop.run_in_executor(None, ctx.download_file, "f", name) for name in names))
        return float(all(reply["success"] for reply in found))

    assert await scored(reward, ctx) == (1.0, "")


async def test_a_reward_in_a_plain_decorator_has_the_old_shapes(ctx: ToolContext) -> None:
    def timed(function: Any) -> Any:
        return lambda *args: function(*args)

    @timed
    async def reward(item: Any, result: Any, ctx: Any) -> float:
        ctx.write_file("f", "no error")
        return float(not ctx.download_file("nowhere", "x")["success"] and "error" not in ctx.read_file("f"))

    assert await scored(reward, ctx) == (1.0, "")


async def test_a_context_made_by_hand_is_that_of_the_task(run: OpenRun) -> None:
    def tests(name: str) -> float:
        ctx = ToolContext(name)
        ctx.write_file("from-thread", "1")
        return float(ctx.terminal("cat from-thread")["exit_code"] == 0)

    async def evaluate() -> list[Any]:
        async def one(name: str) -> Any:
            ctx = ToolContext(task_id=name)
            try:
                by_thread = await asyncio.get_running_loop().run_in_executor(None, tests, name)
                seen = ctx.read_file("from-thread")
                await ctx.terminal("true")
                return by_thread, seen, ctx.terminal("hostname")["exit_code"], len(ctx.calls)
            finally:
                ctx.cleanup()

        return await asyncio.gather(*(asyncio.create_task(one(f"eval-{number}")) for number in range(3)))

    assert await with_blocking_calls(evaluate(), name="env: evaluate") == [(1.0, "1", 0, 5)] * 3
    assert len(run.sessions) == 0, "cleanup closed them"


async def test_a_context_made_by_hand_needs_a_run() -> None:
    with pytest.raises(LachesisError, match="inside a run"):
        ToolContext("nobody")


async def test_calls_of_a_context_made_by_hand_that_nobody_takes_are_an_error_too(run: OpenRun) -> None:
    async def evaluate() -> None:
        asyncio.get_running_loop().call_soon(lambda: ToolContext("task").terminal("true"))
        await asyncio.sleep(0.01)

    with pytest.raises(RewardError, match=r"env: evaluate: ctx\.terminal\(\) at .*never awaited"):
        await with_blocking_calls(evaluate(), name="env: evaluate")


STEPS = st.lists(
    st.tuples(
        st.sampled_from(["write", "append", "read", "missing", "download", "bytes"]),
        st.sampled_from("ab"),
        st.sampled_from(["plain", "await", "task", "gather", "thread"]),
    ),
    max_size=8,
)


def test_any_order_of_calls_gives_what_awaited_calls_give(tmp_path: Path) -> None:
    def call(ctx: Any, kind: str, name: str) -> Any:
        match kind:
            case "write":
                return lambda: ctx.write_file(f"files/{name}", f"{kind} {name}\n")
            case "append":
                return lambda: ctx.terminal(f"mkdir -p files; echo more >> files/{name}; cat files/{name}")
            case "read":
                return lambda: ctx.read_file(f"files/{name}")
            case "missing":
                return lambda: ctx.read_file(f"missing/{name}", default="none")
            case "download":
                return lambda: ctx.download_file("/etc/passwd", tmp_path / name)
        return lambda: ctx.read_bytes("/etc/passwd")

    async def played(ctx: Any, steps: Any, awaited: bool) -> list[Any]:
        results: list[Any] = []
        for kind, name, way in steps:
            run = call(ctx, kind, name)
            if awaited or way == "await":
                results.append(await run())
            elif way == "plain":
                results.append(run())
            elif way == "task":
                results.append(await asyncio.create_task(run()))
            elif way == "gather":
                results += await asyncio.gather(run())
            else:
                results.append(await asyncio.to_thread(run))
        await ctx.terminal("rm -rf files")
        return results

    async def start() -> tuple[ToolSessions, Any]:
        sessions = ToolSessions(create_backend("local"))
        return sessions, ToolContext(sessions.open("task"), BUILTIN_TOOLS)

    with asyncio.Runner() as runner:
        sessions, ctx = runner.run(start())

        @settings(max_examples=some(25), deadline=None, derandomize=True)
        @given(STEPS)
        def check(steps: Any) -> None:
            mixed = runner.run(with_blocking_calls(played(ctx, steps, awaited=False)))
            assert mixed == runner.run(with_blocking_calls(played(ctx, steps, awaited=True)))

        check()
        runner.run(sessions.close_all())


# Through whole runs.


async def test_a_group_is_scored_without_await(tmp_path: Path) -> None:
    class Both(OldSortWords):
        async def compute_reward(self, item: Any, result: Any, ctx: Any) -> float:
            ctx.write_file("out.txt", ctx.task_id)
            return 0.0

        async def compute_group_reward(self, item: Any, results: Any, ctxs: Any) -> Any:
            texts = [ctx.read_file("out.txt")["content"] for ctx in ctxs]
            return [float(text == ctx.task_id) for text, ctx in zip(texts, ctxs, strict=True)]

    result = await process(Both, tmp_path, does_nothing, total_steps=1)
    (group,) = lines(result.files.groups)
    assert group["scores"] == [1.0, 1.0]
    methods = [[call["method"] for call in rollout["reward_calls"]] for rollout in group["rollouts"]]
    assert methods == [["write_file", "read_file"]] * 2


async def test_a_run_that_is_cancelled_during_a_call_without_await_leaves_nothing(tmp_path: Path) -> None:
    begun = asyncio.Event()

    class Slow(OldSortWords):
        async def compute_reward(self, item: Any, result: Any, ctx: Any) -> float:
            with contextlib.suppress(Exception):
                ctx.terminal("true")
                begun.set()
                ctx.terminal("sleep 60", timeout=100)
            return 0.0

    running = asyncio.create_task(process(Slow, tmp_path, does_nothing, total_steps=1))
    await asyncio.wait_for(begun.wait(), 60)
    await asyncio.sleep(0.2)
    running.cancel()
    with pytest.raises(asyncio.CancelledError):
        await running
    assert not lines(tmp_path / "groups.jsonl") and not lines(tmp_path / "groups.failed.jsonl")
    assert sandboxes() == set()


async def test_a_blocked_event_loop_leaves_the_rollout_unscored_and_names_the_place(tmp_path: Path) -> None:
    from concurrent.futures import ThreadPoolExecutor

    class Blocks(OldSortWords):
        async def compute_reward(self, item: Any, result: Any, ctx: Any) -> float:
            with ThreadPoolExecutor(1) as pool:
                try:
                    return float(pool.submit(ctx.terminal, "true").result()["exit_code"] == 0)
                except Exception:
                    return 0.0

    result = await process(Blocks, tmp_path, does_nothing, total_steps=1)
    found = rollouts(result.files.failures)
    assert [rollout["reward"] for rollout in found] == [None, None]
    assert all("asyncio.to_thread" in rollout["traceback"] for rollout in found)
    assert all(f"{Path(__file__).name}:" in rollout["traceback"] for rollout in found)
