"""Grade-school problems without a download: the generator `gsm_symbolic` of the package reasoning-gym.

Importing reasoning-gym as a whole loads a hundred other puzzles and needs a C compiler at install time (pycosat). This
one generator needs nothing but the standard library, so only its own modules are loaded.
"""

from __future__ import annotations

import importlib
import importlib.util
import sys
import types
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from lachesis.runs.dataset_rows import DatasetError

PACKAGE = "reasoning_gym"
_BARE = (PACKAGE, f"{PACKAGE}.coaching", f"{PACKAGE}.arithmetic")
"""Packages whose `__init__` is skipped; their modules are found all the same."""


def gsm_symbolic(size: int, seed: int) -> Any:
    """`size` problems, a sequence of `{"question", "answer", "metadata"}`; the same for the same seed, made on access.

    Raises:
        DatasetError: reasoning-gym is not installed.
    """
    with _bare_packages():
        module = importlib.import_module(f"{PACKAGE}.arithmetic.gsm_symbolic.gsm_symbolic")
        dataset = module.GSMSymbolicDataset(module.GSMSymbolicDatasetConfig(size=size, seed=seed))
        dataset.generators  # noqa: B018  # imports more modules on first use: now, while the packages are bare
    return dataset


@contextmanager
def _bare_packages() -> Iterator[None]:
    """Make modules of reasoning-gym importable without its `__init__`; `sys.modules` is left as it was found."""
    if PACKAGE in sys.modules:
        yield
        return
    spec = importlib.util.find_spec(PACKAGE)
    if spec is None or not spec.submodule_search_locations:
        raise DatasetError(
            "the dataset gsm_symbolic needs the package reasoning-gym. Next step: pip install --no-deps reasoning-gym, "
            "or run the easier problems that need no package: --env.dataset_name word_problems"
        )
    root = spec.submodule_search_locations[0]
    try:
        for package in _BARE:
            bare = types.ModuleType(package)
            bare.__path__ = [root + package.removeprefix(PACKAGE).replace(".", "/")]
            sys.modules[package] = bare
        yield
    finally:
        for loaded in [key for key in sys.modules if key == PACKAGE or key.startswith(f"{PACKAGE}.")]:
            del sys.modules[loaded]
