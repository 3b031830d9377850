"""Concurrent calls, and who was cancelled."""

from __future__ import annotations

import asyncio

import pytest

from backends.tasks import cancel_requests, run_all


async def value(given: int, seconds: float = 0) -> int:
    await asyncio.sleep(seconds)
    return given


async def failure(seconds: float = 0) -> int:
    await asyncio.sleep(seconds)
    raise ValueError("it failed")


async def slow(ended: list[str]) -> int:
    try:
        return await value(1, 100)
    finally:
        await asyncio.sleep(0.05)
        ended.append("slow")


async def test_results_are_in_the_order_of_the_calls() -> None:
    assert await run_all([value(1, 0.02), value(2), value(3, 0.01)]) == [1, 2, 3]
    assert await run_all([]) == []


async def test_the_calls_beside_a_failed_one_have_ended_when_its_error_is_raised() -> None:
    ended: list[str] = []
    with pytest.raises(ValueError, match="it failed"):
        await run_all([slow(ended), failure(0.01)])
    assert ended == ["slow"]


async def test_after_a_failed_call_a_time_limit_is_still_a_time_limit() -> None:
    with pytest.raises(TimeoutError):
        async with asyncio.timeout(0.05):
            with pytest.raises(ValueError, match="it failed"):
                await run_all([value(1), failure(0.01)])
            assert cancel_requests() == 0
            await asyncio.sleep(100)


@pytest.mark.parametrize("failing", [False, True])
async def test_cancelling_the_caller_cancels_every_call(failing: bool) -> None:
    ended: list[str] = []

    async def caller() -> None:
        await run_all([slow(ended), slow(ended), failure(0 if failing else 100)])

    task = asyncio.create_task(caller())
    await asyncio.sleep(0.03)  # with `failing`, it waits for the other two
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    assert ended == ["slow", "slow"]
