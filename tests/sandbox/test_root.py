"""Sandboxes whose commands see themselves as root: they can do what packages need, and the walls are the same."""

from __future__ import annotations

from collections.abc import AsyncIterator

import pytest
from sandbox_watch import missing
from test_isolation import AUDIT, lines

from backends import Backend, BackendUnavailable, Sandbox, SandboxSpec, create_backend
from lachesis_testing.attacks import ATTACKS, AttackTarget, Fell, attacked
from lachesis_testing.backend_suite.attacks import EVERY
from tests.support.ssh_engine import ssh_engine

EXPECTED_TO_FALL = ("neighbours/lock", "neighbours/record lock", "neighbours/opening")
"""Where an ordinary user makes sandboxes, with root inside and without: programs are files of the machine."""
FAMILIES = {"local": ("channel", "kernel", "secrets"), "ssh": ("channel",)}
"""Of the attacks that run by default: those on walls that know users."""


@pytest.fixture(params=["local", "ssh of an ordinary user"])
async def backend(request: pytest.FixtureRequest) -> AsyncIterator[Backend]:
    if request.param == "local":
        yield create_backend("local", root=True)
        return
    try:
        with ssh_engine(ordinary_user=True) as engine:
            yield create_backend("ssh", root=True, **engine.options)
    except RuntimeError as error:
        missing(str(error))


@pytest.fixture
async def inside(backend: Backend) -> AsyncIterator[Sandbox]:
    found = await backend.check()
    if not found.ok:
        missing(f"{found.detail}; {found.fix}")
    sandbox = await backend.create(SandboxSpec())
    yield sandbox
    await sandbox.close()


async def test_root_can_do_what_packages_need_and_has_no_capability(inside: Sandbox) -> None:
    assert await lines(inside, "id -u; id -g; whoami; echo $HOME; echo ~; cat /proc/self/uid_map | wc -l") == [
        "0", "0", "root", "/root", "/root", "1",
    ]  # fmt: skip
    assert set(await lines(inside, "grep ^Cap /proc/self/status | cut -f2")) == {"0" * 16}
    owned = "touch /tmp/x && chown 33:33 /tmp/x && chgrp 42 /tmp/x && stat -c %u:%g /tmp/x"
    assert await lines(inside, owned) == ["0:0"]
    groups = "import os; os.setgroups([]); os.chown('/tmp/x', 1, 1); os.setgid(0); os.setuid(0); print('as before')"
    assert await lines(inside, f'python3 -c "{groups}"') == ["as before"]
    # Nothing pretends that a program has become somebody else.
    for call in ("setuid(33)", "setgid(33)", "setresuid(33, 33, 33)", "setreuid(-1, 33)"):
        done = await inside.exec(f'python3 -c "import os; os.{call}"', timeout=30)
        assert done.exit_code == 1 and b"Invalid argument" in done.stderr, call


async def test_the_shell_of_a_reward_is_not_the_agents(inside: Sandbox) -> None:
    """Also where the machine's programs are read-only: the link to their folder, and what they load, are not."""
    await inside.exec(
        "rm -f /bin; mkdir -p /bin; printf '#!/usr/bin/bash\\necho forged' > /bin/bash; chmod 755 /bin/bash", timeout=30
    )
    done = await inside.exec("echo honest", timeout=30, fresh=True)
    assert done.stdout == b"honest\n"


@pytest.mark.slow
@pytest.mark.sample(1)
async def test_every_wall_holds_for_root(inside: Sandbox, backend: Backend) -> None:
    await inside.write_bytes("audit.py", AUDIT.encode())
    result = await inside.exec("python3 audit.py", timeout=300)
    assert (result.stdout, result.stderr) == (b"", b"")
    target = AttackTarget(backend, inside)
    for attack in ATTACKS:
        if EVERY or (not attack.is_heavy and attack.name.startswith(FAMILIES[backend.name])):
            found = await attacked(attack, target)
            expected = backend.name == "ssh" and attack.name in EXPECTED_TO_FALL
            assert isinstance(found, Fell) is expected, f"{attack.name}: {found}"
    await target.close()


async def test_a_task_asks_for_root_by_its_spec() -> None:
    backend = create_backend("local")
    for root, user in ((True, "root"), (False, "agent")):
        sandbox = await backend.create(SandboxSpec(root=root))
        assert await lines(sandbox, "whoami") == [user]
        await sandbox.close()
    with pytest.raises(BackendUnavailable, match="root cannot be honoured without isolation"):
        await create_backend("local", isolation="none").create(SandboxSpec(root=True))
    with pytest.raises(ValueError, match="root=True needs isolation"):
        create_backend("local", isolation="none", root=True)
