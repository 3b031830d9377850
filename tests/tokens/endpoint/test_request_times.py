"""How long a program waited for the model server, whatever it asked at once and gave up."""

from __future__ import annotations

import asyncio
import contextlib

import pytest

from lachesis_tokens.endpoint.request_times import RequestTimes


async def ask(times: RequestTimes, seconds: float, *, latency: float | None = None) -> None:
    with times.asked() as latencies:
        await asyncio.sleep(seconds)
        if latency is None:
            raise ConnectionError
        latencies.append(latency)


async def give_up(times: RequestTimes, seconds: float) -> None:
    with contextlib.suppress(TimeoutError):
        await asyncio.wait_for(ask(times, 60, latency=1.0), seconds)


async def test_an_answer_is_no_waiting_but_its_queue_and_a_failure_are() -> None:
    times = RequestTimes()
    await ask(times, 0.2, latency=0.2)
    assert times.waited() == pytest.approx(0.0, abs=0.05)
    await ask(times, 0.3, latency=0.1)
    assert times.waited() == pytest.approx(0.2, abs=0.08)
    with contextlib.suppress(ConnectionError):
        await ask(times, 0.2)
    assert times.waited() == pytest.approx(0.4, abs=0.1)


async def test_a_program_that_fills_the_queue_by_itself_waits_for_nobody() -> None:
    times = RequestTimes()
    await asyncio.gather(ask(times, 0.4, latency=0.4), *(ask(times, 0.4, latency=0.01) for _ in range(50)))
    assert times.waited() == pytest.approx(0.0, abs=0.05)


async def test_requests_that_a_program_gives_up_are_its_own_time_but_the_last() -> None:
    times = RequestTimes()
    for _ in range(4):
        await give_up(times, 0.1)
    assert times.waited() == pytest.approx(0.1, abs=0.05)
    await ask(times, 0.1, latency=0.1)
    assert times.waited() == pytest.approx(0.0, abs=0.05)
