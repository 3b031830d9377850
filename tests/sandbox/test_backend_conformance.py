"""All our backends pass the conformance suite that is offered to others; `backend` is a fixture of conftest.py."""

from __future__ import annotations

from collections.abc import Collection
from functools import partial
from typing import Any

import modal
import pytest
from modal_proto import api_pb2

from backends import Backend, Sandbox, create_backend
from lachesis_testing.attacks import ATTACKS
from lachesis_testing.backend_suite import *  # noqa: F403
from lachesis_testing.backend_suite.attacks import EVERY

OPTIONS: dict[str, dict[str, Any]] = {
    "local-bubblewrap": {},
    "local-none": {"isolation": "none"},
    "local-forked": {},
    "local-reset": {},
}

EXPECTED_TO_FALL = {"docker": ["neighbours/lock", "neighbours/record lock", "neighbours/opening"]}
"""Attacks that wait for a wall, by backend: `/.lachesis` of a container is a folder of this machine."""


UNCHECKED = {
    "docker": ["inodes"],  # the runtime is a folder of this machine
    "local-none": ["network", "secrets", "kernel", "neighbours"],  # it has no walls
    # The tests' substitute of the service has others.
    "modal": ["cpus", "memory_bytes", "image", "network", "kernel", "neighbours", "leftovers", "resources/memory"],
}
OF_THE_EXECUTOR = [attack.name for attack in ATTACKS if attack.is_executors]
EXECUTORS = ("local-bubblewrap", "local-none")
"""Where attacks on the executor's own walls run by default: in one it is the sandbox' first process, in one not."""


async def modal_backend(url: str, credentials: tuple[str, str]) -> Backend:
    client = modal.Client(url, api_pb2.CLIENT_TYPE_CLIENT, credentials)
    await client.__aenter__()  # type: ignore[no-untyped-call]
    return create_backend("modal", client=client)


@pytest.fixture
def variant(request: pytest.FixtureRequest) -> str:
    return str(request.node.callspec.params["backend"])


@pytest.fixture
def portable_backend(variant: str, request: pytest.FixtureRequest) -> Any:
    if variant == "modal":
        server = request.getfixturevalue("modal_server")
        return partial(modal_backend, server.url, server.credentials)
    options = OPTIONS[variant] if variant in OPTIONS else request.getfixturevalue(variant).options
    return partial(create_backend, variant.partition("-")[0], **options)


@pytest.fixture
def unchecked(variant: str) -> Collection[str]:
    return [*UNCHECKED.get(variant, []), *([] if EVERY or variant in EXECUTORS else OF_THE_EXECUTOR)]


@pytest.fixture
def expected_to_fall(variant: str) -> Collection[str]:
    return EXPECTED_TO_FALL.get(variant, [])


async def test_no_command_can_replace_the_shell_of_fresh_ones(sandbox: Sandbox, variant: str) -> None:
    if variant in ("local-none", "modal"):
        pytest.skip("commands can write all that is there")
    spoil = """
        rm -f "$BASH"; echo x > "$BASH"; above=$BASH
        while above=${above%/*}; test "$above"; do mv "$above" /tmp/gone-$RANDOM; done
        if mkdir -p "${BASH%/*}"; then printf '#!/bin/sh\necho stolen\n' > "$BASH"; chmod +x "$BASH"; fi
    """
    script = f'echo "$BASH"; command -v bash; {spoil}\necho "$BASH_VERSION"'
    done = await sandbox.exec(script, timeout=20, fresh=True)
    shell, found, version = done.stdout.decode().split()
    assert shell == found == "/.lachesis/shell/bash" and version, done
    again = await sandbox.exec("echo as before", timeout=20, fresh=True)
    assert again.stdout == b"as before\n"
