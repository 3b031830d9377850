"""Finding bash and Python inside."""

from __future__ import annotations

import contextlib
import errno
import os
import re


def find_bash(fallback: str | None) -> str:
    for folder in [*os.environ.get("PATH", os.defpath).split(":"), "/bin", "/usr/bin", "/usr/local/bin"]:
        path = os.path.join(folder, "bash")
        if os.access(path, os.X_OK):
            return path
    if fallback is None:
        raise FileNotFoundError(errno.ENOENT, "bash is needed inside the sandbox", "bash")
    return fallback


def find_python(search_path: str) -> str | None:
    """The path of a Python >= 3.8 inside. Only names are read: running one takes longer than starting a sandbox."""
    for folder in search_path.split(":"):
        for name in ("python3", "python"):
            path = os.path.join(folder, name)
            if folder.startswith("/") and os.access(path, os.X_OK):
                real = os.path.realpath(path)
                library = os.path.join(os.path.dirname(os.path.dirname(real)), "lib")
                names = [os.path.basename(real)]
                if names[0] in ("python", "python3"):
                    with contextlib.suppress(OSError):
                        names = sorted(os.listdir(library))
                if any(int(minor) >= 8 for minor in re.findall(r"\bpython3\.(\d+)\b", " ".join(names))):
                    return path
    return None
