"""Loops, sandboxes and tool calls that an environment makes by hand, with nothing but a task id."""

from __future__ import annotations

import asyncio
import contextlib
import importlib
import json
import logging
import os
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

import lachesis
from backends import BackendError, BackendUnavailable
from lachesis.loop.loop import HermesAgentLoop
from lachesis.loop.open_runs import NoOpenRun, open_run
from lachesis.loop.outcome import Outcome
from lachesis.runs.commands import EvaluationBroken, evaluate_alone
from lachesis_client import ServerUnavailable
from lachesis_tools.budget import ResultBudget
from tests.support.browsers import on_request
from tests.support.job_groups import PICTURE
from tests.support.scripted_server import ScriptedServer, call, say
from tests.support.small_envs import SortWords, does_nothing, make, process, rollouts, sandboxes

assert lachesis.AgentResult  # the old paths below are found once lachesis is imported

from model_tools import get_tool_definitions, handle_function_call  # type: ignore[import-not-found]  # noqa: E402
from tools.terminal_tool import (  # type: ignore[import-not-found]  # noqa: E402
    cleanup_all_environments,
    cleanup_vm,
    clear_task_env_overrides,
    get_active_env,
    register_task_env_overrides,
    terminal_tool,
)

ASK = [{"role": "user", "content": "Go."}]


async def in_run(folder: Path, use: Callable[[Any], Any], policy: Any = does_nothing, **settings: Any) -> Any:
    """What `use(env)` gives inside a run."""
    async with ScriptedServer(policy) as server:
        env = make(SortWords, server, folder, **settings)
        async with env.running():
            result = await use(env)
        assert not open_runs()
        return result


def open_runs() -> bool:
    try:
        open_run()
    except NoOpenRun:
        return False
    return True


class Foreign:
    """A server with `chat_completion` and nothing else, whose answers are namespaces with dicts in them."""

    def __init__(self, *answers: Any) -> None:
        self.answers = list(answers)
        self.asked: list[dict[str, Any]] = []

    async def chat_completion(self, **kwargs: Any) -> Any:
        self.asked.append(kwargs)
        answer = self.answers[min(len(self.asked), len(self.answers)) - 1]
        if isinstance(answer, Exception):
            raise answer
        message = SimpleNamespace(role="assistant", content=None, tool_calls=None, reasoning_content="Hm.")
        vars(message).update(answer)
        return SimpleNamespace(choices=[SimpleNamespace(message=message, finish_reason="stop")], usage=None)

    def get_state(self) -> dict[str, Any]:
        return {"nodes": ["of the server"]}


async def test_a_server_with_chat_completion_only_plays_in_the_sandbox_of_the_task(tmp_path: Path) -> None:
    async def use(env: Any) -> None:
        tools, names = env._resolve_tools_for_group()
        in_text = '<tool_call>{"name": "terminal", "arguments": {"command": "cat a.txt"}}</tool_call>'
        server = Foreign(call(("terminal", {"command": "echo 7 > a.txt"})), {"content": in_text}, say("Done."))
        loop = HermesAgentLoop(server, tools, names, 9, "task-1", 0.5, 64, None, env.config.build_budget_config())
        result = await loop.run(ASK)
        assert (result.outcome, result.turns_used) == (Outcome.COMPLETED, 3)
        assert [m["role"] for m in result.messages] == ["user", "assistant", "tool", "assistant", "tool", "assistant"]
        assert result.messages[1]["content"] == "", "old rewards take its length"
        assert json.loads(result.messages[4]["content"])["output"] == "7\n"
        assert result.reasoning_per_turn == ["Hm."] * 3
        assert result.managed_state == {"nodes": ["of the server"]}
        assert {"messages", "n", "temperature", "max_tokens", "tools"} == set(server.asked[0])
        assert get_active_env("task-1") is not None
        cleanup_vm("task-1")
        await asyncio.gather(*open_run().tasks)
        assert get_active_env("task-1") is None

    await in_run(tmp_path, use)
    assert sandboxes() == set()


async def test_a_wrapper_is_asked_itself_and_not_what_it_wraps(tmp_path: Path) -> None:
    class Wrapper:
        def __init__(self, inner: Any) -> None:
            self.inner = inner
            self.answers: list[Any] = []

        def __getattr__(self, name: str) -> Any:
            return getattr(self.inner, name)

        async def chat_completion(self, **kwargs: Any) -> Any:
            self.answers.append(await self.inner.chat_completion(**kwargs))
            return self.answers[-1]

    async def use(env: Any) -> None:
        wrapper = Wrapper(env.server)
        result = await HermesAgentLoop(wrapper, *env._resolve_tools_for_group(), task_id="t").run(ASK)
        assert [answer.choices[0].message.content for answer in wrapper.answers] == ["I would rather not."]
        assert result.final_response == "I would rather not."

    await in_run(tmp_path, use)


async def test_what_breaks_such_a_server_is_raised_and_kept(tmp_path: Path) -> None:
    async def use(env: Any) -> None:
        loop = HermesAgentLoop(Foreign(ConnectionError("gone")), *env._resolve_tools_for_group(), task_id="task-2")
        with pytest.raises(ServerUnavailable, match=r"Foreign: .*ConnectionError: gone"):
            await loop.run(ASK)
        assert list(open_run().failures) == ["task-2"]

    await in_run(tmp_path, use)


async def test_two_tasks_have_two_sandboxes_and_unusable_answers_are_not_sampled_again(tmp_path: Path) -> None:
    async def use(env: Any) -> None:
        tools, names = env._resolve_tools_for_group()

        async def play(task_id: str) -> Any:
            server = Foreign(call(("terminal", {"command": "echo x >> ~/mark; wc -l < ~/mark"})), {"content": ""})
            return server, await HermesAgentLoop(server, tools, names, task_id=task_id).run(ASK)

        for server, result in await asyncio.gather(play("a"), play("b")):
            assert json.loads(result.messages[2]["content"])["output"] == "1\n"
            assert len(server.asked) == 2 and result.outcome is Outcome.MODEL_ERROR
        assert cleanup_all_environments() == 2

    await in_run(tmp_path, use)
    assert sandboxes() == set()


async def test_the_tools_of_the_web_by_their_old_names(tmp_path: Path) -> None:
    (tmp_path / "salt.md").write_text("# Salt\n\nSalt is white.\n")

    async def use(env: Any) -> None:
        assert web_tools.check_firecrawl_api_key()
        offered = get_tool_definitions(["web", "search", "browser"], quiet_mode=True)
        assert [each["function"]["name"] for each in offered] == ["web_search", "web_extract"]
        searched = json.loads(await asyncio.to_thread(web_tools.web_search_tool, "white", limit=1, task_id="t"))
        assert searched["data"]["web"][0]["url"] == "salt.md"
        read = json.loads(await web_tools.web_extract_tool(["salt.md"], "markdown", task_id="t"))
        assert "Salt is white." in read["results"][0]["content"]
        assert "error" in json.loads(await web_tools.web_extract_tool(["other.md"], task_id="t"))

    web_tools = importlib.import_module("tools.web_tools")
    assert not web_tools.check_firecrawl_api_key(), "no run is open"
    await in_run(tmp_path, use, web=f"corpus:{tmp_path}")


@on_request
async def test_the_browser_of_a_task_ends_and_its_sandbox_stays(tmp_path: Path) -> None:
    browser = importlib.import_module("tools.browser_tool")

    async def use(env: Any) -> None:
        assert browser.check_browser_requirements()
        opened = json.loads(await asyncio.to_thread(browser.browser_navigate, "about:blank", task_id="t"))
        assert opened["success"] and opened["snapshot"] == "(empty page)"
        sandbox = await open_run("t").session("t").sandbox()

        async def programs() -> bytes:
            return (await sandbox.exec("cat /proc/[0-9]*/comm", timeout=20)).stdout

        assert b"chromium" in await programs()
        await asyncio.to_thread(browser.cleanup_browser, "t")
        assert b"chromium" not in await programs()
        assert get_active_env("t") is not None

    await in_run(tmp_path, use, enabled_toolsets=["browser"])


async def test_tools_by_name_on_threads(tmp_path: Path) -> None:
    async def use(env: Any) -> None:
        assert {each["function"]["name"] for each in get_tool_definitions(["file", "web"], quiet_mode=True)} == {
            *("read_file", "write_file", "patch", "search_files")
        }
        written = await asyncio.to_thread(
            handle_function_call, "write_file", {"path": "a.txt", "content": "hello"}, task_id="t", user_task="x"
        )
        assert "error" not in written
        assert json.loads(await asyncio.to_thread(terminal_tool, "cat a.txt", task_id="t"))["output"] == "hello"
        assert "error" in json.loads(await asyncio.to_thread(handle_function_call, "no_tool", {}, task_id="t"))
        with pytest.raises(RuntimeError, match="another thread"):
            handle_function_call("todo", {}, task_id="t")
        await asyncio.to_thread(cleanup_vm, "t")
        assert "t" not in open_run().sessions

    await in_run(tmp_path, use)
    with pytest.raises(NoOpenRun):
        handle_function_call("todo", {}, task_id="t")


async def test_overrides_reach_the_sandbox_of_their_task_only(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    async def use(env: Any) -> None:
        register_task_env_overrides("t", {"cwd": "/app", "docker_image": "alpine", "modal_image": ""})
        register_task_env_overrides("u", {"docker_image": "alpine", "gpu": 1})
        where = [json.loads(await asyncio.to_thread(terminal_tool, "pwd", task_id=task))["output"] for task in "tu"]
        assert where == ["/app\n", "/workspace\n"]
        with pytest.raises(RuntimeError, match="has its sandbox already"):
            register_task_env_overrides("t", {"cwd": "/b"})
        with pytest.raises(ValueError, match="absolute path"):
            register_task_env_overrides("v", {"cwd": "app"})
        clear_task_env_overrides("t")
        clear_task_env_overrides("never")

    with caplog.at_level(logging.WARNING):
        await in_run(tmp_path, use)
    assert caplog.text.count("images of single tasks") == 1
    assert "gpu is not known" in caplog.text


async def test_a_backend_with_images_gets_that_of_the_task(tmp_path: Path) -> None:
    async def use(env: Any) -> None:
        run = open_run()
        run.backend, run.takes_images = "docker", True
        register_task_env_overrides("t", {"docker_image": "alpine:3", "modal_image": "other", "cwd": "/app"})
        assert (run.spec("t").image, run.spec("t").workdir) == ("alpine:3", "/app")
        assert run.spec("u") == run.sessions.spec

    await in_run(tmp_path, use)


async def sets_a_variable(command: str) -> str:
    """What a command shows after the environment has set a variable for it, as YC-Bench does."""
    os.environ["SPINDLE_DB"] = "sqlite:///x"
    try:
        return str(json.loads(await asyncio.to_thread(terminal_tool, command, task_id="t"))["output"])
    finally:
        del os.environ["SPINDLE_DB"]


async def test_variables_that_the_environment_sets_reach_commands_without_walls(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.WARNING):
        shown = await in_run(tmp_path, lambda _: sets_a_variable("echo [$SPINDLE_DB]"), sandbox="none")
    assert shown == "[sqlite:///x]\n"
    assert "SPINDLE_DB" in caplog.text


async def test_with_walls_they_are_no_silent_loss(tmp_path: Path) -> None:
    async def use(env: Any) -> None:
        with pytest.raises(
            BackendUnavailable, match=r"sets SPINDLE_DB in os.environ.*Next step: pass values with --env.terminal_env$"
        ):
            await sets_a_variable("true")
        assert list(open_run().failures) == ["t"], "the evaluation is broken, whatever the environment catches"

    await in_run(tmp_path, use)
    given = {"terminal_env": {"SPINDLE_DB": "given"}}
    assert await in_run(tmp_path, lambda _: sets_a_variable("echo $SPINDLE_DB"), **given) == "given\n"


async def test_a_sandbox_that_fails_under_a_call_by_name_is_kept_too(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def use(env: Any) -> None:
        async def lost() -> Any:
            raise BackendError("the sandbox is gone")

        monkeypatch.setattr(open_run().session("t"), "_create", lost)
        with pytest.raises(BackendError, match="is gone"):
            await asyncio.to_thread(terminal_tool, "true", task_id="t")
        assert list(open_run().failures) == ["t"]

    await in_run(tmp_path, use)


@pytest.mark.parametrize(("failures", "scores"), [(2, []), (1, [1.0])])
async def test_a_judge_that_does_not_answer_is_no_score(tmp_path: Path, failures: int, scores: list[float]) -> None:
    answers = [500] * failures + [say("Yes.")]

    class Judged(SortWords):
        async def compute_reward(self, item: Any, result: Any, ctx: Any) -> float:
            for _ in range(2):
                try:
                    await self.server.chat_completion(messages=[{"role": "user", "content": "Judge!"}])
                    return 1.0
                except Exception:
                    pass
            return 0.25

    def policy(request: dict[str, Any]) -> Any:
        return answers.pop(0) if request["messages"][-1]["content"] == "Judge!" else does_nothing(request)

    await process(Judged, tmp_path, policy, total_steps=1, group_size=1)
    written = [path for path in tmp_path.glob("*.jsonl") if "trajector" not in path.name]
    played = [rollout for path in written for rollout in rollouts(path)]
    assert [rollout["reward"] for rollout in played if rollout["reward"] is not None] == scores
    if not scores:
        assert all("a request of the reward failed" in rollout["reason"] for rollout in played)


async def test_a_loop_in_a_reward_that_breaks_is_no_score(tmp_path: Path) -> None:
    class Catches(SortWords):
        async def compute_reward(self, item: Any, result: Any, ctx: Any) -> float:
            with contextlib.suppress(Exception):
                await HermesAgentLoop(Foreign(ConnectionError("gone")), [], task_id="judge").run(ASK)
            return 0.5

    await process(Catches, tmp_path, does_nothing, total_steps=1, group_size=1)
    assert [r["reward"] for path in tmp_path.glob("*groups*.jsonl") for r in rollouts(path)] in ([], [None])


async def test_an_evaluation_whose_own_requests_fail_is_broken(tmp_path: Path) -> None:
    class Asks(SortWords):
        async def evaluate(self, *args: Any, **kwargs: Any) -> None:
            for question in ("One?", "Two?"):
                with contextlib.suppress(Exception):
                    await self.server.chat_completion(messages=[{"role": "user", "content": question}], split="eval")

    def policy(request: dict[str, Any]) -> Any:
        return 500 if request["messages"][-1]["content"] == "One?" else say("Yes.")

    async with ScriptedServer(policy) as server:
        with pytest.raises(EvaluationBroken, match=r"failed 1 time .* status 500"):
            await evaluate_alone(make(Asks, server, tmp_path))


async def test_the_id_of_a_task_can_be_used_again_right_after_its_end(tmp_path: Path) -> None:
    async def use(env: Any) -> None:
        for folder in ("/a", "/b"):
            register_task_env_overrides("t", {"cwd": folder})
            shown = await asyncio.to_thread(terminal_tool, "pwd; ls ~; touch ~/mark", task_id="t")
            assert json.loads(shown)["output"] == f"{folder}\n"
            cleanup_vm("t")

    await in_run(tmp_path, use)
    assert sandboxes() == set()


async def test_a_sandbox_that_the_environment_ends_under_a_command_did_not_fail(tmp_path: Path) -> None:
    async def use(env: Any) -> None:
        await asyncio.to_thread(terminal_tool, "true", task_id="t")
        running = asyncio.create_task(asyncio.to_thread(terminal_tool, "sleep 60", task_id="t"))
        await asyncio.sleep(0.3)
        cleanup_vm("t")
        with pytest.raises(BackendError):
            await running
        assert open_run().failures == {}

    await in_run(tmp_path, use)


async def test_variables_of_the_test_runner_are_not_meant_for_commands(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def use(env: Any) -> str:
        monkeypatch.setenv("PYTEST_CURRENT_TEST", "another phase of a test")
        return str(await asyncio.to_thread(terminal_tool, "echo ok", task_id="t"))

    assert "ok" in await in_run(tmp_path, use)


def test_a_budget_that_nothing_reads_is_an_error() -> None:
    async def execute(_: Any) -> list[Any]:
        return []

    with pytest.raises(ValueError, match="budget_config has no effect"):
        HermesAgentLoop(Foreign(), [], budget_config=ResultBudget(), execute=execute)


async def test_the_tool_that_looks_at_images_by_its_old_name(tmp_path: Path) -> None:
    async def use(env: Any) -> None:
        assert vision_tools.check_vision_requirements()
        seen = json.loads(await vision_tools.vision_analyze_tool(PICTURE, "What is it?", task_id="t"))
        assert seen["output"] == "A dot."

    vision_tools = importlib.import_module("tools.vision_tools")
    assert not vision_tools.check_vision_requirements(), "no run is open"
    async with ScriptedServer([say("A dot.")]) as server:
        await in_run(tmp_path, use, vision=f"m@{server.base_url}")
