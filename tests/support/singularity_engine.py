"""Apptainer for tests: the installed one, or that of `scripts/install-apptainer.sh` in the project's cache."""

from __future__ import annotations

import contextlib
import os
import shutil
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tests.support.root_images import bare_root, full_root


@dataclass(frozen=True, slots=True)
class SingularityEngine:
    """`options` go to `create_backend("singularity", ...)`."""

    binary: str
    full: Path
    """A root folder with bash, coreutils and Python."""
    bare: Path
    """A root folder with only busybox."""

    @property
    def options(self) -> dict[str, Any]:
        return {"binary": self.binary, "image": str(self.full)}


def find_binary() -> str:
    """The program: in the folder `LACHESIS_APPTAINER`, on PATH, or in the project's cache, in this order.

    Raises:
        RuntimeError: there is none.
    """
    chosen = os.environ.get("LACHESIS_APPTAINER")
    cache = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
    folders = [chosen] if chosen else [*os.environ.get("PATH", "").split(":"), str(cache / "lachesis/apptainer")]
    for folder in folders:
        for place in (folder, str(Path(folder, "usr/bin"))):
            found = shutil.which("apptainer", path=place)
            if found is not None:
                return found
    raise RuntimeError(
        f"there is no apptainer in {chosen or 'PATH, nor in the cache'}; get it with scripts/install-apptainer.sh"
    )


@contextlib.contextmanager
def singularity_engine(roots: Path) -> Iterator[SingularityEngine]:
    """Apptainer and two images. `roots` is the folder for their root file systems.

    Raises:
        RuntimeError: Apptainer is missing. The message says what to do.
    """
    yield SingularityEngine(find_binary(), full_root(roots / "full"), bare_root(roots / "bare"))
