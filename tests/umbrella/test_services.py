"""Every HTTP service of ours on the loopback interface answers the programs of its owner, and nobody else."""

from __future__ import annotations

import os
import socket
import sys
from collections.abc import AsyncIterator, Callable
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from pathlib import Path

import aiohttp
import pytest

from lachesis.loop.reference_server import ReferenceServer
from lachesis_client.wire.visitors import user_by_netlink, user_by_table
from lachesis_testing.fake_server import FakeServer
from lachesis_testing.scripted_server import ScriptedServer, say
from lachesis_tokens.endpoint import RecordingEndpoint
from lachesis_tokens.engines.embedded import EmbeddedServer
from lachesis_train.api import ApiSettings, RolloutApiServer
from lachesis_view import app as viewer
from lachesis_view.index import Index
from tests.support.exactness import stack
from tests.support.fake_serving import payload
from tests.support.strangers import LAST_WORDS, NOBODY, as_another_user, check_refused, status_of
from tests.train.policy_server.serving import serving

Service = Callable[[Path], AbstractAsyncContextManager[str]]
"""Starts it, in a folder of its own; gives the address of a route."""


@asynccontextmanager
async def rollout_api(folder: Path) -> AsyncIterator[str]:
    async with RolloutApiServer(ApiSettings(folder / "api.db", port=0)) as server:
        yield f"{server.url}/reset_data"


@asynccontextmanager
async def rollout_api_with_token(folder: Path) -> AsyncIterator[str]:
    async with RolloutApiServer(ApiSettings(folder / "api.db", port=0, token="secret")) as server:
        yield f"{server.url}/reset_data"


@asynccontextmanager
async def policy_server(folder: Path) -> AsyncIterator[str]:
    async with serving() as running:
        yield f"{running.server.root_url}/v1/models"


@asynccontextmanager
async def policy_server_with_token(folder: Path) -> AsyncIterator[str]:
    async with serving(token="secret") as running:
        yield f"{running.server.root_url}/v1/models"


@asynccontextmanager
async def embedded_model(folder: Path) -> AsyncIterator[str]:
    async with EmbeddedServer(context=256, parallel=1) as server:
        yield f"{server.address}/props"


@asynccontextmanager
async def recording_endpoint(folder: Path) -> AsyncIterator[str]:
    async with stack() as world, RecordingEndpoint(world.tokens) as endpoint:
        endpoint.open()
        yield f"{endpoint.root_url}/v1/models"


@asynccontextmanager
async def fake_server(folder: Path) -> AsyncIterator[str]:
    async with FakeServer() as server:
        yield f"{server.root_url}/fake/stats"


@asynccontextmanager
async def reference_policy(folder: Path) -> AsyncIterator[str]:
    async with ReferenceServer(lambda messages, tools: say("no")) as server:  # type: ignore[arg-type, return-value]
        yield f"{server.root_url}/v1/models"


@asynccontextmanager
async def scripted_server(folder: Path) -> AsyncIterator[str]:
    async with ScriptedServer([]) as server:
        yield f"{server.root_url}/v1/models"


@asynccontextmanager
async def pages(folder: Path) -> AsyncIterator[str]:
    index = Index(folder, folder / "index.sqlite")
    runner, url = await viewer.serve(index, "127.0.0.1", 0)
    try:
        yield url.replace("localhost", "127.0.0.1")
    finally:
        await runner.cleanup()
        index.close()


OPEN = (rollout_api, policy_server, fake_server, reference_policy, scripted_server, pages)
"""Without a key: the owner needs none."""
KEYS = (rollout_api_with_token, policy_server_with_token, embedded_model, recording_endpoint)


@pytest.mark.parametrize("service", OPEN)
async def test_no_web_page_and_no_other_user_is_answered(service: Service, tmp_path: Path) -> None:
    async with service(tmp_path) as url:
        await check_refused(url)


@pytest.mark.parametrize("service", KEYS)
async def test_nobody_is_answered_without_the_key(service: Service, tmp_path: Path) -> None:
    async with service(tmp_path) as url:
        await check_refused(url, answers=401)


@pytest.mark.parametrize("last_words", LAST_WORDS)
async def test_another_user_does_not_reset_the_data_whatever_becomes_of_the_connection(
    tmp_path: Path, last_words: str
) -> None:
    """A connection that was closed counts as root's for the kernel."""
    async with RolloutApiServer(ApiSettings(tmp_path / "api.db", port=0)) as server:
        async with aiohttp.ClientSession() as owner, owner.post(f"{server.url}/scored_data", json=payload(1)) as answer:
            assert answer.status == 200
        await as_another_user(f"{server.url}/reset_data", "GET", last_words)
        assert len(server.state.waiting) == 1


async def test_the_kernel_is_asked_once_for_each_connection(tmp_path: Path) -> None:
    questions: list[int] = []

    def note(event: str, args: tuple[object, ...]) -> None:
        if event == "socket.__new__" and args[1] == socket.AF_NETLINK:
            questions.append(1)

    sys.addaudithook(note)  # for the rest of the process: nothing takes one away
    async with fake_server(tmp_path) as url:
        for asked in (1, 2):
            async with aiohttp.ClientSession() as session:
                for _ in range(5):
                    async with session.get(url) as answer:
                        assert answer.status == 200
            assert len(questions) == asked


async def test_other_users_are_let_in_where_the_owner_says_so(tmp_path: Path) -> None:
    async with RolloutApiServer(ApiSettings(tmp_path / "api.db", port=0, insecure=True)) as server:
        assert set(await as_another_user(f"{server.url}/info", "GET", "waits for the answer")) == {200}
        assert await status_of(f"{server.url}/info", "GET", {"Origin": "http://evil.example"}) == 403


async def test_pages_of_others_may_link_to_the_viewer_and_not_to_what_a_link_would_change(tmp_path: Path) -> None:
    link = {"Sec-Fetch-Site": "cross-site", "Sec-Fetch-Mode": "navigate", "Sec-Fetch-Dest": "document"}
    async with pages(tmp_path) as url:
        assert await status_of(url, "GET", link) == 200
    async with rollout_api(tmp_path) as url:
        assert await status_of(url, "GET", link) == 403


@pytest.mark.parametrize("service", [each for each in OPEN if each is not pages])
async def test_a_picture_on_a_page_in_an_old_browser_is_refused(service: Service, tmp_path: Path) -> None:
    """Which sends neither Origin nor Sec-Fetch-Site with it."""
    async with service(tmp_path) as url:
        assert await status_of(url, "GET", {"Referer": "http://evil.example/page"}) == 403
        assert await status_of(url, "GET", {"Referer": "http://localhost:1/page"}) == 403
        assert await status_of(url, "GET", {"Referer": f"{url}?page"}) == 200


@pytest.mark.parametrize("own", ["localhost", "LOCALHOST:{port}", "127.0.0.1", "[::1]:{port}", "127.0.0.2:{port}"])
async def test_every_spelling_of_this_machine_is_answered(own: str, tmp_path: Path) -> None:
    async with rollout_api(tmp_path) as url:
        for headers in ({}, {"Origin": f"http://{own}", "Sec-Fetch-Site": "same-origin"}):
            assert await status_of(url, "GET", {"Host": own, **headers}) == 200


@pytest.mark.parametrize("user_of", [user_by_netlink, user_by_table])
@pytest.mark.parametrize("host", ["127.0.0.1", "::1"])
def test_the_user_of_a_connection_is_who_made_it_until_it_is_closed(host: str, user_of: object) -> None:
    assert callable(user_of)
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    with (
        socket.create_server((host, 0), family=family) as server,
        socket.create_connection(server.getsockname()[:2]) as it,
    ):
        ends = it.getsockname()[:2], it.getpeername()[:2]
        assert user_of(*ends) == os.getuid()
        if os.getuid() == 0:
            os.fchown(it.fileno(), NOBODY, -1)
            assert user_of(*ends) == NOBODY
        accepted, _ = server.accept()
        with accepted:
            it.close()
            try:
                assert user_of(*ends) is None
            except OSError:
                assert user_of is user_by_netlink, "then the table is read"
