"""Answers of a live provider, kept in a file: the same request gets the same answer, later without the network."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Awaitable, Callable, Iterable, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from backends.errors import SettingsError
from backends.tasks import in_own_thread
from lachesis_tools.tool_registry import ToolFailure
from lachesis_tools.tool_session import waiting
from lachesis_tools.web.provider import NotRecorded, Provider, WebPage


class Recorded:
    """A provider that asks another one once for each request.

    A line of the file is `{"request": [...], "pages": [...]}`, or `failure` with the text for the model in the place of
    `pages`. Failures of the infrastructure are not recorded.
    """

    def __init__(self, path: Path, provider: Provider | None) -> None:
        """`provider` answers what the file does not; None replays the file alone.

        Raises:
            SettingsError: there is no file to replay.
        """
        if provider is None and not path.is_file():
            raise SettingsError(f"there is no file {path} of recorded answers; record one with a live provider")
        self._path = path
        self._provider = provider
        lines = path.read_bytes().split(b"\n") if path.exists() else [b""]
        self._answers = _answers(lines)
        self._torn = bool(lines[-1])
        self._asking: dict[str, asyncio.Lock] = {}

    async def search(self, query: str, limit: int) -> Sequence[WebPage]:
        """See `Provider`."""
        return await self._answer(["search", query, limit], lambda provider: provider.search(query, limit))

    async def page(self, url: str) -> WebPage:
        """See `Provider`."""

        async def one(provider: Provider) -> Sequence[WebPage]:
            return [await provider.page(url)]

        return (await self._answer(["page", url], one))[0]

    async def _answer(
        self, request: list[Any], ask: Callable[[Provider], Awaitable[Sequence[WebPage]]]
    ) -> Sequence[WebPage]:
        key = json.dumps(request)
        asking = self._asking.setdefault(key, asyncio.Lock())  # equal requests of a moment get one answer
        with waiting():
            await asking.acquire()
        try:
            if key not in self._answers:
                if self._provider is None:
                    raise NotRecorded(
                        f"{self._path} has no answer to {key}: a replay needs the same requests as the recorded run; "
                        "use the provider itself to record it"
                    )
                try:
                    answer: dict[str, Any] = {"pages": [asdict(page) for page in await ask(self._provider)]}
                except ToolFailure as failure:
                    answer = {"failure": str(failure)}
                await in_own_thread(self._append, {"request": request, **answer})  # before anybody reads it
                self._answers[key] = answer
        finally:
            asking.release()
        self._asking.pop(key, None)
        found = self._answers[key]
        if "failure" in found:
            raise ToolFailure(found["failure"])
        return [WebPage(**page) for page in found["pages"]]

    def _append(self, entry: dict[str, Any]) -> None:
        self._path.parent.mkdir(parents=True, exist_ok=True)
        start, self._torn = b"\n" * self._torn, False
        with self._path.open("ab") as file:
            file.write(start + json.dumps(entry).encode() + b"\n")


def _answers(lines: Iterable[bytes]) -> dict[str, dict[str, Any]]:
    """The first answer to each request. A line that a killed process left incomplete is skipped."""
    found: dict[str, dict[str, Any]] = {}
    for line in lines:
        try:
            answer = json.loads(line)
        except ValueError:
            continue
        found.setdefault(json.dumps(answer.pop("request")), answer)
    return found
