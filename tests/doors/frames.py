"""What the clients of other standards send, and what they are answered: recorded between them and a server of ours.

`make test-doors RECORD=1` writes the files of `golden/`. The tests that need no client of others play them again.
"""

from __future__ import annotations

import asyncio
import json
import re
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from pathlib import Path
from typing import Any

import aiohttp
import msgpack
import zmq
import zmq.asyncio
from aiohttp import web

GOLDEN = Path(__file__).parent / "golden"
_HEADERS = ("Accept", "Content-Type", "Mcp-Session-Id", "Mcp-Protocol-Version", "X-Session-ID")
_TIMES = ("created_at", "timestamp")
_RANDOM = re.compile(r"[0-9a-f]{32}")


@asynccontextmanager
async def recorded(url: str, frames: list[dict[str, Any]]) -> AsyncIterator[str]:
    """An address that passes everything on to the server at `url`, and back."""
    if url.startswith("tcp:"):
        async with _recorded_zmq(url, frames) as address:
            yield address
        return
    async with aiohttp.ClientSession(cookie_jar=aiohttp.DummyCookieJar()) as http:

        async def passed(request: web.Request) -> web.StreamResponse:
            if request.headers.get("Upgrade", "").lower() == "websocket":
                return await _passed_socket(http, url, request, frames)
            body = await request.text()
            headers = {name: request.headers[name] for name in _HEADERS if name in request.headers}
            frame = {"method": request.method, "path": request.path_qs, "headers": headers, "body": body}
            frames.append(frame)
            frame |= await _asked(http, url, frame)
            kept = {name: frame["told"][name] for name in ("Content-Type", *_HEADERS[2:]) if name in frame["told"]}
            return web.Response(text=frame["answer"], status=frame["status"], headers=kept)

        app = web.Application(client_max_size=1 << 26)
        app.router.add_route("*", "/{path:.*}", passed)
        runner = web.AppRunner(app)
        await runner.setup()
        site = web.TCPSite(runner, "127.0.0.1", 0)
        await site.start()
        try:
            yield f"http://127.0.0.1:{runner.addresses[0][1]}"
        finally:
            await runner.cleanup()


async def _passed_socket(
    http: aiohttp.ClientSession, url: str, request: web.Request, frames: list[dict[str, Any]]
) -> web.WebSocketResponse:
    front = web.WebSocketResponse()
    await front.prepare(request)
    frames.append({"socket": request.path_qs})
    async with http.ws_connect(url + request.path_qs) as back:

        async def reply() -> None:
            async for frame in back:
                frames.append({"told": json.loads(frame.data)})
                await front.send_str(frame.data)

        replies = asyncio.create_task(reply())
        async for frame in front:
            frames.append({"asked": json.loads(frame.data)})
            await back.send_str(frame.data)
    await replies
    return front


async def _asked(http: aiohttp.ClientSession, url: str, frame: dict[str, Any]) -> dict[str, Any]:
    async with http.request(
        frame["method"], url + frame["path"], headers=frame["headers"], data=frame["body"] or None
    ) as response:
        told = {name: response.headers[name] for name in _HEADERS if name in response.headers}
        return {"status": response.status, "told": told, "answer": await response.text()}


@asynccontextmanager
async def _recorded_zmq(url: str, frames: list[dict[str, Any]]) -> AsyncIterator[str]:
    context = zmq.asyncio.Context()
    front, back = context.socket(zmq.ROUTER), context.socket(zmq.DEALER)
    front.bind("tcp://127.0.0.1:*")
    back.connect(url)
    clients: list[bytes] = []

    async def forth() -> None:
        while True:
            client, *rest = await front.recv_multipart()
            clients[:] = [client]
            frames.append({"asked": _read(rest)})
            await back.send_multipart(rest)

    async def reply() -> None:
        while True:
            rest = await back.recv_multipart()
            frames.append({"told": _read(rest)})
            await front.send_multipart([clients[0], *rest])

    tasks = [asyncio.create_task(forth()), asyncio.create_task(reply())]
    try:
        yield front.get_string(zmq.LAST_ENDPOINT)
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.wait(tasks)
        context.destroy(linger=0)


def _read(frames: list[bytes]) -> list[Any]:
    number, kind, body = frames
    return [number.decode(), kind.decode(), msgpack.unpackb(body)]


async def replay(url: str, frames: list[dict[str, Any]], given: dict[str, str]) -> None:
    """Send the requests of `frames` again, and compare the answers. `given`: names in the frames, and what they are."""
    same = Same(given)
    if url.startswith("tcp:"):
        context = zmq.asyncio.Context()
        socket = context.socket(zmq.DEALER)
        socket.connect(url)
        try:
            for frame in frames:
                if "asked" in frame:
                    number, kind, body = same.now(frame["asked"])
                    await socket.send_multipart([number.encode(), kind.encode(), msgpack.packb(body)])
                else:
                    same.check(frame["told"], _read(await asyncio.wait_for(socket.recv_multipart(), 60)))
        finally:
            context.destroy(linger=0)
        return
    async with AsyncExitStack() as stack:
        http = await stack.enter_async_context(aiohttp.ClientSession())
        for frame in frames:
            if "socket" in frame:
                channel = await stack.enter_async_context(http.ws_connect(url + frame["socket"]))
            elif "asked" in frame:
                await channel.send_json(same.now(frame["asked"]))
            elif "told" in frame and "method" not in frame:
                same.check(frame["told"], await channel.receive_json(timeout=60))
            if "method" not in frame:
                continue
            found = await _asked(http, url, same.now(frame))
            for name in ("status", "told", "answer"):
                same.check(_parsed(frame[name]), _parsed(found[name]))


def _parsed(text: Any) -> Any:
    """JSON, events of JSON, or the text itself."""
    if not isinstance(text, str):
        return text
    if text.startswith("event: "):
        return [_parsed(line[6:]) if line.startswith("data: ") else line for line in text.splitlines() if line]
    try:
        return json.loads(text)
    except ValueError:
        return text


class Same:
    """Whether two recordings say the same. Random names stand for each other, in the order of their appearance."""

    def __init__(self, given: dict[str, str]) -> None:
        self._names = dict(given)

    def now(self, value: Any) -> Any:
        """What was recorded, with the names of now."""
        text = json.dumps(value)
        for name, live in self._names.items():
            text = text.replace(name, live)
        return json.loads(text)

    def check(self, recorded: Any, live: Any, at: str = "") -> None:
        if isinstance(recorded, str) and isinstance(live, str):
            self._names.update(zip(_RANDOM.findall(recorded), _RANDOM.findall(live), strict=False))
            assert self.now(recorded) == live, at
        elif isinstance(recorded, dict) and isinstance(live, dict):
            assert recorded.keys() == live.keys(), at
            for name in recorded.keys() - set(_TIMES):
                self.check(recorded[name], live[name], f"{at}.{name}")
        elif isinstance(recorded, list) and isinstance(live, list):
            assert len(recorded) == len(live), at
            for number, pair in enumerate(zip(recorded, live, strict=True)):
                self.check(*pair, f"{at}[{number}]")
        else:
            assert recorded == live, at


def keep(name: str, frames: list[dict[str, Any]], given: dict[str, str]) -> None:
    """Write a golden file, with the names of `given` in the place of addresses."""
    text = "[\n" + ",\n".join(json.dumps(frame) for frame in frames) + "\n]\n"
    for short, live in given.items():
        text = text.replace(live, short)
    (GOLDEN / f"{name}.json").write_text(text)


def golden(name: str) -> list[dict[str, Any]]:
    found: list[dict[str, Any]] = json.loads((GOLDEN / f"{name}.json").read_text())
    return found


def outline(frames: list[dict[str, Any]]) -> list[str]:
    """What the client sent, without what differs from time to time."""
    found = []
    for frame in frames:
        body = frame.get("asked", frame.get("body"))
        read = _parsed(body)
        if isinstance(read, list):  # a message of ZeroMQ, with its method
            read = {read[1]: None, **read[2]}
        names = sorted(read) if isinstance(read, dict) else []
        found.append(" ".join([frame.get("method", ""), frame.get("path", ""), *names]))
    return sorted(found)
