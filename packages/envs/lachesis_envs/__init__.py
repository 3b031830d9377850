"""Environments that are run by name. The scripts in the top-level folder `environments/` start them."""
