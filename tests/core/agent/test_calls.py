"""Calls that are awaited, in coroutines, their tasks and threads: the mechanism, without sandboxes."""

from __future__ import annotations

import asyncio
import contextlib
import functools
import gc
import logging
import threading
import time
from asyncio import gather as together
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from lachesis.rewards.blocked_loop import BlockedLoop
from lachesis.rewards.call_scope import RewardIsOver, current_scope
from lachesis.rewards.calls import in_call_scope
from lachesis.rewards.reward import RewardError
from tests.support.calls import Device, in_scope, plainly


@in_scope
async def test_calls_that_asyncio_takes_stay_concurrent(device: Device) -> None:
    async def most(count: int = 2) -> None:
        assert device.most == count
        device.most = 0

    assert [each["value"] for each in await asyncio.gather(device.get(1), device.get(2))] == [1, 2]
    await most()
    await together(*(device.get(each) for each in range(3)))
    await most(3)
    await together(*[device.get(each) for each in range(3)], return_exceptions=True)
    await most(3)
    calls = [device.get(each) for each in range(3)]
    await asyncio.gather(*calls)
    await most(3)
    calls = []
    for each in range(3):
        calls.append(device.get(each))
    for _ in asyncio.as_completed(calls):
        await _
    await most(3)
    first = asyncio.create_task(device.get(1))
    second = asyncio.get_running_loop().create_task(device.get(2))
    await first, await second
    await most()
    async with asyncio.TaskGroup() as group:
        tasks = [group.create_task(device.get(each)) for each in range(3)]
    assert [task.result()["value"] for task in tasks] == [0, 1, 2]
    await most(3)
    waiting = device.get(1)
    assert (await waiting)["value"] == 1
    get = device.get
    await asyncio.gather(get(1), get(2))
    await most()


class Helpers:
    """Ways to hand a call over that is awaited elsewhere."""

    def __init__(self, device: Device) -> None:
        self.get = device.get
        self.table = {"get": device.get}

    async def within(self, seconds: float, call: Any = None) -> Any:
        return await asyncio.wait_for(call, seconds)

    async def shown(self, *replies: Any) -> list[Any]:
        return [reply["value"] for reply in replies]


async def within(call: Any, seconds: float) -> Any:
    return await asyncio.wait_for(call, timeout=seconds)


@in_scope
async def test_a_time_limit_reaches_a_call_that_a_helper_makes_or_awaits(device: Device) -> None:
    helpers = Helpers(device)
    short = lambda value: device.get(value, 30)  # noqa: E731

    def plain(value: Any) -> Any:
        call = short(value)
        return call  # noqa: RET504

    @functools.wraps(plain)
    def wrapped(*args: Any) -> Any:
        return plain(*args)

    ways: list[Callable[[], Any]] = [
        lambda: asyncio.wait_for(short(0), 0.01),
        lambda: asyncio.wait_for(plain(1), 0.01),
        lambda: asyncio.wait_for(wrapped(2), 0.01),
        lambda: asyncio.wait_for(functools.partial(device.get, 3, 30)(), 0.01),
        lambda: asyncio.wait_for(helpers.get(4, 30), 0.01),
        lambda: asyncio.wait_for(helpers.table["get"](5, 30), 0.01),
        lambda: asyncio.wait_for(fut=getattr(device, "get")(6, 30), timeout=0.01),  # noqa: B009
        lambda: within(device.get(7, 30), 0.01),
        lambda: within(seconds=0.01, call=device.get(8, 30)),
        lambda: helpers.within(0.01, device.get(9, 30)),
        lambda: helpers.within(0.01, call=plain(10)),
    ]
    for way in ways:
        with pytest.raises(TimeoutError):
            await way()
    assert device.cancelled == list(range(len(ways)))
    calls = [plainer(device, each) for each in range(3)]
    await asyncio.gather(*calls)
    waiting = asyncio.gather(*map(device.get, [1, 2]))
    await waiting
    assert device.most == 3


def plainer(device: Device, value: Any) -> Any:
    return device.get(value)


@pytest.mark.parametrize("collected", [False, True])
async def test_a_call_that_is_never_awaited_is_an_error_with_its_line_whatever_the_caller_catches(
    collected: bool, recwarn: pytest.WarningsRecorder
) -> None:
    kept: list[Any] = []

    async def reward(device: Device) -> float:
        with contextlib.suppress(Exception):
            kept.append(device.get(1))
            if collected:
                kept.clear()
                gc.collect()
            return float(kept[0]["value"])
        return 0.0

    with pytest.raises(RewardError, match=r"env: compute_reward: ctx\.get\(\) at .*test_calls\.py:\d+ was nev"):
        await in_call_scope(reward(Device()), name="env: compute_reward")
    kept.clear()
    gc.collect()
    assert [str(warning.message) for warning in recwarn if "awaited" in str(warning.message)] == []


@pytest.mark.parametrize(
    "use",
    [
        lambda call: call["value"],
        lambda call: call.get("value"),
        lambda call: "value" in call,
        lambda call: list(call),
        lambda call: len(call),
        lambda call: float(call),
        lambda call: 1.0 if call else 0.0,
    ],
)
async def test_a_call_that_is_used_as_its_result_says_what_to_write_and_where(use: Callable[[Any], Any]) -> None:
    async def reward(device: Device) -> Any:
        return use(device.get(1))

    with pytest.raises(
        RewardError, match=r"ctx\.get\(\) at .*test_calls\.py:\d+ gives its result to `await` only; write"
    ):
        await in_call_scope(reward(Device()))


async def test_a_call_that_is_thrown_away_in_the_middle_is_an_error() -> None:
    async def reward(device: Device) -> float:
        begun = device.get(1, 30).__await__()
        next(begun)
        del begun
        gc.collect()
        return 1.0

    with pytest.raises(RewardError, match="was still running"):
        await in_call_scope(reward(Device()))


async def test_a_call_that_the_agent_keeps_from_ending_takes_no_score_away() -> None:
    async def after_an_error(device: Device) -> float:
        with contextlib.suppress(ValueError):
            await asyncio.gather(device.get(ValueError("first")), device.get("second", 30))
        return 0.0

    async def after_a_while(device: Device) -> float:
        done, _ = await asyncio.wait([asyncio.create_task(device.get("slow", 30))], timeout=0.01)
        return float(len(done))

    for reward in (after_an_error, after_a_while):
        assert await in_call_scope(reward(Device())) == 0.0
    for task in asyncio.all_tasks() - {asyncio.current_task()}:
        task.cancel()


async def test_a_variable_that_is_not_awaited_after_all_is_an_error() -> None:
    async def reward(device: Device, wanted: bool) -> float:
        call = device.get(1)
        if wanted:
            await call
        return 1.0

    assert await in_call_scope(reward(Device(), True)) == 1.0
    with pytest.raises(RewardError, match="never awaited"):
        await in_call_scope(reward(Device(), False))


async def test_a_call_still_running_in_a_task_of_nobody_is_an_error() -> None:
    async def reward(device: Device) -> float:
        task = asyncio.create_task(device.get(1, 30))
        await asyncio.sleep(0.01)
        tasks.append(task)
        return 0.0

    tasks: list[asyncio.Task[Any]] = []
    with pytest.raises(RewardError, match=r"ctx\.get\(\) at .*test_calls\.py:\d+ was still running"):
        await in_call_scope(reward(Device()))
    tasks[0].cancel()


async def test_a_callback_and_a_gathering_of_nobody_wait_for_nothing() -> None:
    async def reward(device: Device, begin: Callable[[Device], Any]) -> float:
        made.append(begin(device))
        await asyncio.sleep(0.01)
        return 0.0

    def with_callback(device: Device) -> Any:
        task = asyncio.create_task(device.get(1, 30))
        task.add_done_callback(made.remove)
        return task

    def gathered(device: Device) -> Any:
        return asyncio.gather(*[asyncio.create_task(device.get(each, 30)) for each in range(2)])

    made: list[Any] = []
    for begin in (with_callback, gathered):
        with pytest.raises(RewardError, match="was still running"):
            await in_call_scope(reward(Device(), begin))
    for each in made:
        each.cancel()
    await asyncio.gather(*made, return_exceptions=True)


async def test_an_error_of_a_task_of_nobody_is_not_lost() -> None:
    async def reward(device: Device) -> float:
        asyncio.create_task(device.get(ValueError("lost")))  # noqa: RUF006
        await device.get(1, 0.1)
        return 0.0

    with pytest.raises(
        RewardError, match=r"task ctx\.get\(\) at .* ended with ValueError\('lost'\), and the error was never retrieved"
    ):
        await in_call_scope(reward(Device()))


@in_scope
async def test_cancelled_calls_and_those_that_somebody_waited_for_are_no_error(device: Device) -> None:
    never = asyncio.create_task(device.get(1))
    never.cancel()
    begun = asyncio.create_task(device.get(1, 30))
    await asyncio.sleep(0.01)
    begun.cancel()
    with pytest.raises(ValueError):
        await asyncio.gather(device.get(ValueError("first")), device.get("second"))
    _, pending = await asyncio.wait([asyncio.create_task(device.get("third", 0.1))], timeout=0.01)
    assert pending
    await asyncio.wait(pending)
    asyncio.create_task(device.get("fourth", 30)).cancel()
    last = asyncio.create_task(device.get("fifth", 30))
    await asyncio.sleep(0.01)
    last.cancel()


async def test_a_call_of_nobody_is_logged(caplog: pytest.LogCaptureFixture) -> None:
    device = Device()
    assert (await device.get(1))["value"] == 1
    device.get(2)
    gc.collect()
    with caplog.at_level(logging.ERROR):
        assert [record.message.split(" was")[1] for record in caplog.records] == [
            " never awaited, so it did not run; write `await` before it"
        ]


async def test_a_task_that_outlives_its_scope_is_told_so() -> None:
    problems: list[BaseException] = []

    async def straggler(device: Device) -> None:
        await asyncio.sleep(0.05)
        try:
            await device.get(1)
        except RewardIsOver as error:
            problems.append(error)

    async def reward(device: Device) -> Any:
        return asyncio.create_task(straggler(device))

    await (await in_call_scope(reward(Device()), name="env: compute_reward"))
    assert "env: compute_reward is over" in str(problems[0])


@in_scope
async def test_a_call_blocks_a_thread(device: Device) -> None:
    device.scope = current_scope()
    loop = asyncio.get_running_loop()
    assert await loop.run_in_executor(None, plainly, device, 1) == 1
    assert await asyncio.to_thread(plainly, device, 2) == 2
    found: list[Any] = []
    thread = threading.Thread(target=lambda: found.append(plainly(device, 3)))
    thread.start()
    while thread.is_alive():  # noqa: ASYNC110
        await asyncio.sleep(0.01)
    assert found == [3]
    with pytest.raises(KeyError, match="broken"):
        await asyncio.to_thread(plainly, device, KeyError("broken"))

    async def own_loop() -> Any:
        return (await device.get(4))["value"]

    assert await asyncio.to_thread(lambda: asyncio.run(own_loop())) == 4


def blocks_by_future(device: Device, pool: ThreadPoolExecutor) -> Any:
    return pool.submit(device.get, 1).result()


def blocks_by_map(device: Device, pool: ThreadPoolExecutor) -> Any:
    return list(pool.map(device.get, [1, 2]))


def blocks_by_join(device: Device, pool: ThreadPoolExecutor) -> Any:
    problems: list[BaseException] = []

    def work() -> None:
        try:
            device.get(1)
        except BaseException as error:
            problems.append(error)

    thread = threading.Thread(target=work)
    thread.start()
    thread.join()
    raise problems[0]


@pytest.mark.parametrize("blocks", [blocks_by_future, blocks_by_map, blocks_by_join])
@pytest.mark.parametrize("caught", [False, True])
async def test_a_thread_that_the_event_loop_waits_for_is_told_so_at_once(blocks: Any, caught: bool) -> None:
    async def reward(device: Device) -> float:
        device.scope = current_scope()
        with ThreadPoolExecutor(2) as pool, contextlib.suppress(Exception if caught else StopIteration):
            blocks(device, pool)
        return 0.0

    begin = time.monotonic()
    with pytest.raises(
        BlockedLoop, match=r"ctx\.get\(\) at .* waits for that thread at .*asyncio\.to_thread"
    ) as caught_:
        await in_call_scope(reward(Device()))
    assert time.monotonic() - begin < 2
    assert "test_calls.py" in str(caught_.value).split("waits for that thread at ")[1]


async def test_a_loop_that_is_only_busy_is_waited_for() -> None:
    async def reward(device: Device) -> Any:
        waiting = asyncio.ensure_future(asyncio.to_thread(plainly, device, 1))
        await asyncio.sleep(0.05)
        time.sleep(0.8)  # noqa: ASYNC251
        threading.Event().wait(0.8)
        return await waiting

    assert await in_call_scope(reward(Device())) == 1


async def test_a_loop_that_somebody_else_blocks_for_a_time_is_waited_for(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("lachesis.rewards.blocked_loop._PATIENCE", 0.1)

    async def reward(device: Device, limit: float | None) -> Any:
        waiting = asyncio.ensure_future(asyncio.to_thread(plainly, device, 1))
        await asyncio.sleep(0.005)
        opened = threading.Event()
        threading.Timer(1, opened.set).start()
        opened.wait(limit)
        return await waiting

    assert await in_call_scope(reward(Device(), 60)) == 1
    with pytest.raises(BlockedLoop):
        await in_call_scope(reward(Device(), None))


async def test_a_thread_that_is_left_over_ends_at_its_call() -> None:
    unwound: list[str] = []

    def left(device: Device) -> None:
        try:
            device.get(1, 30)
        except RewardIsOver as error:
            unwound.append(str(error))

    async def reward(device: Device) -> float:
        device.scope = current_scope()
        thread = threading.Thread(target=left, args=[device])
        thread.start()
        threads.append(thread)
        await asyncio.sleep(0.05)
        return 1.0

    threads: list[threading.Thread] = []
    assert await in_call_scope(reward(Device()), name="env: evaluate") == 1.0
    await asyncio.to_thread(threads[0].join, 10)
    assert "env: evaluate is over" in unwound[0]


TAKEN = ("await", "task", "gather", "group", "thread", "wait_for", "cancelled")
LEFT = ("left", "left task", "left gathering", "caught")
PROGRAMS = st.lists(st.sampled_from((*TAKEN, *LEFT)), max_size=6)


async def make_calls(device: Device, ways: list[str]) -> None:
    for way in ways:
        call = device.get(way, 0) if way != "thread" else None
        match way:
            case "await":
                await call
            case "task":
                await asyncio.create_task(call)
            case "gather":
                await asyncio.gather(call, device.get(way, 0))
            case "group":
                async with asyncio.TaskGroup() as group:
                    group.create_task(call)
            case "thread":
                await asyncio.to_thread(plainly, device, way)
            case "wait_for":
                await asyncio.wait_for(call, 60)
            case "cancelled":
                asyncio.create_task(call).cancel()
            case "left task":
                device.done.append(asyncio.create_task(device.get(way, 60)))
                call.close()
            case "left gathering":
                device.done.append(asyncio.gather(device.get(way, 60)))
                call.close()
            case "caught":
                with contextlib.suppress(Exception):
                    call["value"]


@settings(max_examples=60, deadline=None)
@given(PROGRAMS)
def test_a_program_of_calls_has_a_result_exactly_if_no_call_is_left(ways: list[str]) -> None:
    async def main() -> None:
        device = Device()
        try:
            await in_call_scope(make_calls(device, ways))
        finally:
            left = [each for each in device.done if isinstance(each, asyncio.Future)]
            for each in left:
                each.cancel()
            await asyncio.gather(*left, return_exceptions=True)

    if any(way in LEFT for way in ways):
        with pytest.raises(RewardError):
            asyncio.run(main())
    else:
        asyncio.run(main())
