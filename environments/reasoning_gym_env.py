"""Puzzles: `python environments/reasoning_gym_env.py process --env.dataset_name reasoning_gym:maze`."""

from lachesis_envs.reasoning_gym import ReasoningGymEnv, ReasoningGymEnvConfig

__all__ = ["ReasoningGymEnv", "ReasoningGymEnvConfig"]

if __name__ == "__main__":
    ReasoningGymEnv.cli()
