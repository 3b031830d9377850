"""`lachesis api` in a process of its own: the stock wire beside the stock server, and the extension."""

from __future__ import annotations

import asyncio
import base64
import gzip
import json
import re
import sys
import zlib
from dataclasses import replace
from pathlib import Path
from typing import Any, ClassVar

import aiohttp
import pytest

from lachesis_testing.fake_server import FakeServer, RandomWords
from lachesis_train.api import ApiSettings, RolloutApiServer
from lachesis_train.api.store import StoreError
from lachesis_train.group_encoding import compress, encode_group
from lachesis_train.outbox import Outbox
from lachesis_train.relay import OutboxRelay, RelayError
from lachesis_train.rollout_api import INSTANCE_HEADER, ApiDown, ApiRefused, EnvDescription, RolloutApi
from tests.support.fake_serving import PACE, number_of, payload
from tests.support.own_api import AcknowledgingTrainer, OwnApi, own_api
from tests.support.recipes import shown
from tests.support.stock_run_api import StockRunApi, Trainer, run_api, until
from tests.support.training_runs import serving, with_tokens

__all__ = ["own_api", "run_api"]

ENV = EnvDescription("fake", max_token_length=40, group_size=2)


async def ask(url: str, method: str, path: str, **request: Any) -> tuple[int, Any]:
    """The status and the body, as JSON if it is JSON."""
    async with aiohttp.ClientSession() as session, session.request(method, url + path, **request) as answer:
        text = await answer.text()
        try:
            return answer.status, json.loads(text)
        except ValueError:
            return answer.status, text


def named(number: int, *, sequences: int = 2, **overrides: Any) -> dict[str, Any]:
    return {
        **payload(number, group_size=sequences),
        "env_id": 0,
        "group_overrides": {"group_id": str(number), **overrides},
    }


async def post(url: str, *groups: dict[str, Any]) -> list[Any]:
    return [(await ask(url, "POST", "/scored_data", json=group))[1] for group in groups]


def sizes(batch: list[dict[str, Any]]) -> list[int]:
    return [len(group["tokens"]) for group in batch]


async def conversation(url: str) -> list[Any]:
    """Every route of the stock API, with all that is not random in the answers."""
    trainer = Trainer(url, batch_size=8, num_steps=5)
    env = {"max_token_length": 40, "desired_name": "one", "weight": 1.0, "group_size": 2}
    said = [
        await ask(url, "GET", "/info"),
        await ask(url, "GET", "/wandb_info"),
        await ask(url, "GET", "/status"),
        await ask(url, "POST", "/register-env", json=env),
        await ask(url, "POST", "/register", json={"batch_size": 1}),
    ]
    status, registered = await ask(url, "POST", "/register", json=trainer.registration(3))
    assert registered["uuid"] > 2**64
    said += [status, list(registered), await ask(url, "POST", "/register-env", json=env)]
    said += [await ask(url, "GET", path) for path in ("/batch", "/info", "/wandb_info", "/status")]
    for changes in ({}, {}, {"desired_name": "two", "weight": 0.5, "min_batch_allocation": 0.25}):
        said.append(await ask(url, "POST", "/register-env", json={**env, **changes}))
    group = {**payload(1), "env_id": 0, "overrides": [{"a": "ü"}, {}], "unknown": 1}
    zipped = {"data": gzip.compress(json.dumps(group).encode()), "headers": {"Content-Encoding": "gzip"}}
    zipped["headers"]["Content-Type"] = "application/json"
    said.append(await ask(url, "POST", "/scored_data", **zipped))
    said.append(
        await ask(url, "POST", "/scored_data_list", json=[{**payload(2), "env_id": 2}, {**payload(3), "env_id": 1}])
    )
    said += [await ask(url, "GET", "/latest_example"), await ask(url, "GET", "/batch")]
    said += [await ask(url, "GET", "/status-env", json={"env_id": env_id}) for env_id in (0, 1, 2)]
    said += [await ask(url, "POST", "/scored_data", json={**payload(4), "env_id": 0}), await ask(url, "GET", "/batch")]
    said += [await ask(url, "GET", path) for path in ("/status", "/batch")]
    said += [await ask(url, "POST", "/disconnect-env", json={"env_id": env_id}) for env_id in (1, 2)]
    said += [await ask(url, "GET", "/status-env", json={"env_id": 0}), await ask(url, "GET", "/reset_data")]
    return [*said, await ask(url, "GET", "/status"), await ask(url, "POST", "/register-env", json=env)]


def common(ours: Any, stock: Any) -> Any:
    """Our answer without what the extension adds, and the stock one without the texts of errors."""
    if isinstance(ours, dict) and isinstance(stock, dict) and "detail" not in stock:
        for answer in (ours, stock):
            if isinstance(batch := answer.get("batch"), list):
                batch.sort(key=number_of)  # a trainer gives the order no meaning
        return {name: ours.get(name, "missing") for name in stock}
    return ours if not isinstance(ours, dict) else list(ours)


async def test_the_stock_wire_is_answered_as_the_stock_server_does(own_api: OwnApi) -> None:
    async with own_api.wiped() as own, StockRunApi() as stock:
        ours, theirs = await conversation(own.url), await conversation(stock.url)
    for number, (mine, other) in enumerate(zip(ours, theirs, strict=True)):
        if isinstance(other, tuple) and isinstance(other[1], dict):
            assert mine[0] == other[0], number
            assert common(mine[1], other[1]) == (other[1] if "detail" not in other[1] else ["detail"]), number
        else:
            assert mine == other, number


async def test_a_group_that_comes_again_is_counted_once_even_after_its_batch_and_a_kill(tmp_path: Path) -> None:
    async with OwnApi(tmp_path) as api:
        trainer = AcknowledgingTrainer(api.url, batch_size=2)
        await trainer.register()
        assert await post(api.url, named(1), named(1)) == [
            {"status": "received"},
            {"status": "received", "duplicate": True},
        ]
        assert await trainer.poll()
        await trainer.acknowledge(1)
        api.kill()
        await api.start()
        assert (await post(api.url, named(1)))[0]["duplicate"]
        answer = await ask(api.url, "POST", "/scored_data_list", json=[named(1), named(2), named(2)])
        assert answer == (200, {"status": "received", "groups_processed": 3, "duplicates": 2})
        assert await trainer.poll() and not await trainer.poll()
        assert [number_of(group) for group in trainer.groups] == [1, 2]


async def test_a_trainer_that_goes_back_to_a_checkpoint_gets_the_same_batches_in_order(tmp_path: Path) -> None:
    async with OwnApi(tmp_path) as api:
        trainer = AcknowledgingTrainer(api.url, batch_size=4)
        await trainer.register()
        await post(api.url, *(named(number) for number in range(10)))
        while await trainer.poll():
            pass
        first = trainer.batches[:]
        assert [[number_of(group) for group in batch] for batch in first] == [[0, 1], [2, 3], [4, 5], [6, 7], [8, 9]]
        await trainer.acknowledge(2)
        for kept in (3, 2):
            api.kill()
            await api.start()
            trainer.go_back(kept)
            await trainer.register()
            while await trainer.poll():
                pass
            assert trainer.batches == first
            assert (await ask(api.url, "GET", "/status"))[1]["current_step"] == 5
        assert (await ask(api.url, "GET", "/batch"))[1]["batch_id"] == 3, "the first that is not acknowledged"
        status, answer = await ask(api.url, "GET", "/batch?after=1")
        assert status == 410 and "resume from a checkpoint that contains batch 2" in answer["detail"]
        status, answer = await ask(api.url, "GET", "/batch?after=6")
        assert status == 409 and "the last one is 5" in answer["detail"]
        assert (await ask(api.url, "POST", "/ack", json={"batch_id": 6}))[0] == 409
        assert (await ask(api.url, "GET", "/batch?after=x"))[0] == 422


async def test_a_stock_trainer_gets_a_batch_again_until_it_has_all_of_it(own_api: OwnApi) -> None:
    async with own_api.wiped() as api:
        trainer = Trainer(api.url, batch_size=256)
        await trainer.register()
        for number in (1, 2):
            rows = [[number] * 6000] * 128
            await post(api.url, {"tokens": rows, "masks": rows, "scores": [1.0] * 128})
        for _ in range(2):  # hang up after the first bytes, as a client whose time is over
            reader, writer = await asyncio.open_connection("127.0.0.1", api.port)
            writer.write(b"GET /batch HTTP/1.1\r\nHost: localhost\r\n\r\n")
            assert await reader.read(100)
            writer.transport.abort()
        await trainer.take(2)
        assert [number_of(group) for group in trainer.groups] == [1, 2]
        assert not await trainer.poll()
        assert (await ask(api.url, "GET", "/status"))[1] == {
            "current_step": 1, "queue_size": 0, "sequences": 0, "unacknowledged": 0,
            "environments": {"registered": 0, "connected": 0},
        }  # fmt: skip


async def test_a_stock_trainer_that_starts_again_gets_what_it_has_not_trained(own_api: OwnApi) -> None:
    async with own_api.wiped() as api:
        trainer = Trainer(api.url, batch_size=2)
        await trainer.register()
        await post(api.url, *(named(number) for number in range(3)))
        assert await trainer.poll()
        await trainer.register(starting_step=0)
        assert await trainer.poll()
        assert [number_of(group) for group in trainer.groups] == [0, 0], "its weights do not contain the first batch"
        await trainer.register(starting_step=1)
        assert await trainer.poll()
        assert number_of(trainer.groups[-1]) == 1, "now they do"


async def test_a_batch_goes_to_another_trainer_when_its_own_is_silent(tmp_path: Path) -> None:
    async with OwnApi(tmp_path, "--lease", "0.5") as api:
        await AcknowledgingTrainer(api.url, batch_size=2).register()
        await post(api.url, *(named(number) for number in range(3)))

        async def get(name: str) -> int | None:
            return (await ask(api.url, "GET", f"/batch?trainer={name}"))[1]["batch_id"]

        assert [await get("a"), await get("b"), await get("a"), await get("b")] == [1, 2, 1, 2]
        assert (await ask(api.url, "POST", "/ack", json={"batch_id": 2, "trainer": "b"}))[0] == 200
        assert [await get("b"), await get("a")] == [3, 1], "b's acknowledgement is not for a's batch"
        async with asyncio.timeout(60):
            while await get("b") != 1:  # a says nothing more
                await ask(api.url, "POST", "/ack", json={"batch_id": 3, "trainer": "b"})
                await asyncio.sleep(0.1)


async def test_groups_of_any_size_become_batches(own_api: OwnApi) -> None:
    async with own_api.wiped() as api:
        trainer = Trainer(api.url, batch_size=8)
        await trainer.register()
        await post(api.url, *(named(number, sequences=size) for number, size in enumerate((3, 3, 3, 5, 2, 9, 8))))
        await trainer.take(7)
        assert [sizes(batch) for batch in trainer.batches] == [[3, 3, 2], [3, 5], [9], [8]]


async def test_no_batch_waits_for_a_dead_environment(tmp_path: Path) -> None:
    settings = ApiSettings(tmp_path / "api.db", port=0, silent_env=3.0)
    async with RolloutApiServer(settings) as server, RolloutApi(server.url) as api:
        trainer = Trainer(server.url, batch_size=2)
        await trainer.register()
        await trainer.poll()
        await api.register(replace(ENV, min_batch_allocation=0.5))
        await api.register(ENV)
        await post(server.url, {**payload(1), "env_id": 1})
        assert not await trainer.poll(), "it may still send its share"
        await trainer.take(1)


async def test_a_full_api_says_so_and_takes_a_stock_group_once_there_is_room(tmp_path: Path) -> None:
    lines: list[str] = []
    settings = ApiSettings(tmp_path / "api.db", port=0, most_stored=4000, most_body=100_000)
    async with RolloutApiServer(settings, report=lines.append) as server:
        trainer = AcknowledgingTrainer(server.url, batch_size=4)
        await trainer.register()
        await post(server.url, named(1), named(2))
        instance = {INSTANCE_HEADER: server.state.instance}
        of_group = {"json": named(3), "headers": instance}
        async with aiohttp.request("POST", f"{server.url}/scored_data", **of_group) as answer:
            assert (answer.status, answer.headers["Retry-After"]) == (429, "5")
        stock = asyncio.create_task(post(server.url, named(4)))
        assert await trainer.poll()
        await asyncio.sleep(0.1)
        assert not stock.done(), "the trainer may need the batch again"
        await trainer.acknowledge(1)
        assert await stock == [{"status": "received"}]
        assert [line.partition(":")[0] for line in lines] == ["full"]
        status, answer = await ask(server.url, "POST", "/scored_data", data=b" " * 100_001)
        assert status == 413 and "--max-body-mb" in answer["detail"]
        bomb = {"data": zlib.compress(b" " * 10_000_000, wbits=31), "headers": {"Content-Encoding": "gzip"}}
        assert (await ask(server.url, "POST", "/scored_data", **bomb))[0] == 413
        for body in (b"nonsense", gzip.compress(b"{}")[:-4]):
            status, _ = await ask(server.url, "POST", "/scored_data", data=body, headers={"Content-Encoding": "gzip"})
            assert status == 400


async def test_a_bad_group_is_refused_and_the_others_are_handed_out(own_api: OwnApi) -> None:
    async with own_api.wiped() as api:
        trainer = Trainer(api.url, batch_size=4)
        await trainer.register()
        bad = json.dumps({**named(1), "inference_logprobs": [[float("nan")] * 40] * 2})
        status, answer = await ask(api.url, "POST", "/scored_data", data=bad)
        assert status == 422 and "inference_logprobs[0]" in answer["detail"]
        status, answer = await ask(api.url, "POST", "/scored_data_list", data=f"[{json.dumps(named(2))},{bad}]")
        assert status == 422 and "group 1: inference_logprobs[0]" in answer["detail"]
        await post(api.url, named(3), named(4))
        assert await trainer.poll()
        assert [number_of(group) for group in trainer.groups] == [3, 4], "a list is taken whole or not at all"


async def test_without_the_token_nothing_is_answered(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    async with RolloutApiServer(ApiSettings(tmp_path / "api.db", port=0, token="secret")) as server:
        for path in ("/", "/metrics", "/batch", "/reset_data"):
            assert (await ask(server.url, "GET", path))[0] == 401
        basic = f"Basic {base64.b64encode(b'any:secret').decode()}"
        assert (await ask(server.url, "GET", "/", headers={"Authorization": basic}))[0] == 200
        async with RolloutApi(server.url, token="other") as api:
            with pytest.raises(ApiRefused, match="rollout_server_token or LACHESIS_API_TOKEN"):
                await api.identify()
        monkeypatch.setenv("LACHESIS_API_TOKEN", "secret")
        async with RolloutApi(server.url) as api:
            assert (await api.identify()).instance == server.state.instance
        headers = {"Authorization": "Bearer secret", "Sec-Fetch-Site": "cross-site"}
        assert (await ask(server.url, "GET", "/reset_data", headers=headers))[0] == 403


async def test_the_page_and_the_metrics_show_the_run(own_api: OwnApi) -> None:
    async with own_api.wiped() as api:
        html = {"Accept": "text/html,*/*"}
        assert "None has registered" in (await ask(api.url, "GET", "/", headers=html))[1]
        trainer = AcknowledgingTrainer(api.url, batch_size=4, num_steps=7)
        await trainer.register()
        await trainer.poll()
        env = {"max_token_length": 40, "desired_name": "<script>", "weight": 1.0, "group_size": 2}
        await ask(api.url, "POST", "/register-env", json=env)
        await post(api.url, *(named(number, begin_step=0) for number in range(3)))
        await trainer.poll()
        page = (await ask(api.url, "GET", "/", headers=html))[1]
        for shown in ("1 groups, 2 sequences", "1 batches: 1", "1 of 7", "&lt;script&gt;_0", "in batch 1", "waiting"):
            assert shown in page
        assert "<script>" not in page
        lines = (await ask(api.url, "GET", "/metrics"))[1].splitlines()
        values = {name: float(value) for name, value in (line.split() for line in lines if line[0] != "#")}
        assert values["lachesis_api_groups_waiting"] == 1
        assert values["lachesis_api_batches_unacknowledged"] == 1
        assert values["lachesis_api_trainer_step"] == 1
        assert values["lachesis_api_age_max_batches"] == 0


async def test_a_second_api_over_the_same_database_is_refused(tmp_path: Path) -> None:
    settings = ApiSettings(tmp_path / "api.db", port=0)
    async with RolloutApiServer(settings):
        with pytest.raises(StoreError, match=r"another run uses it.* choose another file \(--db\)"):
            async with RolloutApiServer(settings):
                pass


# The client.


async def nobody(*_: Any) -> None:
    raise AssertionError("nothing is to be refused")


async def relayed(url: str, outbox: Outbox, condition: Any, **options: Any) -> list[str]:
    """Run a relay until the condition holds; what it reported."""
    lines: list[str] = []
    async with RolloutApi(url) as api:
        relay = OutboxRelay(api, outbox, ENV, on_refused=nobody, report=lines.append, pace=PACE, **options)
        task = asyncio.create_task(relay.run())
        try:
            await until(condition, task)
        finally:
            relay.stop()
            await asyncio.wait([task])
    return lines


async def test_the_client_says_what_it_talks_to_and_what_holds(
    tmp_path: Path, own_api: OwnApi, run_api: StockRunApi
) -> None:
    async with own_api.wiped() as own, run_api.wiped() as stock:
        for number, (api, name) in enumerate([(own, "in exactly one batch"), (stock, "sent at least once")]):
            trainer = Trainer(api.url, batch_size=8)
            await trainer.register()
            await trainer.poll()
            outbox = Outbox(tmp_path / str(number), {})
            await outbox.open()
            await outbox.append(payload(1), key="1", tokens=76)
            lines = await relayed(api.url, outbox, lambda: not outbox.state.unsent)  # noqa: B023
            assert len([line for line in lines if name in line]) == 1
            await outbox.close()


async def test_a_lost_answer_needs_no_guess_even_with_other_environments(tmp_path: Path, own_api: OwnApi) -> None:
    class CutOff(RolloutApi):
        fates: ClassVar = [True, False, True]

        async def send(self, body: bytes, *, connection: int) -> int:
            if not self.fates:
                return await super().send(body, connection=connection)
            if self.fates.pop():
                await super().send(body, connection=connection)
            async with RolloutApi(self.url) as other:
                await other.identify()
                await other.send(
                    compress(encode_group({**payload(1000 + len(self.fates)), "env_id": 7})),
                    connection=other.connection,
                )
            await self.close()
            raise ApiDown(self.url, "cut off")

    async with own_api.wiped() as server, CutOff(server.url) as api:
        trainer = Trainer(server.url, batch_size=2)
        await trainer.register()
        await trainer.poll()
        outbox = Outbox(tmp_path, {})
        await outbox.open()
        for number in range(4):
            await outbox.append(payload(number), key=str(number), tokens=76)
        relay = OutboxRelay(api, outbox, ENV, on_refused=nobody, report=lambda line: None, pace=PACE)
        task = asyncio.create_task(relay.run())
        await trainer.take(7)
        await until(lambda: outbox.state.delivered == 4, task)
        relay.stop()
        await task
        assert sorted(map(number_of, trainer.groups)) == [0, 1, 2, 3, 1000, 1001, 1002]
        assert not await trainer.poll()
        assert outbox.state.requeued == 0
        await outbox.close()


async def test_a_group_waits_where_the_api_is_full(tmp_path: Path) -> None:
    async with RolloutApiServer(ApiSettings(tmp_path / "api.db", port=0, most_stored=2000, retry_after=1)) as server:
        trainer = AcknowledgingTrainer(server.url, batch_size=2)
        await trainer.register()
        await trainer.poll()
        outbox = Outbox(tmp_path / "spool", {})
        await outbox.open()
        for number in range(4):
            await outbox.append(payload(number), key=str(number), tokens=76)

        async def train() -> None:
            while len(trainer.groups) < 4:
                if await trainer.poll():
                    assert len(trainer.groups) < 4 or server.counts["full"] > 0
                    await asyncio.sleep(0.5)  # nothing is acknowledged meanwhile
                    await trainer.acknowledge(len(trainer.batches))

        training = asyncio.create_task(train())
        lines = await relayed(server.url, outbox, training.done, window=9)
        training.result()
        assert any("groups wait for the trainer" in line for line in lines)
        assert not outbox.state.refused
        await outbox.close()


async def test_a_group_larger_than_the_window_joins_a_queue_that_is_no_batch_yet(
    tmp_path: Path, own_api: OwnApi
) -> None:
    async with own_api.wiped() as server:
        trainer = Trainer(server.url, batch_size=4)
        await trainer.register()
        await trainer.poll()
        outbox = Outbox(tmp_path, {})
        await outbox.open()
        for number, sequences in enumerate((2, 20, 2)):
            await outbox.append(payload(number, group_size=sequences), key=str(number), tokens=76)
        training = asyncio.create_task(trainer.take(2))
        await relayed(server.url, outbox, training.done, window=1)
        training.result()
        assert [number_of(group) for group in trainer.groups[:2]] == [0, 1]
        await outbox.close()


async def test_an_api_that_was_reset_gets_everything_that_no_batch_had(tmp_path: Path, own_api: OwnApi) -> None:
    async with own_api.wiped() as server:
        trainer = Trainer(server.url, batch_size=4)
        await trainer.register()
        await trainer.poll()
        outbox = Outbox(tmp_path, {})
        await outbox.open()
        for number in range(3):
            await outbox.append(payload(number), key=str(number), tokens=76)
        await relayed(server.url, outbox, lambda: not outbox.state.unsent)
        assert await trainer.poll()
        await relayed(server.url, outbox, lambda: outbox.state.delivered == 2)
        await ask(server.url, "GET", "/reset_data")
        await trainer.register()
        await trainer.poll()
        await outbox.append(payload(3), key="3", tokens=76)
        await relayed(server.url, outbox, lambda: not outbox.state.unsent and outbox.state.requeued == 1)
        assert await trainer.poll()
        assert [number_of(group) for group in trainer.groups] == [0, 1, 2, 3]
        await outbox.close()


async def test_a_wrong_token_ends_the_run_with_the_setting(tmp_path: Path) -> None:
    async with RolloutApiServer(ApiSettings(tmp_path / "api.db", port=0, token="secret")) as server:
        outbox = Outbox(tmp_path / "spool", {})
        await outbox.open()
        with pytest.raises(RelayError, match="rollout_server_token"):
            await relayed(server.url, outbox, lambda: False)
        await outbox.close()


async def test_the_trainer_of_the_page_starts_before_the_api_and_takes_what_serve_plays(tmp_path: Path) -> None:
    (tmp_path / "my_trainer.py").write_text(shown("serving.md")["my_trainer.py"])
    api = OwnApi(tmp_path, "--pack-wait", "0.1")
    command = (sys.executable, str(tmp_path / "my_trainer.py"), api.url, "2")
    trainer = await asyncio.create_subprocess_exec(*command, stdout=asyncio.subprocess.PIPE)
    async with api, FakeServer(RandomWords(), vary=True) as model:
        try:
            env = serving(tmp_path, api, with_tokens(model, tmp_path))
            result, (printed, _) = await asyncio.gather(env.env_manager(), trainer.communicate())
        finally:
            if trainer.returncode is None:
                trainer.kill()
                await trainer.wait()
    assert (trainer.returncode, result.step) == (0, 2)
    rows = re.findall(r"^  (\d+) tokens, (\d+) trained: score ([\d.]+), weight (\S+)$", printed.decode(), re.MULTILINE)
    assert len(rows) == 8
    assert all(int(trained) < int(tokens) for tokens, trained, _, _ in rows)
    assert sum(int(trained) for _, trained, _, _ in rows) == result.delivered_tokens
    for one, other in zip(rows[::2], rows[1::2], strict=True):  # the two of a group
        assert float(one[3]) * (float(one[2]) - float(other[2])) > 0, "the better one is made likelier"
        assert sum(int(trained) * float(weight) for _, trained, _, weight in (one, other)) == pytest.approx(0, abs=1e-4)
    assert re.findall(r"^step (\d): batch (\d)", printed.decode(), re.MULTILINE) == [("1", "1"), ("2", "2")]
