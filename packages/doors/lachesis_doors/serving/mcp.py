"""An environment as an MCP server over streamable HTTP: `lachesis serve ENV --as mcp`.

A session is a rollout of the task that the URL names. The tools are those of the task, and the call that stands for a
message. The result of the last call has the reward in its `_meta`, which models do not read; a resource has it too.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import Iterable, Mapping
from typing import Any, Final
from weakref import WeakKeyDictionary

from aiohttp import web

from backends.errors import LachesisError
from lachesis_doors.serving.event_stream import event_stream, keep_alive, write_events
from lachesis_doors.serving.host import NoSuchTask, ServingHost
from lachesis_doors.serving.open_rollout import EpisodeEnded, NotScored, OpenRollout, ServedStep
from lachesis_doors.serving.task_routes import TaskRoutes, image_block, refused
from lachesis_tokens.wire.service import WebService, json_response

_VERSIONS: Final = ("2025-11-25", "2025-06-18", "2025-03-26")
"""The revisions that it speaks, the newest first."""
_TASK: Final = "lachesis://task"
_REWARD: Final = "lachesis://reward"
_PARSE, _REQUEST, _METHOD, _PARAMS = -32700, -32600, -32601, -32602
_SERVER = -32000
"""JSON-RPC's code for what is not the caller's doing. -32603 could be: others answer so whatever a tool raises."""


class _Failed(Exception):
    """A request that is answered with an error of JSON-RPC."""

    def __init__(self, code: int, message: str) -> None:
        super().__init__(message)
        self.code = code


class McpService(WebService):
    title = "the MCP server"

    def __init__(self, host: ServingHost, address: str, port: int) -> None:
        super().__init__(address, port)
        self._host = host
        self._ends: WeakKeyDictionary[OpenRollout, dict[str, Any]] = WeakKeyDictionary()
        """The scores."""

    def routes(self) -> Iterable[web.RouteDef]:
        for path in ("/mcp", "/mcp/{split}/{index:[0-9]{1,18}}"):
            yield web.post(path, self._post)
            yield web.delete(path, self._delete)
        yield from TaskRoutes(self._host).routes()

    async def _delete(self, request: web.Request) -> web.Response:
        await self._host.close(request.headers.get("Mcp-Session-Id", ""))
        return web.Response(status=204)

    async def _post(self, request: web.Request) -> web.StreamResponse:
        try:
            asked = json.loads(await request.text())
        except (ValueError, RecursionError, LookupError) as error:
            return json_response(_answer(None, error=_Failed(_PARSE, f"not JSON: {error}")), 400)
        if not isinstance(asked, dict) or not isinstance(asked.get("params", {}), dict):
            return json_response(_answer(None, error=_Failed(_REQUEST, "one JSON-RPC message, with named params")), 400)
        number, method, params = asked.get("id"), asked.get("method"), asked.get("params", {})
        if method == "initialize":
            return await self._initialize(request, number, params)
        rollout = self._host.get(request.headers.get("Mcp-Session-Id", ""))
        if rollout is None:
            raise refused(404, "there is no such session, or it was closed because its client was silent: initialize")
        if number is None or method is None:
            return web.Response(status=202)
        work = asyncio.create_task(self._asked(rollout, method, params))
        stream = await event_stream(request)
        await keep_alive(stream, work)
        await write_events(stream, ("message", json.dumps(await _settled(number, work))))
        return stream

    async def _initialize(self, request: web.Request, number: Any, params: Mapping[str, Any]) -> web.Response:
        split, index = request.match_info.get("split", "train"), request.match_info.get("index")
        name = None
        try:
            name, rollout = self._host.open(split, int(index) if index is not None else None)
            await rollout.begin()
        except BaseException as error:
            if name is not None:
                await self._host.close(name)
            if not isinstance(error, LachesisError):  # the client has left, and does not know the session
                raise
            code = _PARAMS if isinstance(error, NoSuchTask) else _SERVER
            return json_response(_answer(number, error=_Failed(code, str(error))))
        wanted: Any = params.get("protocolVersion")
        texts = [message["content"] for message in rollout.first if isinstance(message.get("content"), str)]
        result: dict[str, Any] = {
            "protocolVersion": wanted if wanted in _VERSIONS else _VERSIONS[0],
            "capabilities": {"tools": {}, "resources": {}},
            "serverInfo": {"name": self._host.name, "version": "1"},
            "instructions": "\n\n".join(texts),
        }
        return json_response(_answer(number, result), headers={"Mcp-Session-Id": name})

    async def _asked(self, rollout: OpenRollout, method: str, params: Mapping[str, Any]) -> Any:
        if method == "ping":
            return {}
        if method == "tools/list":
            return {"tools": [_tool(tool) for tool in rollout.tools]}
        if method == "tools/call":
            return await self._call(rollout, params)
        found = {_TASK: rollout.first, _REWARD: self._ends.get(rollout, {"done": False, "reward": None})}
        if method == "resources/list":
            return {"resources": [{"uri": uri, "name": uri, "mimeType": "application/json"} for uri in found]}
        if method == "resources/read":
            if (uri := params.get("uri")) not in [*found]:  # it may be of any type
                raise _Failed(_PARAMS, f"there is no resource {uri!r}; there are {', '.join(found)}")
            return {"contents": [{"uri": uri, "mimeType": "application/json", "text": json.dumps(found[uri])}]}
        raise _Failed(_METHOD, f"there is no method {method!r}")

    async def _call(self, rollout: OpenRollout, params: Mapping[str, Any]) -> dict[str, Any]:
        name, given = params.get("name"), params.get("arguments") or {}
        known = [tool["name"] for tool in rollout.tools]
        if not isinstance(name, str) or name not in known or not isinstance(given, Mapping):
            raise _Failed(_PARAMS, f"there is no tool {name!r} with these arguments; there are {', '.join(known)}")
        try:
            step = await rollout.call(name, given)
        except EpisodeEnded as error:
            step = ServedStep(str(error), failed=True)
        except NotScored as error:
            self._ends[rollout] = {"done": True, "reward": None, "error": str(error)}
            raise
        blocks = [{"type": "text", "text": step.text}, *(image_block(url) for url in step.images)]
        result: dict[str, Any] = {"content": blocks, "isError": step.failed}
        if step.done:
            end = {"done": True, "reward": step.reward, "components": dict(step.components or {})}
            self._ends[rollout] = end
            result["_meta"] = {f"lachesis/{name}": value for name, value in end.items()}
        return result


def _tool(tool: Mapping[str, Any]) -> dict[str, Any]:
    return {"name": tool["name"], "description": tool["description"], "inputSchema": tool["parameters"]}


async def _settled(number: Any, work: asyncio.Task[Any]) -> dict[str, Any]:
    """The answer. An error that is not the agent's doing has no score: it is one of JSON-RPC."""
    try:
        return _answer(number, await work)
    except _Failed as error:
        return _answer(number, error=error)
    except LachesisError as error:
        return _answer(number, error=_Failed(_SERVER, str(error)))


def _answer(number: Any, result: Any = None, *, error: _Failed | None = None) -> dict[str, Any]:
    said = {"result": result} if error is None else {"error": {"code": error.code, "message": str(error)}}
    return {"jsonrpc": "2.0", "id": number, **said}
