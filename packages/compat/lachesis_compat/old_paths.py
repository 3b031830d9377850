"""Finds the import paths of the removed Hermes stack: `tools.terminal_tool`, `model_tools`, `environments.patches`.

The files are in `lachesis_compat/modules/`. The finder is the last of `sys.meta_path`, so modules of a user's own
project with these names take precedence, and nothing is loaded before it is imported. `lachesis_old_paths.pth`, which
the wheel installs next to the package, registers it in every process without importing anything.
"""

from __future__ import annotations

import sys
from importlib.machinery import ModuleSpec, PathFinder
from pathlib import Path
from typing import Any

_MODULES = f"{__file__.rpartition('/')[0]}/modules"
_TOP = frozenset(
    {
        "agent",
        "atropos",
        "batch_runner",
        "environments",
        "model_tools",
        "run_agent",
        "tools",
        "toolset_distributions",
        "toolsets",
    }
    | {"trajectory_compressor"}
)


class OldPaths:
    """Finds the modules of the removed stack, where nobody else does."""

    @staticmethod
    def find_spec(name: str, path: Any = None, target: Any = None) -> ModuleSpec | None:
        """See `importlib.abc.MetaPathFinder`. The package `environments` itself is a real one."""
        top, *parents = name.split(".")
        if top not in _TOP or name == "environments":
            return None
        below = "/".join(["", top, *parents][:-1])
        folders = [f"{_MODULES}{below}"]
        if top == "environments":  # a user's own package of this name hides ours
            folders += [
                f"{entry}{below}" for entry in sys.path if Path(entry, "environments/hermes_base_env.py").is_file()
            ]
        spec = PathFinder.find_spec(name, folders)
        return spec if spec is not None and spec.loader is not None else None
