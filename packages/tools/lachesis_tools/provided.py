"""The tools that settings provide, each imported where it is asked for."""

from __future__ import annotations

from pathlib import Path

from lachesis_tools.tool_registry import Tool, ToolRegistry


def with_provided(tools: ToolRegistry, web: str | None, record: Path, *, vision: str | None = None) -> ToolRegistry:
    """`tools`, and those of these settings that are not among them.

    Args:
        web: Where pages come from; see `lachesis_tools.web.provider_of`.
        record: The file that keeps answers of a live provider of pages.
        vision: Who looks at images; see `lachesis_tools.vision.look_of`.

    Raises:
        SettingsError: one of them cannot work.
    """
    found: list[Tool] = []
    if web is not None:
        from lachesis_tools.web import provider_of, web_tools

        found += web_tools(provider_of(web, record))
    if vision is not None:
        from lachesis_tools.vision import browser_seen_by, look_of, vision_tools

        look = look_of(vision)
        tools = browser_seen_by(tools, look)
        found += vision_tools(look)
    return tools.extended(*(tool for tool in found if tool.name not in tools))
