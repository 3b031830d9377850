"""Samples for a trainer, and the checks that they contain exactly what was sampled."""
