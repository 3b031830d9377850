"""A policy server for a test, with a plain HTTP client."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import Any

import aiohttp

from lachesis_client.client_settings import ServerSettings
from lachesis_train.policy import CurrentPolicy, PolicyVersion
from lachesis_train.policy_server import PolicyServer
from tests.support.sampler import FakeSampler, parts


@dataclass
class Answer:
    status: int
    body: Any
    headers: Any

    @property
    def error(self) -> str:
        return str(self.body["error"]["message"])


@dataclass
class Running:
    server: PolicyServer
    policy: CurrentPolicy
    sampler: FakeSampler
    session: aiohttp.ClientSession

    async def ask(self, path: str, body: Any = None, **options: Any) -> Answer:
        """A POST of `body`, or a GET without one."""
        method = "GET" if body is None else "POST"
        async with self.session.request(method, self.server.root_url + path, json=body, **options) as response:
            return Answer(response.status, await response.json(), response.headers)

    def settings(self, **more: Any) -> ServerSettings:
        return ServerSettings(self.server.base_url, "policy", **{"max_retries": 0, **more})


@asynccontextmanager
async def serving(says: Any = None, *, sampler: Any = None, **options: Any) -> AsyncIterator[Running]:
    """`says` is what a `FakeSampler` plays."""
    sampler = sampler or FakeSampler(says)
    codec, shared = parts()
    policy = CurrentPolicy(PolicyVersion(0, "run:0", sampler))
    async with (
        PolicyServer(policy, codec.tokenizer, **{"model_name": "policy", "port": 0, **shared, **options}) as server,
        aiohttp.ClientSession() as session,
    ):
        yield Running(server, policy, sampler, session)
