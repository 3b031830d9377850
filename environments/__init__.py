"""Environments that run as scripts, and the Hermes stack under the names that its environments import."""
