"""The tools that the settings of an environment give the agent."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from lachesis.settings.settings import HermesAgentEnvConfig
from lachesis_tools import ToolRegistry, get_tool_definitions
from lachesis_tools.terminal import without_carried_folder
from lachesis_tools.toolsets import (
    PROVIDED_TOOLSETS,
    REMOVED_TOOLSETS,
    TOOLSETS,
    ToolsetError,
    has_toolset,
    how_to_provide,
    left_out_tools,
)


@dataclass(frozen=True, slots=True)
class AgentTools:
    """Toolsets of the removed stack, and those of a setting, that have no tools here are left out: see `missing`."""

    config: HermesAgentEnvConfig
    registry: ToolRegistry

    @property
    def toolsets(self) -> list[str] | None:
        """What the agent gets, or may get where there is a `distribution`; None: all."""
        if self.config.distribution is None:
            return self.config.enabled_toolsets
        from lachesis_tools.distributions import distribution

        return [*distribution(self.config.distribution)]

    def definitions(self) -> list[dict[str, Any]]:
        """OpenAI definitions of all tools that the agent may get."""
        return self.definitions_of(self.toolsets)

    def definitions_of(self, toolsets: Sequence[str] | None) -> list[dict[str, Any]]:
        """OpenAI definitions of the tools of these toolsets, or of all.

        Raises:
            ToolsetError: none of them has tools here, or one does not exist or is unavailable.
        """
        enabled = self._known(toolsets)
        if toolsets and not enabled:
            raise ToolsetError(
                f"none of the toolsets {', '.join(toolsets)} has tools here; choose others, or extend the "
                f"environment's `tools` with tools of these toolsets{self.advice(toolsets)}"
            )
        return get_tool_definitions(enabled, self._known(self.config.disabled_toolsets), registry=self.registry)

    def draw(self, seed: str | None = None) -> list[str] | None:
        """Toolsets that are drawn from the `distribution`: the same for equal seeds, others each time without one. None
        if there is no distribution."""
        if self.config.distribution is None:
            return None
        from lachesis_tools.distributions import draw_toolsets

        return draw_toolsets(self.config.distribution, seed, exists=self._exists)

    def missing(self) -> list[str]:
        """Toolsets of the removed stack that the settings name and that have no tools here."""
        named = dict.fromkeys((*(self.toolsets or ()), *(self.config.disabled_toolsets or ())))
        return [name for name in named if self._is_missing(name)]

    def left_out(self) -> Mapping[str, str]:
        """The tools in the settings that cannot work on this machine, with the missing requirement."""
        return left_out_tools(
            self._known(self.toolsets), self._known(self.config.disabled_toolsets), registry=self.registry
        )

    def _known(self, toolsets: Sequence[str] | None) -> list[str] | None:
        return None if toolsets is None else [name for name in toolsets if not self._is_missing(name)]

    def _exists(self, name: str) -> bool:
        return has_toolset(name, registry=self.registry)

    def _is_missing(self, name: str) -> bool:
        return (name in REMOVED_TOOLSETS or name in PROVIDED_TOOLSETS) and not self._exists(name)

    @staticmethod
    def advice(missing: Sequence[str]) -> str:
        """How to get the tools of missing toolsets, where a setting or the environment provides them."""
        found = [f"; {how_to_provide(name)}" for name in missing if name in PROVIDED_TOOLSETS]
        if "clarify" in missing:
            from lachesis_tools.on_request import NEEDS_USER

            found.append(f"; {NEEDS_USER}")
        return "".join(dict.fromkeys(found))


def chosen_tools(tools: ToolRegistry, config: HermesAgentEnvConfig, name: str, *, user: bool) -> ToolRegistry:
    """An environment's own tools, changed and extended as its settings say; `name` is that of its runs, and `user` says
    whether somebody answers the agent. Those of MCP servers come when a run begins.

    Raises ToolsetError for the toolset `mcp` without servers."""
    named = {*(AgentTools(config, tools).toolsets or ())}
    if named - TOOLSETS.keys():
        from lachesis_tools.on_request import with_requested

        tools = with_requested(tools, named, user=user)
    if "mcp" in named and not config.mcp:
        raise ToolsetError(f"'mcp' has no tools here: {how_to_provide('mcp')}")
    if not config.terminal_carries_cd:
        tools = without_carried_folder(tools)
    if config.web is None and config.vision is None:
        return tools
    from lachesis_tools.provided import with_provided

    groups = Path(config.data_path_to_save_groups or f"data/{name}/groups.jsonl")
    record = Path(config.web_record or groups.with_suffix(".web.jsonl"))
    return with_provided(tools, config.web, record, vision=config.vision)
