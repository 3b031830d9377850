"""One rollout: the agent loop, checks of a turn, outcomes and results."""
