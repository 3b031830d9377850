"""One rollout, from lease to score: the agent loop, checks of a turn, outcomes, results, and what a reward may do."""

from lachesis.agent.agent_fault import AgentFault

__all__ = ["AgentFault"]
