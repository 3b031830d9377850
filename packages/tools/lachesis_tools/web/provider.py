"""The interface of sources of web pages, and how they fail."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

from lachesis_tools.asking import ServiceUnavailable


class NotRecorded(ServiceUnavailable):
    """A replay was asked for what was not recorded. Another attempt ends in the same way."""

    may_pass = False


@dataclass(frozen=True, slots=True)
class WebPage:
    """A page. In answers to a search, `text` is a short description."""

    url: str
    title: str
    text: str


class Provider(Protocol):
    """Where the tools find pages. Methods raise `ToolFailure` for the model's mistakes, else `ServiceUnavailable`."""

    async def search(self, query: str, limit: int) -> Sequence[WebPage]:
        """At most `limit` pages, the best first."""

    async def page(self, url: str) -> WebPage:
        """The whole text of one page."""
