"""A pool for one run: `lachesis pool up` as a process that ends with it."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import shlex
import subprocess
import sys
import threading
import weakref
from pathlib import Path

from backends import BackendUnavailable
from backends.owner import new_id

from .places import OF_RUN, folder, published

_LOG = logging.getLogger(__name__)
_DOWN = 120.0
"""Seconds that it has to end."""


class PoolEnded(BackendUnavailable):
    """A pool that does not come back."""


class OwnPool:
    """Started when it is first asked for, and ended with this object or this process, also if that is killed.

    Args:
        arguments: of `lachesis pool up`.
    """

    def __init__(self, arguments: str) -> None:
        self._arguments = shlex.split(arguments)
        self._name = f"{OF_RUN}{new_id()[-8:]}"
        self._process: subprocess.Popen[str] | None = None
        self._starting = threading.Lock()
        self._finalizer: weakref.finalize[..., OwnPool] | None = None

    async def find(self) -> tuple[str, str]:
        """Its address and its key.

        Raises:
            BackendUnavailable: it does not start, or has ended.
        """
        return await asyncio.to_thread(self._find)

    async def close(self) -> None:
        """End it and its workers."""
        if self._finalizer is not None:
            await asyncio.to_thread(self._finalizer)

    def _find(self) -> tuple[str, str]:
        with self._starting:
            if self._process is None:
                self._process = self._started()
        place = published().get(self._name)
        if place is None or self._process.poll() is not None:
            raise PoolEnded(f"the pool of this run has ended: {self._last_words()}")
        return place["url"], place["token"]

    def _started(self) -> subprocess.Popen[str]:
        command = [sys.executable, "-m", "lachesis_pools", "up", "--name", self._name, "--end-with-input"]
        self._log.parent.mkdir(parents=True, exist_ok=True)
        with self._log.open("wb") as log:
            process = subprocess.Popen(
                [*command, *self._arguments],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=log,
                text=True,
                start_new_session=True,
            )
        self._finalizer = weakref.finalize(self, _end, process, self._name)
        assert process.stdout is not None
        process.stdout.readline()  # it says where it is, or ends
        return process

    @property
    def _log(self) -> Path:
        return folder() / "logs" / self._name

    def _last_words(self) -> str:
        with contextlib.suppress(OSError, IndexError):
            return self._log.read_text(errors="replace").strip().splitlines()[-1][:500]
        return f"see {self._log}"


def _end(process: subprocess.Popen[str], name: str) -> None:
    """End it, and wait until its workers have ended."""
    try:
        said, _ = process.communicate("", timeout=_DOWN)
    except subprocess.TimeoutExpired:
        _LOG.warning("the pool of this run does not end; its process is %d", process.pid)
        return
    _LOG.info("%s", said.strip().rpartition("\n")[2])
    if process.returncode == 0:
        (folder() / "logs" / name).unlink(missing_ok=True)
    (folder() / f"{name}.json").unlink(missing_ok=True)  # it was killed
