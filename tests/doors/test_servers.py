"""The doors of the Open Reward Standard and of OpenEnv, against servers that send the frames of these standards."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest
from aiohttp import WSMsgType, web

from backends.errors import SettingsError
from lachesis.cli.environment_classes import environment_class
from lachesis_doors.guest_process import GuestLost
from tests.support.scripted_server import call, say
from tests.support.small_envs import lines, process, rollouts

GUESS = {"type": "object", "properties": {"number": {"type": "integer"}}, "required": ["number"]}
WORDS = {"type": "object", "properties": {"message": {"type": "string"}, "metadata": {}}, "required": ["message"]}


@asynccontextmanager
async def served(app: web.Application) -> AsyncIterator[str]:
    runner = web.AppRunner(app)
    await runner.setup()
    await web.TCPSite(runner, "127.0.0.1", 0).start()
    try:
        yield f"127.0.0.1:{runner.addresses[0][1]}"
    finally:
        await runner.cleanup()


async def play(target: str, folder: Path, model: Any, **settings: Any) -> Any:
    chosen = {"total_steps": 1, "group_size": 1, "max_infra_retries": 1, "max_agent_turns": 8, **settings}
    return await process(environment_class(target), folder, model, enabled_toolsets=[], **chosen)


def guesses(*numbers: int) -> Callable[[dict[str, Any]], Any]:
    def model(request: dict[str, Any]) -> Any:
        turn = sum(message["role"] == "assistant" for message in request["messages"])
        return call(("guess", {"number": numbers[turn]})) if turn < len(numbers) else say("I give up.")

    return model


# --- the Open Reward Standard


class Ors:
    """One environment, `numbers`: task n wants the number n + 5."""

    def __init__(self, habit: str = "") -> None:
        self.habit = habit
        self.sessions: dict[str, int] = {}
        self.ended: set[str] = set()
        self.opened = 0
        self.app = web.Application()
        self.app.router.add_get("/numbers/tools", self.tools)
        self.app.router.add_post("/numbers/num_tasks", self.num_tasks)
        self.app.router.add_post("/create_session", self.create_session)
        self.app.router.add_post("/create", self.create)
        self.app.router.add_get("/numbers/prompt", self.prompt)
        self.app.router.add_post("/numbers/call", self.call)
        self.app.router.add_post("/delete", self.delete)

    async def tools(self, request: web.Request) -> web.Response:
        described = {"name": "guess", "description": "Guess.", "input_schema": GUESS}
        return web.json_response({"tools": [described, {"name": "stop", "description": None, "input_schema": None}]})

    async def num_tasks(self, request: web.Request) -> web.Response:
        if self.habit == "other form":
            return web.json_response(["numbers"])
        return web.json_response({"num_tasks": 2})

    async def create_session(self, request: web.Request) -> web.StreamResponse:
        self.opened += 1
        return await events(request, ("task_id", f"s{self.opened}"), ("end", ""))

    async def create(self, request: web.Request) -> web.Response:
        task = await request.json()
        assert (task["env_name"], task["split"]) == ("numbers", "train")
        self.sessions[request.headers["X-Session-ID"]] = task["index"] + 5
        return web.json_response({"sid": request.headers["X-Session-ID"]})

    async def prompt(self, request: web.Request) -> web.Response:
        return web.json_response([{"type": "text", "text": "Guess a number."}])

    async def call(self, request: web.Request) -> web.StreamResponse:
        session = request.headers["X-Session-ID"]
        body = await request.json()
        if self.habit == "gone":
            return web.json_response({"detail": "no such session"}, status=410)
        if self.habit == "error":
            return await events(request, ("task_id", "t"), ("error", "the environment fell over"))
        if session in self.ended or body["name"] == "stop":
            answer = {"ok": False, "error": "the episode has ended", "reason": "episode_finished"}
        elif not isinstance(body["input"].get("number"), int):
            answer = {"ok": False, "error": "a number is missing", "reason": "input_validation"}
        else:
            right = body["input"]["number"] == self.sessions[session]
            text = "right" if right else "wrong" * 3000
            habits: dict[str, dict[str, Any]] = {
                "finished": {"finished": "false"},
                "reward": {"reward": "1.0"},
                "large": {"reward": 10**400},
            }
            output: dict[str, Any] = {"blocks": [{"type": "text", "text": text}], "metadata": None}
            output |= {"reward": 1.0 if right else -0.25, "finished": right, **habits.get(self.habit, {})}
            answer = {"ok": "false" if self.habit == "ok" else True, "output": output}
        said = json.dumps(answer)
        chunks = [said[at : at + 4096] for at in range(0, len(said), 4096)]
        if self.habit == "deep":
            return await events(request, ("end", "[" * 100_000))
        if self.habit == "half":
            return await events(request, ("chunk", chunks[0][:20]), ("end", ""))
        if self.habit == "breaks":
            return await events(request, ("chunk", chunks[0]))
        return await events(request, ("task_id", "t"), *(("chunk", each) for each in chunks[:-1]), ("end", chunks[-1]))

    async def delete(self, request: web.Request) -> web.Response:
        self.sessions.pop(request.headers["X-Session-ID"], None)
        return web.json_response({})


async def events(request: web.Request, *named: tuple[str, str]) -> web.StreamResponse:
    response = web.StreamResponse(headers={"Content-Type": "text/event-stream"})
    await response.prepare(request)
    for name, data in named:
        await response.write(f": ping\n\nevent: {name}\ndata: {data}\n\n".encode())
    return response


async def test_ors_pays_and_ends_and_leaves_no_session(tmp_path: Path) -> None:
    server = Ors()
    async with served(server.app) as host:
        result = await play(f"ors:http://{host}/numbers", tmp_path, guesses(4, 5, 6), total_steps=2)
    found = rollouts(result.files.groups)
    assert [(each["reward"], each["turns"], each["reason"]) for each in found] == [
        (0.75, 2, "the tool guess ended the task"),
        (0.5, 3, "the tool guess ended the task"),
    ]
    assert "wrong" * 3000 in {message["content"] for message in lines(result.files.groups)[0]["messages"][0]}
    assert (server.sessions, server.opened) == ({}, 2)


async def test_ors_says_that_a_call_is_wrong_or_that_the_episode_has_ended(tmp_path: Path) -> None:
    def model(request: dict[str, Any]) -> Any:
        said = str(request["messages"][-1]["content"])
        return call(("stop", {}) if "wrong" in said else ("guess", {"number": 1}))

    async with served(Ors().app) as host:
        (each,) = rollouts((await play(f"ors:http://{host}/numbers", tmp_path, model)).files.groups)
    assert (each["reward"], each["outcome"], each["turns"], len(each["tool_errors"])) == (-0.25, "completed", 2, 1)


@pytest.mark.parametrize(
    ("habit", "kind", "attempts", "said"),
    [
        ("gone", "infra_error", 2, "HTTP 410"),
        ("half", "infra_error", 2, "answers in another form"),
        ("breaks", "infra_error", 2, "the stream broke off"),
        ("finished", "infra_error", 2, "'false' stands for the end of the episode"),
        ("reward", "infra_error", 2, "the reward is '1.0', and not a number"),
        ("large", "infra_error", 2, "answers in another form: OverflowError"),
        ("deep", "infra_error", 2, "answers in another form: RecursionError"),
        ("ok", "infra_error", 2, "`ok` is 'false', and neither true nor false"),
        ("error", "environment", 1, "the environment fell over"),
    ],
)
async def test_ors_that_fails_gives_no_score(tmp_path: Path, habit: str, kind: str, attempts: int, said: str) -> None:
    server = Ors(habit)
    async with served(server.app) as host:
        (each,) = rollouts((await play(f"ors:http://{host}/numbers", tmp_path, guesses(5))).files.failures)
    assert (each["reward"], each["unscored_kind"], each["attempts"]) == (None, kind, attempts)
    assert said in each["reason"] + (each["traceback"] or "")
    assert server.sessions == {}


@pytest.mark.parametrize("habit", ["away", "other form", "no such environment"])
async def test_ors_that_is_not_there_is_named_with_the_next_step(tmp_path: Path, habit: str) -> None:
    async with served(Ors(habit).app) as host:
        address = "127.0.0.1:9" if habit == "away" else host
        name = "letters" if habit == "no such environment" else "numbers"
        with pytest.raises(GuestLost, match=rf"ors http://{address}.*Next step: start the server"):
            await play(f"ors:http://{address}/{name}", tmp_path, guesses(5))


# --- OpenEnv


class OpenEnv:
    """An environment that wants to hear its seed, or one with tools of MCP."""

    def __init__(self, habit: str = "", places: int = 1) -> None:
        self.habit = habit
        self.free = asyncio.Semaphore(places)
        self.refused = 0
        self.app = web.Application()
        self.app.router.add_get("/schema", self.schema)
        self.app.router.add_get("/ws", self.episodes)

    async def schema(self, request: web.Request) -> web.Response:
        if self.habit == "other form":
            return web.json_response({"detail": "what?"})
        kind = {"type": {"type": "string"}} if self.habit == "mcp" else {}
        return web.json_response({"action": {**WORDS, "properties": {**WORDS["properties"], **kind}}})

    async def episodes(self, request: web.Request) -> web.WebSocketResponse:
        socket = web.WebSocketResponse()
        await socket.prepare(request)
        if self.free.locked():
            self.refused += 1
            await socket.send_json({"type": "error", "data": {"message": "full", "code": "CAPACITY_REACHED"}})
            await socket.close()
            return socket
        async with self.free:
            seed = 0
            async for frame in socket:
                if frame.type is not WSMsgType.TEXT:
                    break
                message = json.loads(frame.data)
                if message["type"] == "close":
                    break
                seed = message.get("data", {}).get("seed", seed)
                if not await self.answer(socket, message, seed):
                    break
        return socket

    async def answer(self, socket: web.WebSocketResponse, message: dict[str, Any], seed: int) -> bool:
        data = message["data"]

        def observed(observation: Any, reward: float | None = None, *, done: Any = False) -> Any:
            return {"type": "observation", "data": {"observation": observation, "reward": reward, "done": done}}

        if message["type"] == "reset":
            await socket.send_json(observed({"prompt": f"Say {seed}.", "metadata": {}}))
        elif data.get("type") == "list_tools":
            await socket.send_json(observed({"tools": [{"name": "words.say", "input_schema": WORDS}]}))
        elif self.habit == "breaks":
            return False
        elif self.habit == "large":
            await socket.send_json(observed("?", 10**400, done=True))
        elif self.habit == "deep":
            await socket.send_str("[" * 100_000)
        elif self.habit == "half":
            await socket.send_str('{"type": "observation", "da')
        elif self.habit == "other form of steps":
            await socket.send_json({"observation": "?"})
        elif self.habit == "state":
            await socket.send_json({"type": "state", "data": {"episode_id": "e", "step_count": 1, "done": True}})
        elif self.habit == "no done":
            await socket.send_json({"type": "observation", "data": {"observation": "?", "reward": 1.0}})
        elif self.habit in ("done", "bool"):
            await socket.send_json(observed("?", True, done="false" if self.habit == "done" else True))
        elif self.habit == "error":
            await socket.send_json({"type": "error", "data": {"message": "it fell over", "code": "EXECUTION_ERROR"}})
        else:
            said = data["arguments"]["message"] if self.habit == "mcp" else data["message"]
            if said == "":
                error = {"message": "empty", "code": "VALIDATION_ERROR"}
                await socket.send_json({"type": "error", "data": error})
            elif self.habit == "mcp" and said in ("bad", "far"):
                kind = "execution_error" if said == "bad" else "transport_error"
                failed = {"error_type": kind, "message": f"a {said} word"}
                await socket.send_json(observed({"tool_name": "words.say", "error": failed}, -0.5))
            else:
                done = said == str(seed)
                await socket.send_json(observed({"text": f"heard {said}"}, 1.0 if done else -0.25, done=done))
        return True


def speaks(tool: str, *words: str) -> Callable[[dict[str, Any]], Any]:
    def model(request: dict[str, Any]) -> Any:
        turn = sum(message["role"] == "assistant" for message in request["messages"])
        wanted = request["messages"][0]["content"].removeprefix("Say ").removesuffix(".")
        return call((tool, {"message": words[turn] if turn < len(words) else wanted}))

    return model


async def test_openenv_with_one_place_plays_every_rollout(tmp_path: Path) -> None:
    server = OpenEnv()
    async with served(server.app) as host:
        target = f"openenv:ws://{host}?seed=7"
        result = await play(target, tmp_path, speaks("step", "", "what"), total_steps=2, group_size=3)
    found = rollouts(result.files.groups)
    assert [(each["reward"], each["turns"], len(each["tool_errors"])) for each in found] == [(0.75, 3, 1)] * 6
    assert server.refused
    prompts = {messages[0]["content"] for group in lines(result.files.groups) for messages in group["messages"]}
    assert prompts == {"Say 7.", "Say 8."}


async def test_openenv_with_tools_of_mcp(tmp_path: Path) -> None:
    async with served(OpenEnv("mcp").app) as host:
        result = await play(f"openenv:http://{host}", tmp_path, speaks("words_say", "bad"))
    (each,) = rollouts(result.files.groups)
    assert (each["reward"], len(each["tool_errors"])) == (0.5, 1)
    assert [message["content"] for message in lines(result.files.groups)[0]["messages"][0][-1:]] == ["heard 0"]


async def test_openenv_that_does_not_reach_a_tool_gives_no_score(tmp_path: Path) -> None:
    async with served(OpenEnv("mcp").app) as host:
        result = await play(f"openenv:http://{host}", tmp_path, speaks("words_say", "far"))
    (each,) = rollouts(result.files.failures)
    assert (each["reward"], each["unscored_kind"]) == (None, "infra_error")
    assert "did not reach the tool words.say: a far word" in each["reason"]


@pytest.mark.parametrize(
    ("habit", "kind", "said"),
    [
        ("breaks", "infra_error", "the server closed the connection"),
        ("half", "infra_error", "answers in another form"),
        ("other form of steps", "infra_error", "answers in another form"),
        ("state", "infra_error", "no observation with `done`, but"),
        ("no done", "infra_error", "no observation with `done`, but"),
        ("done", "infra_error", "'false' stands for the end of the episode"),
        ("deep", "infra_error", "answers in another form: RecursionError"),
        ("large", "infra_error", "answers in another form: OverflowError"),
        ("error", "environment", "it fell over"),
    ],
)
async def test_openenv_that_fails_gives_no_score(tmp_path: Path, habit: str, kind: str, said: str) -> None:
    async with served(OpenEnv(habit).app) as host:
        (each,) = rollouts((await play(f"openenv:ws://{host}", tmp_path, speaks("step"))).files.failures)
    assert (each["reward"], each["unscored_kind"]) == (None, kind)
    assert said in each["reason"] + (each["traceback"] or "")


async def test_openenv_pays_with_booleans_too(tmp_path: Path) -> None:
    async with served(OpenEnv("bool").app) as host:
        (each,) = rollouts((await play(f"openenv:ws://{host}", tmp_path, speaks("step"))).files.groups)
    assert each["reward"] == 1.0


@pytest.mark.parametrize("habit", ["away", "other form"])
async def test_openenv_that_is_not_there_is_named_with_the_next_step(tmp_path: Path, habit: str) -> None:
    async with served(OpenEnv(habit).app) as host:
        address = "127.0.0.1:9" if habit == "away" else host
        with pytest.raises(GuestLost, match=rf"openenv http://{address}/schema.*Next step: start the server"):
            await play(f"openenv:ws://{address}", tmp_path, speaks("step"))


async def test_openenv_without_a_scheme_is_refused(tmp_path: Path) -> None:
    with pytest.raises(SettingsError, match="write openenv:ws://HOST:PORT"):
        await play("openenv:localhost:8000", tmp_path, speaks("step"))


async def test_openenv_without_a_free_place_is_the_infrastructures(tmp_path: Path) -> None:
    server = OpenEnv()

    def model(request: dict[str, Any]) -> Any:
        server.free = asyncio.Semaphore(0)  # another user has the place, and our rollout breaks off
        server.habit = "breaks"
        return speaks("step")(request)

    async with served(server.app) as host:
        result = await play(f"openenv:ws://{host}", tmp_path, model, setup_timeout=5.0)
    (each,) = rollouts(result.files.failures)
    assert (each["reward"], each["unscored_kind"], each["attempts"]) == (None, "infra_error", 2)
    assert "raise its max_concurrent_envs" in each["reason"]
