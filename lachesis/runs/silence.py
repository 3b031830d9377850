"""Model servers that accept requests and answer none are named."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from rich.console import Console

from lachesis.runs.prose import print_prose
from lachesis.settings.server_settings import ServerConfig, needs_start

if TYPE_CHECKING:
    from lachesis_client.http_client import HttpClient

SILENT_AFTER = 7.0
"""Seconds without the first answer after which a server is named: less than 10 after the command, with the pause of the
watch and a start that takes two on a busy machine."""


class SilenceWatch:
    """Reports model servers that accept requests but answer none. Slow models exist, so this is not a failure."""

    def __init__(self, console: Console) -> None:
        self._console = console
        self._told: dict[HttpClient, float] = {}
        """Seconds of silence after which each server is named again."""

    def add(self, configs: Sequence[ServerConfig], clients: Sequence[Any]) -> None:
        """Watch these servers, without those that the run started."""
        for config, client in zip(configs, clients, strict=False):
            if hasattr(client, "silence") and not needs_start(config):
                self._told[client] = 0.0

    async def run(self) -> None:
        """Look at them for ever."""
        while True:
            for client, again in self._told.items():
                silence = client.silence
                # Later completions may be longer than the first.
                if silence >= (again or (max(60.0, 3 * client.slowest) if client.slowest else SILENT_AFTER)):
                    self._told[client] = 2 * silence
                    self._tell(
                        f"warning: the model server {client.base_url} has answered nothing for {silence:.0f} s; "
                        f"{client.in_flight} requests wait, each for up to {client.settings.timeout:g} s "
                        "(openai.timeout). It may be slow or in training. If not: is openai.base_url the server's, is "
                        "there a proxy between, what does its log say?"
                    )
                elif again and silence < SILENT_AFTER:
                    self._told[client] = 0.0
                    self._tell(f"the model server {client.base_url} answers")
            await asyncio.sleep(min(0.5, SILENT_AFTER / 4))

    def _tell(self, line: str) -> None:
        print_prose(self._console, line, style="yellow")
