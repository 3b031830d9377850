"""Verbs of the command `lachesis`, one module each."""
