"""Environments that are played by name. The scripts in the top-level folder `environments/` start them."""
