"""An environment as a server of OpenEnv: `lachesis serve ENV --as openenv`.

The wire is that of openenv 0.10: `/ws` with reset, step and state, one rollout at a time for each connection; actions
are those of MCP, `list_tools` and `call_tool`. The reward of the rollout comes with its last step.
"""

from __future__ import annotations

import asyncio
import json
import uuid
from collections.abc import Iterable, Mapping
from typing import Any

from aiohttp import WSMsgType, web

from backends.errors import LachesisError
from lachesis_doors.serving.host import NoPlace, NoSuchTask, ServingHost
from lachesis_doors.serving.open_rollout import EpisodeEnded, OpenRollout, ServedStep
from lachesis_doors.serving.task_routes import TaskRoutes
from lachesis_tokens.wire.service import WebService, json_response

_TEXT = {"type": "string"}
_OBJECT = {"type": "object"}
_ACTION = {
    "type": "object",
    "properties": {
        "type": {"type": "string", "enum": ["call_tool", "list_tools"]},
        "tool_name": _TEXT,
        "arguments": _OBJECT,
    },
    "required": ["type"],
}
_OBSERVATION = {"type": "object", "properties": {"tool_name": _TEXT, "result": _TEXT, "error": _OBJECT}}
_RESET = {"type": "object", "properties": {"prompt": _TEXT, "messages": {"type": "array"}}}
_STATE = {"type": "object", "properties": {"episode_id": _TEXT, "step_count": {"type": "integer"}}}
_LONGEST = 1 << 26
"""Bytes of a frame."""


class _Refused(Exception):
    """A frame that is not answered, with a code of the standard."""

    def __init__(self, code: str, message: str) -> None:
        super().__init__(message)
        self.code = code


class OpenEnvService(WebService):
    title = "the OpenEnv server"

    def __init__(self, host: ServingHost, address: str, port: int) -> None:
        super().__init__(address, port)
        self._host = host
        self._sockets: set[web.WebSocketResponse] = set()

    def routes(self) -> Iterable[web.RouteDef]:
        yield web.get("/ws", self._connected)
        yield web.get("/schema", self._schema)
        yield web.get("/metadata", self._metadata)
        yield from TaskRoutes(self._host, healthy="healthy").routes()

    async def stop(self) -> None:
        await asyncio.gather(*(socket.close() for socket in list(self._sockets)))
        await super().stop()

    async def _schema(self, request: web.Request) -> web.Response:
        schemas = {"action": _ACTION, "observation": _OBSERVATION, "reset_observation": _RESET, "state": _STATE}
        return json_response(schemas)

    async def _metadata(self, request: web.Request) -> web.Response:
        about = (type(self._host.env).__doc__ or "").partition("\n")[0]
        return json_response({"name": self._host.name, "description": about})

    async def _connected(self, request: web.Request) -> web.WebSocketResponse:
        socket = web.WebSocketResponse(max_msg_size=_LONGEST, heartbeat=30.0)
        await socket.prepare(request)
        self._sockets.add(socket)
        connection = _Connection(self._host)
        try:
            async for frame in socket:
                if frame.type is not WSMsgType.TEXT:
                    break
                answer = await _answer(connection, frame.data)
                if answer is None:
                    break
                await socket.send_str(json.dumps(answer))
        finally:
            self._sockets.discard(socket)
            await asyncio.shield(self._host.close(connection.name))
            await socket.close()
        return socket


class _Connection:
    """The rollout of one client, if it has begun one."""

    def __init__(self, host: ServingHost) -> None:
        self.host = host
        self.name = uuid.uuid4().hex
        self.episode = ""

    def rollout(self) -> OpenRollout:
        found = self.host.get(self.name)
        if found is None:
            raise _Refused("SESSION_ERROR", "no episode: send reset first (that of a silent client is closed)")
        return found

    async def reset(self, how: Mapping[str, Any]) -> dict[str, Any]:
        """Begin the task `index` of a `split`; otherwise that of the `seed`, or the next one."""
        split, index, seed = how.get("split", "train"), how.get("index"), how.get("seed")
        if not isinstance(split, str) or not all(each is None or type(each) is int for each in (index, seed)):
            raise _Refused("VALIDATION_ERROR", "split is a text; index and seed are numbers")
        if index is None and seed is not None:
            index = seed % max(1, self.host.splits.get(split, 1))
        self.host.check(split, index, self.name)  # a reset that is refused ends nothing
        await self.host.close(self.name)
        self.host.open(split, index, self.name)
        self.episode = str(how.get("episode_id") or self.name)
        rollout = await self.rollout().begin()
        texts = [message["content"] for message in rollout.first if isinstance(message.get("content"), str)]
        return _observed({"prompt": "\n\n".join(texts), "messages": rollout.first}, ServedStep(""))

    async def step(self, action: Mapping[str, Any]) -> dict[str, Any]:
        kind, name, given = action.get("type"), action.get("tool_name"), action.get("arguments", {})
        if kind == "list_tools":
            rollout = self.host.get(self.name)
            listed = rollout.tools if rollout is not None else self.host.tools
            tools = [
                {"name": t["name"], "description": t["description"], "input_schema": t["parameters"]} for t in listed
            ]
            return _observed({"tools": tools}, ServedStep(""))
        if kind != "call_tool" or not isinstance(name, str) or not isinstance(given, Mapping):
            raise _Refused("VALIDATION_ERROR", 'an action is {"type": "call_tool", "tool_name", "arguments"}')
        step = await self.rollout().call(name, given)
        error = {"error_type": "execution_error", "message": step.text} if step.failed else None
        seen: dict[str, Any] = {"tool_name": name, "result": None if step.failed else step.text, "error": error}
        if step.images:
            seen["metadata"] = {"images": list(step.images)}
        return _observed(seen, step)

    def state(self) -> dict[str, Any]:
        rollout = self.host.get(self.name)
        return {"episode_id": self.episode or None, "step_count": 0 if rollout is None else rollout.steps}


async def _answer(connection: _Connection, text: str) -> dict[str, Any] | None:
    """The answer to a frame; None if the client says goodbye."""
    try:
        return await _handle(connection, text)
    except _Refused as refused:
        code, said = refused.code, str(refused)
    except NoPlace as error:
        code, said = "CAPACITY_REACHED", str(error)
    except NoSuchTask as error:
        code, said = "VALIDATION_ERROR", str(error)
    except EpisodeEnded as error:
        code, said = "SESSION_ERROR", f"{error}: send reset"
    except LachesisError as error:  # no score, which is no reward
        code, said = "EXECUTION_ERROR", str(error)
    return {"type": "error", "data": {"message": said, "code": code}}


async def _handle(connection: _Connection, text: str) -> dict[str, Any] | None:
    try:
        message = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise _Refused("INVALID_JSON", f"not JSON: {error}") from error
    kind, data = (message.get("type"), message.get("data") or {}) if isinstance(message, dict) else (None, {})
    if kind == "close":
        return None
    if kind == "state":
        return {"type": "state", "data": connection.state()}
    if kind not in ("reset", "step"):
        raise _Refused("UNKNOWN_TYPE", f"unknown message type: {kind!r}; there are reset, step, state, close")
    if not isinstance(data, Mapping):
        raise _Refused("VALIDATION_ERROR", "data is an object")
    done = await (connection.reset(data) if kind == "reset" else connection.step(data))
    return {"type": "observation", "data": done}


def _observed(observation: Mapping[str, Any], step: ServedStep) -> dict[str, Any]:
    about = {"components": dict(step.components)} if step.components else {}
    data = {"observation": dict(observation), "reward": step.reward, "done": step.done}
    return {**data, "metadata": about} if about else data
