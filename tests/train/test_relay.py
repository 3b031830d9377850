"""The relay and Atropos' rollout API: each finished group is posted at least once."""

from __future__ import annotations

import asyncio
from dataclasses import replace

import orjson
import pytest

from lachesis_train.group_encoding import compress, encode_group
from lachesis_train.outbox import Outbox
from lachesis_train.relay import OutboxRelay, RelayError
from lachesis_train.rollout_api import ApiDown, EnvDescription, RolloutApi
from tests.support.fake_serving import PACE, number_of, payload
from tests.support.stock_run_api import StockRunApi, Trainer, run_api, until

__all__ = ["run_api"]

ENV = EnvDescription("fake", max_token_length=40, group_size=2)
OTHER = EnvDescription("other", max_token_length=40, group_size=2)


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
        assert outbox.state.requeued == (0 if arrives else 3)
        await outbox.close()


@pytest.mark.parametrize("arrives", [True, False])
async def test_where_others_have_posted_since_what_the_queue_held_is_posted_again(tmp_path, arrives):
    """The API names only the last group, and it is not ours: nobody can tell what its queue holds."""
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
        assert len([line for line in reports if "1 group, so they are posted again" in line]) == 1
        assert outbox.state.requeued == 1
        if arrives:
            await trainer.take(4)
            assert sorted(number_of(group) for group in trainer.groups) == [0, 0, 1, 1000]
            foreign = {**payload(1001), "env_id": other.env_id}
            for _ in range(3):
                await theirs.info()
                await theirs.send(compress(encode_group(foreign)), connection=theirs.connection)
            await trainer.take(8)
        else:
            await trainer.take(4)
        assert {number_of(group) for group in trainer.groups} >= {0, 1, 2}
        ids = [group["group_overrides"]["group_id"] for group in trainer.groups if number_of(group) == 0]
        assert len(ids) == 1 + arrives
        assert len(set(ids)) == 1
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

        relay = OutboxRelay(api, outbox, ENV, on_refused=on_refused, report=lambda line: None, pace=PACE)
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
