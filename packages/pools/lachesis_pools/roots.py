"""Brings the root folder of an image from the machine of a run to that of a worker, once for each content."""

from __future__ import annotations

import asyncio
import contextlib
import re
from collections import defaultdict
from collections.abc import Awaitable, Callable
from pathlib import Path

from backends import BackendError, BackendUnavailable
from backends.images.store import layer, root_of

PART = 1 << 22
"""Bytes of a message."""
NextPart = Callable[[], Awaitable[tuple[bytes, bool]]]
_KEY = re.compile(r"[0-9a-f]{16,64}")


class RootSender:
    """The files of a root folder as a tar archive, in parts. Only the next part is ever asked for."""

    def __init__(self, root: str) -> None:
        self._root = root
        self._tar: asyncio.subprocess.Process | None = None
        self._turn, self._closed = asyncio.Lock(), False

    async def part(self) -> tuple[bytes, bool]:
        """The next bytes, and whether they are the last ones. Raises `BackendError`."""
        async with self._turn:
            if self._tar is None and not self._closed:
                self._tar = await asyncio.create_subprocess_exec(
                    "tar", "-C", self._root, "-cf", "-", ".", stdout=asyncio.subprocess.PIPE, limit=2 * PART
                )
            if self._tar is None or self._closed:
                self.close()
                raise BackendError("its lease is over")
            assert self._tar.stdout is not None
            try:
                return await self._tar.stdout.readexactly(PART), False
            except asyncio.IncompleteReadError as end:
                if await self._tar.wait():
                    raise BackendError(f"tar could not read all files of {self._root}") from None
                return end.partial, True

    def close(self) -> None:
        self._closed = True
        if self._tar is not None:
            with contextlib.suppress(ProcessLookupError):
                self._tar.kill()


class RootFolders:
    """The root folders that runs have brought to this machine: layers in the cache of images."""

    def __init__(self) -> None:
        self._turns: defaultdict[str, asyncio.Lock] = defaultdict(asyncio.Lock)

    async def have(self, image: str, next_part: NextPart) -> str:
        """`image`, or the folder here with the same content.

        Raises:
            BackendError: it could not be brought.
        """
        place = Path(image)
        if not place.is_absolute() or place.name != "root" or await asyncio.to_thread(place.is_dir):
            return image  # a name, or a folder that is here
        key = place.parent.name

        async def make(building: Path) -> None:
            await _unpack(building / "root", next_part)

        if not _KEY.fullmatch(key):
            raise BackendUnavailable(f"the worker has no folder {image}. Next step: put it where all nodes see it")
        async with self._turns[key]:  # of this worker; `layer` knows those of others
            await layer(key, {"parent": "", "instruction": "brought from the machine of a run"}, make)
        return str(await asyncio.to_thread(root_of, key))


async def _unpack(root: Path, next_part: NextPart) -> None:
    await asyncio.to_thread(root.mkdir, 0o700)
    tar = await asyncio.create_subprocess_exec(
        "tar", "-x", "-p", "--no-same-owner", "-C", str(root), "-f", "-", stdin=asyncio.subprocess.PIPE
    )
    assert tar.stdin is not None
    try:
        last = False
        while not last:
            data, last = await next_part()
            with contextlib.suppress(ConnectionError):  # its exit code says that it could not
                tar.stdin.write(data)
                await tar.stdin.drain()
        tar.stdin.close()
        if await tar.wait():
            raise BackendError(f"tar could not write all files to {root}")
    finally:
        if tar.returncode is None:
            tar.kill()
            await tar.wait()
