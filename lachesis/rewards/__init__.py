"""Rewards: how they are called and watched, and whose fault an exception is."""

from lachesis.rewards.agent_fault import AgentFault

__all__ = ["AgentFault"]
