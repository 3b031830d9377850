"""The door of OpenEnv: environments behind a WebSocket, `openenv:ws://HOST:PORT` (or http://).

An environment with MCP tools offers these; any other one has the tool `step`, whose arguments are its action. The wire
is that of openenv 0.10: `/ws` for one episode at a time, `/schema` for the action.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import time
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import asynccontextmanager
from typing import Any

import aiohttp

from backends.errors import SettingsError
from lachesis_doors.door_env import PATIENCE, DoorEnv, DoorSession, SteppedSession
from lachesis_doors.guest_process import GuestError, GuestLost, broken_answers
from lachesis_tools import ToolSession

_SECONDS = 300.0
"""For one answer of the server."""
_TEXTS = ("prompt", "messages", "text", "result", "message", "echoed", "content")
"""Fields of observations that are what an agent reads, if there is one of them alone."""
_OF_PROTOCOL = ("done", "reward", "metadata")
_FULL = "CAPACITY_REACHED"


class OpenEnvEnv(DoorEnv):
    """An environment that a server of OpenEnv runs. Items are the seeds of its episodes."""

    async def setup(self) -> None:
        await super().setup()
        self.url = self.target.replace("ws://", "http://").replace("wss://", "https://").rstrip("/")
        if not self.url.startswith("http"):
            raise SettingsError(f"{self.target}: write openenv:ws://HOST:PORT")
        self.step_rewards = self.rule()
        self._http = aiohttp.ClientSession()
        try:
            action = await self._schema()
            async with self._episode({}) as (socket, _):
                self._of_mcp = await _mcp_tools(socket) if "type" in (action.get("properties") or {}) else None
        except BaseException as error:
            await self._http.close()
            if isinstance(error, GuestLost):
                raise GuestLost(f"{error}. Next step: start the server, or correct the address") from error
            raise
        if self._of_mcp is None:
            hidden = ("metadata", "timeout_s")
            properties = {name: kind for name, kind in action.get("properties", {}).items() if name not in hidden}
            required = [name for name in action.get("required") or () if name in properties]
            schema = {**action, "type": "object", "properties": properties, "required": required}
            step = {"name": "step", "description": "Take an action in the environment.", "parameters": schema}
            self._offered: Sequence[Mapping[str, Any]] = [step]
        else:
            self._offered = self._of_mcp

    async def teardown(self) -> None:
        await self._http.close()

    async def _schema(self) -> dict[str, Any]:
        try:
            async with self._http.get(
                f"{self.url}/schema", timeout=aiohttp.ClientTimeout(total=30), raise_for_status=True
            ) as response:
                with broken_answers(f"openenv {self.url}/schema"):
                    return dict((await response.json())["action"])
        except (aiohttp.ClientError, TimeoutError) as error:
            raise GuestLost(f"openenv {self.url}/schema: {type(error).__name__}: {error}") from error

    async def item_at(self, number: int) -> tuple[Any, Sequence[Mapping[str, Any]]] | None:
        return {"seed": int(self.arguments.get("seed", 0)) + number}, self._offered

    @asynccontextmanager
    async def _connected(self) -> AsyncIterator[aiohttp.ClientWebSocketResponse]:
        try:
            socket = await self._http.ws_connect(f"{self.url}/ws", max_msg_size=1 << 26)
        except (aiohttp.ClientError, TimeoutError) as error:
            raise GuestLost(f"openenv {self.url}/ws: {type(error).__name__}: {error}") from error
        try:
            yield socket
        finally:
            with contextlib.suppress(ConnectionError):
                await socket.send_str('{"type": "close"}')
            await socket.close()

    @asynccontextmanager
    async def opened(self, item: Any, tools: ToolSession) -> AsyncIterator[DoorSession]:
        async with self._episode({"seed": item["seed"]}) as (socket, first):
            yield _Episode(socket, first, mcp=self._of_mcp is not None)

    @asynccontextmanager
    async def _episode(
        self, how: Mapping[str, Any]
    ) -> AsyncIterator[tuple[aiohttp.ClientWebSocketResponse, Mapping[str, Any]]]:
        """A connection with a new episode, and its first observation."""
        pause, end = 0.1, time.monotonic() + PATIENCE * self.config.setup_timeout
        while True:
            async with self._connected() as socket:
                try:
                    first = await _asked(socket, {"type": "reset", "data": how})
                except _Full:
                    first = None
                if first is not None:
                    yield socket, first
                    return
            if (left := end - time.monotonic()) <= 0:
                raise GuestLost(
                    f"openenv {self.url}: the server had no place for another episode in the time of setup_timeout. "
                    "Next step: raise its max_concurrent_envs, or run fewer rollouts at once"
                )
            await asyncio.sleep(min(pause, left))  # the server runs as many episodes at once as its class says
            pause = min(5.0, 2 * pause)


class _Full(GuestError):
    """The server has all the sessions that it can have."""


class _Episode(SteppedSession):
    def __init__(self, socket: aiohttp.ClientWebSocketResponse, first: Mapping[str, Any], *, mcp: bool) -> None:
        said = _text(first.get("observation"))
        self.prompt = said or "Call the tools until the environment ends the episode."
        self._socket, self._mcp = socket, mcp

    async def call(self, name: str, arguments: Mapping[str, Any]) -> Mapping[str, Any]:
        action = {"type": "call_tool", "tool_name": name, "arguments": arguments} if self._mcp else dict(arguments)
        try:
            answer = await _asked(self._socket, {"type": "step", "data": action})
        except _BadAction as error:
            return {"text": str(error.args[0]), "error": str(error.args[0])}
        seen = answer.get("observation")
        failed = seen.get("error") if self._mcp and isinstance(seen, Mapping) else None
        text = str(failed.get("message") if isinstance(failed, Mapping) else failed) if failed else _text(seen)
        if isinstance(failed, Mapping) and failed.get("error_type") == "transport_error":  # no doing of the agent
            raise GuestLost(f"openenv: the server did not reach the tool {name}: {text}")
        reward = answer.get("reward")
        reward = float(reward) if isinstance(reward, bool) else reward  # which the standard allows
        said = {"text": text, "reward": reward, "done": answer["done"]}
        return {**said, "error": text} if failed else said


class _BadAction(GuestError):
    """The agent's action does not fit the schema."""


async def _asked(socket: aiohttp.ClientWebSocketResponse, message: Mapping[str, Any]) -> Mapping[str, Any]:
    try:
        await socket.send_str(json.dumps(message))
        reply = await asyncio.wait_for(socket.receive(), _SECONDS)
    except (ConnectionError, TimeoutError) as error:
        raise GuestLost(f"openenv: {type(error).__name__}: {error}") from error
    if reply.type is not aiohttp.WSMsgType.TEXT:
        raise GuestLost("openenv: the server closed the connection")
    with broken_answers("openenv"):
        answer: dict[str, Any] = json.loads(reply.data)
        data: Mapping[str, Any] = dict(answer.get("data") or {})
        failed = answer["type"] == "error"
        # Not by the order of frames alone: an answer that is taken for another one's would shift all later ones.
        if not failed and (answer["type"] != "observation" or "done" not in data):
            raise ValueError(f"no observation with `done`, but {reply.data[:200]}")
    if failed:
        said, code = str(data.get("message")), data.get("code")
        kind = _Full if code == _FULL else _BadAction if code == "VALIDATION_ERROR" else GuestError
        raise kind(f"openenv: {said}")
    return data


async def _mcp_tools(socket: aiohttp.ClientWebSocketResponse) -> list[Mapping[str, Any]] | None:
    try:
        seen = (await _asked(socket, {"type": "step", "data": {"type": "list_tools"}})).get("observation")
    except GuestError:
        return None
    listed = seen.get("tools") if isinstance(seen, Mapping) else None
    if listed is None:
        return None
    empty = {"type": "object", "properties": {}}
    return [
        {
            "name": tool["name"],
            "description": tool.get("description") or "",
            "parameters": tool.get("input_schema") or tool.get("inputSchema") or empty,
        }
        for tool in listed
    ]


def _text(observation: Any) -> str:
    """What an agent reads of an observation: its only field of text, or all fields as JSON."""
    if isinstance(observation, str):
        return observation
    if not isinstance(observation, Mapping):
        return "" if observation is None else json.dumps(observation)
    shown = {name: value for name, value in observation.items() if name not in _OF_PROTOCOL and value is not None}
    for name in _TEXTS:
        if set(shown) == {name} and isinstance(shown[name], str):
            return str(shown[name])
    return json.dumps(shown, ensure_ascii=False)


door = OpenEnvEnv.at
