"""The command line of the project."""
