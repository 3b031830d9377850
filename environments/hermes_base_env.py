"""The base environment under the name that Hermes environments import it by."""

from pydantic import Field

import lachesis


class HermesAgentEnvConfig(lachesis.HermesAgentEnvConfig):
    """The settings, with the defaults of the removed stack where prompts rely on them."""

    terminal_carries_cd: bool = Field(
        default=False, description=lachesis.HermesAgentEnvConfig.model_fields["terminal_carries_cd"].description
    )


class HermesAgentBaseEnv(lachesis.HermesAgentBaseEnv):
    """The base class, with these settings."""

    env_config_cls = HermesAgentEnvConfig


__all__ = ["HermesAgentBaseEnv", "HermesAgentEnvConfig"]
