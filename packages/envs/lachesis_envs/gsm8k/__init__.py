"""GSM8K with tools."""

from lachesis_envs.gsm8k.environment import GSM8kAgentEnv, GSM8kEnvConfig

__all__ = ["GSM8kAgentEnv", "GSM8kEnvConfig"]
