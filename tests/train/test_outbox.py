"""The outbox on disk: whatever happens, a start finds what the last one knew."""

from __future__ import annotations

import asyncio
import math
import multiprocessing
import os
import random
import resource
import shutil
import sqlite3
import subprocess
import sys
import tempfile
import threading
import time
from contextlib import asynccontextmanager, closing, suppress
from multiprocessing.connection import Connection
from pathlib import Path

import orjson
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from lachesis.runs.run_folder import OtherSettings
from lachesis_train.group_encoding import GroupError
from lachesis_train.outbox import Outbox, OutboxError
from lachesis_train.outbox_state import KnownApi
from lachesis_train.rollout_api import EnvDescription
from tests.run import some
from tests.support.fake_serving import number_of, payload
from tests.support.small_envs import ROOT

ENV = EnvDescription("fake", max_token_length=40, group_size=2)


async def opened(folder) -> Outbox:
    outbox = Outbox(folder, {"group_size": 2})
    try:
        await outbox.open()
    except BaseException:
        await outbox.close()
        raise
    return outbox


@asynccontextmanager
async def opening(folder):
    outbox = await opened(folder)
    try:
        yield outbox
    finally:
        await outbox.close()


async def append(outbox: Outbox, number: int, **size: int):
    return await outbox.append(payload(number, **size), key=str(number), tokens=76, undelivered=4, step=1)


async def register(outbox: Outbox, *, again: bool = False, env_id: int = 0, step: int = 0):
    known = KnownApi(env_id, ENV, batch_size=4, step=step, num_steps=9, largest=ENV.group_size)
    await outbox.registered(known, again=again)


async def post(outbox: Outbox, *, env_id: int = 0):
    entry = outbox.state.first_waiting
    await outbox.posting(entry, env_id=env_id)
    return entry


async def deliver(outbox: Outbox, *, step: int = 1):
    await post(outbox)
    await outbox.accepted()
    await outbox.seen(0, step=step, sequences=0)


def facts(outbox: Outbox):
    """All that a start has to know."""
    state = outbox.state
    return {
        "waiting": state.waiting,
        "first": state.first_waiting,
        "in_doubt": state.in_doubt,
        "accepted": state.accepted,
        "in_api": state.in_api,
        "known": state.known,
        "keys": state.keys,
        "counts": (
            state.undelivered,
            state.unsent,
            state.delivered,
            state.delivered_tokens,
            state.undelivered_tokens,
            state.ages,
            state.oldest,
            state.sequences,
            state.requeued,
            state.refused,
        ),
    }


async def test_a_group_comes_out_as_it_went_in_with_an_id(tmp_path):
    async with opening(tmp_path) as outbox:
        await append(outbox, 7)
        await append(outbox, 8, group_size=3, length=300_000)  # several chunks
    async with opening(tmp_path) as outbox:
        for entry, made in zip(
            outbox.state.waiting, [payload(7), payload(8, group_size=3, length=300_000)], strict=True
        ):
            group = orjson.loads(await outbox.payload(entry))
            assert group.pop("group_overrides") == {"group_id": entry.group_id, "begin_step": 1}
            assert group == {name: value for name, value in made.items() if name != "group_overrides"}


async def test_a_malformed_group_is_not_written(tmp_path):
    async with opening(tmp_path) as outbox:
        with pytest.raises(GroupError, match="scores contains a number that is not finite"):
            await outbox.append({**payload(1), "scores": [1.0, math.nan]}, key="1", tokens=1)
        await append(outbox, 2)
    async with opening(tmp_path) as outbox:
        assert [entry.key for entry in outbox.state.waiting] == ["2"]


ACTIONS = st.sampled_from(
    ["append", "append", "post", "accept", "accept", "back", "refuse", "leave out", "see", "restart", "again", "reopen"]
)


@settings(max_examples=some(60), deadline=None)
@given(st.lists(st.tuples(ACTIONS, st.integers(0, 3)), max_size=30))
def test_after_any_history_a_start_knows_what_the_last_one_knew(history):
    async def play(folder: Path) -> None:
        outbox = await opened(folder)
        await register(outbox)
        appended, left_out, env_id, step = 0, 0, 0, 0
        for action, value in history:
            state = outbox.state
            if action == "append":
                await append(outbox, appended)
                appended += 1
            elif action == "post" and state.waiting and state.in_doubt is None:
                await post(outbox, env_id=env_id)
            elif action == "accept" and state.in_doubt is not None:
                await outbox.accepted(buffer=value % 2)
            elif action == "back" and state.in_doubt is not None:
                await outbox.back(unsure=bool(value))
            elif action == "refuse" and state.in_doubt is not None:
                await outbox.refused("bad")
            elif action == "leave out":
                await outbox.left_out(f"item {value}", "same scores", 5)
                left_out += 1
            elif action == "see":
                step += value
                await outbox.seen(env_id, step=step, sequences=2 * value)
            elif action == "restart":
                step = value
                await register(outbox, again=True, step=step)
                env_id = 0
            elif action == "again" and state.in_doubt is None:
                env_id += 1
                await register(outbox, env_id=env_id, step=step)
            elif action == "reopen":
                before = facts(outbox)
                await outbox.close()
                outbox = await opened(folder)
                assert facts(outbox) == before
            state = outbox.state
            on_their_way = [*state.waiting, *state.lost_by_restart()]
            assert len({entry.seq for entry in on_their_way}) == len(on_their_way) == state.undelivered
            assert state.sequences == sum(entry.sequences for entry in on_their_way)
            assert len(on_their_way) == appended - state.delivered - state.refused["bad"]
            assert state.refused["same scores"] == left_out
            assert [entry.seq for entry in state.waiting] == sorted(entry.seq for entry in state.waiting)
        for entry in [*outbox.state.waiting, *outbox.state.lost_by_restart()]:
            group = orjson.loads(await outbox.payload(entry))
            assert str(number_of(group)) == entry.key
        await outbox.close()

    with tempfile.TemporaryDirectory() as folder:
        asyncio.run(play(Path(folder)))


async def test_groups_that_a_restarted_api_lost_wait_in_their_first_order_before_the_rest(tmp_path):
    async with opening(tmp_path) as outbox:
        await register(outbox)
        for number in range(6):
            await append(outbox, number)
        for _ in range(4):
            await post(outbox)
            await outbox.accepted()
        await post(outbox)
        await outbox.seen(0, step=1, sequences=8)
        assert outbox.state.delivered == 0, "as many as it can hold"
        await outbox.seen(0, step=1, sequences=7)
        assert outbox.state.delivered == 1
        await register(outbox, again=True, step=2)
        assert [entry.key for entry in outbox.state.waiting] == ["1", "2", "3", "4", "5"]
        assert (outbox.state.delivered, outbox.state.requeued, outbox.state.in_doubt) == (1, 4, None)


async def test_groups_age_from_the_step_that_the_trainer_went_back_to(tmp_path):
    async with opening(tmp_path) as outbox:
        await register(outbox, step=9)
        for step in (3, 7, 9):
            await outbox.append(payload(step), key=str(step), tokens=76, step=step)
        await post(outbox)
        await outbox.accepted()
        await register(outbox, again=True, step=5)
    async with opening(tmp_path) as outbox:
        assert [(entry.key, entry.step) for entry in outbox.state.waiting] == [("3", 3), ("7", 5), ("9", 5)]
        await deliver(outbox, step=8)
        assert outbox.state.ages == {8 - 1 - 3: 1}


async def test_a_write_ahead_log_that_is_torn_anywhere_loses_only_its_end(tmp_path):
    """A machine that loses power may leave any beginning of what was not yet flushed."""
    folder = tmp_path / "outbox"
    outbox = await opened(folder)
    sizes = []
    log = folder / "outbox.db-wal"
    await register(outbox)
    for number in range(3):
        await append(outbox, number)
        sizes.append(log.stat().st_size)
    torn = tmp_path / "torn"
    for cut in [*sizes, *random.Random(0).sample(range(sizes[0], sizes[-1]), 12)]:
        shutil.copytree(folder, torn)
        os.truncate(torn / "outbox.db-wal", cut)
        async with opening(torn) as copy:
            whole = sum(size <= cut for size in sizes)
            assert [entry.key for entry in copy.state.waiting] == [str(number) for number in range(whole)], cut
            for entry in copy.state.waiting:
                assert number_of(orjson.loads(await copy.payload(entry))) == entry.seq
            await append(copy, 9)
        shutil.rmtree(torn)
    await outbox.close()


@pytest.mark.slow
async def test_content_of_settled_groups_is_deleted_and_its_pages_are_used_again(tmp_path):
    async with opening(tmp_path) as outbox:
        await register(outbox)
        first = await append(outbox, 0, length=100_000)
        for number in range(1, 30):  # of 130 MB, 9 are on their way at once
            await append(outbox, number, length=100_000)
            if number % 5:
                await deliver(outbox, step=number)
            else:
                await post(outbox)
                await outbox.refused("bad")
        assert (outbox.state.delivered, outbox.state.refused["bad"], outbox.state.undelivered) == (24, 5, 1)
        with pytest.raises(OutboxError, match="content of group 0 is gone"):
            await outbox.payload(first)
        before = facts(outbox)
    assert (tmp_path / "outbox.db").stat().st_size < 20e6
    async with opening(tmp_path) as outbox:
        assert facts(outbox) == before


@pytest.mark.slow
async def test_the_write_ahead_log_of_a_large_group_does_not_stay(tmp_path):
    async with opening(tmp_path) as outbox:
        await register(outbox)
        await append(outbox, 0, group_size=8, length=600_000)  # some 80 MB
        for number in range(1, 4):
            await append(outbox, number)
        assert (tmp_path / "outbox.db-wal").stat().st_size <= 64 << 20
        assert len(await outbox.payload(outbox.state.first_waiting)) > 64 << 20


async def test_an_outbox_belongs_to_one_process_with_one_set_of_settings(tmp_path):
    program = (
        "import asyncio, sys; from pathlib import Path; from lachesis_train.outbox import Outbox\n"
        "asyncio.run(Outbox(Path(sys.argv[1]), {'group_size': 2}).open())"
    )
    command = [sys.executable, "-c", program, tmp_path]
    async with opening(tmp_path) as outbox:
        await append(outbox, 1)
        other = await asyncio.to_thread(subprocess.run, command, capture_output=True, text=True, check=False)
        assert "another run uses it" in other.stderr
        with pytest.raises(OutboxError, match="another run uses it"):
            await opened(tmp_path)
    with pytest.raises(OtherSettings, match="group_size: 2 then, 4 now"):
        await Outbox(tmp_path, {"group_size": 4}).open()
    async with opening(tmp_path) as outbox:
        assert outbox.state.unsent == 1


async def test_damage_is_reported_with_the_file_and_a_next_step(tmp_path):
    async with opening(tmp_path / "whole") as outbox:
        for number in range(20):
            await append(outbox, number, length=3000)
    next_step = "restore it from a copy, or choose another folder"
    whole = (tmp_path / "whole/outbox.db").read_bytes()
    for name, content in {
        "no database": b"\0" * 50_000,
        "torn": whole[:-100_000],
        "overwritten": whole[:20_000] + os.urandom(100_000) + whole[120_000:],
    }.items():
        (tmp_path / name).mkdir()
        path = tmp_path / name / "outbox.db"
        path.write_bytes(content)
        with pytest.raises(OutboxError) as damage:
            await opened(path.parent)
        assert str(path) in str(damage.value) and next_step in str(damage.value), name


async def test_a_folder_that_cannot_be_written_and_older_formats_are_reported(tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(OutboxError, match=r"file/spool cannot be made .*choose another folder"):
        await opened(tmp_path / "file/spool")
    (tmp_path / "folder/outbox.db").mkdir(parents=True)
    with pytest.raises(OutboxError, match=r"outbox\.db: unable to open database file; check the disk and the permis"):
        await opened(tmp_path / "folder")
    (tmp_path / "marks.jsonl").write_text("")
    with pytest.raises(OutboxError, match="earlier version of Lachesis"):
        await opened(tmp_path)
    async with opening(tmp_path / "newer"):
        pass
    with closing(sqlite3.connect(tmp_path / "newer/outbox.db")) as database:
        database.execute("PRAGMA user_version = 7")
    with pytest.raises(OutboxError, match="has format 7"):
        await opened(tmp_path / "newer")


FULL_DISK = """
import asyncio, sys
from pathlib import Path
from lachesis_train.outbox import Outbox, OutboxError
from tests.support.fake_serving import payload

async def main():
    outbox = Outbox(Path(sys.argv[1]), {"group_size": 2})
    await outbox.open()
    count = 0
    try:
        while count < 1000:
            await outbox.append(payload(count, length=10_000), key=str(count), tokens=1)
            count += 1
    except OutboxError as error:
        print(count, error)
    for entry in outbox.state.waiting:
        await outbox.payload(entry)
    await outbox.close()

asyncio.run(main())
"""


async def test_a_full_disk_is_reported_and_loses_nothing_that_was_written(tmp_path):
    def limited() -> None:
        resource.setrlimit(resource.RLIMIT_FSIZE, (20 << 20, 20 << 20))

    command = [sys.executable, "-c", FULL_DISK, tmp_path]
    done = await asyncio.to_thread(
        subprocess.run, command, cwd=ROOT, preexec_fn=limited, capture_output=True, text=True, check=True
    )
    count, _, error = done.stdout.partition(" ")
    assert f"{tmp_path / 'outbox.db'}: " in error and "then start again: what was written stays" in error
    async with opening(tmp_path) as outbox:
        assert [entry.key for entry in outbox.state.waiting] == [str(number) for number in range(int(count))]
        await append(outbox, int(count))


@pytest.mark.parametrize("times", [1, 3])
async def test_cancelling_a_write_leaves_disk_and_memory_alike(tmp_path, times):
    outbox = await opened(tmp_path)
    reached, go_on = asyncio.Event(), threading.Event()
    loop = asyncio.get_running_loop()

    def block() -> None:
        loop.call_soon_threadsafe(reached.set)
        go_on.wait()

    blocked = asyncio.create_task(outbox.run(block))
    task = asyncio.create_task(append(outbox, 1))
    await reached.wait()
    for _ in range(times):
        task.cancel()
        await asyncio.sleep(0)
        await asyncio.sleep(0)
    assert not task.done(), "the write has begun, and is finished"
    go_on.set()
    with pytest.raises(asyncio.CancelledError):
        await task
    await blocked
    before = facts(outbox)
    assert outbox.state.unsent == 1
    await outbox.close()
    async with opening(tmp_path) as outbox:
        assert facts(outbox) == before


async def write_forever(folder: Path, say: Connection) -> None:
    outbox = await opened(folder)
    if outbox.state.known is None:
        await register(outbox)
    if outbox.state.in_doubt is not None:
        await outbox.back()
    number = len(outbox.state.keys)
    while True:
        await append(outbox, number, length=2000)
        say.send(("appended", number))
        await post(outbox)
        await outbox.accepted()
        # One look settles several groups if earlier writers were killed before theirs.
        say.send(("delivered_at_most", outbox.state.delivered + len(outbox.state.accepted[0])))
        await outbox.seen(0, step=number, sequences=4)
        say.send(("delivered", outbox.state.delivered))
        number += 1


async def check(folder: Path, *, appended: int, delivered: int, delivered_at_most: int) -> None:
    async with opening(folder) as outbox:
        state = outbox.state
        assert appended < len(state.keys) <= appended + 2
        assert delivered <= state.delivered <= delivered_at_most
        left = [*state.lost_by_restart(), *state.waiting]
        assert [entry.seq for entry in left] == [*range(state.delivered, len(state.keys))]
        for entry in left:
            assert number_of(orjson.loads(await outbox.payload(entry))) == entry.seq


@pytest.mark.slow
def test_kill_9_of_a_writer_loses_nothing_and_settles_nothing_twice(tmp_path):
    """Killed 30 times at random instants."""
    draw = random.Random(random.getrandbits(32))
    known = {"delivered": 0, "delivered_at_most": 0}
    for _ in range(30):
        heard, say = multiprocessing.Pipe(duplex=False)
        writer = multiprocessing.get_context("fork").Process(
            target=lambda say=say: asyncio.run(write_forever(tmp_path, say))
        )
        writer.start()
        say.close()
        known.update([heard.recv()])
        time.sleep(0.15 * draw.random())
        writer.kill()
        with suppress(EOFError):
            while True:
                known.update([heard.recv()])
        writer.join()
        asyncio.run(check(tmp_path, **known))
    assert known["delivered"] > 30
    with closing(sqlite3.connect(tmp_path / "outbox.db")) as database:
        counted = database.execute("SELECT count(*), count(DISTINCT key), count(DISTINCT group_id) FROM groups")
        assert len(set(counted.fetchone())) == 1
