"""The backends that the tests run on, and their engines, each started privately and once.

Tests of an engine that is not installed are skipped with the reason. On CI that is a failure.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path
from typing import Any, TypeVar

import pytest
from sandbox_watch import missing

from backends import Backend, create_backend
from tests.support.branched_backends import ForkedBackend, ResetBackend
from tests.support.docker_engine import DockerEngine, docker_engine
from tests.support.modal_server import ModalServer
from tests.support.pool_engine import PoolEngine, pool_engine
from tests.support.root_images import full_root
from tests.support.singularity_engine import SingularityEngine, singularity_engine
from tests.support.ssh_engine import SshEngine, ssh_engine

T = TypeVar("T")
Engine = Callable[[str], Any]

VARIANTS: Mapping[str, Callable[[Engine], Backend]] = {
    "local-bubblewrap": lambda _: create_backend("local"),
    "local-none": lambda _: create_backend("local", isolation="none"),
    "local-forked": lambda _: ForkedBackend(),
    "local-reset": lambda _: ResetBackend(),
    "docker": lambda engine: create_backend("docker", **engine("docker").options),
    "singularity": lambda engine: create_backend("singularity", **engine("singularity").options),
    "ssh": lambda engine: create_backend("ssh", **engine("ssh").options),
    "pool": lambda engine: create_backend("pool", **engine("pool").options),
    "modal": lambda engine: create_backend("modal", client=engine("modal_client")),
}
"""How to create each of our backends. The argument returns the value of a fixture by its name."""
FEWER = {
    "test_an_attack_fails": pytest.mark.sample(120),
    "test_thirty_two_sandboxes": pytest.mark.long,
    "test_exit_codes_are_the_shells": pytest.mark.sample(18),
    "test_output_is_capped": pytest.mark.sample(7),
    "test_state_persists_however": pytest.mark.sample(8),
    "test_a_slow_reader_stops": pytest.mark.sample(1),
    "test_too_many_connections": pytest.mark.sample(1),
    "test_many_connections_are": pytest.mark.sample(1),
    "test_memory_that_no_process": pytest.mark.sample(1),
    "test_a_big_file_does_not": pytest.mark.sample(1),
    "test_files_move_in_chunks": pytest.mark.sample(1),
}
"""Tests of the suite that are of the executor, which is the same on all backends: all cases run on the default backend,
and so many on the others."""
RARE = ("local-none", "local-forked", "local-reset")
WALLED = [name for name in VARIANTS if name not in RARE]
"""Backends that promise isolation."""


@contextmanager
def started(engine: AbstractContextManager[T]) -> Iterator[T]:
    """The running engine. Skips the test if it cannot start."""
    try:
        running = engine.__enter__()
    except RuntimeError as error:
        missing(str(error))
    with engine_left(engine):
        yield running


@contextmanager
def engine_left(engine: AbstractContextManager[Any]) -> Iterator[None]:
    try:
        yield
    finally:
        engine.__exit__(None, None, None)


@pytest.fixture(scope="session")
def roots(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of the root file systems of all images, which are created once."""
    return tmp_path_factory.getbasetemp() / "roots"


@pytest.fixture(scope="session")
def docker(roots: Path) -> Iterator[DockerEngine]:
    with started(docker_engine(roots)) as engine:
        yield engine


@pytest.fixture(scope="session")
def singularity(roots: Path) -> Iterator[SingularityEngine]:
    with started(singularity_engine(roots)) as engine:
        yield engine


@pytest.fixture(scope="session")
def ssh() -> Iterator[SshEngine]:
    with started(ssh_engine()) as engine:
        yield engine


@pytest.fixture(scope="session")
def pool(tmp_path_factory: pytest.TempPathFactory) -> Iterator[PoolEngine]:
    with started(pool_engine(tmp_path_factory.mktemp("pool"), "--slots", "64", "--least", "1")) as engine:
        engine.ready(1)
        yield engine


@pytest.fixture(scope="session")
def modal_server(tmp_path_factory: pytest.TempPathFactory, roots: Path) -> Iterator[ModalServer]:
    with ModalServer(tmp_path_factory.mktemp("modal"), root=full_root(roots / "full")) as server:
        yield server
    assert server.unbuilt == set(), "calls that the fake server does not implement"


@pytest.fixture(scope="session")
def modal_client(modal_server: ModalServer) -> Iterator[Any]:
    with ThreadPoolExecutor(1) as thread:  # it belongs to the event loop of the SDK, and another loop may run here
        client = thread.submit(lambda: asyncio.run(modal_server.client())).result()
    yield client
    client.close()


_usable: dict[str, Backend] = {}  # checked once, used by every test


async def usable(name: str, request: pytest.FixtureRequest) -> Backend:
    if name not in _usable:
        backend = VARIANTS[name](request.getfixturevalue)
        availability = await backend.check()
        if not availability.ok:
            missing(f"{name}: {availability.detail}; {availability.fix}")
        _usable[name] = backend
    return _usable[name]


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        mark = next((mark for name, mark in FEWER.items() if item.name.startswith(name)), None)
        if mark and isinstance(item, pytest.Function) and item.callspec.params.get("backend") != "local-bubblewrap":
            item.add_marker(mark)


@pytest.fixture(
    # The executor is that of `local-bubblewrap`, and modules of their own try what is different without walls.
    params=[pytest.param(name, marks=pytest.mark.long) if name in RARE else name for name in VARIANTS]
)
async def backend(request: pytest.FixtureRequest) -> Backend:
    return await usable(request.param, request)


@pytest.fixture
def usable_backend(request: pytest.FixtureRequest) -> Callable[[str], Awaitable[Backend]]:
    """The backend with this name. A test that asks for one that does not work here is skipped."""
    return lambda name: usable(name, request)


@pytest.fixture(params=WALLED)
async def walled(request: pytest.FixtureRequest) -> Backend:
    return await usable(request.param, request)
