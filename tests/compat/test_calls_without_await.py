"""Calls with and without `await`, in coroutines, their tasks and threads: the mechanism, without sandboxes."""

from __future__ import annotations

import ast
import asyncio
import contextlib
import contextvars
import functools
import gc
import logging
import threading
import time
import traceback
from asyncio import gather as together
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
from greenlet import greenlet
from hypothesis import given, settings
from hypothesis import strategies as st

from lachesis.agent import call_sites
from lachesis.agent.blocked_loop import BlockedLoop
from lachesis.agent.blocking_calls import result_of, with_blocking_calls
from lachesis.agent.call_scope import CallScope, RewardIsOver, current_scope
from lachesis.agent.context_results import Reply
from lachesis.agent.driven import Driven
from lachesis.agent.reward import RewardError


class Device:
    """Answers late. Knows how many of its calls ran at once, and which were cancelled."""

    def __init__(self, scope: CallScope | None = None) -> None:
        self.loop = asyncio.get_running_loop()
        self.scope = scope
        self.at_once = self.most = 0
        self.done: list[Any] = []
        self.cancelled: list[Any] = []

    def get(self, value: Any, seconds: float = 0.01) -> Any:
        make = functools.partial(self._get, value, seconds)
        return result_of("ctx.get", make, self.loop, current_scope() or self.scope)

    async def _get(self, value: Any, seconds: float) -> Any:
        self.at_once += 1
        self.most = max(self.most, self.at_once)
        try:
            await asyncio.sleep(seconds)
        except asyncio.CancelledError:
            self.cancelled.append(value)
            raise
        finally:
            self.at_once -= 1
        if isinstance(value, Exception):
            raise value
        self.done.append(value)
        return Reply(value=value)


def driven(function: Callable[[Device], Any]) -> Callable[[], Any]:
    """The test as a coroutine of an environment, with a device."""

    @functools.wraps(function)
    async def test() -> None:
        await with_blocking_calls(function(Device()), name="test")

    del test.__wrapped__  # type: ignore[attr-defined]  # pytest would look for its arguments
    return test


def plainly(device: Device, value: Any) -> Any:
    return device.get(value)["value"]


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
    assert ticks > 10
    ticking.cancel()


@driven
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


@driven
async def test_a_list_that_is_also_looked_at_is_filled_one_by_one(device: Device) -> None:
    calls = [device.get(each) for each in range(3)]
    assert calls[0]["value"] == 0
    assert [each["value"] for each in await asyncio.gather(*calls)] == [0, 1, 2]
    assert device.most == 1


async def test_without_source_only_await_is_seen_and_every_result_is_right() -> None:
    code = (
        "import asyncio\n"
        "async def reward(device):\n"
        "    first = device.get(1)['value']\n"
        "    second = (await device.get(2))['value']\n"
        "    rest = await asyncio.gather(device.get(3), device.get(4))\n"
        "    return [first, second, *(each['value'] for each in rest)]\n"
    )
    names: dict[str, Any] = {}
    exec(code, names)
    assert await with_blocking_calls(names["reward"](Device())) == [1, 2, 3, 4]


@driven
async def test_a_time_limit_ends_a_call_without_await(device: Device) -> None:
    begin = time.monotonic()
    with pytest.raises(TimeoutError):
        async with asyncio.timeout(0.05):  # noqa: ASYNC100
            device.get("inside", 30)
    with pytest.raises(TimeoutError):
        await asyncio.wait_for(device.get("awaited", 30), 0.05)
    assert device.cancelled == ["inside", "awaited"] and time.monotonic() - begin < 10
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


@driven
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


@driven
async def test_a_helper_that_looks_at_a_call_gets_its_result(device: Device) -> None:
    helpers = Helpers(device)
    assert plainer(device, 1)["value"] == 1 and (lambda: device.get(2))()["value"] == 2
    assert await helpers.shown(device.get(1), plainer(device, 2)) == [1, 2]
    assert await helpers.shown(*map(device.get, [1, 2])) == [1, 2]
    assert await helpers.shown(*(device.get(each) for each in [1, 2])) == [1, 2]
    assert device.most == 1


def test_a_finalizer_that_parses_too_does_not_keep_the_source_from_being_read() -> None:
    class Parses:
        def __init__(self) -> None:
            self.itself = self

        def __del__(self) -> None:
            ast.parse("a + b" * 50)  # as a traceback that is printed does

    before, read = gc.get_threshold(), []
    gc.set_threshold(50, 2, 2)
    try:
        for number in range(5):
            for _ in range(300):
                Parses()
            with contextlib.suppress(SystemError):
                read.append(call_sites._calls(f"f({number})\n" + "x = [1 + 1, [2]]\n" * 500))
    finally:
        gc.set_threshold(*before)
    assert len(read) == 5


@driven
async def test_what_nobody_gathers_runs_in_its_order(device: Device) -> None:
    asyncio.gather(device.get("first", 0.1))
    asyncio.shield(device.get("second", 0.05))
    device.get("third")
    assert device.done == ["first", "second", "third"]


# Calls whose result nobody takes.


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
        RewardError, match=r"env: compute_reward: ctx\.get\(\) at .*test_blocking_calls\.py:\d+ was nev"
    ):
        await with_blocking_calls(reward(Device()), name="env: compute_reward")
    kept.clear()
    gc.collect()
    assert [str(warning.message) for warning in recwarn] == []


async def test_a_variable_that_is_not_awaited_after_all_is_an_error() -> None:
    async def reward(device: Device, wanted: bool) -> float:
        call = device.get(1)
        if wanted:
            await call
        return 1.0

    assert await with_blocking_calls(reward(Device(), True)) == 1.0
    with pytest.raises(RewardError, match="never awaited"):
        await with_blocking_calls(reward(Device(), False))


async def test_a_call_still_running_in_a_task_of_nobody_is_an_error() -> None:
    async def reward(device: Device) -> float:
        task = asyncio.create_task(device.get(1, 30))
        await asyncio.sleep(0.01)
        tasks.append(task)
        return 0.0

    tasks: list[asyncio.Task[Any]] = []
    with pytest.raises(RewardError, match=r"the task ctx\.get\(\) at .*still running, and nobody waited"):
        await with_blocking_calls(reward(Device()))
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
        with pytest.raises(RewardError, match="still running, and nobody waited for it"):
            await with_blocking_calls(reward(Device(), begin))
    for each in made:
        each.cancel()
    await asyncio.gather(*made, return_exceptions=True)


async def test_an_error_of_a_task_of_nobody_is_not_lost() -> None:
    async def reward(device: Device) -> float:
        asyncio.create_task(device.get(ValueError("lost")))  # noqa: RUF006
        device.get(1, 0.1)
        return 0.0

    with pytest.raises(RewardError, match=r"the task ctx\.get\(\) at .* ended with ValueError\('lost'\), and nobody"):
        await with_blocking_calls(reward(Device()))


@driven
async def test_cancelled_calls_and_those_that_somebody_waited_for_are_no_error(device: Device) -> None:
    never = asyncio.create_task(device.get(1))
    never.cancel()
    begun = asyncio.create_task(device.get(1, 30))
    await asyncio.sleep(0.01)
    begun.cancel()
    with pytest.raises(ValueError):
        await asyncio.gather(device.get(ValueError("first")), device.get("second", 0.1))
    _, pending = await asyncio.wait([asyncio.create_task(device.get("third", 0.1))], timeout=0.01)
    assert pending
    device.get(2)
    asyncio.create_task(device.get("fourth", 30)).cancel()
    last = asyncio.create_task(device.get("fifth", 30))
    await asyncio.sleep(0.01)
    last.cancel()


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
    with pytest.raises(RewardError, match="still running, and nobody waited for it"):
        await with_blocking_calls(forgets(device))


async def forgets(device: Device) -> None:
    device.done.append(asyncio.create_task(device.get(1, 30)))


async def test_a_call_of_nobody_is_logged(caplog: pytest.LogCaptureFixture) -> None:
    device = Device()
    assert (await device.get(1))["value"] == 1
    device.get(2)
    gc.collect()
    with caplog.at_level(logging.ERROR):
        assert [record.message.split(" was")[1] for record in caplog.records] == [
            " never awaited, so nothing ran and nobody has its result; write `await` before it"
        ]


async def test_a_task_that_outlives_its_scope_is_told_so() -> None:
    problems: list[BaseException] = []

    async def straggler(device: Device) -> None:
        await asyncio.sleep(0.05)
        try:
            device.get(1)
        except RewardIsOver as error:
            problems.append(error)

    async def reward(device: Device) -> Any:
        return asyncio.create_task(straggler(device))

    await (await with_blocking_calls(reward(Device()), name="env: compute_reward"))
    assert "env: compute_reward is over" in str(problems[0])


# Threads.


@driven
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
        await with_blocking_calls(reward(Device()))
    assert time.monotonic() - begin < 2
    assert "test_blocking_calls.py" in str(caught_.value).split("waits for that thread at ")[1]


async def test_a_loop_that_is_only_busy_is_waited_for() -> None:
    async def reward(device: Device) -> Any:
        waiting = asyncio.ensure_future(asyncio.to_thread(plainly, device, 1))
        await asyncio.sleep(0.05)
        time.sleep(0.8)  # noqa: ASYNC251
        threading.Event().wait(0.8)
        return await waiting

    assert await with_blocking_calls(reward(Device())) == 1


async def test_a_loop_that_somebody_else_blocks_for_a_time_is_waited_for(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("lachesis.agent.blocked_loop._PATIENCE", 0.1)

    async def reward(device: Device, limit: float | None) -> Any:
        waiting = asyncio.ensure_future(asyncio.to_thread(plainly, device, 1))
        await asyncio.sleep(0.005)
        opened = threading.Event()
        threading.Timer(1, opened.set).start()
        opened.wait(limit)
        return await waiting

    assert await with_blocking_calls(reward(Device(), 60)) == 1
    with pytest.raises(BlockedLoop):
        await with_blocking_calls(reward(Device(), None))


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
    assert await with_blocking_calls(reward(Device()), name="env: evaluate") == 1.0
    await asyncio.to_thread(threads[0].join, 10)
    assert "env: evaluate is over" in unwound[0]


# All of it at once.

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
