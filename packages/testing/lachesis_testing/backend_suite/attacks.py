"""Every attack of `lachesis sandboxes attack`: programs inside cannot escape, forge, outlive or outgrow the sandbox."""

from __future__ import annotations

import os
from collections.abc import AsyncIterator, Collection

import pytest
import pytest_asyncio

from backends import Backend, Sandbox
from lachesis_testing.attacks import ATTACKS, Attack, AttackTarget, Fell, NotApplicable, attacked

EVERY = os.environ.get("LACHESIS_TESTS") == "all"
"""Whether heavy attacks run as well."""


@pytest_asyncio.fixture(scope="module", loop_scope="session")
async def targets() -> AsyncIterator[dict[Backend, AttackTarget]]:
    """State that the attacks on a backend share."""
    targets: dict[Backend, AttackTarget] = {}
    yield targets
    for target in targets.values():
        await target.close()


@pytest.mark.parametrize("attack", [one for one in ATTACKS if EVERY or not one.is_heavy], ids=lambda one: one.name)
async def test_an_attack_fails(
    backend: Backend,
    sandbox: Sandbox,
    attack: Attack,
    targets: dict[Backend, AttackTarget],
    unchecked: Collection[str],
    expected_to_fall: Collection[str],
    request: pytest.FixtureRequest,
) -> None:
    family = attack.name.partition("/")[0]
    for name in {family, attack.name} & set(unchecked):
        pytest.skip(f"the fixture `unchecked` names {name}")
    if attack.name in expected_to_fall:
        request.node.add_marker(pytest.mark.xfail(reason="the fixture `expected_to_fall` names it", strict=True))
    target = targets.setdefault(backend, AttackTarget(backend, sandbox))
    verdict = await attacked(attack, target)
    if isinstance(verdict, NotApplicable):
        pytest.skip(verdict.detail)
    assert not isinstance(verdict, Fell), f"{attack.tries}: {verdict.detail}"
