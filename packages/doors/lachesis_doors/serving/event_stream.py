"""Answers as server-sent events, with signs of life while a call goes on."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from typing import Any

from aiohttp import web

_HEARTBEAT = 10.0
"""Seconds between signs of life; ors-sdk gives up after 30 without one."""


async def event_stream(request: web.Request, headers: Mapping[str, str] | None = None) -> web.StreamResponse:
    """A stream that has begun."""
    fixed = {"Content-Type": "text/event-stream", "Cache-Control": "no-cache"}
    stream = web.StreamResponse(headers={**fixed, **(headers or {})})
    await stream.prepare(request)
    return stream


async def write_events(stream: web.StreamResponse, *named: tuple[str, str]) -> None:
    """Write events, each a name and its data."""
    for name, data in named:
        lines = "".join(f"data: {line}\n" for line in data.split("\n"))
        await stream.write(f"event: {name}\n{lines}\n".encode())


async def keep_alive(stream: web.StreamResponse, call: asyncio.Task[Any]) -> None:
    """Wait for the end of `call`, and let the client know that it goes on."""
    while not call.done():
        await asyncio.wait({call}, timeout=_HEARTBEAT)
        if not call.done():
            await stream.write(b": ping\n\n")
