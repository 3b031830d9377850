"""What could stop the rollout API, or make it lose, double or mix up groups, short of a kill."""

from __future__ import annotations

import asyncio
import base64
import gzip
import json
import sqlite3
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, closing
from pathlib import Path
from typing import Any

import aiohttp
import pytest

from lachesis_train.api import ApiSettings, RolloutApiServer
from lachesis_train.api.group_body import read_group, read_groups
from lachesis_train.api.store import StoreError
from lachesis_train.group_encoding import GroupError
from lachesis_train.verbs.api import main
from tests.support.fake_serving import number_of, payload
from tests.support.own_api import AcknowledgingTrainer
from tests.support.stock_run_api import LIVENESS, Trainer

ENV = {"max_token_length": 40, "desired_name": "e", "weight": 1.0, "group_size": 2}


@asynccontextmanager
async def an_api(folder: Path, **settings: Any) -> AsyncIterator[RolloutApiServer]:
    async with (
        asyncio.timeout(LIVENESS),
        RolloutApiServer(ApiSettings(folder / "api.db", port=0, **{"pack_wait": 0.05, **settings})) as server,
    ):
        yield server


async def ask(server: RolloutApiServer, method: str, path: str, **request: Any) -> tuple[int, str]:
    async with aiohttp.request(method, server.url + path, **request) as answer:
        return answer.status, await answer.text()


async def post(server: RolloutApiServer, number: int, *, sequences: int = 2, **fields: Any) -> int:
    body = {**payload(number, group_size=sequences), "env_id": 0, **fields}
    return (await ask(server, "POST", "/scored_data", json=body))[0]


@pytest.mark.parametrize(
    ("route", "body"),
    [
        ("/register", {"batch_size": 10**30}),
        ("/register", {"starting_step": -(1 << 64)}),
        ("/register-env", {"weight": float("nan")}),
        ("/register-env", {"weight": float("inf")}),
        ("/register-env", {"min_batch_allocation": float("nan")}),
        ("/register-env", {"min_batch_allocation": -1}),
        ("/register-env", {"group_size": 10**25}),
        ("/scored_data", {"env_id": 1 << 63}),
    ],
)
async def test_numbers_that_cannot_be_kept_are_refused_and_change_nothing(
    tmp_path: Path, route: str, body: dict[str, Any]
) -> None:
    async with an_api(tmp_path) as server:
        trainer = Trainer(server.url, batch_size=2)
        if route != "/register":
            await trainer.register()
            await trainer.poll()
        whole = {"/register": trainer.registration(0), "/register-env": ENV, "/scored_data": payload(1)}[route]
        before = repr(server.state)
        status, text = await ask(server, "POST", route, data=json.dumps({**whole, **body}))
        assert status == 422 and next(iter(body)) in text
        assert repr(server.state) == before


async def test_a_step_that_is_no_step_leaves_the_group_without_one(tmp_path: Path) -> None:
    async with an_api(tmp_path) as server:
        assert await post(server, 1, group_overrides={"begin_step": 1 << 63}) == 200
        assert [group.begin_step for group in server.state.recent] == [None]


def test_a_body_ends_with_its_group() -> None:
    group = b'{"tokens":[[1]],"masks":[[1]],"scores":[1]}'
    assert read_group(group + b" \n").tokens == 1
    assert len(read_groups(b"[%b, %b] " % (group, group))) == 2
    assert read_groups(b" [] ") == []
    for read, body in [(read_group, group + b"x"), (read_groups, b"[%b]]" % group), (read_groups, b"[]1")]:
        with pytest.raises(GroupError, match="something follows its end"):
            read(body)


async def test_a_second_gzip_member_is_not_dropped_silently(tmp_path: Path) -> None:
    async with an_api(tmp_path) as server:
        body = gzip.compress(json.dumps(payload(1)).encode()) + gzip.compress(b"more")
        status, text = await ask(server, "POST", "/scored_data", data=body, headers={"Content-Encoding": "gzip"})
        assert status == 400 and "something follows" in text


async def test_an_id_of_another_group_is_refused_and_a_copy_is_not(tmp_path: Path) -> None:
    async with an_api(tmp_path) as server:
        overrides = {"group_id": "1"}
        assert await post(server, 1, group_overrides=overrides) == 200
        assert await post(server, 1, group_overrides=overrides, env_id=5) == 200, "registered again meanwhile"
        assert await post(server, 2, sequences=3, group_overrides=overrides, env_id=1) == 422
        assert server.state.received == 1


async def test_stock_trainers_that_ask_at_the_same_time_get_different_batches(tmp_path: Path) -> None:
    async with an_api(tmp_path) as server:
        trainers = [Trainer(server.url, batch_size=2) for _ in range(4)]
        await trainers[0].register()
        for number in range(20):
            await post(server, number)

        async def train(trainer: Trainer) -> None:
            while await trainer.poll():
                pass

        await asyncio.gather(*map(train, trainers))
        await train(trainers[0])
        assert sorted(number_of(group) for trainer in trainers for group in trainer.groups) == list(range(20))


async def test_a_trainer_with_a_name_hears_that_a_batch_of_its_own_is_gone(tmp_path: Path) -> None:
    async with an_api(tmp_path) as server:
        await AcknowledgingTrainer(server.url, batch_size=2).register()
        for number in range(3):
            await post(server, number)
        for name in ("a", "b", "a"):
            assert (await ask(server, "GET", f"/batch?trainer={name}&after={server.state.last_batch}"))[0] == 200
        assert (await ask(server, "POST", "/ack", json={"batch_id": 3, "trainer": "a"}))[0] == 200
        status, text = await ask(server, "GET", "/batch?trainer=a&after=1")
        assert status == 410 and "contains batch 3" in text
        assert (await ask(server, "GET", "/batch?trainer=b&after=0"))[0] == 200


async def test_a_full_api_takes_the_groups_that_its_trainer_waits_for(tmp_path: Path) -> None:
    async with an_api(tmp_path, most_stored=1, hold=30.0) as server:
        trainer = AcknowledgingTrainer(server.url, batch_size=4)
        await trainer.register()
        await trainer.poll()
        env = {**ENV, "min_batch_allocation": 0.5}
        await ask(server, "POST", "/register-env", json=env)
        assert await post(server, 1, env_id=None) == 200
        posting = asyncio.create_task(post(server, 2, env_id=None))
        await trainer.take(2)  # nothing is acknowledged, and nothing came from the environment with a share
        assert await posting == 200


async def test_a_body_that_stops_gives_its_room_back(tmp_path: Path) -> None:
    async with an_api(tmp_path, most_in_memory=1000, most_body=100_000, stalled=0.2, hold=30.0) as server:
        reader, writer = await asyncio.open_connection("127.0.0.1", int(server.url.rpartition(":")[2]))
        writer.write(b"POST /scored_data HTTP/1.1\r\nHost: localhost\r\nContent-Length: 1000\r\n\r\n{")
        assert b" 408 " in await reader.readline()
        assert await post(server, 1) == 200
        writer.close()


async def test_pages_of_others_cannot_use_the_api_through_a_browser(tmp_path: Path) -> None:
    async with an_api(tmp_path) as server:
        status, text = await ask(server, "GET", "/reset_data", headers={"Host": "rebound.example:8000"})
        assert status == 403 and "127.0.0.1" in text
    async with an_api(tmp_path / "other", token="secret") as server:
        for route in server.routes:
            assert (await ask(server, route.method, route.path))[0] == 401, route
        assert (await ask(server, "GET", "/info", headers={"Authorization": "Bearer \xff"}))[0] == 401
        password = {"Authorization": f"Basic {base64.b64encode(b'any:secret').decode()}"}
        assert (await ask(server, "GET", "/metrics", headers=password))[0] == 200
        assert (await ask(server, "GET", "/reset_data", headers=password))[0] == 401


async def test_what_the_disk_does_not_take_is_not_in_memory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    async with an_api(tmp_path) as server:
        trainer = Trainer(server.url, batch_size=2)
        await trainer.register()
        await trainer.poll()
        await post(server, 1)
        database = server.store._database
        # Not one page more, as on a full disk.
        await database.run(lambda: database._connection.execute("PRAGMA query_only = ON"))  # type: ignore[union-attr]
        before = repr(server.state)
        for method, path, body in [
            ("POST", "/register", trainer.registration(5)),
            ("POST", "/register-env", ENV),
            ("POST", "/scored_data", payload(2)),
            ("GET", "/batch", None),
            ("GET", "/reset_data", None),
        ]:
            assert (await ask(server, method, path, json=body))[0] == 503
            assert repr(server.state) == before, path
        await database.run(lambda: database._connection.execute("PRAGMA query_only = OFF"))  # type: ignore[union-attr]
        await trainer.take(1)


async def test_a_database_of_another_program_gets_no_tables_of_ours(tmp_path: Path) -> None:
    with closing(sqlite3.connect(tmp_path / "api.db")) as other:
        other.executescript("CREATE TABLE theirs (value)")
    with pytest.raises(StoreError, match=r"of another program; choose another file \(--db\)"):
        async with an_api(tmp_path):
            pass
    with closing(sqlite3.connect(tmp_path / "api.db")) as other:
        assert other.execute("SELECT name FROM sqlite_master").fetchall() == [("theirs",)]


@pytest.mark.parametrize("option", ["--lease=-1", "--pack-wait=nan", "--max-stored-mb=0", "--port=99999", "--port=x"])
def test_an_option_that_makes_no_sense_is_refused_by_name(option: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        main([option])
    assert option.partition("=")[0] in capsys.readouterr().err


async def test_a_long_field_is_written_and_sent_in_pieces(tmp_path: Path) -> None:
    async with an_api(tmp_path) as server:
        trainer = Trainer(server.url, batch_size=1)
        await trainer.register()
        text = "x" * (5 << 20)
        body = {"tokens": [[7]], "masks": [[7]], "scores": [1.0], "messages": [[{"role": "user", "content": text}]]}
        assert (await ask(server, "POST", "/scored_data", json=body))[0] == 200
        content = [len(piece) async for piece in server.store.content(server.state.waiting.values())]
        assert sum(content) > len(text) and max(content) < 2 << 20
        await trainer.take(1)
        assert trainer.groups[0]["messages"] == body["messages"]
