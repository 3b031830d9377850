"""A temporary folder of this process, which is removed however the process ends.

A child waits for that, and removes the folder. Where both were killed, the next process that makes one removes it.
"""

from __future__ import annotations

import atexit
import os
import subprocess
import tempfile
import threading
from pathlib import Path

from backends.executor.trees import remove_tree
from backends.owner import is_gone, this_owner

_PREFIX = "lachesis-files-"
_REMOVAL = 60.0
"""Seconds for the folder of a killed process."""
# The end of this process closes the child's stdin. What an agent left may forbid that its folders are read.
_REMOVE = 'read -r _; chmod -R u+rwX -- "$0" 2>/dev/null; rm -rf -- "$0"'

_made: dict[tuple[int, str], Path] = {}
_lock = threading.Lock()


def own_folder() -> Path:
    """The folder, created at the first call. May block while folders of killed processes are removed."""
    place = tempfile.gettempdir()
    with _lock:
        found = _made.get((os.getpid(), place))
        if found is None or not found.is_dir():
            found = Path(tempfile.mkdtemp(prefix=f"{_PREFIX}{this_owner()}-", dir=place))
            _remove_at_the_end(found)
            _made[os.getpid(), place] = found
            _remove_those_of_the_dead(Path(place))
    return found


def _remove_at_the_end(folder: Path) -> None:
    child = subprocess.Popen(
        ["/bin/sh", "-c", _REMOVE, str(folder)],
        stdin=subprocess.PIPE,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
        cwd="/",
        start_new_session=True,  # Ctrl-C is not for it
    )
    owner = os.getpid()

    def end() -> None:
        if os.getpid() == owner and child.stdin is not None:
            child.stdin.close()
            child.wait()

    atexit.register(end)


def _remove_those_of_the_dead(place: Path) -> None:
    for folder in place.glob(f"{_PREFIX}*"):
        owner = folder.name.removeprefix(_PREFIX).rpartition("-")[0]
        if is_gone(owner) and not folder.is_symlink() and folder.lstat().st_uid == os.geteuid():
            remove_tree(str(folder), _REMOVAL)
