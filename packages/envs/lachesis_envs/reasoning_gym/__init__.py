"""The generators of the package reasoning-gym."""

from lachesis_envs.reasoning_gym.environment import ReasoningGymEnv, ReasoningGymEnvConfig

__all__ = ["ReasoningGymEnv", "ReasoningGymEnvConfig"]
