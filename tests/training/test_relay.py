"""The conclusions from the answers of the stock API, and whether they hold for the stock API itself."""

from __future__ import annotations

import asyncio
from dataclasses import replace

import orjson
import pytest
from hypothesis import given
from hypothesis import strategies as st

from lachesis_train.outbox import Outbox
from lachesis_train.outbox_state import POSTING, Entry, KnownApi
from lachesis_train.reconcile import PostResult, result_of_post, taken_unseen, was_restarted
from lachesis_train.relay import OutboxRelay, RelayError
from lachesis_train.rollout_api import ApiDown, EnvDescription, EnvStatus, Latest, RolloutApi, compress, encode_group
from tests.support.fake_serving import PACE, number_of, payload
from tests.support.stock_run_api import StockRunApi, Trainer, run_api, until

__all__ = ["run_api"]

ENV = EnvDescription("fake", max_token_length=40, group_size=2)
OTHER = EnvDescription("other", max_token_length=40, group_size=2)
KNOWN = KnownApi(env_id=1, env=ENV, batch_size=8, step=5, alone=True, last_group_id="last", largest=2)
IN_DOUBT = Entry(seq=9, group_id="doubt", key="9", sequences=2, tokens=1, state=POSTING, env_id=1)
STATUS = EnvStatus(5, 3, 3, 1.0, 0.5)
OURS, THEIRS = Latest(1, "last", False), Latest(0, "theirs", False)


def entries(count: int, sequences: int = 2):
    return [Entry(seq=at, group_id=str(at), key=str(at), sequences=sequences, tokens=1) for at in range(count)]


@pytest.mark.parametrize(
    ("status", "latest", "restarted"),
    [
        (STATUS, OURS, False),
        (STATUS, THEIRS, False),
        (STATUS, Latest(1, "doubt", False), False),
        (replace(STATUS, current_step=6, self_queue_size=0), OURS, False),
        (replace(STATUS, current_step=4), OURS, True),  # steps never go back
        (replace(STATUS, self_queue_size=2), OURS, True),  # groups left without a batch
        (replace(STATUS, current_step=6, self_queue_size=5), OURS, True),  # more than we posted
        (STATUS, Latest(None, None, True), True),  # a process that has received nothing
        (STATUS, Latest(1, "theirs", False), True),  # somebody else has our number
    ],
)
def test_a_restarted_api_gives_itself_away(status, latest, restarted):
    assert was_restarted(KNOWN, status, latest, held=6, in_doubt=IN_DOUBT) is restarted


@pytest.mark.parametrize(
    ("status", "latest", "result"),
    [
        (STATUS, Latest(1, "doubt", False), PostResult.ARRIVED),
        (replace(STATUS, current_step=7, self_queue_size=0), Latest(1, "doubt", False), PostResult.ARRIVED),
        (STATUS, OURS, PostResult.ABSENT),
        (replace(STATUS, current_step=7, self_queue_size=0), OURS, PostResult.ABSENT),
        (STATUS, THEIRS, PostResult.ABSENT),  # others have posted since; our part of the queue has not grown
        (replace(STATUS, self_queue_size=4), THEIRS, PostResult.ARRIVED),
        (replace(STATUS, current_step=6, self_queue_size=1), THEIRS, PostResult.UNKNOWN),
    ],
)
def test_the_fate_of_an_unanswered_post(status, latest, result):
    assert result_of_post(IN_DOUBT, KNOWN, status, latest, held=6) is result


def test_a_group_of_another_size_may_be_held_back_where_nobody_sees_it():
    odd = replace(IN_DOUBT, sequences=1)
    assert result_of_post(odd, KNOWN, STATUS, OURS, held=6) is PostResult.UNKNOWN
    assert result_of_post(odd, KNOWN, STATUS, Latest(1, "doubt", False), held=6) is PostResult.ARRIVED


@pytest.mark.parametrize(
    ("starting_step", "alone", "taken"),
    [
        (5, True, 0),
        (6, True, 4),  # a batch of 8 sequences: 4 groups of 2
        (7, True, 0),  # more than there was: these steps count something else
        (0, True, 0),  # a trainer that begins anew says nothing
        (6, False, 0),  # the batch may have been of others' groups
    ],
)
def test_how_many_groups_a_dead_api_had_handed_out(starting_step, alone, taken):
    assert taken_unseen(entries(5), replace(KNOWN, alone=alone), starting_step) == taken


@given(st.integers(0, 12), st.integers(-3, 6), st.integers(1, 4))
def test_never_more_than_there_was_is_taken_for_handed_out(count, steps, sequences):
    taken = taken_unseen(entries(count, sequences), KNOWN, KNOWN.step + steps)
    assert 0 <= taken <= count
    assert taken * sequences <= max(0, steps) * KNOWN.batch_size + sequences - 1


class CutOff(RolloutApi):
    """Loses the answers to posts, after they were taken or before they are sent."""

    def __init__(self, url: str, fates: list[bool]) -> None:
        super().__init__(url)
        self.fates = fates

    async def send(self, body: bytes, *, connection: int) -> int:
        if not self.fates:
            return await super().send(body, connection=connection)
        if self.fates.pop(0):
            await super().send(body, connection=connection)
        await self.close()
        raise ApiDown(self.url, "cut off")


async def nobody(*_):
    raise AssertionError("nothing is to be refused")


async def delivered(api: RolloutApi, outbox: Outbox, condition, *, env=ENV, report=lambda line: None):
    """Run a relay until the condition is true."""
    relay = OutboxRelay(api, outbox, env, on_refused=nobody, report=report, pace=PACE)
    task = asyncio.create_task(relay.run())
    await until(condition, task)
    relay.stop()
    await task
    return relay


@pytest.mark.parametrize("arrives", [True, False])
async def test_an_unanswered_post_is_neither_lost_nor_doubled(tmp_path, arrives):
    async with StockRunApi() as server:
        trainer = Trainer(server.url, batch_size=8)
        await trainer.register()
        await trainer.poll()
        outbox = Outbox(tmp_path, {})
        await outbox.open()
        for number in range(4):
            await outbox.append(payload(number), key=str(number), tokens=76)
        async with CutOff(server.url, [arrives, arrives, arrives]) as api:
            await delivered(api, outbox, lambda: not outbox.state.unsent)
        await trainer.take(4)
        assert [number_of(group) for group in trainer.groups] == [0, 1, 2, 3]
        assert not await trainer.poll()
        assert outbox.state.maybe_doubled == 0
        await outbox.close()


@pytest.mark.parametrize("arrives", [True, False])
async def test_other_environments_do_not_hide_the_fate_of_a_post(tmp_path, arrives):
    """While the trainer takes nothing, the length of the queue shows it."""
    async with StockRunApi() as server, RolloutApi(server.url) as theirs:
        trainer = Trainer(server.url, batch_size=8)
        await trainer.register()
        await trainer.poll()
        other = await theirs.register(OTHER)

        class Interrupted(CutOff):
            async def send(self, body, *, connection):
                try:
                    return await super().send(body, connection=connection)
                except ApiDown:
                    foreign = {**payload(1000), "env_id": other.env_id}
                    await theirs.info()
                    await theirs.send(compress(encode_group(foreign)), connection=theirs.connection)
                    raise

        outbox = Outbox(tmp_path, {})
        await outbox.open()
        for number in range(3):
            await outbox.append(payload(number), key=str(number), tokens=76)
        reports: list[str] = []
        async with Interrupted(server.url, [arrives]) as api:
            await delivered(api, outbox, lambda: not outbox.state.unsent, report=reports.append)
        assert [report.partition(": ")[0] for report in reports if "group_overrides.group_id" in report] == [
            f"another environment is registered at {server.url}"
        ]
        await trainer.take(4)
        assert sorted(number_of(group) for group in trainer.groups) == [0, 1, 2, 1000]
        assert outbox.state.maybe_doubled == 0
        await outbox.close()


async def test_an_api_that_fails_over_one_group_does_not_hold_up_the_others(tmp_path):
    class Failing(RolloutApi):
        async def send(self, body, *, connection):
            if b"poison" in encodings[body]:
                raise ApiDown(self.url, "/scored_data answered 500", status=500)
            return await super().send(body, connection=connection)

    class Watched(Outbox):
        async def body(self, entry, env_id):
            body = await super().body(entry, env_id)
            encodings[body] = await self.payload(entry)
            return body

    encodings: dict[bytes, bytes] = {}
    refused = []
    async with StockRunApi() as server, Failing(server.url) as api:
        trainer = Trainer(server.url, batch_size=4)
        await trainer.register()
        await trainer.poll()
        outbox = Watched(tmp_path, {})
        await outbox.open()
        await outbox.append({**payload(1), "generation_params": {"x": "poison"}}, key="1", tokens=76)
        await outbox.append(payload(2), key="2", tokens=76)
        await outbox.append(payload(3), key="3", tokens=76)

        async def on_refused(entry, reason):
            refused.append((entry.key, reason))

        relay = OutboxRelay(
            api, outbox, ENV, on_refused=on_refused, report=lambda line: None, pace=replace(PACE, settle=0.0)
        )
        task = asyncio.create_task(relay.run())
        await trainer.take(2)
        relay.stop()
        await task
        assert [key for key, _ in refused] == ["1"]
        assert "500" in refused[0][1]
        assert [number_of(group) for group in trainer.groups] == [2, 3]
        await outbox.close()


@pytest.mark.parametrize(
    ("env", "reason"),
    [
        (replace(ENV, weight=-1.0), "inference_weight above 0"),
        (replace(ENV, group_size=16), "larger than the trainer's batch_size 8"),
    ],
)
async def test_settings_that_cannot_work_are_reported(tmp_path, run_api, env, reason):
    async with run_api.wiped() as server, RolloutApi(server.url) as api:
        trainer = Trainer(server.url, batch_size=8)
        await trainer.register()
        await trainer.poll()
        outbox = Outbox(tmp_path, {})
        await outbox.open()
        with pytest.raises(RelayError, match=reason):
            await delivered(api, outbox, lambda: False, env=env)
        await outbox.close()


async def test_no_more_than_a_batch_lies_at_the_api_and_it_goes_out_in_order(tmp_path, run_api):
    async with run_api.wiped() as server, RolloutApi(server.url) as api:
        trainer = Trainer(server.url, batch_size=8)
        await trainer.register()
        await trainer.poll()
        outbox = Outbox(tmp_path, {})
        await outbox.open()
        for number in range(20):
            await outbox.append(payload(number), key=str(number), tokens=76)
        relay = OutboxRelay(api, outbox, ENV, on_refused=nobody, report=lambda line: None, pace=PACE)
        task = asyncio.create_task(relay.run())
        for batch in range(5):
            await until(lambda batch=batch: outbox.state.in_api.total() == 8 and outbox.state.known.step == batch, task)
            await asyncio.sleep(4 * PACE.poll)
            assert (await trainer.ask("GET", "/status"))["queue_size"] == 4
            assert await trainer.poll()
            assert [number_of(group) for group in trainer.batches[batch]] == list(range(4 * batch, 4 * batch + 4))
        relay.stop()
        await task
        assert orjson.dumps(trainer.groups[3]["tokens"]) == orjson.dumps(payload(3)["tokens"])
        await outbox.close()


async def test_a_start_with_another_weight_takes_its_own_place_over(tmp_path):
    async with StockRunApi() as server:
        trainer = Trainer(server.url, batch_size=8)
        await trainer.register()
        await trainer.poll()
        outbox = Outbox(tmp_path, {})
        await outbox.open()
        for number in range(2):
            await outbox.append(payload(number), key=str(number), tokens=76)
        async with RolloutApi(server.url) as api:
            await delivered(api, outbox, lambda: not outbox.state.unsent, env=replace(ENV, min_batch_allocation=0.75))
        for number in range(2, 4):
            await outbox.append(payload(number), key=str(number), tokens=76)
        async with RolloutApi(server.url) as api:
            relay = await delivered(api, outbox, lambda: not outbox.state.unsent)
            assert outbox.state.known.env_id == 1
            assert (await api.status_env(1)).unallocated_fraction == 1.0, "no batch waits for the old registration"
            assert outbox.state.in_api == {0: 4, 1: 4}
            await trainer.take(4)
            assert relay.status.env_weight == 1.0, "and no other environment is reported"
            await delivered(api, outbox, lambda: outbox.state.delivered == 4)
        assert sorted(number_of(group) for group in trainer.groups) == [0, 1, 2, 3]
        await outbox.close()


async def test_a_connection_that_does_not_last_is_reported(tmp_path):
    """A proxy that hangs up after each answer: no group can be posted where its process is known."""

    class Hasty(RolloutApi):
        async def _request(self, *args, **kwargs):
            answer = await super()._request(*args, **kwargs)
            await self.close()
            return answer

    reports = []
    async with StockRunApi() as server, Hasty(server.url) as api:
        trainer = Trainer(server.url, batch_size=8)
        await trainer.register()
        await trainer.poll()
        outbox = Outbox(tmp_path, {})
        await outbox.open()
        await outbox.append(payload(1), key="1", tokens=76)
        reason = "does not keep connections alive"
        await delivered(api, outbox, lambda: any(reason in report for report in reports), report=reports.append)
        assert outbox.state.unsent == 1
        await outbox.close()
