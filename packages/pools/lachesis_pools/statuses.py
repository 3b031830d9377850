"""What the pools that are known on this machine say of themselves."""

from __future__ import annotations

import asyncio
import os
from functools import partial
from typing import Any

from backends import BackendError

from .link import PoolLink
from .places import known_pool, published
from .wire import URL


async def statuses() -> list[dict[str, Any]]:
    """Of each pool of this user, and of that of LACHESIS_POOL_URL: its status, or `error`."""
    places = {name: place["url"] for name, place in published().items()}
    other = os.environ.get(URL, "").rstrip("/")
    if other and other not in places.values():
        places[other] = other
    return list(await asyncio.gather(*(_status(name, url) for name, url in places.items())))


async def _status(name: str, url: str) -> dict[str, Any]:
    about = {"name": name, "url": url, "error": ""}
    try:
        said: dict[str, Any] = await PoolLink(partial(asyncio.to_thread, known_pool, url)).ask("GET", "status")
    except BackendError as error:
        return {**about, "error": str(error)}
    return {**said, **about}
