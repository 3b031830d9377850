"""Our environments as servers of other standards. The requests of clients are those that the standards' SDKs send."""

from __future__ import annotations

import asyncio
import json
import os
import re
import signal
import subprocess
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import aiohttp
import pytest

from backends import BackendError
from backends.errors import SettingsError
from lachesis import Reward, Tool
from lachesis.cli.environment_classes import environment_class
from lachesis.settings.server_settings import ServerConfig
from lachesis_doors.mcp_http import McpHttpClient, named_events
from lachesis_doors.serving.command import STANDARDS, main, serve
from lachesis_doors.serving.host import ServingHost
from lachesis_doors.serving.open_rollout import Clients
from lachesis_tools.mcp.client import McpLost, McpRefused
from tests.support.scripted_server import call
from tests.support.small_envs import ROOT, HermesAgentBaseEnv, SortWords, make, process, rollouts

NUMBER = {"type": "object", "properties": {"number": {"type": "integer"}}, "required": ["number"]}


class Served(SortWords):
    """Two items, so that their list ends; what a rollout leaves is counted."""

    name = "Served"

    async def setup(self):
        self.items = iter(["pear fig apple", "delta alpha"])

    async def get_next_item(self):
        return next(self.items, None)


class Numbers(HermesAgentBaseEnv):
    """A simulator with a session, tools of the item, and a reward that comes with the calls."""

    name = "numbers"
    step_rewards = "sum"
    wrong = "wrong " * 2000
    open_sessions = 0
    closed: asyncio.Event
    """One of them was closed since the last one began."""

    async def setup(self):
        self.items = iter([5, 7])
        Numbers.closed = asyncio.Event()

    async def get_next_item(self):
        return next(self.items, None)

    def format_prompt(self, item):
        return "Guess."

    @asynccontextmanager
    async def session(self, item):
        Numbers.open_sessions += 1
        Numbers.closed.clear()
        try:
            yield {"secret": item}
        finally:
            Numbers.open_sessions -= 1
            Numbers.closed.set()

    def tools_for(self, item):
        async def guess(arguments, session):
            from lachesis import ToolResult

            if arguments["number"] == 0:
                raise BackendError("the simulator's machine is gone")
            if arguments["number"] == 1:
                raise RuntimeError("the simulator fell over")
            right = arguments["number"] == session["secret"]
            text = "right" if right else self.wrong
            return ToolResult(text, reward=1.0 if right else -0.25, done=right)

        return [Tool.from_schema("guess", "Guess.", NUMBER, guess)]


class Chatty(HermesAgentBaseEnv):
    """A user who answers once."""

    name = "chatty"

    async def get_next_item(self):
        return {"n": 1}

    def format_prompt(self, item):
        return "Say hello."

    def follow_up(self, item, messages):
        return "And now?" if sum(message["role"] == "assistant" for message in messages) < 2 else None

    async def compute_reward(self, item, result, ctx):
        return Reward(0.5, {"last": float(result.final_response == "Bye.")})


@asynccontextmanager
async def serving(
    standard: str, env_cls: Any, folder: Path, model: ServerConfig | str = "http://127.0.0.1:9/v1", **more: Any
) -> AsyncIterator[Any]:
    """A server in this process, which is stopped at the end."""
    settings = {"enabled_toolsets": ["terminal", "file"] if env_cls is Served else [], "grace_period": 0.0}
    how = {name: more.pop(name) for name in ("idle", "on_branches") if name in more}
    env = make(env_cls, model if isinstance(model, str) else "http://127.0.0.1:9/v1", folder, **{**settings, **more})
    if not isinstance(model, str):
        env.server_configs[:] = [model]
    stop, ready = asyncio.Event(), asyncio.get_running_loop().create_future()
    work = serve(STANDARDS.load(standard), env, stop, items=3, **how, ready=ready.set_result)
    running = asyncio.create_task(work)
    await asyncio.wait({running, ready}, return_when=asyncio.FIRST_COMPLETED)
    if running.done():
        running.result()
    try:
        yield ready.result()
    finally:
        stop.set()
        await running


@asynccontextmanager
async def served(standard: str, env_cls: Any, folder: Path, **more: Any) -> AsyncIterator[str]:
    """The address of such a server."""
    async with serving(standard, env_cls, folder, **more) as service:
        yield service.root_url


# --- the Open Reward Standard


class OrsClient:
    """The requests of ors-sdk 0.1.0."""

    def __init__(self, url: str, name: str, http: aiohttp.ClientSession) -> None:
        self.url, self.name, self.http = url, name, http
        self.headers: dict[str, str] = {}

    async def asked(self, method: str, route: str, body: Any = None) -> tuple[int, Any]:
        async with self.http.request(method, f"{self.url}{route}", json=body, headers=self.headers) as response:
            return response.status, await response.json()

    async def streamed(self, route: str, body: Any) -> list[tuple[str, str]]:
        async with self.http.post(f"{self.url}{route}", json=body, headers=self.headers) as response:
            assert (response.status, response.content_type) == (200, "text/event-stream")
            return [event async for event in named_events(response.content)]

    async def begin(self, **task: Any) -> tuple[int, Any]:
        self.headers = {}
        (_, number), end = await self.streamed("/create_session", {})
        assert end == ("end", "")
        self.headers = {"X-Session-ID": number}
        return await self.asked("POST", "/create", task)

    async def call(self, tool: str, **given: Any) -> Any:
        events = await self.streamed(f"/{self.name}/call", {"name": tool, "input": given})
        assert events[0][0] == "task_id"
        assert all(len(data) <= 4096 for _, data in events)
        if events[-1][0] == "error":
            return events[-1][1]
        assert events[-1][0] == "end"
        return json.loads("".join(data for kind, data in events if kind in ("chunk", "end")))


@asynccontextmanager
async def ors(env_cls: Any, folder: Path, **more: Any) -> AsyncIterator[OrsClient]:
    async with served("ors", env_cls, folder, **more) as url, aiohttp.ClientSession() as http:
        yield OrsClient(url, env_cls.name.lower(), http)


async def test_ors_lists_tasks_without_their_content(tmp_path: Path) -> None:
    async with ors(Served, tmp_path) as client:
        assert await client.asked("GET", "/list_environments") == (200, ["served"])
        assert await client.asked("GET", "/served/splits") == (200, [{"name": "train", "type": "train"}])
        assert await client.asked("POST", "/SERVED/num_tasks", {"split": "train"}) == (200, {"num_tasks": 2})
        _, listed = await client.asked("POST", "/served/tasks", {"split": "train"})
        assert [(task["split"], task["index"]) for task in listed["tasks"]] == [("train", 0), ("train", 1)]
        assert "apple" not in json.dumps(listed)
        _, ranged = await client.asked("POST", "/served/task_range", {"split": "train", "start": -1})
        assert ranged["tasks"] == listed["tasks"][1:]
        _, last = await client.asked("POST", "/task", {"split": "train", "index": -1})
        assert last["task"] == listed["tasks"][1]
        for route, body in (("task", {"split": "train", "index": 2}), ("tasks", {"split": "best"}), ("task", [1])):
            status, said = await client.asked("POST", f"/served/{route}", body)
            assert status in (400, 422) and "detail" in said
        assert (await client.asked("GET", "/other/splits"))[0] == 404


async def test_ors_plays_in_a_sandbox_of_the_rollouts_own(tmp_path: Path) -> None:
    async with ors(Served, tmp_path) as client:
        _, listed = await client.asked("POST", "/served/tasks", {"split": "train"})
        assert (await client.begin(task_spec=listed["tasks"][0], env_name="served"))[0] == 200
        _, prompt = await client.asked("GET", "/served/prompt")
        assert prompt == [{"type": "text", "text": Served.format_prompt(None, "pear fig apple")}]  # type: ignore[arg-type]
        _, tools = await client.asked("GET", "/served/task_tools")
        assert [tool["name"] for tool in tools["tools"]][-1] == tools["terminal_tool"]["name"] == "submit"
        answer = await client.call("terminal", command="printf 'apple\nfig\npear\n' >sorted.txt; ls")
        assert (answer["ok"], answer["output"]["reward"], answer["output"]["finished"]) == (True, None, False)
        assert "sorted.txt" in answer["output"]["blocks"][0]["text"]
        assert (await client.call("teleport"))["reason"] == "not_found"
        wrong = await client.call("terminal")
        assert wrong["output"]["metadata"] == {"failed": True} and "command" in wrong["output"]["blocks"][0]["text"]
        for number in (float("nan"), float("inf")):  # Python's clients write these, and 1e400 is read as the second
            wrong = await client.call("terminal", command="ls", timeout=number)
            assert wrong["output"]["metadata"] == {"failed": True}
            assert "arguments of terminal are not JSON: " in wrong["output"]["blocks"][0]["text"]
        assert (await client.call("submit", answer=""))["output"]["finished"] is False
        end = await client.call("submit", answer="Done.")
        assert (end["output"]["reward"], end["output"]["finished"]) == (1.0, True)
        assert (await client.call("terminal", command="ls"))["reason"] == "episode_finished"
        assert (await client.asked("POST", "/delete", {}))[0] == 200
        assert (await client.asked("POST", "/ping", {}))[0] == 404
        await client.begin(split="train", index=0)
        assert "sorted.txt" not in json.dumps(await client.call("terminal", command="ls"))


async def test_ors_pays_once_and_at_the_end(tmp_path: Path) -> None:
    async with ors(Numbers, tmp_path) as client:
        await client.begin(split="train", index=1)
        wrong, right = await client.call("guess", number=3), await client.call("guess", number=7)
        assert len(wrong["output"]["blocks"][0]["text"]) > 4096
        assert [step["output"]["reward"] for step in (wrong, right)] == [None, 0.75]
        assert (right["output"]["blocks"][0]["text"], right["output"]["finished"]) == ("right", True)
        assert Numbers.open_sessions == 0


async def test_ors_says_what_a_user_answers(tmp_path: Path) -> None:
    async with ors(Chatty, tmp_path) as client:
        await client.begin(split="train", index=2)
        said = await client.call("reply", answer="Hello.")
        assert (said["output"]["blocks"][0]["text"], said["output"]["finished"]) == ("And now?", False)
        end = await client.call("reply", answer="Bye.")
        assert (end["output"]["reward"], end["output"]["finished"]) == (0.5, True)
        assert end["output"]["metadata"]["components"] == {"reward/last": 1.0}


@pytest.mark.parametrize(("number", "kind"), [(0, "infra_error"), (1, "environment")])
async def test_ors_what_breaks_is_an_error_and_no_reward(tmp_path: Path, number: int, kind: str) -> None:
    async with ors(Numbers, tmp_path) as client:
        await client.begin(split="train", index=0)
        said = await client.call("guess", number=number)
        assert isinstance(said, str) and f"no score ({kind})" in said
        assert (await client.call("guess", number=5))["reason"] == "episode_finished"
        assert Numbers.open_sessions == 0


async def test_ors_goes_on_with_a_call_whose_connection_broke(tmp_path: Path) -> None:
    async with ors(Served, tmp_path) as client:
        await client.begin(split="train", index=0)
        body = {"name": "terminal", "input": {"command": "sleep 1; echo x >>count; cat count"}}
        async with client.http.post(f"{client.url}/served/call", json=body, headers=client.headers) as response:
            kind, number = await anext(named_events(response.content))
            assert kind == "task_id"
        answer = await client.streamed("/served/call", {**body, "task_id": number})
        assert json.loads(answer[-1][1])["output"]["blocks"][0]["text"].count("x\\n") == 1
        assert (await client.asked("POST", "/served/call", {**body, "task_id": "none"}))[0] == 404


async def test_a_silent_client_loses_its_rollout_and_others_get_the_place(tmp_path: Path) -> None:
    async with ors(Numbers, tmp_path, idle=0.5, max_num_workers=1) as client:
        await client.begin(split="train", index=0)
        await client.asked("GET", "/numbers/prompt")
        assert Numbers.open_sessions == 1
        assert (await client.begin(split="train", index=0))[0] == 429
        await Numbers.closed.wait()
        assert (await client.begin(split="train", index=0))[0] == 200


class LeavesSlowly(Numbers):
    """Its sessions take their time to close."""

    may_close: asyncio.Event

    @asynccontextmanager
    async def session(self, item):
        async with super().session(item) as session:
            try:
                yield session
            finally:
                Numbers.closed.set()
                await self.may_close.wait()


async def test_a_client_that_ends_its_rollout_while_silent_ones_are_closed_leaves_them_watched(tmp_path: Path) -> None:
    LeavesSlowly.may_close = asyncio.Event()
    async with ors(LeavesSlowly, tmp_path, idle=0.5) as client:
        for index in (0, 1):
            await client.begin(split="train", index=index)
            await client.asked("GET", "/numbers/prompt")
        await Numbers.closed.wait()
        deleting = asyncio.create_task(client.asked("POST", "/delete", {}))
        await asyncio.sleep(0.1)
        LeavesSlowly.may_close.set()
        assert (await deleting)[0] == 200
        await client.begin(split="train", index=0)
        await client.asked("GET", "/numbers/prompt")
        await asyncio.wait_for(Numbers.closed.wait(), 20)


async def test_the_end_of_the_server_leaves_nothing_open(tmp_path: Path) -> None:
    async with ors(Numbers, tmp_path) as client:
        for index in (0, 1):
            await client.begin(split="train", index=index)
            await client.asked("GET", "/numbers/prompt")
        assert Numbers.open_sessions == 2
    assert Numbers.open_sessions == 0


async def test_the_end_of_the_server_waits_for_open_rollouts(tmp_path: Path) -> None:
    async with aiohttp.ClientSession() as http:
        async with served("ors", Numbers, tmp_path, grace_period=60.0) as url:
            client = OrsClient(url, "numbers", http)
            await client.begin(split="train", index=0)
            await client.asked("GET", "/numbers/prompt")
            late = asyncio.create_task(end_once_refused(client))
        assert (await late)["output"]["reward"] == 1.0


async def end_once_refused(client: OrsClient) -> Any:
    """Ends its rollout when the server takes no further ones."""
    first = client.headers
    while (await client.begin(split="train", index=1))[0] != 429:
        await client.asked("POST", "/delete", {})
    client.headers = first
    return await client.call("guess", number=5)


# --- MCP


@asynccontextmanager
async def mcp(url: str) -> AsyncIterator[McpHttpClient]:
    client = McpHttpClient("it", url, timeout=60)
    try:
        await client.open()
        yield client
    finally:
        await client.close()


async def test_mcp_plays_a_task_and_its_reward_is_beside_the_last_answer(tmp_path: Path) -> None:
    async with served("mcp", Numbers, tmp_path) as url, mcp(f"{url}/mcp/train/1") as client:
        assert [tool["name"] for tool in await client.tools()] == ["it__guess", "it__submit"]
        read = {"uri": "lachesis://reward"}
        before = json.loads((await client.ask("resources/read", read))["contents"][0]["text"])
        assert before == {"done": False, "reward": None}
        assert "number" in (await client.call("guess", {}))["error"]
        assert "no tool 'dance'" in (await client.call("dance", {}))["error"]
        last = await client.ask("tools/call", {"name": "guess", "arguments": {"number": 7}})
        assert last["content"] == [{"type": "text", "text": "right"}]
        assert last["_meta"]["lachesis/reward"] == 1.0
        after = json.loads((await client.ask("resources/read", read))["contents"][0]["text"])
        assert after == {"done": True, "reward": 1.0, "components": {"reward/guess": 1.0}}
        assert (await client.call("guess", {"number": 7}))["error"] == "the task has ended"
        with pytest.raises(McpRefused, match="no method"):
            await client.ask("prompts/list", {})
        with pytest.raises(McpRefused, match="no resource"):
            await client.ask("resources/read", {"uri": ["lachesis://reward"]})
    assert Numbers.open_sessions == 0


async def test_mcp_what_breaks_is_an_error_and_an_ended_session_frees_its_place(tmp_path: Path) -> None:
    async with served("mcp", Numbers, tmp_path, max_num_workers=1) as url:
        async with mcp(f"{url}/mcp") as client:
            with pytest.raises(McpLost, match="all 1 places are taken"):
                async with mcp(f"{url}/mcp"):
                    pass
            with pytest.raises(McpLost, match=r"no score \(infra_error\)"):
                await client.ask("tools/call", {"name": "guess", "arguments": {"number": 0}})
            end = await client.ask("resources/read", {"uri": "lachesis://reward"})
            end = json.loads(end["contents"][0]["text"])
            assert (end["done"], end["reward"]) == (True, None) and "infra_error" in end["error"]
            assert Numbers.open_sessions == 0
        async with mcp(f"{url}/mcp/train/0") as client:
            assert Numbers.open_sessions == 1
        assert Numbers.open_sessions == 0
        with pytest.raises(McpRefused, match="no task 9"):
            async with mcp(f"{url}/mcp/train/9"):
                pass


class StartsSlowly(Numbers):
    """Its sessions open and begin, and the prompt does not come."""

    began: asyncio.Event

    @asynccontextmanager
    async def session(self, item):
        async with super().session(item) as session:
            self.began.set()
            await asyncio.sleep(600)
            yield session


@pytest.mark.parametrize("standard", ["mcp", "openenv", "nemogym"])
async def test_a_client_that_leaves_while_its_rollout_begins_frees_its_place(tmp_path: Path, standard: str) -> None:
    StartsSlowly.began = asyncio.Event()
    async with served(standard, StartsSlowly, tmp_path) as url, aiohttp.ClientSession() as http:

        async def begin() -> None:
            if standard == "openenv":
                async with http.ws_connect(f"{url}/ws") as socket:
                    await asked(socket, "reset", {})
            row = {"responses_create_params": {"input": []}, "split": "train", "index": 0}
            body = row if standard == "nemogym" else {"jsonrpc": "2.0", "id": 1, "method": "initialize"}
            await http.post(f"{url}/{'run' if standard == 'nemogym' else 'mcp'}", json=body)

        leaving = asyncio.create_task(begin())
        await StartsSlowly.began.wait()
        leaving.cancel()
        await asyncio.wait_for(Numbers.closed.wait(), 20)
        assert Numbers.open_sessions == 0


@pytest.mark.parametrize("steps", range(4))
async def test_a_turn_that_comes_when_its_client_leaves_stays_for_the_next_request(tmp_path: Path, steps: int) -> None:
    env = make(Numbers, "http://127.0.0.1:9/v1", tmp_path, enabled_toolsets=[])
    env.use_server(Clients())
    async with env.running(), ServingHost(env, items=1, idle=900) as host:
        _, rollout = host.open()
        leaving = asyncio.create_task(rollout.begin())
        while not rollout.first:  # noqa: ASYNC110
            await asyncio.sleep(0)
        for _ in range(steps):
            await asyncio.sleep(0)
        leaving.cancel()
        await asyncio.wait({leaving})
        await asyncio.wait_for(rollout.begin(), 20)
        assert (await rollout.call("guess", {"number": 5})).reward == 1.0


class Compresses(Served):
    """Whose set-up chooses that its context is compressed."""

    async def setup(self):
        await super().setup()
        self.config.compress_context_at, self.config.compress_context_to = 1500, 500
        self.config.compress_context_keep, self.config.compress_context_with = 1, "extractive"

    async def compute_reward(self, item, result, ctx):
        return float(len(result.context_edits))


async def test_a_client_gets_every_result_also_of_a_rollout_whose_context_is_compressed(tmp_path: Path) -> None:
    chosen = {"enabled_toolsets": ["terminal"]}
    async with served("mcp", Compresses, tmp_path, **chosen) as url, mcp(f"{url}/mcp/train/0") as client:
        for number in range(6):
            call = {"name": "terminal", "arguments": {"command": f"echo {number}; seq 400"}}
            said = await client.ask("tools/call", call)
            assert json.loads(said["content"][0]["text"])["output"].startswith(f"{number}\n1\n")
        end = await client.ask("tools/call", {"name": "submit", "arguments": {"answer": "Done."}})
        assert end["_meta"]["lachesis/reward"] >= 1


class Chooses(Served):
    """What a served rollout cannot have."""

    async def compute_reward(self, item, result, ctx):
        return float(not result.context_edits)


@pytest.mark.parametrize(("standard", "noted"), [("mcp", 3), ("nemogym", 1)])
async def test_what_a_served_rollout_cannot_have_is_left_out_with_a_note(
    tmp_path: Path, standard: str, noted: int
) -> None:
    chosen = {"enabled_toolsets": ["terminal", "delegation"], "compress_context_at": 1500}
    chosen |= {"tree_at": "turns:2", "group_size": 4}
    notes = ("env.tree_at has no effect", "env.compress_context_at has no effect", "skipped delegate_task")
    async with served(standard, Chooses, tmp_path, **chosen) as url:
        shown = (tmp_path / "console.txt").read_text()
        assert [note for note in notes if note in shown] == [*notes[:noted]]
        if standard == "nemogym":
            return
        async with mcp(f"{url}/mcp/train/0") as client:
            assert [tool["name"] for tool in await client.tools()] == ["it__terminal", "it__process", "it__submit"]
            long = {"name": "terminal", "arguments": {"command": "seq 400"}}
            for _ in range(5):
                assert "400" in (await client.ask("tools/call", long))["content"][0]["text"]
            end = await client.ask("tools/call", {"name": "submit", "arguments": {"answer": "Done."}})
            assert end["_meta"]["lachesis/reward"] == 1.0


# --- the command


COMMANDS = re.findall(r"^lachesis (serve .* --as .*)$", (ROOT / "docs/doors.md").read_text(), re.MULTILINE)


@pytest.mark.parametrize("shown", COMMANDS)
def test_a_command_of_the_docs_serves_until_sigterm(tmp_path: Path, shown: str) -> None:
    command = [sys.executable, "-m", "lachesis", *re.sub(r"--port \d+", "--port 0 --items 2", shown).split()]
    given = {**os.environ, "PYTHONPATH": str(ROOT)}
    with subprocess.Popen(command, cwd=tmp_path, stderr=subprocess.PIPE, text=True, env=given) as running:
        assert running.stderr is not None
        said = running.stderr.readline()
        assert re.search(r" is served at (http|tcp)://127\.0\.0\.1:\d+: ", said), said + running.stderr.read()
        if "--rows" in shown:
            rows = [json.loads(line) for line in (tmp_path / "gsm8k.jsonl").read_text().splitlines()]
            assert [(row["split"], row["index"]) for row in rows][:2] == [("train", 0), ("train", 1)]
        running.send_signal(signal.SIGTERM)
        assert running.wait(60) == 0, running.stderr.read()


def test_the_command_names_what_is_wrong(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        main(["gsm8k", "--as", "telepathy"])
    assert "ors" in capsys.readouterr().err
    with pytest.raises(SettingsError, match="positive"):
        main(["gsm8k", "--as", "ors", "--items", "0"])
    assert main([]) == 2


# --- OpenEnv


async def asked(socket: aiohttp.ClientWebSocketResponse, kind: str, data: Any = None) -> Any:
    await socket.send_json({"type": kind} if data is None else {"type": kind, "data": data})
    return await socket.receive_json(timeout=60)


async def test_openenv_plays_episodes_over_a_socket(tmp_path: Path) -> None:
    async with served("openenv", Numbers, tmp_path) as url, aiohttp.ClientSession() as http:
        async with http.get(f"{url}/schema") as response:
            assert "type" in (await response.json())["action"]["properties"]
        async with http.ws_connect(f"{url}/ws") as socket:
            assert (await asked(socket, "step", {"type": "call_tool", "tool_name": "guess"}))["type"] == "error"
            first = await asked(socket, "reset", {"seed": 1, "episode_id": "e1"})
            assert first["data"]["observation"]["prompt"] == "Guess."
            listed = await asked(socket, "step", {"type": "list_tools"})
            assert [tool["name"] for tool in listed["data"]["observation"]["tools"]] == ["guess", "submit"]
            guess = {"type": "call_tool", "tool_name": "guess", "arguments": {"number": 3}}
            wrong = (await asked(socket, "step", guess))["data"]
            assert (wrong["reward"], wrong["done"], wrong["observation"]["error"]) == (None, False, None)
            failed = (await asked(socket, "step", {**guess, "arguments": {}}))["data"]
            assert "number" in failed["observation"]["error"]["message"]
            assert (await asked(socket, "state"))["data"] == {"episode_id": "e1", "step_count": 2}
            right = (await asked(socket, "step", {**guess, "arguments": {"number": 7}}))["data"]
            assert (right["observation"]["result"], right["reward"], right["done"]) == ("right", 0.75, True)
            assert (await asked(socket, "step", guess))["data"]["code"] == "SESSION_ERROR"
            assert (await asked(socket, "reset", {}))["type"] == "observation"
            broken = await asked(socket, "step", {**guess, "arguments": {"number": 0}})
            assert broken["data"]["code"] == "EXECUTION_ERROR" and "infra_error" in broken["data"]["message"]
            assert (await asked(socket, "dance", {}))["data"]["code"] == "UNKNOWN_TYPE"
            await socket.send_str("{")
            assert (await socket.receive_json())["data"]["code"] == "INVALID_JSON"
            assert (await asked(socket, "reset", {"index": 9}))["data"]["code"] == "VALIDATION_ERROR"


async def test_openenv_says_when_it_is_full_and_frees_the_place_of_a_client_that_leaves(tmp_path: Path) -> None:
    async with (
        served("openenv", Numbers, tmp_path, max_num_workers=1) as url,
        aiohttp.ClientSession() as http,
        http.ws_connect(f"{url}/ws") as one,
        http.ws_connect(f"{url}/ws") as other,
    ):
        assert (await asked(one, "reset", {}))["type"] == "observation"
        assert (await asked(other, "reset", {}))["data"]["code"] == "CAPACITY_REACHED"
        await one.close()
        await Numbers.closed.wait()
        assert (await asked(other, "reset", {}))["type"] == "observation"
    assert Numbers.open_sessions == 0


async def test_openenv_refuses_what_it_cannot_read_and_the_episode_goes_on(tmp_path: Path) -> None:
    async with (
        served("openenv", Numbers, tmp_path, max_num_workers=1) as url,
        aiohttp.ClientSession() as http,
        http.ws_connect(f"{url}/ws") as socket,
    ):
        assert (await asked(socket, "reset", {"seed": 1}))["type"] == "observation"
        for how in ({"split": ["train"]}, {"split": "later"}, {"index": 9}, {"seed": "1"}):
            assert (await asked(socket, "reset", how))["data"]["code"] == "VALIDATION_ERROR"
        await socket.send_str("[" * 100_000)
        assert (await socket.receive_json())["data"]["code"] == "INVALID_JSON"
        guess = {"type": "call_tool", "tool_name": "guess", "arguments": {"number": 7}}
        assert (await asked(socket, "step", guess))["data"]["reward"] == 1.0
        assert (await asked(socket, "reset", {}))["type"] == "observation"


class TakesLong(Numbers):
    """With a tool that answers after 2 s."""

    def tools_for(self, item):
        async def wait(arguments, session):
            await asyncio.sleep(2)
            return "waited"

        return [Tool.from_schema("wait", "Wait.", {"type": "object", "properties": {}}, wait)]


async def test_openenv_a_client_that_waits_for_a_long_call_is_not_silent(tmp_path: Path) -> None:
    async with (
        served("openenv", TakesLong, tmp_path, idle=1.5) as url,
        aiohttp.ClientSession() as http,
        http.ws_connect(f"{url}/ws") as socket,
    ):
        await asked(socket, "reset", {})
        called = await asked(socket, "step", {"type": "call_tool", "tool_name": "wait", "arguments": {}})
        assert called["data"]["observation"]["result"] == "waited"
        await asyncio.sleep(0.7)
        assert (await asked(socket, "state"))["data"]["step_count"] == 1


@pytest.mark.parametrize(("standard", "path", "status"), [("ors", "/numbers/num_tasks", 422), ("mcp", "/mcp", 400)])
async def test_a_body_that_is_too_deep_is_refused(tmp_path: Path, standard: str, path: str, status: int) -> None:
    async with (
        served(standard, Numbers, tmp_path) as url,
        aiohttp.ClientSession() as http,
        http.post(f"{url}{path}", data="[" * 100_000) as response,
    ):
        assert response.status == status


async def test_our_own_doors_play_what_we_serve(tmp_path: Path) -> None:
    def halves(request: dict[str, Any]) -> Any:
        turn = sum(message["role"] == "assistant" for message in request["messages"])
        return call(("guess", {"number": (6, 5, 7)[turn]}))

    for standard, target in (("ors", "ors:{}/numbers"), ("openenv", "openenv:{}")):
        async with served(standard, Numbers, tmp_path) as url:
            door = environment_class(target.format(url))
            (tmp_path / standard).mkdir()
            chosen = {"total_steps": 2, "group_size": 1, "enabled_toolsets": []}
            result = await process(door, tmp_path / standard, halves, **chosen)
        found = rollouts(result.files.groups)
        assert sorted(each["reward"] for each in found) == [0.5, 0.75]


@pytest.mark.parametrize(("standard", "path", "status"), [("ors", "/numbers/num_tasks", 422), ("mcp", "/mcp", 400)])
async def test_what_cannot_be_read_is_refused(tmp_path: Path, standard: str, path: str, status: int) -> None:
    unknown = {"Content-Type": "application/json; charset=klingon"}
    async with served(standard, Numbers, tmp_path) as url, aiohttp.ClientSession() as http:
        async with http.post(f"{url}{path}", data="{}", headers=unknown) as response:
            assert response.status == status
        if standard == "mcp":
            asked = {"jsonrpc": "2.0", "id": 1, "method": "initialize"}
            async with http.post(f"{url}/mcp/train/{'9' * 5000}", json=asked) as response:
                assert response.status == 404


@pytest.mark.parametrize("end", ["\n", "\r\n", "\r"])
@pytest.mark.parametrize("size", [1, 2, 5, 1000])
async def test_events_are_read_whatever_ends_their_lines(end: str, size: int) -> None:
    said = "\ufeffevent: end\ndata: one\ndata: tw\u00f6\n\n: ping\n\ndata: \ufeffthree\n\n".replace("\n", end).encode()

    class Stream:
        async def iter_any(self) -> AsyncIterator[bytes]:
            for at in range(0, len(said), size):
                yield said[at : at + size]

    stream: Any = Stream()
    assert [each async for each in named_events(stream)] == [("end", "one\ntw\u00f6"), ("message", "\ufeffthree")]
