"""The package datasets, which is large (with pyarrow and pandas 270 MB) and which most runs do not need."""

from __future__ import annotations

import importlib.util

from backends.errors import LachesisError


class DatasetsMissing(LachesisError):
    """The package datasets, or pyarrow, which comes with it, is not installed."""


def need_datasets(what: str, module: str = "datasets") -> None:
    """Raises DatasetsMissing, which names `what` needs it, where the module cannot be imported."""
    if importlib.util.find_spec(module) is None:
        raise DatasetsMissing(f"{what}: the package {module} is not installed; pip install 'lachesis-rl[datasets]'")
