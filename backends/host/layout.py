"""Where the things of the portable runtime are."""

from __future__ import annotations

RUNTIME = "/run/lachesis"
"""The folder's place inside. Its programs work nowhere else."""
PYTHON, BASH, EXECUTOR = "bin/python3", "bin/bash", "executor.pyc"
SHELL = "shell/bash"
"""A link to bash, alone in its folder: that may be in PATH, where the Python must not be found."""
