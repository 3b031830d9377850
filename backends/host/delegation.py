"""Control groups for ordinary users: systemd gives them a part of the tree of version 2, to processes that ask for it.

A session of ssh is not in that part, and its processes cannot move there. So the user's systemd starts the helper that
makes sandboxes (`spawner.py`) in a scope, and what the helper starts can be moved to groups next to that scope.
"""

from __future__ import annotations

import os
import shutil
import subprocess
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from .cgroups import Cgroups

_PATIENCE = 10.0
_BUS = ("DBUS_SESSION_BUS_ADDRESS", "XDG_RUNTIME_DIR")
"""Variables by which systemd-run finds the user's systemd."""


def bus() -> dict[str, str]:
    """The variables that `in_scope` needs."""
    runtime = f"/run/user/{os.geteuid()}"
    found = {name: os.environ[name] for name in _BUS if name in os.environ}
    return {**({"XDG_RUNTIME_DIR": runtime} if os.path.isdir(runtime) else {}), **found}


def in_scope(found: Cgroups) -> list[str]:
    """The prefix of a command line that runs it in a scope of the user's systemd. Blocks.

    Empty where that is of no use, as for root and where groups can be made anyway, or does not work.
    """
    program = shutil.which("systemd-run")
    if os.geteuid() == 0 or found.version != 2 or found.parents or program is None or not bus():
        return []
    command = [program, "--user", "--scope", "--quiet", "--collect", "-p", "Delegate=yes", "--"]
    null = subprocess.DEVNULL
    try:
        tried = subprocess.run(
            [*command, "/bin/true"], env=bus(), stdin=null, stdout=null, stderr=null, timeout=_PATIENCE, check=False
        )
    except (OSError, subprocess.TimeoutExpired):
        return []
    return command if tried.returncode == 0 else []
