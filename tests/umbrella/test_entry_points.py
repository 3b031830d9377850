"""What the packages declare by entry point can be loaded: a name that leads nowhere fails only where it is used."""

from importlib.metadata import EntryPoint, distributions

import pytest

DECLARED = sorted(
    {
        (each.group, each.name, each.value)
        for distribution in distributions()
        if distribution.name.startswith("lachesis")
        for each in distribution.entry_points
    }
)


def test_every_package_that_declares_something_is_looked_at() -> None:
    assert {"lachesis.environments", "lachesis.schemes", "lachesis.verbs"} <= {group for group, _, _ in DECLARED}


@pytest.mark.parametrize(("group", "name", "value"), DECLARED)
def test_it_can_be_loaded(group: str, name: str, value: str) -> None:
    assert callable(EntryPoint(name, value, group).load()) or group == "pytest11"
