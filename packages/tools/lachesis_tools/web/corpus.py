"""A corpus of pages on this machine, ranked by BM25: the same answers in every run, without a network."""

from __future__ import annotations

import asyncio
import json
import re
import sqlite3
import threading
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path

from backends.errors import SettingsError
from backends.tasks import in_own_thread
from lachesis_tools.tool_registry import ToolFailure
from lachesis_tools.web.html_text import html_text
from lachesis_tools.web.provider import WebPage

_SUFFIXES = (".html", ".htm", ".md", ".txt")
_SNIPPET_WORDS = 32
_TITLE_WEIGHT = 4
"""How much more a word in the title counts than one in the text."""


class Corpus:
    """Searches pages by SQLite's full-text index, which is made in memory at the first use."""

    def __init__(self, pages: Callable[[], Iterable[WebPage]]) -> None:
        """`pages` gives the pages, in another thread. Their order decides between equal ranks."""
        self._pages = pages
        self._lock = threading.Lock()
        self._index: sqlite3.Connection | None = None

    @classmethod
    def at(cls, path: Path) -> Corpus:
        """The .html, .md and .txt files below a folder, or a JSONL file of `{url, title, text}`.

        Raises:
            SettingsError: there is no such folder or file.
        """
        if path.is_dir():
            return cls(partial(_of_folder, path))
        if path.is_file():
            return cls(partial(_of_lines, path))
        raise SettingsError(f"the corpus {path} does not exist; name a folder of pages or a JSONL file of them")

    async def search(self, query: str, limit: int) -> Sequence[WebPage]:
        """See `Provider`. Pages with any of the words are found."""
        words = re.findall(r"\w+", query)
        if not words:
            raise ToolFailure("the query has no words")
        match = " OR ".join(f'"{word}"' for word in dict.fromkeys(words))
        rows = await self._rows(
            f"SELECT url, title, snippet(pages, 2, '', '', ' ... ', {_SNIPPET_WORDS}) FROM pages WHERE pages MATCH ? "
            f"ORDER BY bm25(pages, 0, {_TITLE_WEIGHT}, 1), rowid LIMIT ?",
            match,
            limit,
        )
        return [WebPage(*row) for row in rows]

    async def page(self, url: str) -> WebPage:
        """See `Provider`."""
        rows = await self._rows(
            "SELECT url, title, text FROM pages JOIN ids ON pages.rowid = id WHERE address = ?", url
        )
        if not rows:
            raise ToolFailure(f"there is no page {url!r}; web_search gives the addresses of pages")
        return WebPage(*rows[0])

    def _rows(self, statement: str, *values: object) -> asyncio.Future[list[tuple[str, str, str]]]:
        return in_own_thread(self._execute, statement, values)

    def _execute(self, statement: str, values: Sequence[object]) -> list[tuple[str, str, str]]:
        with self._lock:
            if self._index is None:
                self._index = _indexed(self._pages())
            return self._index.execute(statement, values).fetchall()


def _indexed(pages: Iterable[WebPage]) -> sqlite3.Connection:
    index = sqlite3.connect(":memory:", check_same_thread=False)
    index.execute("CREATE VIRTUAL TABLE pages USING fts5(url UNINDEXED, title, text, tokenize = 'porter unicode61')")
    index.execute("CREATE TABLE ids(address TEXT PRIMARY KEY, id INTEGER)")
    for number, page in enumerate(pages, start=1):
        try:
            index.execute("INSERT INTO ids VALUES (?, ?)", (page.url, number))
        except sqlite3.IntegrityError:
            raise SettingsError(f"the corpus has two pages with the address {page.url!r}") from None
        row = (number, page.url, page.title, page.text)
        index.execute("INSERT INTO pages(rowid, url, title, text) VALUES (?, ?, ?, ?)", row)
    return index


def _of_folder(folder: Path) -> Iterator[WebPage]:
    """The address of a page is its path in the folder."""
    for path in sorted(path for path in folder.rglob("*") if path.suffix.lower() in _SUFFIXES and path.is_file()):
        data, url = path.read_bytes(), path.relative_to(folder).as_posix()
        if path.suffix.lower() in (".html", ".htm"):
            title, text = html_text(data)
        else:
            text = data.decode(errors="replace")
            heading = re.search(r"^#\s+(.+)$", text, re.MULTILINE) if path.suffix.lower() == ".md" else None
            title = heading[1].strip() if heading else ""
        yield WebPage(url, title or path.stem, text)


def _of_lines(path: Path) -> Iterator[WebPage]:
    with path.open(encoding="utf-8") as lines:
        for number, line in enumerate(lines, start=1):
            if not line.strip():
                continue
            try:
                found = json.loads(line)
            except ValueError:
                found = None
            fields = found if isinstance(found, Mapping) else {}
            texts = [text for key in ("url", "title", "text") if isinstance(text := fields.get(key), str)]
            if len(texts) < 3:
                raise SettingsError(f"{path}, line {number}: not a page, an object with the texts url, title and text")
            yield WebPage(*texts)
