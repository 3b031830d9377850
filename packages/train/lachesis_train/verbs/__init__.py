"""Verbs of the command `lachesis` that this package adds."""
