"""Concrete environments, and the modules of the Hermes stack under the names that its environments import."""
