"""Files that are on the disk whole, or not at all."""

from __future__ import annotations

import os
from pathlib import Path


def write_atomically(path: Path, content: bytes) -> None:
    """Replace a file by another, which is on the disk before the old one is gone, also if the machine loses power.

    A process that is killed leaves `.NAME.part` beside it.
    """
    part = path.with_name(f".{path.name}.part")
    try:
        part.write_bytes(content)
        move_atomically(part, path)
    finally:
        part.unlink(missing_ok=True)


def move_atomically(part: Path, path: Path) -> None:
    """Replace a file by another of the same folder, which is on the disk before the old one is gone."""
    with part.open("rb") as file:
        os.fsync(file.fileno())
    part.replace(path)
    folder = os.open(path.parent, os.O_RDONLY)
    try:
        os.fsync(folder)
    finally:
        os.close(folder)
