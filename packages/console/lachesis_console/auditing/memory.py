"""The memory of a process and of all that it started."""

from __future__ import annotations

import os
import re
import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

_PAUSE = 0.3
"""Seconds between two looks."""


class Memory:
    """Of this process and its descendants, looked at several times a second while it is watched."""

    def __init__(self) -> None:
        self._peak = 0.0
        self._ended = threading.Event()

    @contextmanager
    def watched(self) -> Iterator[None]:
        threading.Thread(target=self._follow, daemon=True, name="memory of the audit").start()
        try:
            yield
        finally:
            self._ended.set()

    def peak(self) -> float:
        """MiB, the most since the last call."""
        found, self._peak = max(self._peak, resident()), 0.0
        return found

    def _follow(self) -> None:
        while not self._ended.wait(_PAUSE):
            self._peak = max(self._peak, resident())


def resident() -> float:
    """MiB of this process and its descendants; 0 where there is no /proc."""
    children: dict[int, list[int]] = {}
    sizes: dict[int, float] = {}
    for folder in Path("/proc").glob("[0-9]*"):
        with suppress(OSError):
            text = (folder / "status").read_text()
            parent, size = (re.search(rf"^{name}:\s+(\d+)", text, re.MULTILINE) for name in ("PPid", "VmRSS"))
            if parent is not None:
                children.setdefault(int(parent[1]), []).append(int(folder.name))
                sizes[int(folder.name)] = int(size[1]) / 1024 if size is not None else 0.0
    todo, total = [os.getpid()], 0.0
    while todo:
        process = todo.pop()
        total += sizes.get(process, 0.0)
        todo += children.get(process, [])
    return total
