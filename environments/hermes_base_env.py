"""The base environment under the name that Hermes environments import it by."""

from lachesis.base_env import HermesAgentBaseEnv
from lachesis.runs.settings import HermesAgentEnvConfig

__all__ = ["HermesAgentBaseEnv", "HermesAgentEnvConfig"]
