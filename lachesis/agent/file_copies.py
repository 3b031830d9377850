"""Files between this machine and a sandbox."""

from __future__ import annotations

import threading
import time
from collections.abc import AsyncIterator
from pathlib import Path

from lachesis.agent.context_results import Replies, Reply
from lachesis.tasks import in_own_thread

_CHUNK = 1 << 20


def files_below(folder: Path) -> Replies:
    files = [path for path in sorted(folder.rglob("*")) if path.is_file()]
    return Replies(Reply.written(path.stat().st_size) for path in files)


async def chunks(path: Path) -> AsyncIterator[bytes]:
    file = await in_own_thread(lambda: path.open("rb"))
    try:
        while data := await in_own_thread(file.read, _CHUNK):
            yield data
    finally:
        file.close()


async def write_local(path: Path, chunks: AsyncIterator[bytes], room: int | None = None) -> int:
    """Write beside `path`, then move over it; the number of bytes. More than `room` bytes are an `OSError`."""
    await in_own_thread(path.parent.mkdir, parents=True, exist_ok=True)
    temporary = path.with_name(f".{path.name}.part-{threading.get_ident():x}-{time.monotonic_ns():x}")
    try:
        with temporary.open("wb") as file:  # in no thread: cancelled, it would make the file after it was removed
            written = 0
            async for chunk in chunks:
                written += len(chunk)
                if room is not None and written > room:
                    raise OSError(f"more than {room} bytes")
                await in_own_thread(file.write, chunk)
        await in_own_thread(temporary.replace, path)
    except BaseException:
        temporary.unlink(missing_ok=True)
        raise
    return written


def size(path: Path) -> int:
    if path.is_dir():
        return sum(member.lstat().st_size for member in path.rglob("*"))
    return path.stat().st_size
