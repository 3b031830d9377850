"""The tools of the web, by task id. Their results are JSON."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from typing import Any

from lachesis_compat.in_run import registry_in_use
from lachesis_compat.modules.model_tools import handle_function_call


def check_firecrawl_api_key() -> bool:
    """Whether the open run has tools of the web, of Firecrawl or any other provider."""
    return "web_search" in registry_in_use()


def web_search_tool(query: str, limit: int = 5, task_id: str | None = None) -> str:
    """The tool `web_search`. Blocks, so not on the event loop."""
    return handle_function_call("web_search", {"query": query, "limit": limit}, task_id=task_id)


async def web_extract_tool(urls: Sequence[str], *_: Any, task_id: str | None = None, **__: Any) -> str:
    """The tool `web_extract`. Other arguments, such as a format, have no effect."""
    return await asyncio.to_thread(handle_function_call, "web_extract", {"urls": list(urls)}, task_id=task_id)
