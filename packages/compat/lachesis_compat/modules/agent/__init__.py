"""Modules of the old package `agent`."""
