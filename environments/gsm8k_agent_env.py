"""GSM8K with tools: `python environments/gsm8k_agent_env.py process --env.total_steps 8`."""

from lachesis_envs.gsm8k import GSM8kAgentEnv, GSM8kEnvConfig

__all__ = ["GSM8kAgentEnv", "GSM8kEnvConfig"]

if __name__ == "__main__":
    GSM8kAgentEnv.cli()
