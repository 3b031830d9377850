"""What the descriptions of the removed stack promise, claim by claim; a number is that of a claim, in its own order.

Claims 1 to 20 were missing once. 21 to 36 differ on purpose: their tests hold what our pages say instead, and why. The
rest works as written.
"""

from __future__ import annotations

import asyncio
import importlib
import importlib.util
import json
import logging
import os
import re
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import FrozenInstanceError
from pathlib import Path
from typing import Any, ClassVar

import aiohttp
import pytest
import yaml

import lachesis
from lachesis.cli import main
from lachesis.loop.limits import LoopLimits
from lachesis.loop.loop import HermesAgentLoop
from lachesis.loop.outcome import Outcome
from lachesis.settings.server_settings import ServerConfig
from lachesis_client import OpenAIServer, ServerSettings
from lachesis_compat.modules import model_tools
from lachesis_messages.errors import DuplicateCallId, MalformedMessage, UnexpectedToolResult
from lachesis_messages.history import MessageHistory
from lachesis_messages.markup import convert_scratchpad_to_think
from lachesis_messages.message_rules import validate_messages
from lachesis_messages.messages import FinishReason, Message
from lachesis_messages.records.dataset_entries import (
    load_trajectories,
    save_trajectory,
    to_batch_entry,
    to_dataset_entry,
)
from lachesis_messages.records.entries import to_trajectory_entry
from lachesis_messages.records.sharegpt import to_conversations
from lachesis_messages.responses import ChatResponse, ToolResponse, as_message
from lachesis_messages.tokens import TokenPrefix
from lachesis_testing.fake_server import FakeServer, Scripted, fake_tokenizer
from lachesis_tokens.samples.samples import samples
from lachesis_tokens.samples.verification import verify
from lachesis_tools import (
    BUILTIN_TOOLS,
    TOOLSETS,
    ToolResult,
    Toolset,
    ToolsetError,
    get_tool_definitions,
    resolve_toolset,
    tool,
    validate_toolset,
)
from tests.support.batch_runs import entries, flags, thinks, write_rows
from tests.support.ports import free_port
from tests.support.sampler import FakeSampler
from tests.support.scripted_server import Answer, ScriptedServer, call, say
from tests.support.small_envs import (
    ROOT,
    ManyWords,
    OldSortWords,
    SortWords,
    does_nothing,
    lines,
    make,
    process,
    rollouts,
    served,
    sorts,
)
from tests.support.stock_run_api import LIVENESS, Trainer
from tests.support.token_trees import END, completion
from tests.support.training_runs import with_tokens

DATA = ROOT / "tests" / "support" / "entries"
SCHEMA = {"type": "object", "properties": {"command": {"type": "string"}}}
TERMINAL = {
    "type": "function",
    "function": {"name": "terminal", "description": "Execute shell commands", "parameters": SCHEMA},
}
TWO_TOOLS = [TERMINAL, {"type": "function", "function": {**TERMINAL["function"], "name": "read_file"}}]  # type: ignore[dict-item]
SEARCHED: list[dict[str, Any]] = [
    {"role": "system", "content": "You are a helpful assistant..."},
    {"role": "user", "content": "Search for Python tutorials"},
    {
        "role": "assistant",
        "content": None,
        "tool_calls": [
            {
                "id": "call_abc123",
                "type": "function",
                "function": {"name": "web_search", "arguments": '{"query": "Python tutorials"}'},
            }
        ],
    },
    {"role": "tool", "tool_call_id": "call_abc123", "content": '{"results": [...]}'},
    {"role": "assistant", "content": "Here's what I found..."},
]
USER = {"role": "user", "content": "go"}


def answered(content: str | None = None, *calls: tuple[str, str, str], **more: Any) -> dict[str, Any]:
    """An assistant's message; a call is (id, name, arguments)."""
    made = [{"id": i, "type": "function", "function": {"name": n, "arguments": a}} for i, n, a in calls]
    return {"role": "assistant", "content": content, **({"tool_calls": made} if made else {}), **more}


def result(call_id: str, content: str) -> dict[str, Any]:
    return {"role": "tool", "tool_call_id": call_id, "content": content}


def turns(*messages: dict[str, Any], **options: Any) -> list[str]:
    """The values of the turns after the user's."""
    found = to_conversations([USER, *messages], system="none", **options)
    return [turn["value"] for turn in found.conversations[1:]]


async def looped(script: Sequence[Answer] | Any, limits: LoopLimits | None = None, **more: Any) -> tuple[Any, Any]:
    """A loop with one tool against a server that plays `script`: the result and the server."""

    async def execute(calls: Sequence[Any]) -> list[ToolResult]:
        return [ToolResult(content="done") for _ in calls]

    class Server:
        async def chat(self, messages: Any, *, split: str = "train", **options: Any) -> Any:
            return await client.chat(messages, **options)

    async with ScriptedServer(script) as server:
        client = OpenAIServer(ServerSettings(base_url=server.base_url, model_name="m", **{"max_retries": 0, **more}))
        loop = HermesAgentLoop(Server(), [TERMINAL], execute=execute, limits=limits or LoopLimits(max_resamples=3))
        try:
            return await loop.run([USER]), server
        finally:
            await client.close()


def fresh(program: str, folder: Path, **env: str) -> subprocess.CompletedProcess[str]:
    """A program that starts in another folder, with the project installed."""
    return subprocess.run(
        [sys.executable, "-c", program],
        cwd=folder,
        capture_output=True,
        text=True,
        env={**os.environ, **env},
        timeout=100,
    )


def datasets_of(*files: Path, **more: Any) -> Any:
    """The rows of files, loaded together."""
    loading = importlib.import_module("datasets")
    loading.disable_progress_bars()
    cache = str(files[0].parent / "cache")
    return loading.load_dataset(
        "json", data_files=[str(file) for file in files], split="train", cache_dir=cache, **more
    )


class Asked(SortWords):
    """Answers in words only."""

    toolsets: ClassVar[Sequence[str]] = ()
    needs_sandboxes = False

    async def compute_reward(self, item: Any, result: Any, ctx: Any) -> float:
        return 1.0


# What was missing.


async def test_01_a_scratchpad_is_reasoning_in_the_loop() -> None:
    scratchpad = "<REASONING_SCRATCHPAD>\nplan\n</REASONING_SCRATCHPAD>"
    found, _ = await looped([say(f"{scratchpad}\nanswer")])
    assert (found.final_response, found.reasoning_per_turn) == ("answer", ["plan"])
    found, server = await looped([say(scratchpad), say("answer")])
    assert (found.final_response, len(server.requests)) == ("answer", 2), "alone it is no answer"


@pytest.mark.parametrize("tag", ["REASONING_SCRATCHPAD", "think"])
def test_02_reasoning_that_was_cut_off_is_in_the_one_think_block(tag: str) -> None:
    (value,) = turns(answered(f"<{tag}>s"))
    assert re.fullmatch(r"<think>\s*s\s*(</think>\s*)?", value)


async def test_03_every_conversation_that_failed_is_in_failed_trajectories(tmp_path: Path) -> None:
    policy = [say("")] * 50
    await process(Asked, tmp_path, policy, total_steps=1, group_size=1, max_resamples=1, max_failed_groups=9)
    (entry,) = lines(tmp_path / "failed_trajectories.jsonl")
    assert entry["completed"] is False


def test_04_entries_of_toolsets_may_be_plain_dicts_with_includes(monkeypatch: pytest.MonkeyPatch) -> None:
    module = importlib.import_module("toolsets")
    monkeypatch.setitem(module.TOOLSETS, "d2", {"tools": ["terminal"], "includes": ["file"]})
    monkeypatch.setitem(module.TOOLSETS, "bad", {"tools": [], "includes": ["gone"]})
    names = ["patch", "read_file", "search_files", "terminal", "write_file"]
    assert module.validate_toolset("d2") and module.resolve_toolset("d2") == names
    assert not module.validate_toolset("bad")
    defined = model_tools.get_tool_definitions(["d2"], quiet_mode=True)
    assert sorted(each["function"]["name"] for each in defined) == names
    assert module.get_toolset_info("d2")["resolved_tools"] == names


async def test_05_exported_batch_lines_have_all_tools_and_leave_out_what_has_no_reasoning(tmp_path: Path) -> None:
    def policy(request: dict[str, Any]) -> Answer:
        return say("Done.", **({"reasoning_content": "Hm."} if "alpha" in str(request["messages"]) else {}))

    await process(Asked, tmp_path, policy)
    out = tmp_path / "batch.jsonl"
    assert main(["export", str(tmp_path / "groups.jsonl"), "--format", "batch", "--out", str(out)]) == 0
    assert [set(line["tool_stats"]) for line in lines(out)] == [set(model_tools.TOOL_TO_TOOLSET_MAP)] * 2


@pytest.fixture(scope="module")
def batch(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of a batch run of five prompts in two files, one without reasoning, of different metadata."""
    folder = tmp_path_factory.mktemp("batch")
    rows: list[dict[str, Any]] = [{"prompt": f"p{number}", "metadata": {"level": number}} for number in range(3)]
    rows += [{"prompt": "p3", "metadata": {"level": 3, "note": "x"}}, {"prompt": "no thought", "metadata": {}}]
    with served(thinks) as server:
        arguments = flags(write_rows(folder / "rows.jsonl", rows), folder, server.base_url, size=3)
        assert main(["batch", *arguments, "--ephemeral_system_prompt", "EPHEMERAL"]) == 0
        (folder / "requests.json").write_text(json.dumps(server.requests))
    return folder / "run"


def test_06_files_with_different_metadata_load_together(batch: Path) -> None:
    """With the columns named, as the first file cannot know those of the others."""
    features = importlib.import_module("lachesis_data.files.formats").dataset_features("batch")
    assert datasets_of(*sorted(batch.glob("batch_*_output.jsonl")), features=features).num_rows == 4


def test_07_files_with_rewards_and_without_load_together(tmp_path: Path) -> None:
    module = tmp_path / "scored.py"
    module.write_text(
        "from lachesis_data.batch.prompts import Prompts\n"
        "class Scored(Prompts):\n"
        "    needs_sandboxes = False\n"
        "    async def compute_reward(self, item, result, ctx):\n"
        "        return None if 'p0' in str(item) else 1.0\n"
    )
    with served(thinks) as server:
        rows = write_rows(tmp_path / "rows.jsonl", [{"prompt": "p0"}, {"prompt": "p1"}])
        main(["batch", *flags(rows, tmp_path, server.base_url, "--env", f"{module}:Scored", size=1)])
    assert datasets_of(*sorted((tmp_path / "run").glob("batch_*_output.jsonl"))).num_rows >= 1
    assert "reward" in importlib.import_module("lachesis_data.files.formats").dataset_features("batch")


def test_08_an_ephemeral_prompt_is_in_no_file_of_the_run(batch: Path) -> None:
    assert "EPHEMERAL" in (batch.parent / "requests.json").read_text(), "the model reads it"
    assert [file.name for file in batch.rglob("*") if file.is_file() and b"EPHEMERAL" in file.read_bytes()] == []


def test_09_a_batch_run_waits_while_the_model_is_silent_and_plays_all_prompts(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Twenty answers without a word would be the end of three samples in a row."""
    monkeypatch.setattr("lachesis_data.batch.sink.RETRY_PAUSE", 0.01)
    for name in ("_FIRST_PAUSE", "_LONGEST_PAUSE"):
        monkeypatch.setattr(f"lachesis.runs.failures.{name}", 0.01)
    asked = iter(range(1000))
    with served(lambda request: say("") if next(asked) < 20 else thinks(request)) as server:
        rows = write_rows(tmp_path / "rows.jsonl", [{"prompt": f"p{number}"} for number in range(7)])
        assert main(["batch", *flags(rows, tmp_path, server.base_url, "--num_workers", "1")]) == 0
    assert len(entries(tmp_path / "run")) == 7


def subagent() -> MessageHistory:
    chat = ["Subagent call received", "Process this request", "Processing..."]
    return MessageHistory(
        [{"role": r, "content": c} for r, c in zip(("system", "user", "assistant"), chat, strict=True)]
    )


def test_10_the_chat_of_a_subagent_is_frozen_when_it_is_appended() -> None:
    chat, history = subagent(), MessageHistory([USER])
    history.append(ToolResponse(Message("tool", "Subagent call output", tool_call_id="c"), "subagent", chat=chat))
    before = history.to_mermaid()
    chat[0]["content"] = "CHANGED"
    assert history.to_mermaid() == before


def test_11_the_length_beside_the_chat_of_a_subagent_is_that_of_the_chat() -> None:
    history = MessageHistory([USER])
    history.append(ToolResponse(Message("tool", "Subagent call output", tool_call_id="c"), "subagent", chat=subagent()))
    assert re.search(r"Length: 3(?!\d)|Messages: 3(?!\d)", history.to_mermaid())


async def test_12_a_tool_without_its_key_disables_itself_and_not_its_toolset(tmp_path: Path) -> None:
    @tool(toolset="mixed", check=lambda: "no API key")
    async def needs_key() -> str:
        """A tool."""
        return ""

    @tool(toolset="mixed")
    async def works() -> str:
        """Another."""
        return ""

    class Mixed(Asked):
        tools = BUILTIN_TOOLS.extended(needs_key, works)

    async with ScriptedServer(does_nothing) as server:
        env = make(Mixed, server, tmp_path, enabled_toolsets=["mixed"], total_steps=1, group_size=1)
        await env.process_manager()
        assert [each["function"]["name"] for each in server.requests[0]["tools"]] == ["works"]
    assert "no API key" in (tmp_path / "console.txt").read_text()


async def by_hand(folder: Path, use: Any) -> Any:
    """What `use()` gives on a thread, inside a run with a sandbox backend."""
    async with ScriptedServer(does_nothing) as server, make(SortWords, server, folder).running():
        return await asyncio.to_thread(use)


async def test_13_tools_return_json(tmp_path: Path) -> None:
    def use() -> list[str]:
        handle = model_tools.handle_function_call
        arguments = ({"path": "a.txt", "content": "x\n"}, {"path": "a.txt"}, {"pattern": "x"})
        return [handle(n, a, "t") for n, a in zip(("write_file", "read_file", "search_files"), arguments, strict=True)]

    for text in await by_hand(tmp_path, use):
        assert isinstance(json.loads(text), dict)


@pytest.mark.parametrize("form", ["text", "json"])
def test_13_lines_of_a_batch_show_results_as_the_model_read_them(tmp_path: Path, form: str) -> None:
    """A block is a JSON object. Its content is text where the tool's result is text, as in the format's example: JSON
    in the file for text in the prompt would train what comes after it in a context that no model saw."""
    steps = (("write_file", {"path": "a.txt", "content": "x\n"}), ("read_file", {"path": "a.txt"}))
    requests: list[dict[str, Any]] = []

    def policy(request: dict[str, Any]) -> Answer:
        requests.append(request)
        done = sum(message["role"] == "tool" for message in request["messages"])
        return say("Done.", reasoning_content="All done.") if done == len(steps) else call(steps[done])

    with served(policy) as server:
        rows = write_rows(tmp_path / "rows.jsonl", [{"prompt": "p"}])
        more = ["--env.enabled_toolsets", "[file]", "--env.tool_result_format", form, "--keep_without_reasoning"]
        assert main(["batch", *flags(rows, tmp_path, server.base_url, *more)]) == 0
    (entry,) = entries(tmp_path / "run")
    blocks = re.findall(
        r"<tool_response>\n(.*?)\n</tool_response>",
        "\n".join(turn["value"] for turn in entry["conversations"][1:]),
        re.S,
    )
    shown = [json.loads(block) for block in blocks]
    assert [list(block) for block in shown] == [["tool_call_id", "name", "content"]] * 2
    read = [message["content"] for message in requests[-1]["messages"] if message["role"] == "tool"]
    contents = [block["content"] for block in shown]
    assert [type(content) for content in contents] == [str if form == "text" else dict] * 2
    assert contents == (read if form == "text" else [json.loads(text) for text in read])


@pytest.mark.parametrize("name", ["hermes", "qwen", "deepseek", "llama"])
def test_14_the_parsers_that_are_named_exist(name: str) -> None:
    assert importlib.import_module("tool_call_parsers").get_parser(name)


def test_15_a_warning_is_logged_where_arguments_are_replaced(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING):
        (value, _) = turns(answered(None, ("c", "terminal", "{bad")), result("c", "x"))
    assert '"arguments": {}' in value
    assert any("terminal" in record.getMessage() for record in caplog.records)


FIRST = (ROOT / "packages" / "compat" / "lachesis_compat" / "lachesis_old_paths.pth").read_text()
"""What each process runs where the wheel is installed."""
OLD = {
    16: "from agent.trajectory import _convert_to_trajectory_format",
    17: "import agent.trajectory, batch_runner, trajectory_compressor",
    18: "from tools.terminal_tool import check_terminal_requirements as c; assert c() in (True, False)",
    19: "import atropos.backends",
    20: "from environments.tool_call_parsers import register_parser",
}


@pytest.mark.parametrize("claim", OLD)
def test_16_to_20_names_of_the_removed_stack_can_be_imported(claim: int, tmp_path: Path) -> None:
    done = fresh(f"import lachesis; {OLD[claim]}", tmp_path)
    assert done.returncode == 0, done.stderr


# What differs on purpose.


def test_21_results_belong_to_calls_by_their_ids_as_an_order_can_be_wrong() -> None:
    asks = answered(None, ("1", "terminal", "{}"), ("2", "read_file", "{}"))
    assert turns(asks, result("2", "b"), result("1", "a")) == turns(asks, result("1", "a"), result("2", "b"))
    for messages, error in (
        ([answered(None, ("1", "a", "{}"), ("1", "b", "{}"))], DuplicateCallId),
        ([asks, {"role": "tool", "content": "b"}], MalformedMessage),
        ([asks, result("3", "b")], UnexpectedToolResult),
    ):
        with pytest.raises(error):
            turns(*messages)


def test_22_only_json_is_parsed_as_json_and_no_text_closes_the_block() -> None:
    for content, written in (('{"a": 1}', {"a": 1}), ("[1]", [1]), ("[INFO] x", None), ('{"a":1,"a":2}', None)):
        value = turns(answered(None, ("c", "terminal", "{}")), result("c", content))[1]
        assert json.loads(value.split("\n")[1])["content"] == (content if written is None else written)
    value = turns(answered(None, ("c", "terminal", "{}")), result("c", "</tool_response>"))[1]
    assert value.count("</tool_response>") == 1


class Thinker(Asked):
    """A conversation with a system prompt of its own."""

    name = "thinker"


@pytest.fixture(scope="module")
def played(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of a run with tools, reasoning, and a group that is not completed."""
    folder = tmp_path_factory.mktemp("played")

    def policy(request: dict[str, Any]) -> Answer:
        if "delta" in str(request["messages"]):
            return call(("terminal", {"command": "true"}))
        if request["messages"][-1]["role"] == "tool":
            return say("Done.", reasoning_content="It is written.")
        return call(("terminal", {"command": "printf 'apple\nfig\npear' > sorted.txt; echo hi"}))

    async def run() -> None:
        async with ScriptedServer(policy) as server:
            env = make(SortWords, server, folder, max_agent_turns=2)
            await env.process_manager()
            (folder / "requests.json").write_text(json.dumps(server.requests))

    asyncio.run(run())
    return folder


def test_23_save_trajectory_writes_here_and_a_run_into_its_folder(
    tmp_path: Path, played: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Two runs that write into one folder would mix."""
    monkeypatch.chdir(tmp_path)
    conversion = to_conversations([USER, answered("ok")])
    assert save_trajectory(conversion, "m", True).resolve() == tmp_path / "trajectory_samples.jsonl"
    assert (played / "trajectory_samples.jsonl").exists()


def test_24_lines_begin_with_the_four_keys_and_a_run_adds_where_they_come_from(played: Path) -> None:
    (line, _) = lines(played / "trajectory_samples.jsonl")
    keys = list(line)
    assert keys[:4] == ["conversations", "timestamp", "model", "completed"]
    assert {"environment", "item_key", "rollout_id", "outcome", "reward"} <= set(keys[4:])


async def test_25_trajectories_are_saved_unless_somebody_says_no(tmp_path: Path) -> None:
    """They are what most runs are for; `lachesis batch` has no such flag, since it always saves."""
    await process(Asked, tmp_path, does_nothing, save_trajectories=False, total_steps=1)
    assert (tmp_path / "groups.jsonl").exists() and not list(tmp_path.glob("*trajector*"))
    assert main(["batch", "--save-trajectories", "true"]) == 2


def test_26_load_trajectories_is_an_iterator_as_files_may_be_larger_than_memory(played: Path) -> None:
    found = load_trajectories(played / "trajectory_samples.jsonl")
    assert not isinstance(found, list) and len(list(found)) == 2


def test_26_on_the_old_path_load_trajectories_is_a_list(played: Path) -> None:
    path = str(played / "trajectory_samples.jsonl")
    done = fresh(f"{FIRST}\nfrom agent.trajectory import load_trajectories as l; print(type(l({path!r})))", played)
    assert "list" in done.stdout, done.stderr


def test_27_a_cycle_of_toolsets_is_an_error_that_names_it_and_a_diamond_is_none() -> None:
    """Upstream stops silently, and tools are missing."""

    def sets(**includes: tuple[str, ...]) -> dict[str, Toolset]:
        return {name: Toolset("", ("terminal",), of) for name, of in includes.items()}

    with pytest.raises(ToolsetError, match="a -> b -> a"):
        resolve_toolset("a", sets(a=("b",), b=("a",)))
    assert list(resolve_toolset("a", sets(a=("b", "c"), b=("d",), c=("d",), d=()))) == ["terminal"]


def test_28_toolsets_of_the_seed_compose() -> None:
    """Names of tools that are removed are kept: a registry of yours may have them."""
    seed = {
        "web": Toolset("", ("web_search", "web_extract")),
        "debugging": Toolset("", ("terminal",), ("web",)),
        "full_stack": Toolset("", (), ("web", "debugging")),
    }
    assert set(resolve_toolset("debugging", seed)) == {"terminal", "web_search", "web_extract"}
    assert set(resolve_toolset("full_stack", seed)) == {"terminal", "web_search", "web_extract"}


async def test_29_the_backend_is_a_setting_and_a_variable_that_says_another_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A run has all of its settings in one place."""
    monkeypatch.setenv("TERMINAL_ENV", "docker")
    await process(Asked, tmp_path, does_nothing, total_steps=1)
    assert json.loads((tmp_path / "groups.run.json").read_text())["settings"]["terminal_backend"] == "local"


@pytest.mark.parametrize("place", ["variables", "the file .env"])
def test_30_atropos_server_settings_name_the_server(tmp_path: Path, place: str) -> None:
    program = (
        "import os, sys; from lachesis_envs.gsm8k import GSM8kAgentEnv\n"
        "try: GSM8kAgentEnv.cli()\n"
        "finally: print('environ:', 'of-the-variable' in str(os.environ))"
    )
    program = "import sys; sys.argv[1:] = ['process', '--env.total_steps', '1', '--env.group_size', '1']\n" + program
    with served(does_nothing) as server:
        known = {"BASE_URL": server.base_url, "MODEL": "of-the-variable", "API_KEY": "x"}
        known = {f"ATROPOS_SERVER_{name}": value for name, value in known.items()}
        if place != "variables":
            (tmp_path / ".env").write_text("".join(f"{name}={value}\n" for name, value in known.items()) + "OTHER=1\n")
        done = fresh(program, tmp_path, **(known if place == "variables" else {}))
        assert {request["model"] for request in server.requests} == {"of-the-variable"}, done.stderr
    assert f"environ: {place == 'variables'}" in done.stdout, "a file is read as settings and goes no further"


async def test_31_math_verify_compares_what_is_not_equal_as_a_number_or_a_text() -> None:
    verifier = importlib.import_module("lachesis_envs.gsm8k.math_answer").MathVerifier()
    try:
        for given in ("42", "42.0", "x=42", "2+40", r"\frac{84}{2}"):
            assert await verifier.equal(given, "42"), given
        assert not await verifier.equal("43", "42")
    finally:
        await verifier.close()


def test_31_texts_are_compared_where_math_verify_does_not_start(tmp_path: Path) -> None:
    (tmp_path / "math_verify.py").write_text("raise ImportError('broken')\n")
    program = (
        "import asyncio\nfrom lachesis_envs.gsm8k.math_answer import MathVerifier\n"
        "async def f():\n    v = MathVerifier()\n"
        "    print(await v.equal('x = 42', 'x=42'), await v.equal('x=43', 'y=42'))\n"
        "    await v.close()\nasyncio.run(f())"
    )
    done = fresh(program, tmp_path, PYTHONPATH=f"{tmp_path}:{ROOT}")
    assert done.stdout.split()[-1:] == ["False"], done.stderr


async def test_32_gsm8k_has_generated_problems_unless_a_file_or_a_data_set_is_named(tmp_path: Path) -> None:
    """There may be no network. A file has the rows of the real one."""
    from lachesis_envs.gsm8k import GSM8kAgentEnv, GSM8kEnvConfig

    file = tmp_path / "gsm.jsonl"
    file.write_text(json.dumps({"question": "What is 40 + 2?", "answer": "It is 40+2=<<40+2=42>>42.\n#### 42"}) + "\n")
    config = GSM8kEnvConfig(
        dataset_name=str(file),
        total_steps=1,
        group_size=2,
        data_path_to_save_groups=str(tmp_path / "groups.jsonl"),
    )
    assert GSM8kEnvConfig().dataset_name == "gsm_symbolic"
    found = await GSM8kAgentEnv(config, [ServerConfig(model_name="reference")]).process_manager()
    assert found.summary.reward.mean == 1.0
    assert [group["scores"] for group in lines(tmp_path / "groups.jsonl")] == [[1.0, 1.0]]


@pytest.mark.parametrize("before", ["import lachesis", FIRST], ids=["later", "first"])
def test_33_old_paths_can_be_imported(tmp_path: Path, before: str) -> None:
    done = fresh(before + "\nimport model_tools, toolsets; from tools.terminal_tool import cleanup_vm", tmp_path)
    assert done.returncode == 0, done.stderr


def test_34_launch_training_says_what_it_trains_or_what_is_missing(tmp_path: Path) -> None:
    """Where torch is missing, it names how to install it."""
    command = [
        sys.executable,
        str(ROOT / "launch_training.py"),
        "--training.num_steps",
        "1",
        "--training.base_model",
        "no",
    ]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=100)
    assert done.returncode in (1, 2) and "Traceback" not in done.stderr
    assert re.search(r"train-venv|lachesis-rl\[torch\]|no model|base_model", done.stderr)


def test_34_without_arguments_it_trains_what_its_config_says_and_says_so(tmp_path: Path) -> None:
    """Where torch is missing it ends then."""
    if importlib.util.find_spec("torch"):
        pytest.skip("it would train")
    command = [sys.executable, str(ROOT / "launch_training.py")]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=100)
    assert "train_tool_call.yaml" in done.stdout + done.stderr


async def test_35_a_server_without_tokens_is_refused_as_made_up_ones_would_be_trained(tmp_path: Path) -> None:
    """`openai.base_url` alone is enough for the policy server of a run: see the test of claim 88."""
    servers = yaml.safe_load((ROOT / "configs" / "train_gsm8k.yaml").read_text())["openai"]
    assert [server["server_type"] for server in (servers if isinstance(servers, list) else [servers])] == ["vllm"]
    async with FakeServer() as model:
        file = tmp_path / "run.yaml"
        file.write_text(f"openai: {{base_url: {model.base_url}, model_name: fake}}\nenv: {{batch_size: 8}}\n")
        command = [str(ROOT / "environments" / "gsm8k_agent_env.py"), "serve", "--config", str(file)]
        run = await asyncio.create_subprocess_exec(
            sys.executable,
            *command,
            cwd=tmp_path,
            stdout=asyncio.subprocess.PIPE,
            stderr=asyncio.subprocess.STDOUT,
        )
        output, _ = await asyncio.wait_for(run.communicate(), 100)
    assert run.returncode == 2
    assert "--openai.server_type vllm" in output.decode()
    assert not model.stats["requests"], "nothing was sampled"


def test_36_the_clients_of_backends_are_extras_and_wandb_is_there() -> None:
    project = (ROOT / "pyproject.toml").read_text()
    assert {"modal", "docker", "ssh"} <= set(re.findall(r"^(\w+) = \[\"", project, re.MULTILINE))
    assert importlib.import_module("importlib.metadata").version("wandb")


def test_36_vllm_is_an_extra() -> None:
    assert re.search(r"^vllm = \[", (ROOT / "pyproject.toml").read_text(), re.MULTILINE)


# What works as written.


def test_37_messages_are_those_of_the_api() -> None:
    validate_messages(SEARCHED)
    assert list(MessageHistory(SEARCHED)) == SEARCHED


def test_38_the_dataset_entry_is_the_documented_one() -> None:
    documented = json.loads((DATA / "dataset_entry.json").read_text())
    entry, warnings = to_dataset_entry(SEARCHED, [{"type": "function", "function": {"name": "web_search"}}])
    assert (list(entry), warnings) == (list(documented), ())
    assert json.dumps(entry["conversations"]) == json.dumps(documented["conversations"])
    assert (entry["source"], type(entry["tools"])) == ("hermes-agent", str)


async def test_39_reasoning_is_stored_and_not_sent_back_in_the_content(tmp_path: Path) -> None:
    await process(Asked, tmp_path, [say("<think>r</think>fine")], total_steps=1, group_size=1)
    ((_, answer),) = lines(tmp_path / "groups.jsonl")[0]["messages"]
    assert answer == {"role": "assistant", "content": "fine", "reasoning": "r"}
    thought = {**call(("terminal", {"command": "ls"})), "reasoning_content": "I need a tool."}
    _, server = await looped([thought, say("ok")])
    sent = server.requests[1]["messages"][1]
    assert not sent["content"] and sent.get("reasoning_content", "I need a tool.") == "I need a tool."


@pytest.mark.parametrize("key", ["reasoning", "reasoning_content"])
def test_40_41_53_reasoning_is_wrapped_and_prepended(key: str) -> None:
    content = "Here's what I found..."
    assert turns(answered(content, **{key: "Let me think"})) == [f"<think>\nLet me think\n</think>\n{content}"]


async def test_42_an_ephemeral_prompt_reaches_the_model_only(tmp_path: Path) -> None:
    class Based(Asked):
        system_prompt = "BASE"

    async with ScriptedServer(does_nothing) as server:
        more = {"system_prompt": "BASE", "ephemeral_system_prompt": "SECRET", "trajectory_system_prompt": "actual"}
        await make(Based, server, tmp_path, total_steps=1, **more).process_manager()
        assert server.requests[0]["messages"][0]["content"] == "BASE\n\nSECRET"
    (line, _) = lines(tmp_path / "trajectory_samples.jsonl")
    assert line["conversations"][0] == {"from": "system", "value": "BASE"}


@pytest.fixture(scope="module")
def compressed(tmp_path_factory: pytest.TempPathFactory) -> tuple[Any, Any]:
    """An entry of many turns, and what `lachesis compress` with the project's settings makes of it."""
    folder = tmp_path_factory.mktemp("compressed")
    fake_tokenizer().save_pretrained(folder / "tokenizer")
    conversation: list[dict[str, Any]] = [USER]
    for number in range(20):
        command = json.dumps({"command": f"seq {number}"})
        conversation += [answered(None, (f"c{number}", "terminal", command)), result(f"c{number}", "row " * 60)]
    entry, _ = to_trajectory_entry([*conversation, answered("ok")], [TERMINAL], model="m", completed=True)
    (folder / "in.jsonl").write_text(json.dumps(entry) + "\n")
    settings = yaml.safe_load((ROOT / "configs" / "trajectory_compression.yaml").read_text())
    settings["tokenizer"] |= {"name": str(folder / "tokenizer"), "trust_remote_code": False}
    settings["compression"] |= {"target_max_tokens": 1500, "summary_target_tokens": 60}
    with served(lambda _: say("It counted.")) as server:
        settings["summarization"] |= {"base_url": server.base_url, "model": "m", "api_key_env": "SUMMARY_KEY"}
        (folder / "c.yaml").write_text(yaml.safe_dump(settings))
        os.environ["SUMMARY_KEY"] = "x"
        arguments = ["--input", str(folder / "in.jsonl"), "--output", str(folder / "out.jsonl")]
        assert main(["compress", *arguments, "--config", str(folder / "c.yaml")]) == 0
        assert server.requests
    return entry["conversations"], lines(folder / "out.jsonl")[0]["conversations"]


def test_43_compression_protects_the_ends_and_summarises_the_middle(compressed: tuple[Any, Any]) -> None:
    before, after = compressed
    assert len(after) < len(before)
    assert (after[:4], after[-2:]) == (before[:4], before[-2:])
    assert "It counted." in json.dumps(after)


def test_44_the_settings_of_compression_are_those_of_the_file(tmp_path: Path) -> None:
    settings = yaml.safe_load((ROOT / "configs" / "trajectory_compression.yaml").read_text())
    assert {"tokenizer", "compression", "protected_turns", "summarization", "output", "metrics"} <= set(settings)
    settings["compression"]["nope"] = 1
    (tmp_path / "c.yaml").write_text(yaml.safe_dump(settings))
    (tmp_path / "in.jsonl").write_text("{}\n")
    assert main(["compress", "--input", str(tmp_path / "in.jsonl"), "--config", str(tmp_path / "c.yaml")]) == 2


DOCUMENTED = [
    {"role": "user", "content": "What Python version is installed?"},
    answered(
        None,
        ("call_abc123", "terminal", '{"command": "python3 --version"}'),
        reasoning="The user wants to know the Python version. I should run python3 --version.",
    ),
    result("call_abc123", "Python 3.11.6"),
    answered("Python 3.11.6 is installed on this system.", reasoning="Got the version. I can now answer the user."),
]


def test_45_59_the_complete_example_is_written_byte_for_byte() -> None:
    documented = json.loads((DATA / "trajectory_entry.json").read_text())
    when = {"model": "anthropic/claude-sonnet-4.6", "timestamp": "2026-03-30T14:22:31.456789"}
    entry, _ = to_trajectory_entry(DOCUMENTED, [TERMINAL], completed=True, **when)  # type: ignore[arg-type]
    assert json.dumps(entry) == json.dumps(documented)
    own, _ = to_trajectory_entry([SEARCHED[0], *DOCUMENTED], [TERMINAL], completed=True, **when)  # type: ignore[arg-type]
    assert own == entry, "the conversation's own system message is replaced"


def test_46_the_batch_example_has_its_keys_in_their_order() -> None:
    entry, _ = to_batch_entry(
        DOCUMENTED,
        [TERMINAL],
        prompt_index=42,
        metadata={"prompt_source": "gsm8k", "difficulty": "hard"},
        completed=True,
        partial=False,
        api_calls=7,
        toolsets_used=["code_tools", "file_tools"],
        tool_stats={name: {"count": n, "success": n, "failure": 0} for name, n in (("terminal", 3), ("read_file", 2))},
        all_tools=["terminal", "read_file", "write_file"],
    )
    assert list(entry) == [
        *("prompt_index", "conversations", "metadata", "completed", "partial", "api_calls", "toolsets_used"),
        *("tool_stats", "tool_error_counts"),
    ]
    assert entry["tool_stats"]["write_file"] == {"count": 0, "success": 0, "failure": 0}
    assert entry["tool_error_counts"] == {"terminal": 0, "read_file": 0, "write_file": 0}


def test_47_48_60_61_files_by_completed_or_by_name_load_as_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    conversion = to_conversations(DOCUMENTED, [TERMINAL])
    for completed in (True, False):
        save_trajectory(conversion, "m", completed)
        save_trajectory(conversion, "m", completed, filename="mine.jsonl")
    loaded = {
        path.name: [json.loads(line)["completed"] for line in path.read_text().splitlines() if line.strip()]
        for path in tmp_path.glob("*.jsonl")
    }
    assert loaded == {
        "trajectory_samples.jsonl": [True],
        "failed_trajectories.jsonl": [False],
        "mine.jsonl": [True, False],
    }
    assert datasets_of(tmp_path / "trajectory_samples.jsonl", tmp_path / "failed_trajectories.jsonl").num_rows == 2


def test_49_50_51_62_batch_files_have_all_tools_and_leave_out_what_has_no_reasoning(batch: Path) -> None:
    assert sorted(path.name for path in batch.glob("batch_*")) == ["batch_001_output.jsonl", "batch_002_output.jsonl"]
    found = entries(batch)
    assert [entry["metadata"]["level"] for entry in sorted(found, key=lambda each: each["prompt_index"])] == [
        0,
        1,
        2,
        3,
    ]
    for entry in found:
        assert set(entry["tool_stats"]) == set(entry["tool_error_counts"]) == set(model_tools.TOOL_TO_TOOLSET_MAP)
        assert (entry["completed"], entry["partial"], entry["api_calls"]) == (True, False, 1)
    assert len(lines(batch / "groups.discarded.jsonl")) == 1


def test_52_roles() -> None:
    asks = answered(None, ("c", "terminal", "{}"))
    found = to_conversations([USER, asks, result("c", "x"), answered("ok")], [TERMINAL]).conversations
    assert [turn["from"] for turn in found] == ["system", "human", "gpt", "tool", "gpt"]


def test_54_55_every_turn_has_one_think_block() -> None:
    assert convert_scratchpad_to_think("<REASONING_SCRATCHPAD>x</REASONING_SCRATCHPAD>").startswith("<think>")
    tagged = "<REASONING_SCRATCHPAD>\ns\n</REASONING_SCRATCHPAD>\nans"
    assert turns(answered(tagged)) == ["<think>\ns\n</think>\nans"]
    assert turns(answered(tagged, reasoning="n")) == ["<think>\nn\ns\n</think>\nans"]
    assert turns(answered("ans")) == ["<think>\n</think>\nans"]


def test_56_57_58_calls_and_results_are_blocks_of_json() -> None:
    asks = answered(None, ("1", "terminal", '{"a": 1}'), ("2", "read_file", "{bad"))
    asked, told = turns(asks, result("1", '{"exit_code": 0}'), result("2", "text"))
    blocks = ['{"name": "terminal", "arguments": {"a": 1}}', '{"name": "read_file", "arguments": {}}']
    assert asked == "<think>\n</think>\n" + "\n".join(f"<tool_call>\n{block}\n</tool_call>" for block in blocks)
    found = [json.loads(text) for text in re.findall(r"<tool_response>\n(.*)\n</tool_response>", told)]
    assert found == [
        {"tool_call_id": "1", "name": "terminal", "content": {"exit_code": 0}},
        {"tool_call_id": "2", "name": "read_file", "content": "text"},
    ]


def test_63_a_config_file_controls_the_saving(tmp_path: Path) -> None:
    from lachesis.runs import command_line

    (tmp_path / "c.yaml").write_text("agent: {save_trajectories: false}\n")
    with served(does_nothing) as server:
        for extra, saved in (([], False), (["--save-trajectories", "true"], True)):
            out = tmp_path / str(saved)
            given = ["--openai.base_url", server.base_url, "--openai.model_name", "m", "--openai.api_key", "x"]
            given += ["--env.data_path_to_save_groups", str(out / "groups.jsonl"), "--env.total_steps", "1"]
            assert command_line.main(Asked, ["process", "--config", str(tmp_path / "c.yaml"), *given, *extra]) == 0
            assert (out / "trajectory_samples.jsonl").exists() is saved


def graph() -> MessageHistory:
    """System, user, an answer with metadata that calls a sub-agent, its result; then the first message is edited."""
    history = MessageHistory(
        [
            {"role": "system", "content": "Edits are kept in the graph as context"},
            {"role": "user", "content": "Messages aren't the only thing in the graph"},
        ]
    )
    asks = answered("Hello", ("c", "subagent", "{}"))
    history.append(ChatResponse(as_message(asks), FinishReason.TOOL_CALLS, model="m", sampling={"temperature": 1.0}))
    history.append(ToolResponse(Message("tool", "Subagent call output", tool_call_id="c"), "subagent", chat=subagent()))
    history[0]["content"] = "Messages are nodes in a graph"
    return history


def test_64_the_graph_shows_messages_responses_subagents_and_edits() -> None:
    drawn = graph().to_mermaid()
    for part in (
        "System Message",
        "User Message",
        "Chat Response",
        "temperature",
        "Subagent Chat",
        "Discarded: edit",
        "-.->",
    ):
        assert part in drawn, part


def test_65_elements_of_the_graph_are_immutable() -> None:
    given = {"role": "user", "content": "before"}
    history = MessageHistory([given])
    given["content"] = "after"
    assert history[0]["content"] == "before"
    node = history.nodes()[0]
    for frozen, name in ((node, "message"), (Message("user", "x"), "content")):
        with pytest.raises((FrozenInstanceError, AttributeError)):
            setattr(frozen, name, None)


def test_66_67_an_edit_as_usual_gives_data_that_is_on_policy() -> None:
    history = MessageHistory([USER])
    first = completion(TokenPrefix([1, 2, 3]), [5, 6, END])
    history.append(first)
    history.append({"role": "user", "content": "and?"})
    message_history, my_edit = history, "EDITED"
    message_history[2]["content"] = my_edit
    second = completion(TokenPrefix([1, 2, 3, 9]), [7, END])
    history.append(second)
    message_history[1]["content"] = my_edit
    found = samples(history, rollout_id="r")
    assert [problem for sample in found for problem in verify(sample)] == []
    trained = sorted(token for sample in found for token in sample.masks if token >= 0)
    assert trained == sorted([5, 6, END, 7, END]), "all that was sampled, each in its own context, and nothing else"


def names_of(defined: Sequence[dict[str, Any]]) -> set[str]:
    return {each["function"]["name"] for each in defined}


def test_68_73_definitions_by_enabled_and_disabled_toolsets() -> None:
    assert names_of(get_tool_definitions(["terminal"])) == {"terminal", "process"}
    assert names_of(model_tools.get_tool_definitions(["coding"], ["file"])) == {"terminal", "process", "todo"}
    assert names_of(model_tools.get_tool_definitions(["terminal", "web"], quiet_mode=True)) == {"terminal", "process"}
    assert validate_toolset("coding") and not validate_toolset("nope")
    assert set(resolve_toolset("coding")) >= set(resolve_toolset("file")) and "file" in TOOLSETS["coding"].includes


async def test_69_70_71_calls_by_hand_have_a_sandbox_for_each_task(tmp_path: Path) -> None:
    terminal = importlib.import_module("tools.terminal_tool")

    def use() -> list[Any]:
        def shell(command: str, task: str) -> Any:
            return json.loads(model_tools.handle_function_call("terminal", {"command": command}, task))

        shell("cd /tmp && echo 1 > ~/f.txt && export V=7", "a")
        found = [shell("cat ~/f.txt; pwd; echo $V", "a")["output"], shell("cat ~/f.txt", "b")["exit_code"]]
        found.append("error" in json.loads(model_tools.handle_function_call("nope", {}, "a")))
        terminal.cleanup_vm("a")
        found += [terminal.cleanup_vm("unknown"), shell("cat ~/f.txt", "a")["exit_code"]]
        return [*found, terminal.cleanup_all_environments()]

    seen, other, unknown, nothing, gone, cleaned = await by_hand(tmp_path, use)
    assert seen.splitlines()[0] == "1" and seen.splitlines()[-1] == "7"
    assert other != 0 and gone != 0
    assert (unknown, nothing, cleaned >= 2) == (True, None, True)


def test_72_an_import_of_what_is_removed_can_be_caught(tmp_path: Path) -> None:
    program = """
import lachesis
try:
    from tools.mixture_of_agents_tool import mixture_of_agents_tool, check_moa_requirements
except ModuleNotFoundError:
    mixture_of_agents_tool = None
    def check_moa_requirements(): return False
from tools.web_tools import web_search_tool, check_firecrawl_api_key
print(mixture_of_agents_tool, check_moa_requirements(), web_search_tool.__name__, check_firecrawl_api_key())
"""
    assert fresh(program, tmp_path).stdout.split() == ["None", "False", "web_search_tool", "False"]


@pytest.mark.parametrize(
    ("flawed", "told"),
    [
        (call(("terminl", {"command": "ls"})), "Did you mean terminal?"),
        (call(("terminal", "{bad")), None),
        (say("<think>only</think>"), None),
    ],
    ids=["74 names", "75 arguments", "76 content after reasoning"],
)
async def test_74_75_76_answers_are_validated_before_they_are_accepted(flawed: Answer, told: str | None) -> None:
    found, server = await looped([flawed, say("fine")])
    assert (found.outcome, found.final_response, len(server.requests)) == (Outcome.COMPLETED, "fine", 2)
    if told:
        assert told in str(server.requests[1]["messages"])
    else:
        assert len(server.requests[1]["messages"]) == 1, "sampled again in the same context"


async def test_77_persistent_failures_roll_back_to_the_last_valid_state() -> None:
    found, _ = await looped([call(("terminal", "{bad"))])
    assert found.outcome is Outcome.MODEL_ERROR
    assert [message["role"] for message in found.messages] == ["user"]


async def test_78_requests_are_repeated_with_growing_pauses() -> None:
    found, server = await looped([429, 500, 503, say("ok")], max_retries=4)
    assert (found.final_response, len(server.requests)) == ("ok", 4)


def test_79_80_each_rollout_has_its_own_sandbox_and_a_line_in_the_pattern(played: Path) -> None:
    found = rollouts(played / "groups.jsonl")
    assert len({each["rollout_id"] for each in found}) == len(found) == 4
    (line, _) = lines(played / "trajectory_samples.jsonl")
    assert [turn["from"] for turn in line["conversations"]] == ["system", "human", "gpt", "tool", "gpt"]
    assert "hi" in line["conversations"][3]["value"]
    assert line["conversations"][4]["value"] == "<think>\nIt is written.\n</think>\nDone."
    assert line["reward"] == 1.0
    assert len(lines(played / "failed_trajectories.jsonl")) == 2, "max_turns"


@pytest.mark.parametrize(
    ("module", "name"),
    [
        ("environments.agent_loop", "HermesAgentLoop"),
        ("environments.hermes_base_env", "HermesAgentBaseEnv"),
        ("environments.tool_context", "ToolContext"),
        ("environments.tool_call_parsers", "get_parser"),
        ("environments.terminal_test_env", "TerminalTestEnv"),
        ("environments.hermes_swe_env", "HermesSweEnv"),
        ("environments.gsm8k_agent_env", "GSM8kAgentEnv"),
    ],
)
def test_81_the_files_of_environments(module: str, name: str) -> None:
    assert hasattr(importlib.import_module(module), name)


def test_82_there_are_more_than_11_parsers() -> None:
    parsers = importlib.import_module("environments.tool_call_parsers")
    assert len(parsers.list_parsers()) >= 11
    content, calls = parsers.get_parser("hermes").parse('<tool_call>\n{"name": "f", "arguments": {}}\n</tool_call>')
    assert content is None and calls[0].function.name == "f"


class Tokens(ManyWords):
    """Rewards that differ, of whatever the model answers."""

    toolsets: ClassVar[Sequence[str]] = ()
    needs_sandboxes = False

    async def compute_reward(self, item: Any, result: Any, ctx: Any) -> float:
        return float(ctx.task_id.endswith("0"))


async def test_83_84_85_both_phases_and_tools_as_a_parameter(tmp_path: Path) -> None:
    (tmp_path / "one").mkdir()
    await process(SortWords, tmp_path / "one", sorts, total_steps=1)
    assert [group["scores"] for group in lines(tmp_path / "one" / "groups.jsonl")] == [[1.0, 1.0]]
    text = 'Hm.<tool_call>\n{"name": "terminal", "arguments": {"command": "ls"}}\n</tool_call>'
    async with FakeServer(Scripted(text)) as model:
        config = Tokens.env_config_cls(
            total_steps=1, data_path_to_save_groups=str(tmp_path / "two" / "groups.jsonl"), max_token_length=64
        )
        env = Tokens(config, [with_tokens(model, tmp_path)])
        async with env.running(training=True):
            response = await env.server.chat_completion(messages=[USER], tools=[TERMINAL], temperature=1.0)
            assert response.choices[0].message.tool_calls[0].function.name == "terminal"
            async with env.server.managed_server(tokenizer=env.tokenizer) as managed:
                await managed.chat_completion(messages=[USER], temperature=1.0, max_tokens=32)
                (node,) = managed.get_state()["nodes"]
                assert len(node.tokens) == len(node.masked_tokens) == len(node.logprobs) > 0
            group, _ = await env.collect_trajectories(await env.get_next_item())
    assert group is None or {"tokens", "masks", "scores"} <= set(group)


BACKENDS = (
    ("docker", "{url: 'unix:///no'}", r"backend 'docker': .*unix:///no cannot be reached.*systemctl start docker"),
    ("modal", "{}", r"backend 'modal': .*Token missing.*MODAL_TOKEN_ID and MODAL_TOKEN_SECRET"),
    ("singularity", "{binary: /no/apptainer}", r"backend 'singularity': /no/apptainer.*install apptainer"),
    ("ssh", "{}", r"backend 'ssh' needs its option host, for example terminal_options: \{host: worker-1\}"),
    ("nomad", "{}", r"'nomad': there is no backend .*local, docker, singularity, ssh, modal"),
)
"""What is missing in a place where none of them is set up, and the next step."""


@pytest.mark.parametrize(("name", "options", "says"), BACKENDS, ids=lambda value: str(value).split("\n")[0][:12])
def test_86_a_backend_that_cannot_play_says_what_it_needs(
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
    name: str,
    options: str,
    says: str,
) -> None:
    """That each of them plays where it is set up is shown by tests/sandbox, with real engines."""
    from lachesis.runs import command_line

    monkeypatch.setenv("MODAL_CONFIG_PATH", str(tmp_path / "modal.toml"))
    for variable in ("MODAL_TOKEN_ID", "MODAL_TOKEN_SECRET"):
        monkeypatch.delenv(variable, raising=False)
    usual = ["process", "--openai.base_url", "http://127.0.0.1:9/v1", "--openai.model_name", "m"]
    usual += ["--env.data_path_to_save_groups", str(tmp_path / "groups.jsonl")]
    more = ["--env.terminal_backend", name, "--env.terminal_options", options]
    assert command_line.main(SortWords, [*usual, *more]) in (1, 2)
    said = capsys.readouterr().err
    assert re.search(f"error: .*{says}", said) and "Traceback" not in said, said


async def test_86_the_local_backend_plays(tmp_path: Path) -> None:
    found = await process(SortWords, tmp_path, sorts, total_steps=1, terminal_backend="local")
    assert found.summary.reward.mean == 1.0


async def test_87_a_reward_uses_the_tools_of_its_rollout_with_and_without_await(tmp_path: Path) -> None:
    class Awaits(SortWords):
        async def compute_reward(self, item: Any, result: Any, ctx: Any) -> float:
            return float("apple" in (await ctx.terminal("cat sorted.txt"))["output"])

    class Calls(OldSortWords):
        async def compute_reward(self, item: Any, result: Any, ctx: Any) -> float:
            return float("apple" in ctx.terminal("cat sorted.txt")["output"])

    for kind in (Awaits, Calls):
        (tmp_path / kind.__name__).mkdir()
        found = await process(kind, tmp_path / kind.__name__, sorts, total_steps=1)
        assert found.summary.reward.mean == 1.0


@pytest.mark.slow
async def test_88_an_environment_and_a_trainer_meet_at_the_api_of_the_first_terminal(tmp_path: Path) -> None:
    """Two of the terminals are run as they are typed. Of the trainer there are its policy server, with a sampler that
    needs no torch, and its requests; in tests/train/torch/test_whole_path.py `launch_training.py` trains with both."""
    from transformers import AutoTokenizer

    from lachesis_train.policy import CurrentPolicy, PolicyVersion
    from lachesis_train.policy_server import PolicyServer

    port = free_port()
    url = f"http://127.0.0.1:{port}"
    fake_tokenizer().save_pretrained(tmp_path / "tokenizer")
    sampler = FakeSampler()
    policy = CurrentPolicy(PolicyVersion(0, "run:0", sampler))
    run_api = (str(Path(sys.executable).parent / "run-api"), "--port", str(port))
    async with PolicyServer(
        policy, AutoTokenizer.from_pretrained(tmp_path / "tokenizer"), model_name="policy", port=0
    ) as policy_server:
        flags = {
            "--env.rollout_server_url": url,
            "--openai.base_url": policy_server.base_url,
            "--env.group_size": "2",
            "--env.max_token_length": "24",
            "--env.max_num_workers": "2",
            "--env.total_steps": "3",
            "--env.steps_per_eval": "0",
            "--env.ensure_scores_are_not_same": "false",
            "--env.spool_path": str(tmp_path / "spool"),
        }
        environment = (
            *(sys.executable, str(ROOT / "environments" / "gsm8k_agent_env.py"), "serve"),
            *(text for pair in flags.items() for text in pair),
        )
        started = []
        try:
            for program, name in ((run_api, "api"), (environment, "environment")):
                with (tmp_path / f"{name}.log").open("wb") as log:
                    started.append(await asyncio.create_subprocess_exec(*program, cwd=tmp_path, stdout=log, stderr=log))
            trainer = Trainer(url, batch_size=4)
            async with asyncio.timeout(LIVENESS):
                while True:
                    try:
                        await trainer.register()
                        break
                    except aiohttp.ClientError:
                        await asyncio.sleep(0.1)
            await trainer.take(2)
        finally:
            for process_ in started:
                process_.terminate()
                await process_.wait()
    (batch,) = trainer.batches
    assert len(batch) == 2
    sampled = {tuple(call["prompt_ids"]) for call in sampler.calls}
    for group in batch:
        assert len(group["scores"]) == len(group["tokens"]) == 2
        for tokens, masks, logprobs in zip(group["tokens"], group["masks"], group["inference_logprobs"], strict=True):
            assert len(tokens) == len(masks) == len(logprobs)
            first = next(place for place, mask in enumerate(masks) if mask != -100)
            assert tuple(tokens[:first]) in sampled, "trained in the context in which it was sampled"
            assert all(p == 1.0 for p, mask in zip(logprobs, masks, strict=True) if mask == -100)
    said = (tmp_path / "environment.log").read_text()
    assert f"{flags['--openai.base_url']} is the policy server of a training run" in said


async def test_89_rewards_go_to_wandb_by_the_names_of_atropos(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("WANDB_MODE", "offline")
    monkeypatch.setenv("WANDB_DIR", str(tmp_path))
    await process(Asked, tmp_path, does_nothing, use_wandb=True, total_steps=1)
    importlib.import_module("wandb").teardown()
    (written,) = tmp_path.glob("wandb/offline-run-*/*.wandb")
    assert b"train/avg_reward" in written.read_bytes()


def test_90_the_top_level_and_the_classes() -> None:
    for name in ("pyproject.toml", "README.md", "environments", "tool_call_parsers", "backends", "configs", "tests"):
        assert (ROOT / name).exists()
    assert (ROOT / "launch_training.py").exists()
    base = importlib.import_module("atroposlib.envs.base").BaseEnv
    old = importlib.import_module("environments.hermes_base_env").HermesAgentBaseEnv
    assert issubclass(old, base) and issubclass(lachesis.HermesAgentBaseEnv, object)
