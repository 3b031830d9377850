"""Fixtures of the suite. A test module that imports the suite provides one more, `backend`."""

from __future__ import annotations

import asyncio
import shlex
from collections.abc import AsyncIterator, Callable, Collection
from typing import Any

import pytest
import pytest_asyncio

from backends import Backend, Sandbox, SandboxSpec

from .probes import host_processes, output

FindProcesses = Callable[[str], list[int]]
"""Numbers of all living processes whose command line or environment contains a text."""

RESET = """
cd {workdir} && chmod -R u+rwx . && rm -rf ..?* .[!.]* *
for name in $(compgen -e); do case " {names} " in *" $name "*) ;; *) unset "$name" ;; esac; done
"""


@pytest.fixture
def find_processes() -> FindProcesses:
    """How the tests see processes from outside. Override it where sandboxes do not run on this machine."""
    return host_processes


@pytest.fixture
def unchecked() -> Collection[str]:
    """Fields of the spec that `create` accepts and the suite cannot check. Override it where the backend declares that
    it does not enforce the network, or where a service enforces limits that the test's substitute does not have.
    The name of an attack, or of a family of them, leaves those out: for a backend that promises no isolation."""
    return ()


@pytest.fixture
def expected_to_fall() -> Collection[str]:
    """Names of attacks against which the backend has no wall. They must succeed: one that fails is to be removed."""
    return ()


@pytest.fixture
def portable_backend(backend: Backend) -> Any:
    """A pickleable copy of the backend for another process, or a function without parameters that makes one (it may be
    a coroutine function). Override it where the backend itself cannot be pickled."""
    return backend


@pytest.fixture(autouse=True)
def has_every_method(request: pytest.FixtureRequest, backend: Backend) -> None:
    """One test fails when the backend lacks a method; all others are skipped."""
    complete: bool = isinstance(backend, Backend)
    if request.node.originalname != "test_the_backend_has_every_method" and not complete:
        pytest.skip("the backend lacks methods: see test_the_backend_has_every_method")


@pytest_asyncio.fixture(scope="module", loop_scope="session")
async def shared_sandboxes() -> AsyncIterator[dict[Backend, tuple[Sandbox, str]]]:
    """One sandbox of each backend for all tests that leave it usable, and the names of its variables."""
    sandboxes: dict[Backend, tuple[Sandbox, str]] = {}
    yield sandboxes
    await asyncio.gather(*(sandbox.close() for sandbox, _ in sandboxes.values()))


@pytest_asyncio.fixture(loop_scope="session")
async def sandbox(backend: Backend, shared_sandboxes: dict[Backend, tuple[Sandbox, str]]) -> Sandbox:
    """A sandbox as good as new: without files, living processes, variables or the folder of earlier tests."""
    if backend not in shared_sandboxes:
        sandbox = await backend.create(SandboxSpec())
        shared_sandboxes[backend] = sandbox, (await output(sandbox, "echo $(compgen -e)"))
    sandbox, names = shared_sandboxes[backend]
    await sandbox.stop_processes()
    reset = await sandbox.exec(RESET.format(workdir=shlex.quote(sandbox.workdir), names=names), timeout=20)
    assert reset.exit_code == 0, reset
    return sandbox
