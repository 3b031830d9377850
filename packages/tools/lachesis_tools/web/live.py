"""Live providers: SearXNG, whose results are then opened from here, and Firecrawl, which opens them itself."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypeVar
from urllib.parse import urljoin

from backends.errors import SettingsError, os_error_hint
from backends.tasks import in_own_thread
from lachesis_tools.asking import MAX_BYTES, AnswerTooLarge, ServiceUnavailable, asked
from lachesis_tools.gate import Gate
from lachesis_tools.tool_registry import ToolFailure
from lachesis_tools.web.addresses import check_url, failed_here, public_resolver
from lachesis_tools.web.html_text import html_text
from lachesis_tools.web.provider import WebPage

T = TypeVar("T")
FIRECRAWL_URL = "https://api.firecrawl.dev"
_TIMEOUT = 30.0
"""Seconds for one request."""
_MAX_BYTES = 5_000_000
_MAX_REDIRECTS = 5


class SearXNG:
    """Searches by the JSON API of a SearXNG server."""

    def __init__(self, url: str, *, pause: float = 1.0, private_pages: bool = False) -> None:
        """
        Args:
            url: Of the server.
            pause: Seconds before the second attempt; twice as many before the third.
            private_pages: Whether pages of this machine and its network may be opened.
        """
        self._url = url.rstrip("/")
        self._pause, self._gate = pause, Gate(pause)
        self._private_pages = private_pages

    async def search(self, query: str, limit: int) -> Sequence[WebPage]:
        """See `Provider`."""
        url = f"{self._url}/search"

        def read(status: int, found: Mapping[str, Any]) -> Sequence[WebPage]:
            if status == 403:
                raise ServiceUnavailable(f"{url} refuses JSON; add json to search.formats in its settings.yml")
            if status != 200:
                raise ServiceUnavailable(f"{url} answers {status} without results: {str(found)[:200]}")
            return _pages(found["results"], "content", limit)

        params = {"q": query, "format": "json"}
        return await asked("GET", url, read, gate=self._gate, timeout=_TIMEOUT, pause=self._pause, params=params)

    async def page(self, url: str) -> WebPage:
        """See `Provider`. What the page's own server does is an answer for the model, which has chosen it."""
        import aiohttp

        connector = aiohttp.TCPConnector(resolver=None if self._private_pages else public_resolver())
        timeout = aiohttp.ClientTimeout(_TIMEOUT)
        try:
            async with aiohttp.ClientSession(connector=connector, timeout=timeout) as http:
                kind, charset, data = await self._opened(http, url)
        except TimeoutError:
            raise ToolFailure(f"{url} did not answer in {_TIMEOUT:g} s") from None
        except (aiohttp.ClientError, ValueError) as error:
            if failed_here(error):
                system = getattr(error, "os_error", None)
                step = os_error_hint(system or OSError()) or "repair the network of this machine"
                raise ServiceUnavailable(f"{url} cannot be opened from here: {error}. Next step: {step}") from error
            raise ToolFailure(f"{url} cannot be opened: {error}") from None
        if kind in ("text/html", "application/xhtml+xml"):
            title, text = await in_own_thread(html_text, _text(data, charset) if charset else data)
        elif kind.startswith("text/") or kind == "application/json":
            title, text = "", _text(data, charset)
        else:
            raise ToolFailure(f"{url} is {kind}, which cannot be read as text")
        return WebPage(url, title, text)

    async def _opened(self, http: Any, url: str) -> tuple[str, str | None, bytes]:
        """Type, charset and content of a page; every redirect is checked like the first address."""
        for _ in range(_MAX_REDIRECTS + 1):
            if not self._private_pages:
                await check_url(url)
            async with http.get(url, allow_redirects=False) as response:
                if response.status in (301, 302, 303, 307, 308) and "Location" in response.headers:
                    url = urljoin(url, response.headers["Location"])
                    continue
                if response.status >= 400:
                    raise ToolFailure(f"{url} answers {response.status} {response.reason}")
                data = bytearray()
                async for chunk in response.content.iter_chunked(1 << 16):
                    data += chunk
                    if len(data) > _MAX_BYTES:
                        raise ToolFailure(f"{url} has more than {_MAX_BYTES} bytes")
                return response.content_type, response.charset, bytes(data)
        raise ToolFailure(f"{url} redirects more than {_MAX_REDIRECTS} times")


class Firecrawl:
    """Searches and reads by Firecrawl's API, version 2. The key is read from `FIRECRAWL_API_KEY` for each request."""

    def __init__(self, url: str = FIRECRAWL_URL, *, pause: float = 1.0) -> None:
        """Another `url` is a server of your own, which may need no key."""
        self._url = url.rstrip("/")
        self._pause, self._gate = pause, Gate(pause)
        if self._url == FIRECRAWL_URL and not os.environ.get("FIRECRAWL_API_KEY"):
            raise SettingsError("firecrawl needs a key in the variable FIRECRAWL_API_KEY, or firecrawl:URL a server")

    async def search(self, query: str, limit: int) -> Sequence[WebPage]:
        """See `Provider`."""

        def read(data: Mapping[str, Any]) -> Sequence[WebPage]:
            return _pages([] if data.get("web") is None else data["web"], "description", limit)

        return await self._post("search", {"query": query, "limit": limit}, read)

    async def page(self, url: str) -> WebPage:
        """See `Provider`."""

        def read(data: Mapping[str, Any]) -> WebPage:
            about, text = data.get("metadata") or {}, data.get("markdown")
            if int(about.get("statusCode") or 200) >= 400:
                raise ToolFailure(f"{url} answers {about['statusCode']}")
            if not isinstance(text, str) and (text is not None or not about):
                raise ValueError("no page")
            return WebPage(url, str(about.get("title") or ""), text or "")

        await check_url(url)
        try:
            return await self._post("scrape", {"url": url, "formats": ["markdown"], "onlyMainContent": True}, read)
        except AnswerTooLarge:
            raise ToolFailure(f"{url} has more than {MAX_BYTES} bytes") from None

    async def _post(self, what: str, body: Mapping[str, Any], read: Callable[[Mapping[str, Any]], T]) -> T:
        key = os.environ.get("FIRECRAWL_API_KEY")
        headers = {"Authorization": f"Bearer {key}"} if key else {}
        url = f"{self._url}/v2/{what}"

        def data_of(status: int, found: Mapping[str, Any]) -> T:
            if status == 200 and found["success"]:
                return read(found["data"])
            if status in (400, 422) or _of_page(found) or (status in (403, 408) and what == "scrape"):
                raise ToolFailure(str(found.get("error") or f"{what} failed"))
            raise ServiceUnavailable(f"{url} answers {status}: {str(found.get('error') or found)[:200]}")

        return await asked(
            "POST",
            url,
            data_of,
            gate=self._gate,
            timeout=_TIMEOUT,
            pause=self._pause,
            final=_of_page,
            json=body,
            headers=headers,
        )


def _of_page(found: Mapping[str, Any]) -> bool:
    """Whether Firecrawl says that the page failed, and not Firecrawl."""
    return str(found.get("code", "")).startswith("SCRAPE_")


def _pages(found: Any, text: str, limit: int) -> list[WebPage]:
    """Raises an error of Python's own for what is no list of results."""
    if not isinstance(found, list):
        raise TypeError(f"{type(found).__name__} for a list of results")
    return [WebPage(*(str(each.get(key) or "") for key in ("url", "title", text))) for each in found[:limit]]


def _text(data: bytes, charset: str | None) -> str:
    try:
        return data.decode(charset or "utf-8", errors="replace")
    except (LookupError, ValueError):  # no charset that anybody knows, or none of texts
        return data.decode(errors="replace")
