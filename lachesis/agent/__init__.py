"""One rollout, from lease to score: agent loop, checks of a turn, outcomes, results, and rewards with their context."""

from lachesis.agent.agent_fault import AgentFault

__all__ = ["AgentFault"]
