"""Rollouts of an environment for trainers that call us, sampled by their own inference engines."""
