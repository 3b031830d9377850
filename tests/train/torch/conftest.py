"""What the tests of training leave is ended before the interpreter is."""

from __future__ import annotations

import asyncio
import gc
import sys
from collections.abc import Iterator

import pytest


@pytest.fixture(scope="session", autouse=True)
def the_thread_of_the_sdk_ends() -> Iterator[None]:
    """Stop Tinker's event loop, which runs in a daemon thread and goes on with a heartbeat for each client that was not
    closed: one that runs while the interpreter ends can abort the process, after all tests have passed."""
    yield
    holders = sys.modules.get("tinker.lib.internal_client_holder")
    if holders is None:
        return
    gc.collect()
    sdk = holders._internal_client_holder_thread_singleton
    loop, thread = sdk.loop_if_started(), sdk._thread
    if loop is not None and thread is not None:
        asyncio.run_coroutine_threadsafe(_cancel_the_others(), loop).result(timeout=60)
        loop.call_soon_threadsafe(loop.stop)
        thread.join(timeout=60)
        assert not thread.is_alive()


async def _cancel_the_others() -> None:
    others = asyncio.all_tasks() - {asyncio.current_task()}
    for task in others:
        task.cancel()
    if others:
        await asyncio.wait(others, timeout=30)
