"""The tools that settings provide, each imported where it is asked for."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

from lachesis_tools.tool_registry import Tool


def provided_tools(web: str | None, record: Path, *, vision: str | None = None) -> Iterator[Tool]:
    """The tools of these settings.

    Args:
        web: Where pages come from; see `lachesis_tools.web.provider_of`.
        record: The file that keeps answers of a live provider of pages.
        vision: Who looks at images; see `lachesis_tools.vision.look_of`.

    Raises:
        SettingsError: one of them cannot work.
    """
    if web is not None:
        from lachesis_tools.web import provider_of, web_tools

        yield from web_tools(provider_of(web, record))
    if vision is not None:
        from lachesis_tools.vision import look_of, vision_tools

        yield from vision_tools(look_of(vision))
