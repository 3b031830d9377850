"""From finished rollouts to a trainer: groups as it takes them, and the client of the rollout API."""
