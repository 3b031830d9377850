"""Names, settings with their defaults, and flags of the first version are there."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from tests.umbrella.golden.names import VERBS, flags, public_names

FIRST: dict[str, Any] = json.loads(Path(__file__).with_name("names.json").read_text(encoding="utf-8"))


def test_no_public_name_is_gone() -> None:
    now = public_names()
    assert set(FIRST["lachesis"]) - set(now["lachesis"]) == set()
    assert {cls: sorted(set(names) - set(now["members"][cls])) for cls, names in FIRST["members"].items()} == {
        cls: [] for cls in FIRST["members"]
    }


def test_every_setting_has_the_default_it_had() -> None:
    now = public_names()["settings"]
    assert {name: now.get(name) for name in FIRST["settings"]} == FIRST["settings"]


@pytest.mark.parametrize("verb", VERBS)
def test_no_flag_of_a_verb_is_gone(verb: str) -> None:
    assert set(FIRST["flags"][verb]) - set(flags(verb)) == set()
