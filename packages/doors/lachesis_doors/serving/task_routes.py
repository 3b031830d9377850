"""The routes for tasks, which the Open Reward Standard and OpenEnv share."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from aiohttp import web

from lachesis_doors.serving.host import NoSuchTask, ServingHost
from lachesis_tokens.wire.service import json_response


class TaskRoutes:
    """Lists tasks. They are named by split and number: their content may contain the solution."""

    def __init__(self, host: ServingHost, healthy: str = "ok") -> None:
        self.host = host
        self._healthy = healthy

    def routes(self) -> Iterable[web.RouteDef]:
        """All, under the environment's name, and under none: that of the only environment."""
        yield web.get("/health", self._health)
        yield web.get("/list_environments", self._environments)
        for prefix in ("", "/{env}"):
            yield web.get(f"{prefix}/splits", self._splits)
            yield web.post(f"{prefix}/tasks", self._tasks)
            yield web.post(f"{prefix}/num_tasks", self._num_tasks)
            yield web.post(f"{prefix}/task", self._task)
            yield web.post(f"{prefix}/task_range", self._tasks)

    def check_name(self, request: web.Request) -> None:
        """Raises HTTP 404 where the request names another environment."""
        name = request.match_info.get("env")
        if name is not None and name.lower() != self.host.name:
            raise refused(404, f"there is no environment {name!r}; this is {self.host.name}")

    async def _health(self, request: web.Request) -> web.Response:
        return json_response({"status": self._healthy})

    async def _environments(self, request: web.Request) -> web.Response:
        return json_response([self.host.name])

    async def _splits(self, request: web.Request) -> web.Response:
        self.check_name(request)
        return json_response([{"name": split, "type": split} for split in self.host.splits])

    async def _asked(self, request: web.Request) -> tuple[dict[str, Any], str, int]:
        """The body, its split and the split's size."""
        self.check_name(request)
        body = await body_of(request)
        split = body.get("split")
        if not isinstance(split, str) or split not in self.host.splits:
            raise refused(400, f"there is no split {split!r}; there are {', '.join(self.host.splits)}")
        return body, split, self.host.splits[split]

    async def _tasks(self, request: web.Request) -> web.Response:
        """All, or those from `start` to before `stop`, which may be negative as in Python."""
        body, split, size = await self._asked(request)
        bounds = body.get("start"), body.get("stop")
        if not all(bound is None or isinstance(bound, int) for bound in bounds):
            raise refused(400, "start and stop are numbers")
        numbers = range(*slice(*bounds).indices(size))
        return json_response({"tasks": [self.host.task(split, at) for at in numbers], "env_name": self.host.name})

    async def _num_tasks(self, request: web.Request) -> web.Response:
        _, _, size = await self._asked(request)
        return json_response({"num_tasks": size})

    async def _task(self, request: web.Request) -> web.Response:
        body, split, size = await self._asked(request)
        index = body.get("index")
        if not isinstance(index, int):
            raise refused(400, "index is a number")
        try:
            return json_response({"task": self.host.task(split, index + size if index < 0 else index)})
        except NoSuchTask as error:
            raise refused(400, str(error)) from error


def with_input_schema(tools: Iterable[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """The tools, each as `{"name", "description", "input_schema"}`."""
    return [{"name": t["name"], "description": t["description"], "input_schema": t["parameters"]} for t in tools]


def image_block(url: str) -> dict[str, Any]:
    """The image of a data URL, as MCP and the Open Reward Standard write it."""
    kind, _, data = url.removeprefix("data:").partition(";base64,")
    return {"type": "image", "data": data, "mimeType": kind}


async def body_of(request: web.Request) -> dict[str, Any]:
    """The JSON object of a request. Raises HTTP 422 where there is none."""
    try:
        body = await request.json()
    except (ValueError, RecursionError, LookupError) as error:  # it is too deep, or its charset is not known
        raise refused(422, f"the body is not JSON: {error}") from error
    if not isinstance(body, dict):
        raise refused(422, "the body is not a JSON object")
    return body


def refused(status: int, detail: str) -> web.HTTPException:
    """An answer in the form of FastAPI's."""
    kind = type("Refused", (web.HTTPException,), {"status_code": status})
    answer: web.HTTPException = kind(text=json_response({"detail": detail}).text, content_type="application/json")
    return answer
