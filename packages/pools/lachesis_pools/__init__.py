"""Sandboxes of many machines: workers that engines place, and a pool that gives their slots to rollouts."""
