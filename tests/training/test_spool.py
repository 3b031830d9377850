"""The spool on disk: whatever happens, a start finds what the last one knew."""

from __future__ import annotations

import asyncio
import errno
import os
import subprocess
import sys
import tempfile
import threading
import time
from pathlib import Path

import orjson
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from lachesis.run_folder import RunFolderError
from lachesis.runs.ledger import Ledger
from lachesis.training.rollout_api import EnvDescription, GroupError
from lachesis.training.spool import Spool, SpoolError
from tests.support.fake_serving import number_of, payload

ENV = EnvDescription("fake", max_token_length=40, group_size=2)


async def opened(folder, **options) -> Spool:
    spool = Spool(folder, {"group_size": 2}, **options)
    await spool.open()
    return spool


async def append(spool: Spool, number: int):
    return await spool.append(payload(number), key=str(number), tokens=76, undelivered=4, step=1)


async def register(spool: Spool, *, restarted: bool = False, taken: int = 0, env_id: int = 0, step: int = 0):
    await spool.registered(env_id, ENV, batch_size=4, step=step, num_steps=9, restarted=restarted, taken=taken)


async def post(spool: Spool, *, env_id: int = 0):
    entry = spool.state.waiting[0]
    await spool.posting(entry, env_id=env_id, step=0, alone=True)
    return entry


def facts(spool: Spool):
    """All that a start has to know."""
    state = spool.state
    return {
        "waiting": list(state.waiting),
        "doubt": state.doubt,
        "accepted": {env_id: list(queue) for env_id, queue in state.accepted.items()},
        "in_api": {env_id: held for env_id, held in state.in_api.items() if held},
        "known": state.known,
        "keys": state.keys,
        "counts": (
            state.delivered,
            state.delivered_tokens,
            state.undelivered_tokens,
            state.steps_late,
            state.maybe_doubled,
            state.requeued,
            dict(state.refused),
        ),
    }


async def test_a_group_comes_out_as_it_went_in_with_a_name_of_its_own(tmp_path):
    spool = await opened(tmp_path)
    await spool.append(payload(7), key="seven", tokens=76, record={"samples": [{"x": 1}, {"y": 2}], "note": "n"})
    await spool.close()
    spool = await opened(tmp_path)
    (entry,) = spool.state.waiting
    group = orjson.loads(await spool.payload(entry))
    assert group.pop("group_overrides") == {"group_id": entry.group_id}
    assert group == {name: value for name, value in payload(7).items() if name != "group_overrides"}
    line = orjson.loads((tmp_path / "000000.jsonl").read_bytes())
    assert line["samples"] == [{"x": 1}, {"y": 2}]
    assert line["note"] == "n"
    await spool.close()


async def test_a_malformed_group_is_not_written(tmp_path):
    spool = await opened(tmp_path)
    with pytest.raises(GroupError):
        await spool.append({**payload(1), "scores": [1.0]}, key="1", tokens=1)
    await append(spool, 2)
    await spool.close()
    spool = await opened(tmp_path)
    assert [entry.key for entry in spool.state.waiting] == ["2"]
    await spool.close()


ACTIONS = st.sampled_from(
    ["append", "append", "post", "accept", "accept", "back", "refuse", "leave out", "see", "restart", "again", "reopen"]
)


@settings(max_examples=60, deadline=None)
@given(st.lists(st.tuples(ACTIONS, st.integers(0, 3)), max_size=30))
def test_after_any_history_a_start_knows_what_the_last_one_knew(history):
    async def play(folder: Path) -> None:
        spool = await opened(folder, segment_bytes=1500)
        await register(spool)
        appended, env_id, step = 0, 0, 0
        for action, value in history:
            state = spool.state
            if action == "append":
                await append(spool, appended)
                appended += 1
            elif action == "post" and state.waiting and state.doubt is None:
                await post(spool, env_id=env_id)
            elif action == "accept" and state.doubt is not None:
                await spool.accepted(buffer=value % 2)
            elif action == "back" and state.doubt is not None:
                await spool.back(unsure=bool(value))
            elif action == "refuse" and state.doubt is not None:
                await spool.refused("bad")
            elif action == "leave out":
                await spool.left_out(f"item {value}", "same scores", 5)
            elif action == "see":
                step += value
                await spool.seen(env_id, step=step, sequences=2 * value)
            elif action == "restart":
                step = value
                lost = len(state.lost_by_restart())
                await register(spool, restarted=True, taken=min(value, lost), step=step)
                env_id = 0
            elif action == "again" and state.doubt is None:
                env_id += 1
                await register(spool, env_id=env_id, step=step)
            elif action == "reopen":
                before = facts(spool)
                await spool.close()
                spool = await opened(folder, segment_bytes=1500)
                assert facts(spool) == before
            state = spool.state
            on_their_way = [*state.waiting, *state.lost_by_restart()]
            settled = state.delivered + state.refused["bad"]
            assert len({entry.seq for entry in on_their_way}) == len(on_their_way) == appended - settled
            assert [entry.seq for entry in state.waiting] == sorted(entry.seq for entry in state.waiting)
        for entry in [*spool.state.waiting, *spool.state.lost_by_restart()]:
            group = orjson.loads(await spool.payload(entry))
            assert str(number_of(group)) == entry.key
        await spool.close()

    with tempfile.TemporaryDirectory() as folder:
        asyncio.run(play(Path(folder)))


async def test_what_a_restarted_api_lost_waits_in_its_old_order_before_the_rest(tmp_path):
    spool = await opened(tmp_path)
    await register(spool)
    for number in range(6):
        await append(spool, number)
    for _ in range(4):
        await post(spool)
        await spool.accepted()
    await post(spool)
    await spool.seen(0, step=1, sequences=8)
    assert spool.state.delivered == 0, "as many as it can hold"
    await spool.seen(0, step=1, sequences=7)
    assert spool.state.delivered == 1
    await register(spool, restarted=True, taken=1, step=2)
    assert [entry.key for entry in spool.state.waiting] == ["2", "3", "4", "5"]
    assert (spool.state.delivered, spool.state.requeued, spool.state.doubt) == (2, 3, None)
    await spool.close()


async def test_a_torn_last_group_is_cut_off_wherever_it_is_torn(tmp_path):
    spool = await opened(tmp_path)
    await append(spool, 1)
    await append(spool, 2)
    await spool.close()
    path = tmp_path / "000000.jsonl"
    whole = path.read_bytes()
    first = whole.index(b"\n") + 1
    for cut in [first, first + 1, first + 60, *range(first + 200, len(whole), 397), len(whole) - 2, len(whole) - 1]:
        path.write_bytes(whole[:cut])
        spool = await opened(tmp_path)
        complete = cut == len(whole) - 1  # but for its newline
        assert [entry.key for entry in spool.state.waiting] == (["1", "2"] if complete else ["1"]), cut
        await append(spool, 3)
        await spool.close()
        spool = await opened(tmp_path)
        assert [number_of(orjson.loads(await spool.payload(entry))) for entry in spool.state.waiting][-1] == 3
        await spool.close()


async def test_a_torn_mark_leaves_its_group_in_doubt(tmp_path):
    spool = await opened(tmp_path)
    await register(spool)
    await append(spool, 1)
    entry = await post(spool)
    await spool.accepted()
    await spool.close()
    marks = tmp_path / "marks.jsonl"
    marks.write_bytes(marks.read_bytes()[:-6])
    spool = await opened(tmp_path)
    assert spool.state.doubt.entry == entry
    await spool.close()


async def test_files_of_settled_groups_are_deleted_unless_they_are_kept(tmp_path):
    for keep in (False, True):
        folder = tmp_path / str(keep)
        spool = await opened(folder, segment_bytes=1, keep_delivered=keep)
        await register(spool)
        for number in range(4):
            await append(spool, number)
        for _ in range(3):
            await post(spool)
            await spool.accepted()
        await spool.seen(0, step=1, sequences=2)
        left = sorted(path.name for path in folder.glob("0*.jsonl"))
        assert left == [f"{number:06}.jsonl" for number in (range(4) if keep else (2, 3))]
        before = facts(spool)
        await spool.close()
        spool = await opened(folder, keep_delivered=keep)
        assert facts(spool) == before
        assert (await append(spool, 4)).seq == 4
        await spool.close()


async def test_the_file_of_a_group_stays_that_was_written_while_all_before_it_were_settled(tmp_path):
    spool = await opened(tmp_path)
    await register(spool)
    await append(spool, 0)
    spool._segment_bytes = (tmp_path / "000000.jsonl").stat().st_size + 1
    await post(spool)
    await spool.accepted()
    settled = asyncio.create_task(spool.seen(0, step=1, sequences=0))
    written = [asyncio.create_task(append(spool, number)) for number in (1, 2)]  # the second one into another file
    await asyncio.sleep(0)
    await asyncio.sleep(0)
    time.sleep(0.3)  # noqa: ASYNC251  (the loop is busy until all three are on the disk)
    await asyncio.gather(settled, *written)
    for entry in spool.state.waiting:
        assert number_of(orjson.loads(await spool.payload(entry))) == int(entry.key)
    await spool.close()
    spool = await opened(tmp_path)
    assert [entry.key for entry in spool.state.waiting] == ["1", "2"]
    await spool.close()


async def test_a_file_whose_groups_were_settled_before_the_next_one_began_is_deleted(tmp_path):
    spool = await opened(tmp_path, segment_bytes=1)
    await register(spool)
    for number in range(4):
        await append(spool, number)
        await post(spool)
        await spool.accepted()
        await spool.seen(0, step=number + 1, sequences=0)
    assert [path.name for path in tmp_path.glob("0*.jsonl")] == ["000003.jsonl"]
    await spool.close()


async def test_a_next_file_that_cannot_be_made_ends_no_other_file(tmp_path):
    """The number of a descriptor that was closed belongs to the next one that is opened, a socket for example."""
    spool = await opened(tmp_path, segment_bytes=1)
    await append(spool, 0)
    (tmp_path / "000001.jsonl").mkdir()
    others = []
    for number in (1, 2):
        with pytest.raises(SpoolError, match=r"000001\.jsonl: cannot open for writing"):
            await append(spool, number)
        others.append((tmp_path / f"other-{number}").open("w"))
    (tmp_path / "000001.jsonl").rmdir()
    await append(spool, 3)
    await spool.close()
    for other in others:
        with other:
            other.write("still open")
        assert (tmp_path / other.name).read_text() == "still open"
    spool = await opened(tmp_path)
    assert [entry.key for entry in spool.state.waiting] == ["0", "3"]
    await spool.close()


async def test_a_lost_file_is_told(tmp_path):
    spool = await opened(tmp_path)
    await register(spool)
    await append(spool, 1)
    await post(spool)
    await spool.close()
    (tmp_path / "000000.jsonl").unlink()
    with pytest.raises(SpoolError, match="its file is gone"):
        await opened(tmp_path)


async def test_a_spool_belongs_to_one_run_with_one_set_of_settings(tmp_path):
    spool = await opened(tmp_path)
    program = (
        "import asyncio, sys; from pathlib import Path; from lachesis.training.spool import Spool\n"
        "asyncio.run(Spool(Path(sys.argv[1]), {'group_size': 2}).open())"
    )
    command = [sys.executable, "-c", program, tmp_path]
    other = await asyncio.to_thread(subprocess.run, command, capture_output=True, text=True, check=False)
    assert "another run uses" in other.stderr
    await spool.close()
    with pytest.raises(RunFolderError, match="group_size: 2 then, 4 now"):
        await Spool(tmp_path, {"group_size": 4}).open()


async def test_a_file_system_without_locks_is_not_taken_for_another_run(tmp_path, monkeypatch):
    def without_locks(*_: object) -> None:
        raise OSError(errno.ENOLCK, "No locks available")

    monkeypatch.setattr("fcntl.flock", without_locks)
    told = r"lock cannot be locked \(No locks available\); choose a folder on a file system that has flock"
    with pytest.raises(RunFolderError, match=told):
        await opened(tmp_path)
    with pytest.raises(RunFolderError, match=told):
        Ledger(tmp_path / "groups.jsonl", {}, key="item_key").open()


async def test_the_name_of_each_file_is_on_the_disk_before_a_group_in_it_counts(tmp_path, monkeypatch):
    """Else a machine that loses power keeps the groups, and the folder does not know where."""
    named: set[str] = set()

    def flush(fd: int, flush=os.fsync) -> None:
        flush(fd)
        if Path(f"/proc/self/fd/{fd}").readlink() == tmp_path:
            named.update(path.name for path in tmp_path.iterdir())

    monkeypatch.setattr(os, "fsync", flush)
    spool = await opened(tmp_path, segment_bytes=1, keep_delivered=True)
    for number in range(3):
        await append(spool, number)
        assert {path.name for path in tmp_path.glob("*.json*")} <= named
    assert {"manifest.json", "marks.jsonl", "000000.jsonl", "000002.jsonl"} <= named
    await spool.close()


@pytest.mark.parametrize("times", [1, 3])
async def test_cancelling_a_write_leaves_disk_and_memory_alike(tmp_path, monkeypatch, times):
    spool = await opened(tmp_path)
    reached, go_on = asyncio.Event(), threading.Event()
    loop = asyncio.get_running_loop()

    def flush(fd: int, flush=os.fdatasync) -> None:
        loop.call_soon_threadsafe(reached.set)
        go_on.wait()
        flush(fd)

    monkeypatch.setattr(os, "fdatasync", flush)
    task = asyncio.create_task(append(spool, 1))
    await reached.wait()
    for _ in range(times):
        task.cancel()
        await asyncio.sleep(0)
        await asyncio.sleep(0)
    go_on.set()
    with pytest.raises(asyncio.CancelledError):
        await task
    before = facts(spool)
    await spool.close()
    spool = await opened(tmp_path)
    assert facts(spool) == before
    await spool.close()
