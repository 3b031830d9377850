"""The two tools, and the setting that says where they find pages."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

from pydantic import Field

from backends.errors import SettingsError
from lachesis_tools.tool_registry import Tool, ToolFailure, tool
from lachesis_tools.web.corpus import Corpus
from lachesis_tools.web.live import FIRECRAWL_URL, Firecrawl, SearXNG
from lachesis_tools.web.provider import Provider
from lachesis_tools.web.recorded import Recorded

MAX_PAGE_CHARS = 8_000
"""Characters of one page that a model gets; five pages fit into the limit of a tool's result."""


def provider_of(setting: str, record: Path) -> Provider:
    """The provider that a setting names.

    Args:
        setting: `corpus:PATH`, `searxng:URL`, `firecrawl`, `firecrawl:URL`, or `replay:FILE` of recorded answers.
        record: The file that keeps the answers of a live provider.

    Raises:
        SettingsError: it names none, or one that cannot work.
    """
    kind, _, where = setting.partition(":")
    if kind == "corpus" and where:
        return Corpus.at(Path(where))
    if kind == "replay" and where:
        return Recorded(Path(where), None)
    if where and kind in ("searxng", "firecrawl") and not where.startswith(("http://", "https://")):
        raise SettingsError(f"web: {setting!r} has no URL after {kind}: such as http://localhost:8080")
    if kind == "searxng" and where:
        return Recorded(record, SearXNG(where))
    if kind == "firecrawl":
        return Recorded(record, Firecrawl(where or FIRECRAWL_URL))
    raise SettingsError(
        f"web: {setting!r} is no provider; write corpus:FOLDER, corpus:FILE.jsonl, searxng:URL, firecrawl, "
        "firecrawl:URL or replay:FILE.jsonl"
    )


def web_tools(provider: Provider) -> tuple[Tool, ...]:
    """`web_search` and `web_extract`, which find pages at `provider`."""

    @tool(toolset="web", concurrency_safe=True, time_limit=None)  # the provider limits its time
    async def web_search(
        query: Annotated[str, Field(min_length=1)], limit: Annotated[int, Field(ge=1, le=20)] = 5
    ) -> Any:
        """Search the web. Returns addresses, titles and short descriptions of pages, the best first; read the pages
        with web_extract.

        Args:
            query: What to search for.
            limit: The most results.
        """
        found = await provider.search(query, limit)
        rows = [
            {"url": page.url, "title": page.title, "description": page.text, "position": number}
            for number, page in enumerate(found, start=1)
        ]
        return {"success": True, "data": {"web": rows}}

    @tool(toolset="web", concurrency_safe=True, time_limit=None)
    async def web_extract(urls: Annotated[list[str], Field(min_length=1, max_length=5)]) -> Any:
        """Read the text of web pages.

        Args:
            urls: Addresses of the pages, at most 5.
        """
        results = [await _extracted(provider, url) for url in urls]
        if all(result["error"] for result in results):
            raise ToolFailure("; ".join(str(result["error"]) for result in results))
        return {"results": results}

    return web_search, web_extract


async def _extracted(provider: Provider, url: str) -> dict[str, str | None]:
    try:
        page = await provider.page(url)
    except ToolFailure as failure:
        return {"url": url, "title": "", "content": "", "error": str(failure)}
    text, more = page.text, len(page.text) - MAX_PAGE_CHARS
    if more > 0:
        text = f"{text[:MAX_PAGE_CHARS]}\n[{more} more characters]"
    return {"url": page.url, "title": page.title, "content": text, "error": None}
