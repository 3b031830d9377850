"""An environment as a server of the Open Reward Standard: `lachesis serve ENV --as ors`.

The wire is that of ors-sdk 0.1.0 (https://openrewardstandard.io). The reward of the rollout comes with its last call,
and the calls before it have none, so that the sum, the last and the largest of them are the same.
"""

from __future__ import annotations

import asyncio
import json
import uuid
from collections.abc import Iterable, Mapping, Sequence
from typing import Any
from weakref import WeakKeyDictionary

from aiohttp import web

from backends.errors import LachesisError
from lachesis_doors.serving.event_stream import event_stream, keep_alive, write_events
from lachesis_doors.serving.host import NoPlace, NoSuchTask, ServingHost
from lachesis_doors.serving.open_rollout import ANSWER, EpisodeEnded, OpenRollout, ServedStep
from lachesis_doors.serving.task_routes import TaskRoutes, body_of, image_block, refused, with_input_schema
from lachesis_tokens.wire.service import WebService, json_response

_CHUNK = 4096
"""Characters of one event: clients read a line at a time, and a long one is too long."""


class OrsService(WebService):
    title = "the ORS server"

    def __init__(self, host: ServingHost, address: str, port: int) -> None:
        super().__init__(address, port)
        self._host = host
        self._tasks = TaskRoutes(host)
        self._calls: WeakKeyDictionary[OpenRollout, dict[str, asyncio.Task[dict[str, Any]]]] = WeakKeyDictionary()
        """Of each rollout, by number, as long as it is not closed."""

    def routes(self) -> Iterable[web.RouteDef]:
        yield web.post("/create_session", self._create_session)
        yield web.post("/create", self._create)
        yield web.post("/ping", self._ping)
        yield web.post("/delete", self._delete)
        yield web.post("/delete_session", self._delete)
        for prefix in ("", "/{env}"):
            yield web.get(f"{prefix}/tools", self._tools)
            yield web.get(f"{prefix}/task_tools", self._task_tools)
            yield web.get(f"{prefix}/prompt", self._prompt)
            yield web.post(f"{prefix}/call", self._call)
        yield from self._tasks.routes()

    # The session.

    async def _create_session(self, request: web.Request) -> web.StreamResponse:
        stream = await event_stream(request)
        await write_events(stream, ("task_id", uuid.uuid4().hex), ("end", ""))
        return stream

    async def _create(self, request: web.Request) -> web.Response:
        name, body = _session(request), await body_of(request)
        env = body.get("env_name")
        if env is not None and str(env).lower() != self._host.name:
            raise refused(404, f"there is no environment {env!r}; this is {self._host.name}")
        task = body.get("task_spec") or body
        if not (isinstance(task, Mapping) and isinstance(task.get("split"), str) and type(task.get("index")) is int):
            raise refused(400, "name the task by `split` and `index`, or by a task_spec that this server listed")
        if self._host.get(name) is not None:
            raise refused(400, "the session has a task already")
        try:
            self._host.open(task["split"], task["index"], name)
        except NoSuchTask as error:
            raise refused(400, str(error)) from error
        except NoPlace as error:
            raise refused(429, str(error)) from error
        return json_response({"sid": name})

    async def _ping(self, request: web.Request) -> web.Response:
        self._rollout(request)
        return json_response({"status": "ok"})

    async def _delete(self, request: web.Request) -> web.Response:
        name = _session(request)
        await self._host.close(name)
        return json_response({"sid": name})

    def _rollout(self, request: web.Request) -> OpenRollout:
        self._tasks.check_name(request)
        rollout = self._host.get(_session(request))
        if rollout is None:
            raise refused(404, "there is no such session, or it was closed because its client was silent")
        return rollout

    # The task.

    async def _tools(self, request: web.Request) -> web.Response:
        self._tasks.check_name(request)
        return json_response(self._listed(self._host.tools))

    async def _task_tools(self, request: web.Request) -> web.Response:
        return json_response(self._listed(self._rollout(request).tools))

    def _listed(self, tools: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
        ends = {"name": self._host.answer_tool, "arg": ANSWER, "description": tools[-1]["description"]}
        return {"tools": with_input_schema(tools), "terminal_tool": ends}

    async def _prompt(self, request: web.Request) -> web.Response:
        try:
            rollout = await self._rollout(request).begin()
        except LachesisError as error:
            raise refused(410 if isinstance(error, EpisodeEnded) else 500, str(error)) from error
        blocks: list[dict[str, Any]] = []
        for message in rollout.first:
            content = message.get("content") or ""
            parts = [{"type": "text", "text": content}] if isinstance(content, str) else content
            blocks += [_block(part) for part in parts if part.get("text") != ""]
        return json_response(blocks)

    async def _call(self, request: web.Request) -> web.StreamResponse:
        rollout, body = self._rollout(request), await body_of(request)
        number, name, given = body.get("task_id"), body.get("name"), body.get("input", {})
        calls = self._calls.setdefault(rollout, {})
        if isinstance(number, str) and number in calls:
            call = calls[number]  # a client whose connection broke asks again
        elif number is not None:
            raise refused(404, f"there is no call {number!r} to go on with")
        else:
            number = uuid.uuid4().hex
            call = calls[number] = asyncio.create_task(_called(rollout, name, given))
        stream = await event_stream(request)
        await write_events(stream, ("task_id", number))
        await keep_alive(stream, call)
        failure = call.exception()
        if failure is not None:
            await write_events(stream, ("error", str(failure)))
            return stream
        said = json.dumps(call.result())
        chunks = [said[at : at + _CHUNK] for at in range(0, len(said), _CHUNK)]
        await write_events(stream, *(("chunk", chunk) for chunk in chunks[:-1]), ("end", chunks[-1]))
        return stream


async def _called(rollout: OpenRollout, name: Any, given: Any) -> dict[str, Any]:
    """Raises what is not the agent's doing: `NotScored`, for example."""
    if not isinstance(name, str) or not isinstance(given, Mapping):
        return {"ok": False, "error": "`name` is a text and `input` an object", "reason": "input_validation"}
    if name not in {tool["name"] for tool in rollout.tools}:
        known = ", ".join(tool["name"] for tool in rollout.tools)
        return {"ok": False, "error": f"{name!r} is not a valid tool; there are {known}", "reason": "not_found"}
    try:
        step = await rollout.call(name, given)
    except EpisodeEnded as error:
        return {"ok": False, "error": str(error), "reason": "episode_finished"}
    return {"ok": True, "output": _output(step)}


def _output(step: ServedStep) -> dict[str, Any]:
    """A failed call is an answer that the model reads: it is part of the conversation that the reward sees."""
    blocks = [{"type": "text", "text": step.text}, *(image_block(url) for url in step.images)]
    about: dict[str, Any] = {"failed": True} if step.failed else {}
    if step.components:
        about["components"] = dict(step.components)
    return {"blocks": blocks, "reward": step.reward, "finished": step.done, "metadata": about or None}


def _block(part: Mapping[str, Any]) -> dict[str, Any]:
    return image_block(part["image_url"]["url"]) if "image_url" in part else {"type": "text", "text": part["text"]}


def _session(request: web.Request) -> str:
    name = request.headers.get("X-Session-ID", "").strip()
    if not name:
        raise refused(400, "the header X-Session-ID is missing")
    return name
