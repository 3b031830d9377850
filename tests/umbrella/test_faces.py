"""The names that a package exports are there, and importing the package loads nothing heavy."""

from __future__ import annotations

import importlib
import subprocess
import sys

import pytest

PACKAGES = ("lachesis_testing", "lachesis_train")
HEAVY = {"aiohttp", "datasets", "numpy", "pydantic", "pytest", "torch", "transformers"}


@pytest.mark.parametrize("name", PACKAGES)
def test_every_exported_name_can_be_imported(name: str) -> None:
    package = importlib.import_module(name)
    assert package.__all__ == sorted(package.__all__, key=lambda each: (each[0].islower(), each))
    for each in package.__all__:
        found = getattr(package, each)
        assert getattr(found, "__name__", each) == each
        assert found.__module__.startswith(f"{name}.")


@pytest.mark.parametrize("name", PACKAGES)
def test_a_package_loads_nothing_heavy_before_a_name_is_used(name: str) -> None:
    code = f"import sys, {name}; print(*{HEAVY!r} & sys.modules.keys())"
    asked = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert asked.stdout.strip() == ""
