"""The variants that every backend test runs on. A new backend joins by adding itself to `VARIANTS`."""

from __future__ import annotations

import os
from collections.abc import AsyncIterator

import pytest

from backends import Backend, Sandbox, SandboxSpec, create_backend

VARIANTS = {
    "local-bubblewrap": lambda: create_backend("local"),
    "local-none": lambda: create_backend("local", isolation="none"),
}
WALLED = [name for name in VARIANTS if name != "local-none"]
"""Variants that promise to wall a sandbox off."""


_usable: dict[str, Backend] = {}  # a backend belongs to no event loop: checked once, used by every test


async def usable(name: str) -> Backend:
    if name not in _usable:
        backend = VARIANTS[name]()
        availability = await backend.check()
        if not availability.ok:
            message = f"{name}: {availability.detail}; {availability.fix}"
            if os.environ.get("CI") == "true":
                pytest.fail(message)
            pytest.skip(message)
        _usable[name] = backend
    return _usable[name]


@pytest.fixture(params=VARIANTS)
async def backend(request: pytest.FixtureRequest) -> Backend:
    return await usable(request.param)


@pytest.fixture(params=WALLED)
async def walled(request: pytest.FixtureRequest) -> Backend:
    return await usable(request.param)


@pytest.fixture
async def sandbox(backend: Backend) -> AsyncIterator[Sandbox]:
    sandbox = await backend.create(SandboxSpec())
    yield sandbox
    await sandbox.close()
