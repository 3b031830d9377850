"""`serve` against Atropos' own rollout API: a finished group reaches the trainer once, whatever is killed."""

from __future__ import annotations

import asyncio
import io
import os
import random
import signal
import sqlite3
import sys
from collections import Counter
from contextlib import closing, suppress
from dataclasses import replace

import orjson
import pytest
from rich.console import Console

from lachesis.figures.item_keys import ItemError
from lachesis.loop.outcome import Outcome
from lachesis.loop.rollout import PlayedGroup, Rollout
from lachesis.runs.decisions import Kept, LeftOut
from lachesis.runs.failures import FailureBrake, RunStopped
from lachesis.settings.settings import HermesAgentEnvConfig
from lachesis_messages.tokens import TokenPrefix
from lachesis_tokens.samples.decision import ANY_TRAINER, decide_for_training
from lachesis_tokens.samples.samples import samples as token_samples
from lachesis_train.rollout_api import RolloutApi
from tests.support.fake_serving import GROUP_SIZE, PACE, Items, build, make_run, number_of, payload, play
from tests.support.small_envs import ROOT
from tests.support.stock_run_api import LIVENESS, StockRunApi, Trainer, run_api, until
from tests.support.token_trees import Tree

__all__ = ["run_api"]

GROUPS = 100
"""Of two rollouts each."""


async def started(server: StockRunApi, **options) -> Trainer:
    trainer = Trainer(server.url, batch_size=8, **options)
    await trainer.register()
    await trainer.poll()
    return trainer


async def spawn(server: StockRunApi, folder, *options: str, count: int = GROUPS):
    command = [sys.executable, "-m", "tests.support.fake_serving", server.url, str(folder), str(count), *options]
    return await asyncio.create_subprocess_exec(*command, cwd=ROOT, stdout=asyncio.subprocess.PIPE)


def once(trainer: Trainer, count: int) -> bool:
    return Counter(map(number_of, trainer.groups)) == Counter(range(count))


async def test_groups_arrive_whole_and_as_they_were_made(tmp_path, run_api):
    async with run_api.wiped() as server:
        trainer = await started(server)
        run = make_run(server.url, tmp_path, 12)
        result, _ = await asyncio.gather(run.serve(), trainer.take(12))
        assert once(trainer, 12)
        for group in trainer.groups:
            made = payload(number_of(group))
            assert {name: group[name] for name in made if name != "group_overrides"} == {
                name: value for name, value in made.items() if name != "group_overrides"
            }
            assert group["env_id"] == 0
        assert len({group["group_overrides"]["group_id"] for group in trainer.groups}) == 12
        assert (result.sent, result.waiting, result.refused, result.reward) == (12, 0, {}, 0.5)
        assert result.rollouts == 24


async def test_a_run_ends_when_nothing_is_left_to_learn(tmp_path, run_api):
    """Groups with equal rewards in a row: those since the last one that was sent, not others that are left out."""

    def rewarded(number, info):
        if number == 5:
            return build(number, info)
        if number % 2:
            return LeftOut("malformed", "", rewards=[0.0, 1.0])
        return LeftOut("same scores", "", rewards=[0.75, 0.75])

    async with run_api.wiped() as server:
        trainer = await started(server)
        run = make_run(server.url, tmp_path, 200, build=rewarded, max_equal_groups=4, workers=1)
        result, _ = await asyncio.gather(run.serve(), trainer.poll())
        assert "4 groups in a row had equal rewards, 0.750 on average" in result.reason
        assert "warm-start" not in result.reason
        assert result.refused["same scores"] == 7, "0, 2, 4, then 6, 8, 10, 12"
        assert result.sent == 1
        endless = make_run(server.url, tmp_path / "endless", 20, build=rewarded, max_equal_groups=None, workers=1)
        assert (await endless.serve()).reason == "all items are played (20 in this start)"


async def test_a_run_goes_on_while_the_trainer_makes_steps(tmp_path, run_api):
    """Another environment may feed it, and other weights may find groups easier or harder."""

    def rewarded(number, info):
        return build(number, info) if number < 4 else LeftOut("same scores", "", rewards=[0.0, 0.0])

    async with run_api.wiped() as server:
        trainer = await started(server)

        async def play_one(item, key):
            if item["number"] == 7:
                await trainer.take(4)
                await until(lambda: run.sink.step == 1)
            return await play(item, key)

        run = make_run(server.url, tmp_path, 40, build=rewarded, play=play_one, max_equal_groups=5, workers=1)
        result = await run.serve()
        assert "5 groups in a row had equal rewards" in result.reason
        assert "no rollout earned anything: `lachesis train --warm-start 64`" in result.reason
        assert result.refused["same scores"] == 8, "4, 5, 6, then a step, then 7 to 11"


async def test_kill_9_of_the_environment_loses_and_doubles_nothing(tmp_path, run_api):
    """200 rollouts; killed four times, two of them while nobody knows whether a group arrived."""
    async with run_api.wiped() as server:
        trainer = await started(server)
        taking = asyncio.create_task(trainer.take(GROUPS))
        moments = ["after", "any", "before", "any"]
        for moment in moments:
            if moment == "any":
                wanted = len(trainer.groups) + 16
                process = await spawn(server, tmp_path)
                await until(lambda wanted=wanted: len(trainer.groups) >= wanted, taking)
                await asyncio.sleep(0.05 * random.random())
                process.kill()
            else:
                process = await spawn(server, tmp_path, "--when", moment, "--at", str(random.randint(1, 9)))
            assert await asyncio.wait_for(process.wait(), LIVENESS) == -signal.SIGKILL
        assert 0 < len(trainer.groups) < GROUPS, "killed in the middle"
        process = await spawn(server, tmp_path)
        await taking
        assert await asyncio.wait_for(process.wait(), LIVENESS) == 0
        assert once(trainer, GROUPS)
        assert not await trainer.poll()


@pytest.mark.sample(1)
@pytest.mark.parametrize("moment", ["queued", "queued, trainer begins at 0", "just taken"])
async def test_an_api_that_is_killed_and_restarted_loses_nothing(tmp_path, moment):
    """What nobody has seen leave its queue is posted again: a batch that the trainer has just taken is doubled."""
    pace = replace(PACE, poll=0.4) if moment == "just taken" else PACE
    may_ask = asyncio.Event()
    may_ask.set()

    class Held(RolloutApi):
        async def _request(self, *args, **kwargs):
            await may_ask.wait()
            return await super()._request(*args, **kwargs)

    async with StockRunApi() as server:
        trainer = await started(server)
        api = Held(server.url)
        run = make_run(server.url, tmp_path, 28, api=api, max_batches_offpolicy=2, pace=pace)
        state = run.sink.outbox.state
        task = asyncio.create_task(run.serve())
        for killed in range(1, 3):
            await trainer.take(8 * killed)
            # A whole batch lies in its memory, and the environment has seen the one before leave.
            await until(lambda: state.known.step == trainer.steps and state.in_api.total() == 8, task)
            if moment == "just taken":
                may_ask.clear()
                assert await trainer.poll(), "which the environment will not have seen"
            server.kill()
            may_ask.set()
            await server.start()
            await trainer.register(starting_step=0 if "0" in moment else len(trainer.batches))
        doubled = 8 if moment == "just taken" else 0
        await trainer.take(28 + doubled)
        result = await task
        counts = Counter(map(number_of, trainer.groups))
        assert set(counts) == set(range(28))
        assert (result.requeued, counts.total() - len(counts)) == (8, doubled)


@pytest.mark.long
async def test_environment_and_api_killed_together(tmp_path):
    async with StockRunApi() as server:
        trainer = await started(server)
        process = await spawn(server, tmp_path, count=40)
        await trainer.take(16)
        await asyncio.sleep(0.3)
        process.kill()
        server.kill()
        await process.wait()
        await server.start()
        await trainer.register(starting_step=len(trainer.batches))
        process = await spawn(server, tmp_path, count=40)
        await trainer.take(40)
        assert await asyncio.wait_for(process.wait(), LIVENESS) == 0
        assert once(trainer, 40)


async def test_rollouts_go_on_while_the_api_is_down_and_a_late_trainer_is_waited_for(tmp_path):
    server = StockRunApi()
    run = make_run(server.url, tmp_path, 8)
    task = asyncio.create_task(run.serve())
    await until(lambda: run.sink.relay.trouble, task)
    assert server.url in run.sink.relay.trouble
    try:
        await server.start()
        await until(lambda: "no trainer" in run.sink.relay.trouble, task)
        trainer = Trainer(server.url, batch_size=8)
        await trainer.register()
        await until(lambda: "first batch" in run.sink.relay.trouble, task)
        assert not run.groups
        await trainer.take(8)
        await task
        assert once(trainer, 8)
    finally:
        server.kill()


async def test_a_clean_stop_leaves_and_the_next_start_goes_on(tmp_path, run_api):
    """What lies in the API's queue when the only environment disconnects is neither lost nor posted again."""
    async with run_api.wiped() as server:
        trainer = await started(server)
        process = await spawn(server, tmp_path, count=40)
        await trainer.take(8)
        process.send_signal(signal.SIGTERM)
        out, _ = await asyncio.wait_for(process.communicate(), LIVENESS)
        assert process.returncode == 0
        sent, waiting, reason = out.split()
        assert reason == b"SIGTERM"
        assert int(sent) + int(waiting) < 40
        with closing(sqlite3.connect(tmp_path / "spool/outbox.db")) as database:
            (known,) = database.execute("SELECT value FROM facts WHERE name = 'api'").fetchone()
        assert orjson.loads(known)["connected"] is False
        process = await spawn(server, tmp_path, count=40)
        await trainer.take(40)
        assert await asyncio.wait_for(process.wait(), LIVENESS) == 0
        assert once(trainer, 40)


async def test_a_group_that_finishes_while_the_trainer_is_away_is_kept(tmp_path, run_api):
    class Reset(RolloutApi):
        resets = 0

        async def info(self):
            answer = await super().info()
            self.resets -= 1
            return None if self.resets >= 0 else answer

    finish = asyncio.Event()

    async def slow(item, key):
        await finish.wait()
        return item["number"]

    async with run_api.wiped() as server:
        trainer = await started(server)
        api = Reset(server.url)
        run = make_run("", tmp_path, 4, api=api, play=slow)
        task = asyncio.create_task(run.serve())
        await until(lambda: len(run._playing) == 4, task)
        api.resets = 3
        await api.close()  # on a new connection it asks who the trainer is
        await until(lambda: run.sink.relay.trouble, task)
        finish.set()
        await trainer.take(4)
        await task
        assert once(trainer, 4)


async def test_in_flight_groups_finish_in_the_grace_period_and_others_are_cancelled_and_release(tmp_path, run_api):
    released = []

    async def slow(item, key):
        try:
            await asyncio.sleep(0.5 if item["number"] % 2 else 3600)
            return item["number"]
        finally:
            released.append(item["number"])

    async with run_api.wiped() as server:
        await started(server)
        run = make_run(server.url, tmp_path, 6, play=slow, grace_period=5, workers=6)
        task = asyncio.create_task(run.serve())
        await until(lambda: len(run._playing) == 6, task)
        os.kill(os.getpid(), signal.SIGTERM)
        result = await asyncio.wait_for(task, LIVENESS)
        assert result.reason == "SIGTERM"
        assert result.sent + result.waiting == 3
        assert sorted(released) == list(range(6))


async def test_signals_during_the_final_flush_do_not_end_the_process_before_its_cleanup(tmp_path, run_api):
    class Leaving(RolloutApi):
        async def disconnect(self, *args, **kwargs):
            assert callable(signal.getsignal(signal.SIGTERM)), "a signal would end this process"
            os.kill(os.getpid(), signal.SIGTERM)
            await asyncio.sleep(0.2)
            await super().disconnect(*args, **kwargs)
            left.append(True)

    left: list[bool] = []
    async with run_api.wiped() as server:
        await started(server)
        after = asyncio.Event()

        async def command() -> None:
            task = asyncio.current_task()
            assert task is not None
            asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, task.cancel)
            result = await make_run(server.url, tmp_path, 3, api=Leaving(server.url)).serve()
            assert result.reason and left == [True]
            after.set()
            await asyncio.sleep(LIVENESS)

        interrupted = signal.getsignal(signal.SIGINT)
        running = asyncio.create_task(command())
        try:
            await until(after.is_set, running)
            assert signal.getsignal(signal.SIGINT) == interrupted
            os.kill(os.getpid(), signal.SIGTERM)
            with pytest.raises(asyncio.CancelledError):
                await running
        finally:
            asyncio.get_running_loop().remove_signal_handler(signal.SIGTERM)


async def test_groups_on_their_way_are_bounded_and_none_is_cancelled_for_it(tmp_path, run_api):
    begun, cancelled = [], []

    async def counted(item, key):
        begun.append(item["number"])
        try:
            return await play(item, key)
        except asyncio.CancelledError:
            cancelled.append(item["number"])
            raise

    async with run_api.wiped() as server:
        trainer = await started(server)
        run = make_run(server.url, tmp_path, 100, play=counted, workers=50, max_batches_offpolicy=3)
        task = asyncio.create_task(run.serve())
        await until(lambda: run.sink.outbox.state.undelivered == 12, task)
        await asyncio.sleep(1.0)
        assert len(begun) == 12, "three batches of four groups"
        await trainer.take(4)
        await until(lambda: run.sink.outbox.state.undelivered == 12 and run.sink.outbox.state.delivered == 4, task)
        assert len(begun) == 16
        run.stop("enough")
        await task
        assert not cancelled


async def test_every_evaluation_boundary_counts_once_also_when_steps_jump(tmp_path, run_api):
    seen = []
    async with run_api.wiped() as server:
        trainer = await started(server, num_steps=9)

        async def evaluate():
            step = run.sink.outbox.state.known.step
            await asyncio.sleep(0.1)
            seen.append(step)

        run = make_run(
            server.url, tmp_path, 1000, steps_per_eval=3, window=3, max_batches_offpolicy=3, evaluate=evaluate
        )
        task = asyncio.create_task(run.serve())
        for jump in range(3):  # the API forms three batches at once: 0, 3, 6, 9
            await until(lambda: run.sink.outbox.state.in_api.total() == 24, task)
            await trainer.take(4 + 12 * jump)
            if jump < 2:
                await until(lambda jump=jump: run.sink.outbox.state.known.step == 3 * (jump + 1), task)
            await trainer.take(12 + 12 * jump)
        result = await asyncio.wait_for(task, LIVENESS)
        assert seen == [3, 6, 9]
        assert result.reason == "the trainer has made 9 of 9 steps"


async def test_an_evaluation_stops_training_if_it_is_told_to(tmp_path, run_api):
    for handling, plays_on in (("STOP_TRAIN", False), ("NONE", True)):
        evaluating, go_on = asyncio.Event(), asyncio.Event()

        async def evaluate(evaluating=evaluating, go_on=go_on):
            evaluating.set()
            await go_on.wait()

        async with run_api.wiped() as server:
            trainer = await started(server)
            run = make_run(
                server.url,
                tmp_path / handling,
                1000,
                steps_per_eval=1,
                eval_handling=handling,
                max_batches_offpolicy=4,
                evaluate=evaluate,
            )
            task = asyncio.create_task(run.serve())
            await trainer.take(4)
            await until(evaluating.is_set, task)
            await until(lambda run=run: not run._playing and not run._drawing, task)
            before = run.groups
            await trainer.take(8)
            if plays_on:
                await until(lambda run=run, before=before: run.groups > before, task)
            else:
                await asyncio.sleep(0.5)
                assert run.groups == before
            go_on.set()
            await until(lambda run=run, before=before: run.groups > before, task)
            run.stop("enough")
            await task


async def test_what_is_not_sent_is_written_down_with_the_reason(tmp_path, run_api):
    def decide(number, info):
        made = build(number, info)
        if number == 0:
            return LeftOut("same scores", "all 2 rewards are 1", tokens=70, rewards=[1.0, 1.0], record={"why": "x"})
        if number == 1:
            return Kept({**made.content, "messages": [[{"role": "user"}]] * 2}, tokens=76)
        if number == 2:
            return Kept({**made.content, "scores": [0.0, float("nan")]}, tokens=76)
        return made

    async with run_api.wiped() as server:
        trainer = await started(server)
        run = make_run(server.url, tmp_path, 7, build=decide)
        result, _ = await asyncio.gather(run.serve(), trainer.take(4))
        assert sorted(map(number_of, trainer.groups)) == [3, 4, 5, 6]
        assert result.refused == {"same scores": 1, "refused by the rollout API": 1, "malformed": 1}
        assert result.undelivered_tokens == 70 + 76 + 76
        lines = [orjson.loads(line) for line in (tmp_path / "groups.refused.jsonl").read_bytes().splitlines()]
        by_reason = {line["reason"].split(":")[0]: line for line in lines}
        assert by_reason["same scores"]["detail"] == "all 2 rewards are 1"
        assert by_reason["same scores"]["why"] == "x"
        assert "not finite" in by_reason["malformed"]["detail"]
        set_aside = by_reason["the rollout API answered 422"]
        assert "content" in set_aside["reason"]
        assert set_aside["group"]["tokens"] == payload(1)["tokens"]
        # A second start neither plays nor counts them again.
        result = await make_run(server.url, tmp_path, 7, build=decide).serve()
        assert (result.groups, sum(result.refused.values())) == (0, 3)


async def test_why_groups_are_not_sent_is_told_once_a_reason(tmp_path, run_api):
    def decide(number, info):
        if number % 2:
            return LeftOut("unproven", f"rollout {number}: turn 0 goes on after its end-of-turn token")
        return LeftOut("same scores", f"all 2 rewards are {number}")

    console = Console(file=io.StringIO(), width=1000)
    async with run_api.wiped() as server:
        await started(server)
        result = await make_run(server.url, tmp_path, 8, build=decide, console=console).serve()
    assert result.refused == {"unproven": 4, "same scores": 4}
    said = [line for line in console.file.getvalue().splitlines() if "is not sent" in line]
    assert len(said) == 2
    assert any("unproven: rollout " in line and "goes on after its end-of-turn token" in line for line in said)
    assert all("groups.refused.jsonl" in line for line in said)


async def test_when_no_group_is_sent_any_more_a_line_says_so_and_why(tmp_path, run_api):
    console = Console(file=io.StringIO(), width=1000)
    async with run_api.wiped() as server:
        await started(server)

        def decide(number, info):
            if number == 15:
                return build(number, info)
            return LeftOut("same scores", "all 2 rewards are 1; env.ensure_scores_are_not_same allows it")

        await make_run(server.url, tmp_path, 16 + 16 + 16, build=decide, console=console, workers=1).serve()
    said = [line for line in console.file.getvalue().splitlines() if "in a row" in line]
    assert [line.split()[0] for line in said] == ["16", "32"]
    assert all("the trainer waits" in line and "env.ensure_scores_are_not_same" in line for line in said)


@pytest.mark.slow
async def test_broken_infrastructure_costs_no_item(tmp_path, run_api):
    down, tries = True, Counter()

    async def flaky(item, key):
        tries[item["number"]] += 1
        if down:
            raise ConnectionError("the model server is gone")
        if item["number"] == 5:
            raise RuntimeError("this item breaks its sandbox")
        return await play(item, key)

    async with run_api.wiped() as server:
        trainer = await started(server)
        run = make_run(server.url, tmp_path, 17, play=flaky, workers=4)
        task = asyncio.create_task(run.serve())
        await until(lambda: tries.total() > 4, task)
        assert len(run._playing) <= 1
        down = False
        result, _ = await asyncio.gather(task, trainer.take(16))
        assert sorted(map(number_of, trainer.groups)) == [number for number in range(17) if number != 5]
        assert result.refused == {"failed": 1}
        assert b"breaks its sandbox" in (tmp_path / "groups.refused.jsonl").read_bytes()


async def test_a_group_that_hangs_holds_no_other_up_after_an_outage(tmp_path, run_api):
    """After three failures in a row one group at a time is tried; the hung one is still in flight then."""
    failed = Counter()

    async def play_item(item, key):
        if item["number"] == 0:
            await asyncio.sleep(3600)
        failed[item["number"]] += 1
        if failed.total() <= 3:
            raise ConnectionError("the server restarts")
        return await play(item, key)

    async with run_api.wiped() as server:
        trainer = await started(server)
        run = make_run(server.url, tmp_path, 5, play=play_item, workers=4, grace_period=0.0)
        task = asyncio.create_task(run.serve())
        await trainer.take(4)
        run.stop("enough")
        await task
        assert sorted(number_of(group) for group in trainer.groups) == [1, 2, 3, 4]


async def test_what_was_sampled_in_vain_is_counted_whatever_becomes_of_the_item(tmp_path, run_api):
    times = Counter()

    def decide(number, info):
        times[number] += 1
        if times[number] == 1 or number == 2:
            return LeftOut("incomplete", "the sandbox was lost", tokens=100, again=True)
        return build(number, info) if number != 1 else LeftOut("same scores", "all are 0", tokens=10)

    async with run_api.wiped() as server:
        trainer = await started(server)
        run = make_run(server.url, tmp_path, 10, build=decide, workers=2)
        result, _ = await asyncio.gather(run.serve(), trainer.take(8))
        assert result.refused == {"same scores": 1, "failed": 1}
        lines = [orjson.loads(line) for line in (tmp_path / "groups.refused.jsonl").read_bytes().splitlines()]
        of_two = 100 * times[2]
        assert {line["reason"]: line["tokens"] for line in lines} == {"same scores": 110, "failed": of_two}
        of_sent = sum(entry.undelivered for queue in run.sink.outbox.state.accepted.values() for entry in queue)
        assert result.undelivered_tokens + of_sent == 110 + of_two + 8 * 100


async def test_a_group_that_takes_too_long_is_ended_and_named(tmp_path, run_api):
    async def stuck(item, key):
        return await play(item, key) if item["number"] else await asyncio.sleep(3600)

    async with run_api.wiped() as server:
        trainer = await started(server)
        run = make_run(server.url, tmp_path, 5, play=stuck, timeout=4)
        result, _ = await asyncio.gather(run.serve(), trainer.take(4))
        assert result.refused == {"worker timeout": 1}


@pytest.mark.parametrize(("broken", "problem"), [(True, "KeyError: 'my-bug'"), (False, "longer than 0.1 s; see env")])
async def test_groups_that_fail_without_end_end_the_run(tmp_path, run_api, broken, problem):
    async def fails(item: dict[str, int], key: str) -> int:
        if not broken:
            await asyncio.sleep(100)
        async with asyncio.TaskGroup() as tasks:
            tasks.create_task(bug())
        return 0

    async def bug() -> None:
        raise KeyError("my-bug")

    async with run_api.wiped() as server:
        await started(server)
        console = Console(file=io.StringIO(), width=200)
        run = make_run(server.url, tmp_path, 60, play=fails, timeout=0.1, console=console, workers=1)
        run.brake = FailureBrake(console, 3)
        with pytest.raises(RunStopped, match=f"3 groups in a row without a scored rollout(.|\n)*{problem}"):
            await asyncio.wait_for(run.serve(), LIVENESS)
        assert not broken or console.file.getvalue().count("exception in the environment") == 1


async def test_a_group_that_catches_its_time_limit_is_not_sent(tmp_path, run_api):
    async def catching(item: dict[str, int], key: str) -> int:
        with suppress(BaseException):
            await asyncio.sleep(100)
        return item["number"]

    async with run_api.wiped() as server:
        await started(server)
        result = await make_run(server.url, tmp_path, 2, play=catching, timeout=0.1).serve()
    assert result.refused == {"worker timeout": 2}
    assert result.sent == 0


async def test_an_error_that_ends_the_run_loses_no_finished_group(tmp_path, run_api):
    async def refused_key(item, key):
        if item["number"] == 3:
            await until(lambda: run.sink.outbox.state.undelivered == 3)
            raise RunStopped("the model server refuses the key")
        return await play(item, key)

    async with run_api.wiped() as server:
        trainer = await started(server)
        run = make_run(server.url, tmp_path, 4, play=refused_key)
        with pytest.raises(RunStopped, match="refuses the key"):
            await run.serve()
        run = make_run(server.url, tmp_path, 4)
        await asyncio.gather(run.serve(), trainer.take(4))
        assert once(trainer, 4)


async def test_an_environment_that_cannot_give_an_item_ends_the_run(tmp_path, run_api):
    items = Items(6)

    async def broken_at_the_seventh():
        item = await items()
        if item is None:
            raise LookupError("row 7 of the dataset is broken")
        return item

    async def gives_objects():
        return object()

    async with run_api.wiped() as server:
        await started(server)
        run = make_run(server.url, tmp_path, 0, next_item=broken_at_the_seventh)
        with pytest.raises(LookupError, match="row 7"):
            await asyncio.wait_for(run.serve(), LIVENESS)
        run = make_run(server.url, tmp_path, 0, next_item=gives_objects)
        with pytest.raises(ItemError, match="object"):
            await asyncio.wait_for(run.serve(), LIVENESS)


async def test_a_wrong_address_is_told(tmp_path, run_api):
    async with run_api.wiped() as server:
        run = make_run("", tmp_path, 4, api=RolloutApi(f"{server.url}/elsewhere"))
        with pytest.raises(RunStopped, match="rollout_server_url"):
            await run.serve()


async def test_split_groups_are_refused_before_the_first_at_an_api_that_would_hand_out_none(tmp_path, run_api):
    async with run_api.wiped() as server:
        with pytest.raises(RunStopped, match=r"split_rollouts all makes groups .* Set --env.split_rollouts final"):
            await asyncio.wait_for(make_run(server.url, tmp_path, 3, split_rollouts="all").serve(), LIVENESS)
        assert (await Trainer(server.url, batch_size=4).ask("GET", "/status"))["queue_size"] == 0


async def test_a_min_batch_allocation_is_kept_free_for_others_and_told_to_the_api(tmp_path, run_api):
    async with run_api.wiped() as server:
        trainer = await started(server)
        run = make_run(server.url, tmp_path, 4, max_staleness=0)
        run.sink.relay.env = run.sink.env = run.sink.env.__class__(
            "fake", 40, GROUP_SIZE, weight=2.0, min_batch_allocation=0.5
        )
        task = asyncio.create_task(run.serve())
        await until(lambda: run.sink.relay.status is not None, task)
        assert run.sink.relay.status.unallocated_fraction == 0.5
        await trainer.take(4)
        await task


async def test_on_group_and_on_step_hear_of_everything(tmp_path, run_api):
    groups, steps = [], []

    async def on_group(group, decision):
        groups.append((group, type(decision)))

    async def on_step(step):
        steps.append(step)

    async with run_api.wiped() as server:
        trainer = await started(server, num_steps=2)
        run = make_run(server.url, tmp_path, 8, on_group=on_group, on_step=on_step)
        await asyncio.gather(run.serve(), trainer.take(8))
        assert sorted(groups) == [(number, Kept) for number in range(8)]
        assert steps[-1] in (1, 2)
        assert steps == sorted(set(steps))


def test_refused_groups_keep_the_builders_words():
    def rollout(name, tokens):
        tree = Tree()
        tree.sample(TokenPrefix([1, 2]), [4] * tokens)

        class Sampled(Rollout):
            samples = token_samples(tree, rollout_id=name)

        return Sampled(name, "key", 0, Outcome.COMPLETED, "the model answered", 1.0, result=None)

    group = PlayedGroup({"number": 0}, "key", [], [rollout("a", 30), rollout("b", 40)])
    decision = decide_for_training(group, HermesAgentEnvConfig(group_size=2), ANY_TRAINER)
    assert (decision.reason, decision.tokens, decision.again) == ("same scores", 70, False)
    assert decision.detail == "all 2 rewards are 1; env.ensure_scores_are_not_same allows it"


def test_the_fake_environment_is_what_it_says():
    assert PACE.poll < 5
    assert number_of(payload(3)) == 3
    assert asyncio.run(Items(1)()) == {"number": 0}
