"""Modules of the old package `tools`."""
