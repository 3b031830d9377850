"""Environments that play what others bring: agent programs, environments of Atropos, recordings; and `check`."""
