"""The agent at the wire: a scripted model server, real sandboxes, and the files in the working folder."""

from __future__ import annotations

import asyncio
import json
import subprocess
import sys
import threading
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
from aiohttp import web
from run_agent import AIAgent  # type: ignore[import-not-found]
from tools.browser_tool import cleanup_browser  # type: ignore[import-not-found]
from tools.terminal_tool import cleanup_vm, get_active_env  # type: ignore[import-not-found]

from backends.errors import LachesisError, SettingsError
from lachesis_client import OpenAIServer, Router, ServerUnavailable, http_attempts
from lachesis_console import AgentEvents, AgentSession
from lachesis_console.agent import load_cli_config
from lachesis_console.agent.session import SUMMARY
from lachesis_messages.records.dataset_entries import load_trajectories
from lachesis_testing.scripted_server import ScriptedServer, call, say
from tests.tools.test_mcp_toolset import COMMAND

TWO = [
    call(("terminal", {"command": "echo one > a.txt; cat a.txt"}), reasoning_content="First a file."),
    call(("read_file", {"path": "a.txt"}), ("terminal", {"command": "echo two"})),
    say("Done.", reasoning_content="All is there."),
]


@pytest.fixture(autouse=True)
def own_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(http_attempts, "_FIRST_DELAY", 0.02)
    for name in ("TERMINAL_ENV", "OPENAI_BASE_URL", "LLM_MODEL"):
        monkeypatch.delenv(name, raising=False)
    return tmp_path


@contextmanager
def serving(script):
    """A scripted server in a thread of its own."""
    server, loop = ScriptedServer(script), asyncio.new_event_loop()
    thread = threading.Thread(target=loop.run_forever)
    thread.start()
    asyncio.run_coroutine_threadsafe(server.__aenter__(), loop).result()
    try:
        yield server
    finally:
        asyncio.run_coroutine_threadsafe(server.__aexit__(None, None, None), loop).result()
        loop.call_soon_threadsafe(loop.stop)
        thread.join()
        loop.close()


@contextmanager
def agent_for(script, **given):
    defaults: dict[str, Any] = {"model": "scripted", "enabled_toolsets": ["terminal", "file"], "quiet_mode": True}
    with serving(script) as server, AIAgent(base_url=server.base_url, **{**defaults, **given}) as agent:
        yield agent, server


def test_two_turns_of_tools_end_in_an_answer_a_trajectory_and_a_log(own_folder: Path) -> None:
    told: list[tuple[Any, ...]] = []
    with agent_for(
        TWO,
        save_trajectories=True,
        ephemeral_system_prompt="Whisper.",
        prefill_messages=[{"role": "user", "content": "Hi"}, {"role": "assistant", "content": "Hello"}],
        providers_order=["a", "b"],
        reasoning_config={"effort": "low"},
        max_tokens=77,
        tool_start_callback=lambda *about: told.append(("start", *about[1:])),
        tool_complete_callback=lambda *about: told.append(("complete", about[1], about[3])),
        step_callback=lambda number: told.append(("step", number)),
    ) as (agent, server):
        result = agent.run_conversation("Write a file.", system_message="Be brief.")
        path = own_folder / f"logs/session_{agent.session_id}.json"
        assert json.loads(path.read_text())["messages"] == result["messages"]
    assert result["final_response"] == "Done." and result["api_calls"] == 3 and result["error"] is None
    assert (result["completed"], result["partial"], result["interrupted"]) == (True, False, False)
    roles = [message["role"] for message in result["messages"]]
    assert roles == ["system", "user", "assistant", "tool", "assistant", "tool", "tool", "assistant"]
    assert "one" in result["messages"][3]["content"] and "one" in result["messages"][5]["content"]
    first = server.requests[0]
    assert first["messages"][0]["content"] == "Be brief.\n\nWhisper." and first["messages"][1]["content"] == "Hi"
    assert (first["max_tokens"], first["provider"], first["reasoning"]) == (
        77,
        {"order": ["a", "b"]},
        {"effort": "low"},
    )
    assert "Whisper" not in json.dumps(result["messages"]) and "temperature" not in first
    assert told[:2] == [("step", 1), ("start", "terminal", {"command": "echo one > a.txt; cat a.txt"})]
    assert [each[:2] for each in told if each[0] == "complete"][1:] == [
        ("complete", "read_file"),
        ("complete", "terminal"),
    ]
    (entry,) = load_trajectories(own_folder / "trajectory_samples.jsonl")
    assert entry["completed"] is True and entry["model"] == "scripted"
    assert [turn["from"] for turn in entry["conversations"]] == ["system", "human", "gpt", "tool", "gpt", "tool", "gpt"]


def test_a_stream_makes_the_same_conversation(own_folder: Path) -> None:
    with agent_for(TWO) as (agent, _):
        whole = agent.run_conversation("Write a file.")
    pieces: list[str] = []
    with agent_for(TWO, reasoning_callback=(thoughts := []).append, tool_gen_callback=(calls := []).append) as (
        agent,
        server,
    ):
        streamed = agent.run_conversation("Write a file.", stream_callback=pieces.append)
    assert all(request["stream"] for request in server.requests)
    assert streamed["messages"] == whole["messages"]
    assert pieces == ["Done."] and thoughts == ["First a file.", "All is there."]
    assert calls == ["terminal", "read_file", "terminal"]


def test_names_and_arguments_are_checked_and_the_model_may_correct_itself() -> None:
    script = [
        call(("terminall", {"command": "ls"})),
        call(("terminal", "{not json")),
        say(""),
        500,
        call(("terminal", {})),
        say("I give up."),
    ]
    with agent_for(script) as (agent, server):
        result = agent.run_conversation("List.")
    assert result["completed"] and result["final_response"] == "I give up." and len(server.requests) == 6
    unknown, missing = (message["content"] for message in result["messages"] if message["role"] == "tool")
    assert "Did you mean terminal" in unknown and "command" in missing


def test_an_answer_that_stays_unusable_is_partial_and_never_completed(own_folder: Path) -> None:
    with agent_for([TWO[0], call(("terminal", "{not json"))], save_trajectories=True) as (agent, _):
        result = agent.run_conversation("List.")
    assert (result["completed"], result["partial"], result["final_response"]) == (False, True, None)
    assert [message["role"] for message in result["messages"]] == ["user", "assistant", "tool"]
    (entry,) = load_trajectories(own_folder / "failed_trajectories.jsonl")
    assert entry["completed"] is False and not (own_folder / "trajectory_samples.jsonl").exists()


def test_at_the_limit_of_iterations_the_model_sums_up_without_tools() -> None:
    def answer(request):
        return call(("terminal", {"command": "true"})) if request.get("tools") else say("So far: nothing.")

    with agent_for(answer, max_iterations=2) as (agent, server):
        result = agent.run_conversation("Work.")
    assert (result["final_response"], result["completed"], result["api_calls"]) == ("So far: nothing.", False, 3)
    assert server.requests[-1]["messages"][-1] == {"role": "user", "content": SUMMARY}
    assert "tools" not in server.requests[-1] and "2 turns" in result["error"]


def test_a_budget_of_iterations_is_that_of_all_conversations() -> None:
    with agent_for([say("1"), say("2")], iteration_budget=2) as (agent, _):
        assert [agent.chat("a"), agent.chat("b")] == ["1", "2"]
        with pytest.raises(LachesisError, match="iteration_budget"):
            agent.chat("c")


def test_a_server_that_fails_is_asked_again_and_a_dead_one_is_an_error(own_folder: Path) -> None:
    with agent_for([500, 503, say("At last.")]) as (agent, server):
        assert agent.chat("Hi") == "At last." and len(server.requests) == 3
    with agent_for([TWO[0], 400], save_trajectories=True) as (agent, _):
        result = agent.run_conversation("Hi")
    assert result["completed"] is False and "400" in result["error"] and len(result["messages"]) == 3
    (entry,) = load_trajectories(own_folder / "failed_trajectories.jsonl")
    assert entry["completed"] is False


def test_a_fallback_model_goes_on_where_the_first_is_gone() -> None:
    told: list[str] = []
    dead = {"base_url": "http://127.0.0.1:9/v1"}
    with (
        serving([say("From the second.")]) as server,
        AIAgent(
            **dead,
            model="one",
            enabled_toolsets=[],
            quiet_mode=True,
            fallback_model={"model": "two", "base_url": server.base_url},
            status_callback=told.append,
        ) as agent,
    ):
        assert agent.chat("Hi") == "From the second." and server.requests[0]["model"] == "two"
        assert "the fallback model goes on" in told[0]
        agent.switch_model("three", base_url=server.base_url)
        assert agent.chat("Hi") == "From the second." and server.requests[-1]["model"] == "three"


class Endless(web.StreamResponse):
    """A stream that says one word."""

    def __init__(self) -> None:
        super().__init__(headers={"Content-Type": "text/event-stream"})

    async def prepare(self, request):
        writer = await super().prepare(request)
        piece = {"choices": [{"index": 0, "delta": {"content": "Never"}, "finish_reason": None}]}
        await self.write(f"data: {json.dumps(piece)}\n\n".encode())
        await asyncio.sleep(60)
        return writer


def test_an_interrupt_in_the_middle_of_an_answer_drops_it(own_folder: Path) -> None:
    began = threading.Event()

    with agent_for([TWO[0], lambda _: Endless(), say("Again.")], save_trajectories=True) as (agent, _):

        def heard(_):
            began.set()
            agent.interrupt("stop that")

        result = agent.run_conversation("Go.", stream_callback=heard)
        assert began.is_set() and result["interrupted"] and result["interrupt_message"] == "stop that"
        assert [message["role"] for message in result["messages"]] == ["user", "assistant", "tool"]
        assert "one" in result["messages"][-1]["content"] and not result["completed"] and result["error"] is None
        more = agent.run_conversation("Go on.", conversation_history=result["messages"])
        assert more["final_response"] == "Again." and more["interrupt_message"] is None
    assert len(list(load_trajectories(own_folder / "failed_trajectories.jsonl"))) == 1


def test_an_interrupt_in_the_middle_of_calls_keeps_the_results_that_are_there() -> None:
    turn = call(
        ("terminal", {"command": "echo kept"}), ("terminal", {"command": "sleep 60"}), ("terminal", {"command": "ls"})
    )

    def started(_id, _name, arguments):
        if arguments["command"].startswith("sleep"):
            agent.interrupt()

    with agent_for([turn, say("Never asked.")], tool_start_callback=started) as (agent, server):
        result = agent.run_conversation("Go.")
        assert result["interrupted"] and len(server.requests) == 1
        kept, *others = (message["content"] for message in result["messages"] if message["role"] == "tool")
    assert "kept" in kept and [json.loads(other) for other in others] == [{"error": "interrupted"}] * 2


def test_what_the_user_adds_follows_the_next_results_or_the_answer() -> None:
    def started(*_):
        agent.steer("and hurry")

    def answer(request):
        messages = request["messages"]
        if len(messages) == 1:
            return call(("terminal", {"command": "true"}))
        return say(f"Heard: {messages[-1]['content']}")

    with agent_for(answer, tool_start_callback=started) as (agent, server):
        result = agent.run_conversation("Go.")
        assert "[The user adds: and hurry]" in result["final_response"] and len(server.requests) == 2
    with agent_for([say("One."), say("Two.")]) as (agent, server):
        assert agent.steer("more") and not agent.steer(" ")
        result = agent.run_conversation("Go.")
        assert [message["content"] for message in result["messages"]] == ["Go.", "One.", "more", "Two."]


TRUE = ("terminal", {"command": "true"})


@pytest.mark.parametrize(
    ("said", "at"),
    [(say("Never read."), 1), (say(""), 1), (call(TRUE, ("read_file", {})), 1), (call(TRUE), 3)],
    ids=["interrupted", "unusable", "taken back", "asked for a summary"],
)
def test_what_the_user_adds_waits_for_the_next_conversation_where_this_one_ends_without_it(said: Any, at: int) -> None:
    asked: list[Any] = []

    def answer(request):
        asked.append(request["messages"])
        if len(asked) == at:
            agent.steer("figs too")
            if said == say("Never read."):
                agent.interrupt()
        return say("Yes.") if first is not None or len(asked) == 3 == at else said

    first = None
    with agent_for(answer, max_iterations=2 if at == 3 else 9) as (agent, _):
        first = agent.run_conversation("Go.")
        assert "figs too" not in str(first["messages"])
        second = agent.run_conversation("On.", conversation_history=first["messages"])
        assert [message["content"] for message in second["messages"]][-4:] == ["On.", "Yes.", "figs too", "Yes."]
        third = agent.run_conversation("Now.", conversation_history=second["messages"])
        assert str(third["messages"]).count("figs too") == 1


def test_the_sandbox_of_a_task_stays_until_it_is_cleaned_up() -> None:
    look = call(("terminal", {"command": "cat a.txt"}))
    with agent_for([TWO[0], say("."), look, say("."), look, say(".")]) as (agent, _):
        agent.run_conversation("Go.", task_id="mine")
        assert "one" in agent.run_conversation("Look.", task_id="mine")["messages"][2]["content"]
        assert get_active_env("mine") is not None
        cleanup_browser("mine")
        cleanup_vm("mine")
        assert get_active_env("mine") is None
        assert "No such file" in agent.run_conversation("Look.", task_id="mine")["messages"][2]["content"]


def test_the_model_can_ask_the_person() -> None:
    script = [call(("clarify", {"question": "Which?", "choices": ["a", "b"]})), say("Then b.")]
    with agent_for(script, clarify_callback=lambda question, choices: f"{question} {choices[1]}") as (agent, _):
        assert agent.run_conversation("Choose.")["messages"][2]["content"] == "Which? b"


def test_a_callback_that_fails_changes_nothing_for_others(caplog: pytest.LogCaptureFixture) -> None:
    def fail(*_):
        raise ValueError("no window")

    script = [call(("clarify", {"question": "Which?"})), say("Then none.")]
    named = dict.fromkeys(("thinking_callback", "tool_gen_callback", "clarify_callback", "tool_start_callback"), fail)
    pieces: list[str] = []
    with agent_for(script, stream_delta_callback=fail, step_callback=lambda _: sys.exit(3), **named) as (agent, _):
        result = agent.run_conversation("Choose.", stream_callback=pieces.append)
    assert result["final_response"] == "".join(pieces) == "Then none." and result["completed"]
    assert "the user does not answer" in result["messages"][2]["content"]
    assert "fail failed, and the agent goes on: no window" in caplog.text


def test_a_conversation_that_cannot_be_written_down_is_returned(
    own_folder: Path, caplog: pytest.LogCaptureFixture
) -> None:
    (own_folder / "logs").write_text("no folder")
    (own_folder / "trajectory_samples.jsonl").mkdir()
    with agent_for([say("Done.")], save_trajectories=True, session_id="x" * 300) as (agent, _):
        assert agent.chat("Go.") == "Done." and agent.run_conversation("Go.")["completed"]
    assert caplog.text.count("write_session_log failed") == caplog.text.count("record_trajectory failed") == 2


def test_the_system_prompt_of_the_file_is_that_of_every_conversation(own_folder: Path) -> None:
    (own_folder / "cli-config.yaml").write_text("agent: {system_prompt: Be brief.}")
    with agent_for([say(".")]) as (agent, server):
        agent.chat("Go.")
        agent.run_conversation("Go.", system_message="Be long.")
        agent.run_conversation("Go.", conversation_history=[{"role": "system", "content": "Be."}])
    assert [request["messages"][0]["content"] for request in server.requests] == ["Be brief.", "Be long.", "Be."]


def test_an_interrupt_in_the_last_turn_is_one(own_folder: Path) -> None:
    script = [call(("terminal", {"command": "sleep 60"})), say("Never asked.")]
    with agent_for(script, max_iterations=1, tool_start_callback=lambda *_: agent.interrupt("stop")) as (agent, server):
        result = agent.run_conversation("Go.")
    assert (result["interrupted"], result["interrupt_message"], result["error"]) == (True, "stop", None)
    assert len(server.requests) == 1 and not agent.steer("more")


def test_a_sub_agent_works_unseen_with_the_tools_of_the_agent_and_of_a_server(own_folder: Path) -> None:
    (own_folder / "cli-config.yaml").write_text(json.dumps({"env": {"mcp": {"sums": COMMAND}}}))
    started: list[str] = []
    texts: list[str] = []
    script = [
        call(("delegate_task", {"goal": "Add.", "toolsets": ["mcp"]})),
        call(("sums__add", {"by": 4})),
        say("It is 4."),
        say("The sum is 4."),
    ]
    toolsets = ["terminal", "delegation", "mcp", "memory"]
    with agent_for(script, enabled_toolsets=toolsets, tool_start_callback=lambda *of: started.append(of[1])) as (
        agent,
        server,
    ):
        result = agent.run_conversation("Go.", stream_callback=texts.append)
        assert {"delegate_task", "memory"} < agent.valid_tool_names and "clarify" not in agent.valid_tool_names
    assert result["messages"][2]["content"] == "It is 4." and result["final_response"] == "The sum is 4."
    assert started == ["delegate_task"] and "".join(texts) == "The sum is 4."
    assert [tool["function"]["name"] for tool in server.requests[1]["tools"]] == ["sums__add", "sums__fail_now"]


def test_an_unknown_parameter_is_an_error_that_names_the_nearest() -> None:
    with pytest.raises(TypeError, match="max_iteration'; the nearest is 'max_iterations'"):
        AIAgent(max_iteration=3)
    with pytest.raises(TypeError, match=r"by name: AIAgent\(base_url="):
        AIAgent("http://127.0.0.1:9/v1")


def test_methods_of_the_removed_agent_name_what_to_use_instead(own_folder: Path) -> None:
    with AIAgent(base_url="http://127.0.0.1:9/v1", model="m", enabled_toolsets=[]) as agent:
        for name, instead in (
            ("_convert_to_trajectory_format", "agent.trajectory"),
            ("_save_trajectory", "save_trajectories=True"),
            ("reset_session_state", "begins anew"),
        ):
            with pytest.raises(AttributeError, match=f"{name}.*{instead}"):
                getattr(agent, name)
        assert not hasattr(agent, "nothing")


def test_settings_come_from_the_file_then_variables_then_arguments(
    own_folder: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    (own_folder / "cli-config.yaml").write_text(
        "model: {default: of-the-file, base_url: 'http://127.0.0.1:9/v1'}\nterminl: {}\n"
        "terminal: {timeout: 7, env_type: docker, docker_image: 'alpine:3', cwd: .}\n"
        "agent: {max_turns: 5}\nenv: {compress_context_at: 5000}\ntoolsets: [file]\n"
    )
    monkeypatch.setenv("TERMINAL_ENV", "local")
    monkeypatch.setenv("LLM_MODEL", "of-the-variable")
    config = load_cli_config()
    assert config["terminal"]["env_type"] == "local" and config["terminal"]["timeout"] == 7
    assert config["agent"]["max_turns"] == 5 and "did you mean 'terminal'" in caplog.text
    with AIAgent() as agent:
        assert agent.model == "of-the-variable" and "write_file" in agent.valid_tool_names
    with AIAgent(model="given", enabled_toolsets=["terminal"]) as agent:
        assert agent.model == "given" and "write_file" not in agent.valid_tool_names
    (own_folder / "cli-config.yaml").write_text("terminal: {timeout: -1}")
    with pytest.raises(SettingsError, match="terminal_timeout"):
        AIAgent()


def test_a_context_that_grows_is_compressed(own_folder: Path) -> None:
    (own_folder / "cli-config.yaml").write_text(
        "env: {compress_context_at: 600, compress_context_keep: 2, compress_context_with: extractive}"
    )

    def answer(request):
        size = len(json.dumps(request["messages"])) // 4
        usage = {"usage": {"prompt_tokens": size, "completion_tokens": 20}}
        if len(server.requests) == 7:
            return say("Done.", **usage)
        return call(("terminal", {"command": "head -c 1500 /dev/zero | tr '\\\\0' x"}), **usage)

    with agent_for(answer) as (agent, server):
        assert agent.run_conversation("Work.")["completed"]
    assert any("[CONTEXT SUMMARY]" in json.dumps(request["messages"]) for request in server.requests)


async def test_a_cancelled_conversation_is_in_the_history() -> None:
    from lachesis import BUILTIN_TOOLS
    from lachesis.loop.tool_calls import SessionCalls
    from lachesis_tools import ToolSession
    from lachesis_tools.budget import ResultBudget

    asked = asyncio.Event()

    async def hang(_):
        asked.set()
        await asyncio.sleep(60)

    async def no_sandbox():
        raise AssertionError("no tool needs it")

    tools = SessionCalls(ToolSession("t", no_sandbox), BUILTIN_TOOLS, ["todo"], ResultBudget())
    pieces: list[str] = []
    async with (
        ScriptedServer([call(("todo", {})), hang]) as server,
        Router([OpenAIServer(server.settings())]) as router,
    ):
        session = AgentSession(
            router,
            BUILTIN_TOOLS.definitions(["todo"]),
            tools,
            events=AgentEvents(delta=lambda delta: pieces.append(delta.text)),
        )
        running = asyncio.create_task(session.run([{"role": "user", "content": "Go."}]))
        await asked.wait()
        running.cancel()
        with pytest.raises(asyncio.CancelledError):
            await running
    assert [message["role"] for message in session.history] == ["user", "assistant", "tool"] and pieces == ["todo"]


def test_a_process_that_forgets_to_close_leaves_nothing(own_folder: Path) -> None:
    with serving([TWO[0], say("Done.")]) as server:
        program = f"""
from run_agent import AIAgent
agent = AIAgent(base_url={server.base_url!r}, model="scripted", save_trajectories=True)
print(agent.chat("Go."))
"""
        done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=60)
    assert done.returncode == 0 and done.stdout.endswith("Done.\n"), done.stderr
    assert done.stdout.startswith("terminal {") and done.stderr == ""


def test_ctrl_c_ends_the_conversation_and_keeps_it(own_folder: Path) -> None:
    with serving([TWO[0], lambda _: Endless()]) as server:
        program = f"""
import os, signal
from run_agent import AIAgent
agent = AIAgent(base_url={server.base_url!r}, model="scripted", save_trajectories=True, quiet_mode=True)
try:
    agent.chat("Go.", stream_callback=lambda _: os.kill(os.getpid(), signal.SIGINT))
except KeyboardInterrupt:
    print("ended")
"""
        done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=60)
    assert done.stdout == "ended\n" and done.stderr == ""
    (entry,) = load_trajectories(own_folder / "failed_trajectories.jsonl")
    assert [turn["from"] for turn in entry["conversations"]] == ["system", "human", "gpt", "tool"]


def test_a_callback_that_waits_for_its_agent_is_refused(caplog: pytest.LogCaptureFixture) -> None:
    with agent_for([say("Hello.")], step_callback=lambda _: agent.chat("Again.")) as (agent, server):
        assert agent.chat("Hi") == "Hello." and len(server.requests) == 1
    assert "call it on another thread" in caplog.text


def test_a_dead_server_raises_from_chat() -> None:
    dead = AIAgent(base_url="http://127.0.0.1:9/v1", model="m", quiet_mode=True, enabled_toolsets=[])
    with dead, pytest.raises(ServerUnavailable):
        dead.chat("Hi")
    with pytest.raises(LachesisError, match="closed"):
        dead.chat("Hi")


@pytest.mark.slow
def test_the_files_pass_the_check_of_datasets(own_folder: Path) -> None:
    from datasets import load_dataset

    with agent_for(TWO, save_trajectories=True) as (agent, _):
        agent.chat("Write a file.")
    with agent_for([TWO[0], 400], save_trajectories=True) as (agent, _):
        agent.run_conversation("Hi")
    for name in ("trajectory_samples.jsonl", "failed_trajectories.jsonl"):
        done = subprocess.run(
            [str(Path(sys.executable).parent / "lachesis"), "trajectories", "validate", name],
            capture_output=True,
            text=True,
            timeout=60,
        )
        assert done.returncode == 0, done.stdout + done.stderr
    program = """
import json

def load_trajectories(path: str):
    entries = []
    with open(path, "r", encoding="utf-8") as f:
        for line in f:
            line = line.strip()
            if line:
                entries.append(json.loads(line))
    return entries

successful = [e for e in load_trajectories("trajectory_samples.jsonl")
    if e.get("completed")]
training_data = [e["conversations"] for e in successful]
print(len(training_data))
"""  # as the format's description shows it
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=60)
    assert done.stdout == "1\n", done.stderr
    rows = load_dataset("json", data_files="trajectory_samples.jsonl", split="train", cache_dir=str(own_folder / "c"))
    assert rows.column_names == ["conversations", "timestamp", "model", "completed"] and len(rows) == 1
