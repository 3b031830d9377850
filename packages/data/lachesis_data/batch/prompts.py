"""The environment of a batch run: one that only asks, or any other one with its reward, over the rows of a file."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from types import new_class
from typing import TYPE_CHECKING, Any, ClassVar, cast

from lachesis.base_env import HermesAgentBaseEnv
from lachesis_data.batch.rows import IMAGE_FIELDS

if TYPE_CHECKING:
    from backends import SandboxSpec
    from lachesis.loop.result import AgentResult

DIGITS = 16
"""Of the digest that a key begins with."""


class Prompts(HermesAgentBaseEnv):
    """Plays the prompts of the rows without scoring."""

    name = "batch"

    async def get_next_item(self) -> None:
        return None

    def format_prompt(self, item: Any) -> str | list[dict[str, Any]]:
        prompt: str | list[dict[str, Any]] = item[self.config.prompt_field]
        return prompt

    def initial_messages(self, item: Any) -> list[dict[str, Any]]:
        if (messages := item.get("messages")) is None:
            return super().initial_messages(item)
        system = self.config.system_prompt
        own = [] if not system or messages[0]["role"] == "system" else [{"role": "system", "content": system}]
        return [*own, *messages]

    async def compute_reward(self, item: Any, result: AgentResult, ctx: Any) -> None:
        return None


class _OverRows(HermesAgentBaseEnv):
    """Draws toolsets by seed and prompt, and gives each row the image and the folder that it names."""

    _batch_seed: ClassVar[int] = 0

    def group_tools(self, item_key: str) -> tuple[list[str] | None, list[dict[str, Any]]]:
        name = self.config.distribution
        if name is None:
            drawn, tools = super().group_tools(item_key)
            names = {tool["function"]["name"] for tool in tools}
            own = dict.fromkeys(toolset for name, toolset in self.tools.toolsets().items() if name in names)
            return drawn or self.config.enabled_toolsets or list(own), tools
        # The prompt's digest alone: other samples of it, and other settings, draw the same.
        chosen = self.agent_tools.draw(f"{self._batch_seed}:{item_key[:DIGITS]}")
        return chosen, self.agent_tools.definitions_of(chosen)

    def sandbox_for(self, item: Any, spec: SandboxSpec) -> SandboxSpec:
        own = super().sandbox_for(item, spec)
        if not isinstance(item, Mapping):
            return own
        image = next((item[field] for field in IMAGE_FIELDS if item.get(field)), None)
        changed = {"image": image, "workdir": item.get("cwd")}
        return replace(own, **{name: value for name, value in changed.items() if value})


def over_rows(base: type[HermesAgentBaseEnv] | None, *, seed: int) -> type[HermesAgentBaseEnv]:
    """The class of a run's environment: `base` over the rows, or one that only asks."""
    cls = base or Prompts
    attributes: dict[str, object] = {"_batch_seed": seed, "__module__": cls.__module__, "__doc__": cls.__doc__}
    made = new_class(cls.__name__, (_OverRows, cls), {}, lambda own: own.update(attributes))
    return cast("type[HermesAgentBaseEnv]", made)
