"""Names, settings with their defaults, and flags of the first version are there."""

from __future__ import annotations

import json
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from lachesis.cli import command
from lachesis_data.verbs import batch, compress
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
def test_no_flag_of_a_verb_is_gone(verb: str, capsys: pytest.CaptureFixture[str]) -> None:
    """An old spelling may be in no help, and is taken."""
    now = {flag.replace("_", "-") for flag in flags(verb)}
    for flag in {flag.replace("_", "-") for flag in FIRST["flags"][verb]} - now:
        with pytest.raises(SystemExit):
            command(verb)([flag])
        assert f"{flag}, " in (said := capsys.readouterr().err) and "needs a value" in said


@pytest.mark.parametrize(("verb", "parser"), [("batch", batch), ("compress", compress)])
def test_a_flag_that_had_two_spellings_has_both(verb: str, parser: ModuleType) -> None:
    taken = parser._parser()._option_string_actions
    own = [flag for flag in FIRST["flags"][verb] if "." not in flag and flag != "--config"]
    assert "--dry_run" in own or "--batch-size" in own
    assert [flag for flag in own if flag not in taken] == []
