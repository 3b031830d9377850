"""A training run in virtual time: the real pipeline and pacing rules, with simulated model servers and trainer."""
