"""Finds the import paths of the removed Hermes stack: `tools.terminal_tool`, `model_tools`, `environments.patches`.

The files are in `lachesis/compat/modules/`. The finder is the last of `sys.meta_path`, so modules of a user's own
project with these names win, and nothing is loaded before it is imported. `import lachesis` registers it; of an
installed wheel, `lachesis_old_paths.pth` does so in every process, without importing anything.
"""

from __future__ import annotations

import sys
from importlib.machinery import ModuleSpec, PathFinder
from typing import Any

_ROOT = __file__.rpartition("/")[0]
_MODULES = f"{_ROOT}/compat/modules"
_ENVIRONMENTS = f"{_ROOT.rpartition('/')[0]}/environments"
_TOP = frozenset(
    {"agent", "atropos", "batch_runner", "environments", "model_tools", "tools", "toolset_distributions", "toolsets"}
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
            folders.append(f"{_ENVIRONMENTS}{below.removeprefix('/environments')}")
        spec = PathFinder.find_spec(name, folders)
        return spec if spec is not None and spec.loader is not None else None


def register_old_paths() -> None:
    """Let the old paths be found. Calling it again changes nothing."""
    if OldPaths not in sys.meta_path:
        sys.meta_path.append(OldPaths)
