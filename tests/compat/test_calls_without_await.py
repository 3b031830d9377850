"""Calls without `await` in coroutines, their tasks and threads: the mechanism, without sandboxes."""

from __future__ import annotations

import asyncio
import contextlib
import contextvars
import functools
import gc
import time
import traceback
from collections.abc import Callable
from typing import Any

import pytest
from greenlet import greenlet
from hypothesis import given, settings
from hypothesis import strategies as st

from lachesis.rewards.reward import RewardError
from lachesis_compat.synchronous import blocking, with_blocking_calls
from lachesis_compat.synchronous.driven import Driven
from tests.support import calls
from tests.support.calls import plainly


class Device(calls.Device):
    """Is called without `await`."""

    def _given(self, what: str, value: Any, seconds: float) -> Any:
        return blocking(super()._given(what, value, seconds))


def driven(function: Callable[[Device], Any]) -> Callable[[], Any]:
    """The test as a coroutine of an environment, with a device."""

    @functools.wraps(function)
    async def test() -> None:
        await with_blocking_calls(function(Device()), name="test")

    del test.__wrapped__  # type: ignore[attr-defined]  # pytest would look for its arguments
    return test


@driven
async def test_a_call_works_with_and_without_await(device: Device) -> None:
    assert device.get(1)["value"] == 1
    assert (await device.get(2))["value"] == 2
    assert plainly(device, 3) == 3
    assert [device.get(each)["value"] for each in (4, 5)] == [4, 5]
    assert sorted((7, 6), key=lambda each: device.get(each)["value"]) == [6, 7], "from C code"
    reply = device.get(8)
    assert (await reply) is reply, "what ran at once can be awaited"
    assert (await asyncio.create_task(reply))["value"] == 8
    assert device.most == 1


@driven
async def test_everything_else_goes_on_during_a_call_without_await(device: Device) -> None:
    ticks = 0

    async def tick() -> None:
        nonlocal ticks
        while True:
            ticks += 1
            await asyncio.sleep(0.001)

    ticking = asyncio.ensure_future(tick())
    device.get(1, 0.1)
    assert ticks > 1
    ticking.cancel()


@driven
async def test_calls_that_are_gathered_run_one_by_one(device: Device) -> None:
    calls = [device.get(each) for each in range(3)]
    assert calls[0]["value"] == 0
    assert [each["value"] for each in await asyncio.gather(*calls)] == [0, 1, 2]
    assert device.most == 1


@driven
async def test_a_time_limit_ends_a_call_without_await(device: Device) -> None:
    begin = time.monotonic()
    with pytest.raises(TimeoutError):
        async with asyncio.timeout(0.05):  # noqa: ASYNC100
            device.get("inside", 30)
    assert device.cancelled == ["inside"] and time.monotonic() - begin < 10
    assert device.get("after")["value"] == "after"


@driven
async def test_tasks_that_a_reward_starts_may_call_without_await_too(device: Device) -> None:
    async def check(value: Any) -> Any:
        await asyncio.sleep(0)
        return device.get(value)["value"]

    assert await asyncio.gather(check(1), check(2), asyncio.create_task(check(3))) == [1, 2, 3]
    async with asyncio.TaskGroup() as group:
        task = group.create_task(check(4))
    assert task.result() == 4 and device.most == 3
    with pytest.raises(TimeoutError):
        await asyncio.wait_for(asyncio.create_task(with_blocking_calls(late(device))), 0.05)


async def late(device: Device) -> None:
    device.get("late", 30)


@driven
async def test_a_group_of_tasks_ends_with_its_first_error(device: Device) -> None:
    async def fails() -> None:
        device.get(ValueError("one of them"))

    with pytest.raises(ExceptionGroup):
        async with asyncio.TaskGroup() as group:
            group.create_task(late(device))
            group.create_task(fails())
    assert device.cancelled == ["late"]


@driven
async def test_the_task_and_its_context_variables_are_the_same_on_both_sides_of_a_call(device: Device) -> None:
    variable: contextvars.ContextVar[int] = contextvars.ContextVar("variable", default=0)
    task = asyncio.current_task()
    variable.set(1)
    device.get(1)
    assert variable.get() == 1 and asyncio.current_task() is task
    contextvars.copy_context().run(lambda: (variable.set(2), device.get(1)))
    assert variable.get() == 1
    await asyncio.sleep(0)
    assert variable.get() == 1
    token = variable.set(3)
    await device.get(1)
    variable.reset(token)


@driven
async def test_another_greenlet_between_the_coroutine_and_the_call_is_no_obstacle(device: Device) -> None:
    assert greenlet(lambda: device.get(1)["value"]).switch() == 1


@driven
async def test_an_error_has_the_lines_of_the_caller_and_of_the_call(device: Device) -> None:
    try:
        plainly(device, KeyError("broken"))
    except KeyError as error:
        lines = "".join(traceback.format_exception(error))
        assert lines.index("in plainly") < lines.index("in _get"), lines
        assert "in _go_on" not in lines and "During handling" not in lines
    else:
        raise AssertionError("nothing was raised")


async def test_cancelling_the_task_ends_the_call_and_reaches_the_caller() -> None:
    device, seen = Device(), []

    async def reward() -> None:
        try:
            device.get("slow", 30)
        except BaseException as error:
            seen.append(type(error))
            raise
        finally:
            device.get("cleanup")

    task = asyncio.create_task(with_blocking_calls(reward()))
    await asyncio.sleep(0.05)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    assert seen == [asyncio.CancelledError] and device.cancelled == ["slow"] and device.done == ["cleanup"]


@pytest.mark.slow
async def test_a_coroutine_that_is_dropped_during_a_call_is_closed() -> None:
    device, closed = Device(), []

    async def reward() -> None:
        try:
            device.get(1)
        finally:
            closed.append(True)

    dropped: Any = Driven(reward())
    dropped.send(None)
    del dropped
    gc.collect()
    assert closed == [True]
    assert not [each for each in gc.get_objects() if isinstance(each, greenlet) and each.dead is False and each.parent]


def plainer(device: Device, value: Any) -> Any:
    return device.get(value)


@driven
async def test_a_helper_that_looks_at_a_call_gets_its_result(device: Device) -> None:
    async def shown(*replies: Any) -> list[Any]:
        return [reply["value"] for reply in replies]

    assert plainer(device, 1)["value"] == 1 and (lambda: device.get(2))()["value"] == 2
    assert await shown(device.get(1), plainer(device, 2)) == [1, 2]
    assert await shown(*map(device.get, [1, 2])) == [1, 2]
    assert await shown(*(device.get(each) for each in [1, 2])) == [1, 2]
    assert device.most == 1


@driven
async def test_what_nobody_gathers_runs_in_its_order(device: Device) -> None:
    asyncio.gather(device.get("first", 0.1))
    asyncio.shield(device.get("second", 0.05))
    device.get("third")
    assert device.done == ["first", "second", "third"]


@pytest.mark.slow
@pytest.mark.parametrize("collected", [False, True])
async def test_a_call_that_is_never_awaited_is_an_error_with_its_line_whatever_the_caller_catches(
    collected: bool, recwarn: pytest.WarningsRecorder
) -> None:
    kept: list[Any] = []

    async def reward(device: Device) -> float:
        with contextlib.suppress(Exception):
            loop = asyncio.get_running_loop()
            loop.call_soon(lambda: kept.append(device.get(1)))  # nothing can stop there
            await asyncio.sleep(0.01)
            if collected:
                kept.clear()
                gc.collect()
            return float(kept[0]["value"])
        return 0.0

    with pytest.raises(
        RewardError, match=r"env: compute_reward: ctx\.get\(\) at .*test_calls_without_await\.py:\d+ was nev"
    ):
        await with_blocking_calls(reward(Device()), name="env: compute_reward")
    kept.clear()
    gc.collect()
    assert [str(warning.message) for warning in recwarn if "awaited" in str(warning.message)] == []


@pytest.mark.skipif(not hasattr(asyncio, "eager_task_factory"), reason="Python 3.12 and later")
async def test_a_task_factory_that_was_there_before_is_kept() -> None:
    asyncio.get_running_loop().set_task_factory(getattr(asyncio, "eager_task_factory", None))
    device, begun = Device(), []

    async def check(value: Any) -> Any:
        begun.append(value)
        return device.get(value)["value"]

    async def reward() -> Any:
        task = asyncio.create_task(check(1))
        assert begun == [1], "eager"
        return await task, await asyncio.gather(check(2), check(3))

    assert await with_blocking_calls(reward()) == (1, [2, 3])
    with pytest.raises(RewardError, match="was still running"):
        await with_blocking_calls(forgets(device))


async def forgets(device: Device) -> None:
    device.done.append(asyncio.create_task(late(device)))
    await asyncio.sleep(0.01)


NODES = st.recursive(
    st.tuples(st.sampled_from(["plain", "await", "task", "thread", "wait_for", "error"]), st.integers(0, 9)),
    lambda inner: st.tuples(st.sampled_from(["list", "gather", "helper", "group"]), st.lists(inner, max_size=4)),
    max_leaves=12,
)


async def evaluated(device: Device, node: Any) -> Any:
    """The value of a random program of calls."""
    kind, value = node
    if kind == "plain":
        return device.get(value, 0)["value"]
    if kind == "await":
        return (await device.get(value, 0.001))["value"]
    if kind == "task":
        return (await asyncio.create_task(device.get(value, 0)))["value"]
    if kind == "thread":
        return await asyncio.to_thread(plainly, device, value)
    if kind == "wait_for":
        return (await asyncio.wait_for(device.get(value, 0), 60))["value"]
    if kind == "error":
        try:
            device.get(ValueError(value), 0)
        except ValueError as error:
            return -error.args[0]
    if kind == "list":
        return [await evaluated(device, each) for each in value]
    if kind == "gather":
        return list(await asyncio.gather(*(evaluated(device, each) for each in value)))
    if kind == "group":
        async with asyncio.TaskGroup() as group:
            tasks = [group.create_task(evaluated(device, each)) for each in value]
        return [task.result() for task in tasks]
    return await with_blocking_calls(evaluated(device, ("list", value)))


def expected(node: Any) -> Any:
    kind, value = node
    if isinstance(value, list):
        return [expected(each) for each in value]
    return -value if kind == "error" else value


@settings(max_examples=60, deadline=None)
@given(NODES)
def test_any_mixture_of_calls_has_the_results_of_awaited_ones(node: Any) -> None:
    async def main() -> Any:
        return await with_blocking_calls(evaluated(Device(), node))

    assert asyncio.run(main()) == expected(node)
