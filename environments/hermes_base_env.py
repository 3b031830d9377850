"""The base environment under the name that Hermes environments import it by."""

from lachesis import HermesAgentBaseEnv, HermesAgentEnvConfig

__all__ = ["HermesAgentBaseEnv", "HermesAgentEnvConfig"]
