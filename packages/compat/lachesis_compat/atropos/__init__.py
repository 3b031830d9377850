"""Environments on Atropos' own base class."""
