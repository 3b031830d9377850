"""The base environment under the name that Hermes environments import it by."""

from __future__ import annotations

from typing import TYPE_CHECKING

from pydantic import Field

import lachesis

if TYPE_CHECKING:
    from lachesis_compat.synchronous import SynchronousToolContext


class HermesAgentEnvConfig(lachesis.HermesAgentEnvConfig):
    """The settings, with the defaults of the removed stack where prompts rely on them."""

    terminal_carries_cd: bool = Field(
        default=False, description=lachesis.HermesAgentEnvConfig.model_fields["terminal_carries_cd"].description
    )


class HermesAgentBaseEnv(lachesis.HermesAgentBaseEnv):
    """The base class, with these settings and synchronous contexts."""

    env_config_cls = HermesAgentEnvConfig

    @classmethod
    def tool_context_class(cls) -> type[SynchronousToolContext]:
        from lachesis_compat.synchronous import SynchronousToolContext

        return SynchronousToolContext


__all__ = ["HermesAgentBaseEnv", "HermesAgentEnvConfig"]
