"""Streams over a far API, and folders that are packed in a thread, when something else fails at the same time."""

from __future__ import annotations

import asyncio
import os
import signal
import time
from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from backends.byte_stream import PumpedStream
from backends.docker.container import labels, listed
from backends.owner import new_id, this_owner
from backends.spec import SandboxSpec
from backends.transfer import upload


async def test_what_arrived_is_read_before_the_failure_of_a_send() -> None:
    async def arriving() -> AsyncIterator[bytes]:
        yield b"the last words"
        await asyncio.sleep(100)

    async def send(data: bytes) -> None:
        raise ConnectionError("the exec has ended")

    stream = PumpedStream(arriving(), send)
    await asyncio.sleep(0.01)
    stream.write(b"ping")
    await asyncio.sleep(0.01)
    assert await stream.read(100) == b"the last words"
    with pytest.raises(ConnectionError, match="the exec has ended"):
        await stream.read(100)


class Parts:
    """The far side of an upload: slow, and otherwise willing."""

    committed = False

    async def push(self, data: bytes) -> None:
        await asyncio.sleep(0.005)

    async def commit(self) -> None:
        self.committed = True


def forked() -> int:
    if (child := os.fork()) == 0:
        time.sleep(60)
        os._exit(0)
    return child


def end(child: int) -> None:
    os.kill(child, signal.SIGKILL)
    os.waitpid(child, 0)


@pytest.mark.parametrize("cancelled", [False, True])
async def test_a_forked_copy_of_this_process_holds_up_no_transfer(tmp_path: Path, cancelled: bool) -> None:
    (tmp_path / "file").write_bytes(b"x" * 20_000_000)
    parts = Parts()
    task = asyncio.create_task(upload(parts, str(tmp_path)))  # type: ignore[arg-type]
    await asyncio.sleep(0.05)
    assert not task.done()
    child = forked()  # it holds copies of all descriptors, like the workers of a data loader
    try:
        if cancelled:
            task.cancel()
        await asyncio.wait([task], timeout=30)
        assert task.done() and task.cancelled() == cancelled and parts.committed != cancelled
    finally:
        end(child)


def test_labels_of_an_image_are_not_those_of_its_sandbox() -> None:
    spec = SandboxSpec(labels={"run_id": "r1"})
    own = labels(new_id(), spec, this_owner(), 0.0)
    info = listed({"Labels": {**own, "owner": "platform-team", "run_id": "base", "id": "i"}, "State": "running"})
    assert (info.run_id, info.orphan) == ("r1", False)
