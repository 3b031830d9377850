"""Samples for a trainer, and the checks that they hold exactly what was sampled."""
