"""The door of the Open Reward Standard: environments of an HTTP server whose tools pay and end episodes.

    ors:http://HOST:PORT/ENVIRONMENT?split=train

The wire is that of ors-sdk 0.1.0 (https://openrewardstandard.io).
"""

from __future__ import annotations

import contextlib
import json
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import asynccontextmanager
from typing import Any

import aiohttp

from backends.errors import SettingsError
from lachesis_doors.door_env import DoorEnv, DoorSession, SteppedSession
from lachesis_doors.guest_process import BROKEN, GuestError, GuestLost, broken_answers
from lachesis_doors.mcp_http import named_events
from lachesis_tools import ToolSession

_SECONDS = 300.0
"""For one answer of the server."""


class OrsServer:
    """The routes of one environment."""

    def __init__(self, url: str, name: str, http: aiohttp.ClientSession) -> None:
        self.url = url
        self.name = name
        self._http = http

    async def get(self, route: str, session: str | None = None) -> Any:
        return await self._asked("GET", f"/{self.name}/{route}", None, session)

    async def post(self, route: str, body: Mapping[str, Any], session: str | None = None) -> Any:
        return await self._asked("POST", f"/{self.name}/{route}", body, session)

    async def root(self, route: str, body: Mapping[str, Any], session: str | None = None) -> Any:
        """A route that belongs to the server and not to an environment."""
        return await self._asked("POST", f"/{route}", body, session)

    async def stream(self, route: str, body: Mapping[str, Any], session: str | None = None) -> str:
        """The data of a stream of events, up to `end`.

        Raises:
            GuestError: the environment raised an exception.
            GuestLost: the server is gone, or the session is.
        """
        said: list[str] = []
        async with self._opened("POST", route, body, session) as response:
            async for kind, data in named_events(response.content):
                if kind == "error":
                    raise GuestError(f"ors {self.url}{route}: {data}")
                if kind in ("chunk", "end", "task_id"):
                    said.append(data if kind != "task_id" or route == "/create_session" else "")
                if kind == "end":
                    return "".join(said)
        raise GuestLost(f"ors {self.url}{route}: the stream broke off")

    async def _asked(self, method: str, route: str, body: Mapping[str, Any] | None, session: str | None) -> Any:
        async with self._opened(method, route, body, session) as response:
            return json.loads(await response.read())

    @asynccontextmanager
    async def _opened(
        self, method: str, route: str, body: Mapping[str, Any] | None, session: str | None
    ) -> AsyncIterator[aiohttp.ClientResponse]:
        headers = {} if session is None else {"X-Session-ID": session}
        timeout = aiohttp.ClientTimeout(total=None, sock_read=_SECONDS, sock_connect=30)
        try:
            async with self._http.request(
                method, f"{self.url}{route}", json=body, headers=headers, timeout=timeout
            ) as response:
                if response.status >= 400:
                    said = (await response.text())[:500]
                    raise GuestLost(f"ors {self.url}{route}: HTTP {response.status}: {said}")
                yield response
        except (aiohttp.ClientError, TimeoutError, *BROKEN) as error:
            raise GuestLost(f"ors {self.url}{route}: {type(error).__name__}: {error}") from error


class OrsEnv(DoorEnv):
    """An environment that a server of the Open Reward Standard offers. A task of it is an item."""

    async def setup(self) -> None:
        await super().setup()
        url, _, name = self.target.rpartition("/")
        if not url.startswith("http"):
            raise SettingsError(f"{self.target}: write ors:http://HOST:PORT/ENVIRONMENT")
        self._split = str(self.arguments.get("split", "train"))
        self.step_rewards = self.rule()
        self._http = aiohttp.ClientSession()
        self._ors = OrsServer(url, name, self._http)
        try:
            with broken_answers(f"ors {self.target}"):
                self._size = int((await self._ors.post("num_tasks", {"split": self._split}))["num_tasks"])
                self._listed = _tools((await self._ors.get("tools")).get("tools") or ())
        except GuestLost as error:
            await self._http.close()
            raise GuestLost(f"{error}. Next step: start the server, or correct the address or the name") from error

    async def teardown(self) -> None:
        await self._http.close()

    async def item_at(self, number: int) -> tuple[Any, Sequence[Mapping[str, Any]]] | None:
        if number >= self._size:
            return None
        return {"split": self._split, "index": number}, self._listed

    @asynccontextmanager
    async def opened(self, item: Any, tools: ToolSession) -> AsyncIterator[DoorSession]:
        session = await self._ors.stream("/create_session", {})
        try:
            await self._ors.root("create", {"env_name": self._ors.name, **item}, session)
            with broken_answers(f"ors {self.target}"):
                prompt = _content(await self._ors.get("prompt", session))
            yield _OrsSession(self._ors, session, prompt)
        finally:
            with contextlib.suppress(GuestLost):
                await self._ors.root("delete", {}, session)


class _OrsSession(SteppedSession):
    def __init__(self, server: OrsServer, session: str, prompt: str | list[dict[str, Any]]) -> None:
        self.prompt: str | list[dict[str, Any]]
        self.prompt = prompt if isinstance(prompt, str) else [{"role": "user", "content": prompt}]
        self._server, self._session = server, session

    async def call(self, name: str, arguments: Mapping[str, Any]) -> Mapping[str, Any]:
        body = {"name": name, "input": dict(arguments)}
        said = await self._server.stream(f"/{self._server.name}/call", body, self._session)
        with broken_answers(f"ors {self._server.url}/{self._server.name}/call"):
            return self._answer(json.loads(said))

    def _answer(self, answer: Mapping[str, Any]) -> Mapping[str, Any]:
        if type(answer["ok"]) is not bool:
            raise TypeError(f"`ok` is {answer['ok']!r}, and neither true nor false")
        if not answer["ok"]:
            return {
                "text": answer["error"],
                "error": answer["error"],
                "done": answer.get("reason") == "episode_finished",
            }
        output = answer["output"]
        content = _content(output.get("blocks") or ())
        images = (
            [] if isinstance(content, str) else [p["image_url"]["url"] for p in content if p["type"] == "image_url"]
        )
        text = content if isinstance(content, str) else "\n".join(p["text"] for p in content if p["type"] == "text")
        return {"text": text, "images": images, "reward": output.get("reward"), "done": output.get("finished", False)}


def _tools(given: Sequence[Mapping[str, Any]]) -> list[Mapping[str, Any]]:
    return [
        {
            "name": tool["name"],
            "description": tool.get("description") or "",
            "parameters": tool.get("input_schema") or {"type": "object", "properties": {}},
        }
        for tool in given
    ]


def _url(block: Mapping[str, Any]) -> str:
    return f"data:{block['mimeType']};base64,{block['data']}"


def _content(blocks: Sequence[Mapping[str, Any]]) -> str | list[dict[str, Any]]:
    """Text, or OpenAI's parts where there are images."""
    parts: list[dict[str, Any]] = []
    for block in blocks:
        if block["type"] == "image":
            parts.append({"type": "image_url", "image_url": {"url": _url(block)}})
        else:
            parts.append({"type": "text", "text": block["text"]})
    return parts if any(part["type"] != "text" for part in parts) else "\n".join(part["text"] for part in parts)


door = OrsEnv.at
