"""Where the things of the portable runtime are."""

from __future__ import annotations

RUNTIME = "/.lachesis"
"""The folder's place inside. Its programs work nowhere else. It is mounted in the root: commands cannot rename a mount
point, but any folder above one that is not itself one."""
PYTHON, BASH, EXECUTOR = "bin/python3", "bin/bash", "executor.pyc"
SHELL = "shell/bash"
"""A link to bash, alone in its folder: that may be in PATH, where the Python must not be found."""
MISPLACED = 3
"""Exit code of a new root that cannot be used because commands have moved a folder in which the sandbox has a mount."""
